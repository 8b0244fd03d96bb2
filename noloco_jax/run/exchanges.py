"""What a run says of an island's exchanges."""

import dataclasses
from typing import TYPE_CHECKING, Any

from noloco_jax.formatting import format_bytes

if TYPE_CHECKING:  # for whose imports a run of all replicas need not wait
    from noloco_jax.islands.protocol.headers import Status
    from noloco_jax.islands.results import Met
    from noloco_jax.run.island_log import IslandLog

LAST_SECONDS = 10.0  # for the last exchange of a run


def exchange_figures(
    met: "Met", status: "Status", seconds_exposed: float, log: "IslandLog", seconds: float
) -> dict[str, Any]:
    """For metrics: what became of a message, and what the island's exchanges have come to with it.

    Args:
      met: the message.
      status: of the island.
      seconds_exposed: see `IslandSteps`.
      log: of the island, which has the message.
      seconds: of the run, up to now.
    """
    return {
        **dataclasses.asdict(met),
        "participation": status.committed / status.due if status.due else 1.0,
        "committed": status.committed,
        "due": status.due,
        "one_sided_commits": log.one_sided,
        "seconds_exposed": seconds_exposed,
        "goodput": log.goodput(seconds),
    }


def exchange_line(met: "Met", status: "Status", size: int | float) -> str:
    """For people: round, partner, what came of it, bytes, participation so far."""
    what = {
        "met": f"met {met.partner}, {format_bytes(size)} each way",
        "late": f"met {met.partner} late by {met.lag}, {format_bytes(size)} each way",
        "healed": f"these weights came from {met.partner}",
        "alone": f"alone{f', without {met.partner}' if met.partner else ''}: {met.reason}",
    }[met.outcome]
    sided = ", one-sided" if met.one_sided else ""
    share = f", participation {100 * status.committed / status.due:.0f} %" if status.due else ""
    return f"round {met.round + 1}: {what}{sided}{share}"
