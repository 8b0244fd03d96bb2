"""What would hide an exchange behind computing: the smallest delay, the shortest interval, the widest wire.

All three are searches over `cost_of`, so that they cannot disagree with its figures.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace

from noloco_jax.simulate.cost import Setting, cost_of
from noloco_jax.wires import BLOCK_BITS, FLOAT_BYTES

_LONGEST = 10**9  # inner steps that are looked at


def exposed_share(setting: Setting, method: str) -> float:
    """Share of the wall clock that waits for the links, 0 to 1."""
    return 1 - cost_of(setting, method).compute_share


def smallest_delay(setting: Setting, method: str) -> int | None:
    """The fewest inner steps that hide an exchange; None where it takes longer than the steps up to the next one."""
    return _first(
        range(setting.sync_every + 1),
        lambda steps: cost_of(replace(setting, delay=steps), method).exposed_per_step == 0,
    )


def shortest_interval(setting: Setting, method: str, share: float) -> int | None:
    """The least `sync_every`, not below the delay, with which at most this share of the wall clock is exposed."""
    return _first(
        range(max(setting.delay, 1), _LONGEST),
        lambda steps: exposed_share(replace(setting, sync_every=steps), method) <= share,
    )


def widest_wire(setting: Setting, share: float) -> str | None:
    """The wire with the most bits of which at most this share of the wall clock is exposed, with NoLoCo."""
    widest_first = (*FLOAT_BYTES, *BLOCK_BITS)  # modulo4 has int4's bytes and a round of windows ahead of them
    return next((w for w in widest_first if exposed_share(replace(setting, wire=w), "NoLoCo") <= share), None)


def _first(candidates: Sequence[int], holds: Callable[[int], bool]) -> int | None:
    """The first for which something holds that goes on to hold."""
    index = bisect_left(candidates, True, key=holds)
    return candidates[index] if index < len(candidates) else None
