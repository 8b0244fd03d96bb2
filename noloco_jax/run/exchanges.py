"""What a run says of an island's exchanges."""

import dataclasses
from typing import Any

from noloco_jax.formatting import format_bytes
from noloco_jax.islands.protocol.headers import Status
from noloco_jax.islands.results import Met

LAST_SECONDS = 10.0  # for the last exchange of a run


def exchange_figures(met: Met, status: Status) -> dict[str, Any]:
    """For metrics."""
    participation = status.committed / status.due if status.due else 1.0
    return {
        **dataclasses.asdict(met),
        "participation": participation,
        "committed": status.committed,
        "due": status.due,
    }


def exchange_line(met: Met, status: Status, size: int | float) -> str:
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
