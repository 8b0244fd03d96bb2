"""Cost model of communication on given links, and the setting that hides an exchange behind computation.

A message of V bytes takes latency + 8V / bandwidth. Links are full duplex, and all replicas communicate at once.
All-reduces are recursive halving and doubling: 2⌈log₂ N⌉ latency + 2(N−1)/N · V/bandwidth. What overlaps with
computation:

* FSDP's collectives with the whole step, as each layer's weights are fetched while the layer before computes;
* DDP's all-reduce with the backward pass, two thirds of the step, as gradients are sent when they are ready;
* an exchange of DiLoCo or NoLoCo with the `delay` inner steps after it, or with those up to the next exchange if these
  are fewer; islands never wait, and leave out exchanges that the link has no time for.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from noloco_jax.config import OuterConfig, TrainConfig
from noloco_jax.errors import UserError
from noloco_jax.methods import defaults_of
from noloco_jax.wires import MODULO_BITS, WIRES, block_bytes, block_of

METHODS = {"fsdp": "FSDP", "ddp": "DDP", "diloco": "DiLoCo", "noloco": "NoLoCo"}
OUTER_METHODS = ("diloco", "noloco")
BACKWARD = 2 / 3  # share of a step's computing time
ISLAND_HOPS = 5  # messages of an island's exchange, one after another: hello, accept, the payload, received, commit
_ROUNDING = 1e-9  # relative error of sums of times


@dataclass(frozen=True)
class Setting:
    """A model, a set of replicas and their links.

    Attributes:
      params: parameters of the model.
      bandwidth: bandwidth of a replica's link, bits per second each way.
      latency: one-way latency of a message, seconds.
      step_time: computing time of an inner step, seconds.
      replicas: number of replicas N (of FSDP: of shards).
      method: the method that a setting is wanted for, one of `OUTER_METHODS`.
      sync_every: inner steps H between outer steps, of DiLoCo and NoLoCo alike.
      group_size: replicas n that average together in NoLoCo.
      steps: inner steps of the run.
      fragments: equal parts F of the parameters, each with an outer step of its own every H inner steps.
      wire: the messages' wire format, one of `WIRES`. All-reduces and FSDP sum numbers in transit and send float32.
      delay: inner steps with which an outer step's exchange overlaps; 0: all replicas wait for it.
      islands: NoLoCo's replicas are islands, which never wait for an exchange.
    """

    params: float = 125e6
    bandwidth: float = 1e9
    latency: float = 0.04
    step_time: float = 1.0
    replicas: int = 16
    method: str = "noloco"
    sync_every: int = defaults_of("sync_every")["noloco"]
    group_size: int = defaults_of("group_size")["noloco"]
    steps: int = TrainConfig.num_steps
    fragments: int = OuterConfig.fragments
    wire: str = defaults_of("wire")["noloco"]
    delay: int = OuterConfig.delay
    islands: bool = False

    def check(self) -> None:
        """Check the fields' ranges and that they fit together.

        Raises:
          UserError: if a field is out of its range or two disagree.
        """
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, str | bool):
                continue
            if field.name in ("latency", "delay"):
                if not 0 <= value < math.inf:
                    raise UserError(f"--{field.name}={value}: must be zero or greater, and finite")
            elif not 0 < value < math.inf:
                raise UserError(f"--{field.name}={value}: must be greater than zero and finite")
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
        if self.wire in MODULO_BITS and self.group_size > 2:
            raise UserError(f"--wire={self.wire} is for pairs and --group_size={self.group_size}: use --wire=int8")
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


def all_reduce(setting: Setting, fragments: int = 1) -> tuple[float, float]:
    """Return the bytes that a replica sends in one all-reduce of a fragment, and its seconds."""
    n = setting.replicas
    sent = 2 * (n - 1) / n * _message_bytes(setting, "float32", fragments)
    return sent, 2 * _hops(n) * setting.latency + _transfer(setting, sent)


def sharded_step(setting: Setting, fragments: int = 1) -> tuple[float, float]:
    """Return bytes and seconds of a step of FSDP: two all-gathers of the weights, a reduce-scatter of the gradients.

    3(N−1)/N · V bytes and 3 ⌈log₂ N⌉ latency, as one collective of each kind for the whole model. Real programs go
    layer by layer and pay the latency once a layer.
    """
    n = setting.replicas
    sent = 3 * (n - 1) / n * _message_bytes(setting, "float32", fragments)
    return sent, 3 * _hops(n) * setting.latency + _transfer(setting, sent)


def group_exchange(setting: Setting, fragments: int = 1) -> tuple[float, float]:
    """Return the bytes that a replica sends in NoLoCo's outer step, on average, and its seconds (`exchange.mean`).

    A replica sends a message of a fragment's V bytes to each other member of its group, in turn. A modulo format sends
    two, one after the other: the first agrees on the windows of the second. A replica of the remainder group sends to
    fewer.
    """
    size, (n, replicas) = _message_bytes(setting, setting.wire, fragments), (setting.group_size, setting.replicas)
    windows = setting.latency if setting.wire in MODULO_BITS else 0.0
    if setting.islands:
        return size, windows + ISLAND_HOPS * setting.latency + _transfer(setting, size)
    rest = replicas % n
    others = ((replicas - rest) * (n - 1) + rest * (rest - 1)) / replicas
    return others * size, (n - 1) * (windows + setting.latency + _transfer(setting, size))


_EXCHANGES: dict[str, Callable[[Setting, int], tuple[float, float]]] = {
    "fsdp": sharded_step,
    "ddp": all_reduce,
    "diloco": all_reduce,
    "noloco": group_exchange,
}


def cost_of(setting: Setting, method: str) -> Cost:
    """Return the cost of one of `METHODS`."""
    is_outer = method in OUTER_METHODS
    interval, fragments = (setting.sync_every, setting.fragments) if is_outer else (1, 1)
    every = interval / fragments
    sent, seconds = _EXCHANGES[method](setting, fragments)
    overlap = {"fsdp": 1.0, "ddp": BACKWARD}.get(method, setting.delay)
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
    wires = wires_for(setting.group_size) if setting.method == "noloco" else [setting.wire]
    narrower = setting
    for wire in wires[wires.index(setting.wire) :]:
        narrower = replace(setting, wire=wire, delay=0)
        if (delay := smallest_delay(narrower, setting.method)) is not None:
            break
    else:
        narrower = replace(narrower, sync_every=shortest_interval(narrower, setting.method))
        delay = smallest_delay(narrower, setting.method)
    return narrower if setting.islands else replace(narrower, delay=delay)


def wires_for(group_size: int) -> list[str]:
    """Return the wire formats that groups of this size can use, by decreasing bits a weight."""
    fitting = [wire for wire in WIRES if group_size == 2 or wire not in MODULO_BITS]
    return sorted(fitting, key=lambda wire: -block_bytes(wire) / block_of(wire))


@dataclass(frozen=True)
class Latency:
    """Seconds of one averaging of a fragment among n replicas, by how it is done."""

    pair: float
    halving: float
    ring: float
    tree: float


def latency_of(setting: Setting, replicas: int) -> Latency:
    """Return the times of a float32 message between two replicas, and of all-reduces among `replicas`.

    A ring sends 2(n−1) messages of an n-th, one after another. A tree sends whole messages up and down its levels.
    """
    size = _message_bytes(setting, "float32", setting.fragments)
    message = setting.latency + _transfer(setting, size)
    _, halving = all_reduce(replace(setting, replicas=replicas), setting.fragments)
    ring = 2 * (replicas - 1) * (setting.latency + _transfer(setting, size / replicas))
    return Latency(message, halving, ring, 2 * _hops(replicas) * message)


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


def _hops(n: int) -> int:
    """Return the number of sequential messages of a reduce-scatter or all-gather by halving or doubling."""
    return (n - 1).bit_length()
