"""An island's process that is altered: `python -m support.altered HOW SECONDS noloco_jax.island train ARGUMENT...`

SECONDS are those that it sleeps before a step, as in `paced.py`.
"""

import dataclasses
import sys
from typing import Any

from noloco_jax.island.membership import Membership
from noloco_jax.islands.protocol.messages import Speed, Timing
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


HOW = {"lies of speed": lie_of_speed, "begins anew soon": begin_anew_soon}


def main() -> None:
    HOW[sys.argv.pop(1)]()
    paced.main()


if __name__ == "__main__":
    main()
