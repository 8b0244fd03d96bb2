"""Settings with which an island's messages fit its link."""

import math

from noloco_jax.optim.wire_sizes import WIRES, block_bytes, block_of


def settings_that_fit(wire: str, sync_every: int, share: float, prefix: str = "outer.") -> str:
    """Return the settings with which a link carries all messages, for people.

    Args:
      wire: format of messages, in `noloco_jax.optim.wire_sizes`.
      sync_every: inner steps between two messages of a fragment.
      share: of the messages that the link carries, above 0.
      prefix: of the settings' names.
    """
    narrower = [one for one in WIRES if _bytes_a_weight(one) <= share * _bytes_a_weight(wire)]
    widest = max(narrower, key=_bytes_a_weight, default=None)
    format = "" if widest is None else f"{prefix}wire={widest} or "
    return f"give {format}{prefix}sync_every={math.ceil(sync_every / share)}"


def _bytes_a_weight(wire: str) -> float:
    return block_bytes(wire) / block_of(wire)
