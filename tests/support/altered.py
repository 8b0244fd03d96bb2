"""An island's process that is altered: `python -m support.altered HOW SECONDS noloco_jax.island train ARGUMENT...`

SECONDS are those that it sleeps before a step, as in `paced.py`.
"""

import dataclasses
import sys
import time
from types import SimpleNamespace
from typing import Any

import numpy as np

from noloco_jax.island.membership import Membership
from noloco_jax.island.mode import IslandMode
from noloco_jax.islands import start
from noloco_jax.islands.agent import Agent
from noloco_jax.islands.protocol.messages import Message, Speed, Timing
from noloco_jax.islands.protocol.pace import Pace
from support import paced

FALSE_SECONDS = 1e-9  # of an inner step
LOST_SECONDS = 5.0


def lie_of_speed() -> None:
    """Tell others of false speeds, of its own and of an island that there is not."""
    told = Pace.timing

    def timing(self: Pace, round: int, now: float) -> Timing | None:
        timing = told(self, round, now)
        if timing is None or timing.own is None:
            return timing
        own = dataclasses.replace(timing.own, seconds=FALSE_SECONDS)
        return dataclasses.replace(timing, own=own, fastest=Speed("nobody", FALSE_SECONDS, 2**62))

    Pace.timing = timing


def begin_anew_soon() -> None:
    """Wait for lost weights no longer than `LOST_SECONDS`."""
    usual = Membership.settings

    def settings(self: Membership, config: Any) -> Any:
        return dataclasses.replace(usual(self, config), lost_seconds=LOST_SECONDS)

    Membership.settings = settings


def flip_signs() -> None:
    """Send messages of the opposite sign, as a broken device might."""
    ended = Agent.end_round

    def end_round(self: Agent, round: int, tokens: int, message: Any, norm: float) -> None:
        ended(self, round, tokens, [-x for x in message], norm)

    Agent.end_round = end_round


def send_twice() -> None:
    """Send a second message of every exchange behind the first, of values that are not finite."""
    usual = Agent._send_message

    def twice(self: Agent, channel: Any, header: Message) -> None:
        usual(self, channel, header)
        self._calls.send(channel, header, [np.full_like(x, np.nan) for x in self._own[header.xid.round]])

    Agent._send_message = twice


def set_clock_back() -> None:
    """Begin with the incarnation of a machine whose clock is in 1970."""
    start.time = SimpleNamespace(time_ns=lambda: 0, sleep=time.sleep)


def wait_for_exchanges() -> None:
    """Take the next inner step once the exchange is over, so that islands are a function of their configuration."""
    usual = IslandMode.__init__
    IslandMode.__init__ = lambda self, member: usual(self, dataclasses.replace(member, at_once=True))


HOW = {
    "waits for exchanges": wait_for_exchanges,
    "lies of speed": lie_of_speed,
    "begins anew soon": begin_anew_soon,
    "flips signs": flip_signs,
    "sends twice": send_twice,
    "has its clock set back": set_clock_back,
}


def main() -> None:
    HOW[sys.argv.pop(1)]()
    paced.main()


if __name__ == "__main__":
    main()
