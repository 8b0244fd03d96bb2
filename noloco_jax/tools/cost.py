"""Cost model of communication on given links, and the setting that hides an exchange behind computation.

The model is of exchanges between hosts as gloo makes them, and was compared with `python -m noloco_jax.network`. Links
are full duplex, and all replicas communicate at once. A step of a collective costs a round trip, as the receiver
announces that it is ready: a message of V bytes takes 2 latency + 8V / bandwidth, and an all-reduce is a ring of 2(N−1)
steps. FSDP's collectives overlap with the whole step, and DDP's with nothing; an exchange of DiLoCo or NoLoCo overlaps
with the `delay` inner steps after it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from noloco_jax.config import OuterConfig, TrainConfig
from noloco_jax.errors import UserError
from noloco_jax.formatting import (
    format_bandwidth,
    format_count,
    format_seconds,
    parse_bandwidth,
    parse_count,
    parse_seconds,
)
from noloco_jax.optim.defaults import DEFAULTS
from noloco_jax.optim.fits import exchange_of_groups, misfits
from noloco_jax.optim.wire_sizes import MODULO_BITS, WIRES, block_bytes, block_of

METHOD_TITLES = {"fsdp": "FSDP", "ddp": "DDP", "diloco": "DiLoCo", "noloco": "NoLoCo"}
OUTER_METHODS = ("diloco", "noloco")
ISLAND_HOPS = 5  # messages of an island's exchange, one after another: hello, accept, the payload, received, commit
_ROUNDING = 1e-9  # relative error of sums of times


def _flag(default: Any, parse: Callable[[str], Any], meaning: str, shown: Callable[[Any], object] = str) -> Any:
    """Declare a field of `Setting` with the parser, the meaning and the printed default of its flag."""
    return field(default=default, metadata={"parse": parse, "help": f"{meaning} (default {shown(default)})"})


@dataclass(frozen=True)
class Setting:
    """A model, a set of replicas and their links, in bits and seconds. Every field is a flag of the command."""

    params: float = _flag(125e6, partial(parse_count, name="--params"), "parameters: 125M, 1.3B", format_count)
    bandwidth: float = _flag(
        1e9,
        partial(parse_bandwidth, name="--bandwidth"),
        "of a replica's link, each way: 100Mbit, 1GB/s",
        format_bandwidth,
    )
    latency: float = _flag(
        0.04, partial(parse_seconds, name="--latency", zero=True), "of a message, one way: 40ms", format_seconds
    )
    step_time: float = _flag(
        1.0,
        partial(parse_seconds, name="--step_time"),
        "computing time of a step, as bench measures it: 1.2s",
        format_seconds,
    )
    method: str = _flag("noloco", str, f"method to find a setting for: {' or '.join(OUTER_METHODS)}")
    replicas: int = _flag(16, int, "number of replicas; for FSDP, of shards")
    sync_every: int = _flag(DEFAULTS["noloco"]["sync_every"], int, "inner steps between outer steps")
    group_size: int = _flag(DEFAULTS["noloco"]["group_size"], int, "replicas that average together in NoLoCo")
    steps: int = _flag(TrainConfig.num_steps, int, "inner steps of the run")
    fragments: int = _flag(
        OuterConfig.fragments, int, "equal parts of the parameters that DiLoCo and NoLoCo send in turn"
    )
    wire: str = _flag(DEFAULTS["noloco"]["wire"], str, f"messages' wire format: {', '.join(WIRES)}")
    delay: int = _flag(OuterConfig.delay, int, "inner steps beside which DiLoCo and NoLoCo exchange")
    islands: bool = False  # NoLoCo's replicas never wait for an exchange

    @property
    def by_swaps(self) -> bool:
        """True if NoLoCo's groups average by swaps of pairs."""
        return exchange_of_groups(self.replicas, self.group_size) == "pairs"

    def check(self) -> None:
        """Raise `UserError` if a field is out of its range or two disagree."""
        for name in ("sync_every", "steps", "fragments", "delay"):  # the parsers check times, sizes and rates
            if (value := getattr(self, name)) < (least := int(name != "delay")):
                raise UserError(f"--{name}={value}: must be {least} or greater")
        if self.replicas < 2:
            raise UserError(f"--replicas={self.replicas}: one replica sends nothing, give at least 2")
        if not 2 <= self.group_size <= self.replicas:
            raise UserError(
                f"--group_size={self.group_size} does not fit --replicas={self.replicas}: choose from 2 to the replicas"
            )
        if self.method not in OUTER_METHODS:
            raise UserError(f"--method={self.method} has no setting to choose: give {' or '.join(OUTER_METHODS)}")
        if self.wire not in WIRES:
            raise UserError(f"--wire={self.wire}: choose one of {', '.join(WIRES)}")
        exchange, given = "pairs", ""
        if self.method == "diloco":
            exchange, given = "all", "--method=diloco"
        elif not self.by_swaps:
            exchange, given = "groups", f"--group_size={self.group_size} of --replicas={self.replicas}"
        for message in misfits(exchange, {"wire": self.wire}, given, lambda name, value: f"--{name}={value}"):
            raise UserError(message)
        if self.delay > self.sync_every:
            raise UserError(
                f"--delay={self.delay} is more than the --sync_every={self.sync_every} steps after which a fragment "
                "has its next outer step: lower it"
            )
        for name, wanted in (("method", "noloco"), ("group_size", 2), ("delay", 0)) if self.islands else ():
            if (value := getattr(self, name)) != wanted:
                raise UserError(f"--{name}={value} is not for --islands: give --{name}={wanted}")


@dataclass(frozen=True)
class Cost:
    """Communication of a method.

    Attributes:
      every: mean inner steps between its exchanges; below 1 if several follow one inner step.
      bytes_per_sync: bytes sent by a replica in one exchange, averaged over replicas.
      bytes_in_all: bytes sent by a replica in the whole run.
      seconds_per_sync: link time of one exchange.
      exposed_per_step: seconds of link time that computing does not hide, averaged over inner steps.
      compute_share: computing time over all time.
    """

    every: float
    bytes_per_sync: float
    bytes_in_all: float
    seconds_per_sync: float
    exposed_per_step: float
    compute_share: float


def collectives(setting: Setting, count: int, fragments: int = 1, wire: str = "float32") -> tuple[float, float]:
    """Return the bytes that a replica sends in reduce-scatters and all-gathers of a fragment, and their seconds.

    An all-reduce is two of them. A step of FSDP is three, two all-gathers of the weights and a reduce-scatter of the
    gradients, counted here as one collective each for the whole model: real programs pay the latency once a layer.
    """
    n = setting.replicas
    sent = count * (n - 1) / n * _message_bytes(setting, wire, fragments)
    return sent, count * (n - 1) * _round_trip(setting) + _transfer(setting, sent)


def all_exchange(setting: Setting, fragments: int = 1) -> tuple[float, float]:
    """Return the bytes that a replica sends in DiLoCo's outer step, and its seconds (`exchange.all_reduce`).

    Quantized parts go to the others in turn, and the means of the parts are gathered. A modulo format is for NoLoCo's
    pairs, and DiLoCo beside them has "int4".
    """
    return collectives(setting, 2, fragments, "int4" if setting.wire in MODULO_BITS else setting.wire)


def group_exchange(setting: Setting, fragments: int = 1) -> tuple[float, float]:
    """Return the bytes that a replica sends in NoLoCo's outer step, on average, and its seconds (`exchange.mean`).

    Groups of g = 2, 4, 8, ... swap parts of a message of a fragment's V bytes: V/2, V/4, ..., V · 2/g in the innermost
    pair, ..., V/4, V/2 (`exchange.halves`). In others a replica sends V to each other member, in turn; one of the
    remainder group sends to fewer. A modulo format sends the windows of a message first.
    """
    size, (n, replicas) = _message_bytes(setting, setting.wire, fragments), (setting.group_size, setting.replicas)
    has_windows = setting.wire in MODULO_BITS
    if setting.islands:
        return size, (has_windows + ISLAND_HOPS) * setting.latency + _transfer(setting, size)
    if setting.by_swaps and replicas % n == 0:
        halves = [size / 2**depth for depth in range(1, n.bit_length() - 1)]
        parts = [*halves, size * 2 / n, *halves]
        windows = has_windows * (len(halves) + 1) * _round_trip(setting)
        return sum(parts), windows + sum(swap_seconds(setting, part) for part in parts)
    rest = replicas % n
    others = ((replicas - rest) * (n - 1) + rest * (rest - 1)) / replicas
    shifts = (n - 1) * (_round_trip(setting) + _transfer(setting, size))  # around the group, by 1 to n - 1 places
    if n % 2 == 0:  # the shift by half of the group is a swap of pairs
        shifts += swap_seconds(setting, size) - _round_trip(setting) - _transfer(setting, size)
    return others * size, has_windows * _round_trip(setting) + shifts


def swap_seconds(setting: Setting, size: float) -> float:
    """Return the seconds of a swap, half duplex by a permutation or in two steps by a sum (`exchange.swap`)."""
    by_permutation = _round_trip(setting) + 2 * _transfer(setting, size)
    return min(by_permutation, 2 * _round_trip(setting) + _transfer(setting, size))


def cost_of(setting: Setting, method: str) -> Cost:
    """Return the cost of one of `METHOD_TITLES`."""
    interval, fragments = (setting.sync_every, setting.fragments) if method in OUTER_METHODS else (1, 1)
    every = interval / fragments
    if method in OUTER_METHODS:
        sent, seconds = (group_exchange if method == "noloco" else all_exchange)(setting, fragments)
    else:
        sent, seconds = collectives(setting, 3 if method == "fsdp" else 2, fragments)
    overlap = {"fsdp": 1.0, "ddp": 0.0}.get(method, setting.delay)
    if setting.islands and method == "noloco":
        return Cost(every, sent, sent * (setting.steps * fragments // interval), seconds, 0.0, 1.0)
    exposed = exposed_seconds(seconds, every, overlap, setting.step_time) / every
    share = setting.step_time / (setting.step_time + exposed)
    return Cost(every, sent, sent * (setting.steps * fragments // interval), seconds, exposed, share)


def exposed_seconds(seconds: float, every: float, overlap: float, step_time: float) -> float:
    """Return the seconds of an exchange that computing does not hide.

    The exchange overlaps with `overlap` inner steps, or with those until the next exchange needs the link if these are
    fewer; the next one then begins later. Outer steps count as evenly spaced, which is exact if F divides H or H
    divides F; otherwise a run waits for an exchange less than a tenth of a step longer (a test replays it).
    """
    left = seconds - min(overlap, every) * step_time
    return left if left > _ROUNDING * seconds else 0.0


def smallest_delay(setting: Setting, method: str) -> int | None:
    """Return the fewest inner steps that hide an exchange; None if none do before the next exchange."""
    cost = cost_of(setting, method)
    hidden = exposed_seconds(cost.seconds_per_sync, cost.every, cost.every, setting.step_time) == 0
    return _at_least(cost.seconds_per_sync / setting.step_time) if hidden else None


def shortest_interval(setting: Setting, method: str) -> int:
    """Return the smallest `sync_every` with which some delay hides every exchange."""
    seconds = cost_of(setting, method).seconds_per_sync
    return max(_at_least(setting.fragments * seconds / setting.step_time), 1)


def fitting(setting: Setting) -> Setting:
    """Return the nearest setting in which the method's exchanges are hidden, with the smallest delay for that.

    It keeps the wire format if possible, else uses the widest narrower one that fits. If none fits, it uses the
    narrowest at the shortest interval. On islands, which take no delay, it leaves that at 0.
    """
    wires = wires_for(by_swaps=setting.method == "noloco" and setting.by_swaps)
    narrower = setting
    for wire in wires[wires.index(setting.wire) :]:
        narrower = replace(setting, wire=wire, delay=0)
        if (delay := smallest_delay(narrower, setting.method)) is not None:
            break
    else:
        narrower = replace(narrower, sync_every=shortest_interval(narrower, setting.method))
        delay = smallest_delay(narrower, setting.method)
    return narrower if setting.islands else replace(narrower, delay=delay)


def wires_for(by_swaps: bool) -> list[str]:
    """Return the wire formats of exchanges by swaps of pairs, or of others, by decreasing bits a weight."""
    fitting = [wire for wire in WIRES if by_swaps or wire not in MODULO_BITS]
    return sorted(fitting, key=lambda wire: -block_bytes(wire) / block_of(wire))


def latencies_of(setting: Setting, replicas: int) -> tuple[float, float, float]:
    """Return the seconds of a float32 swap of two replicas, and of two all-reduces among `replicas`.

    The first all-reduce is a ring, the second a tree, which sends whole messages up and down its levels.
    """
    size = _message_bytes(setting, "float32", setting.fragments)
    _, ring = collectives(replace(setting, replicas=replicas), 2, setting.fragments)
    levels = (replicas - 1).bit_length()
    return swap_seconds(setting, size), ring, 2 * levels * (_round_trip(setting) + _transfer(setting, size))


def tree_over_pair(variation: float, num_levels: int, num_runs: int, seed: int = 0) -> np.ndarray:
    """Return the expected time of a tree all-reduce over n = 2, 4, ... replicas over that of a tree of two.

    At each level two subtrees send their sums to be added, and the later arrival counts:
    T(2n) = max(T(n) + t, T'(n) + t') with T(1) = 0 and log-normal t, t' of mean 1. The broadcast is the same tree in
    reverse. With `variation` 0 the ratio is log₂ n, the paper's; waiting that accumulates makes it larger.

    Args:
      variation: standard deviation over mean of a message's time.
      num_levels: the largest tree has 2^num_levels replicas.
      num_runs: number of independent trees R to average over.
      seed: seed of the draws.

    Returns:
      (num_levels,) the ratio for each n.
    """
    rng = np.random.default_rng(seed)
    sigma = math.sqrt(math.log1p(variation**2))
    means, finish_RN = [], np.zeros((num_runs, 2**num_levels))
    for _ in range(num_levels):
        arrival_RN = finish_RN + np.exp(sigma * rng.standard_normal(finish_RN.shape) - sigma**2 / 2)
        finish_RN = np.maximum(arrival_RN[:, ::2], arrival_RN[:, 1::2])
        means.append(finish_RN.mean())
    return np.array(means) / (1 + math.erf(sigma / 2))  # E max(t, t') of two log-normal times of mean 1


def _at_least(steps: float) -> int:
    """Return the smallest number of whole steps that is no less, up to rounding errors."""
    return math.ceil(steps * (1 - _ROUNDING))


def _message_bytes(setting: Setting, wire: str, fragments: int) -> float:
    """Return the bytes of a fragment, without the padding of an array's last block."""
    return setting.params / fragments * block_bytes(wire) / block_of(wire)


def _transfer(setting: Setting, size: float) -> float:
    return 8 * size / setting.bandwidth


def _round_trip(setting: Setting) -> float:
    return 2 * setting.latency
