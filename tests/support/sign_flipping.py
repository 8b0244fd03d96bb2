"""A paced command whose island sends messages of the opposite sign, as a broken device might.

python -m support.sign_flipping SECONDS noloco_jax.island train ARGUMENT...      as `support.paced`
"""

from typing import Any

from noloco_jax.islands.agent import Agent
from support import paced

if __name__ == "__main__":
    end_round = Agent.end_round

    def end_round_flipped(self: Agent, round: int, tokens: int, message: Any, norm: float) -> None:
        end_round(self, round, tokens, [-x for x in message], norm)

    Agent.end_round = end_round_flipped
    paced.main()
