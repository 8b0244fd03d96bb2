"""Cost model of communication on given links, and searches for settings that hide it behind computation.

A message of V bytes takes latency + 8V / bandwidth. Links are full duplex, and all replicas communicate at once. An
exchange overlaps with the `delay` inner steps after it, one exchange at a time; nothing else overlaps with computation.
All-reduces are recursive halving and doubling, the best known in latency and bytes: they take
2⌈log₂ N⌉ latency + 2(N−1)/N · V/bandwidth.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

from noloco_jax.config import OuterConfig, TrainConfig
from noloco_jax.errors import UserError
from noloco_jax.methods import defaults_of
from noloco_jax.simulate.waiting import waiting_per_step
from noloco_jax.wires import MODULO_BITS, WIRES, block_bytes, block_of, goes_by_shares

METHODS = ("FSDP", "DDP", "DiLoCo", "NoLoCo")
OUTER_METHODS = ("DiLoCo", "NoLoCo")
# The most draws of step times in one round of the waiting simulation; more would take minutes.
_MAX_STEPS_A_ROUND = 5_000_000
_LONGEST = 10**9  # inner steps, the end of the search for an interval


@dataclass(frozen=True)
class Setting:
    """A model, a set of replicas and their links.

    Attributes:
      params: parameters of the model.
      bandwidth: bandwidth of a replica's link, bits per second each way.
      latency: one-way latency of a message, seconds.
      step_time: computing time of an inner step, seconds.
      replicas: number of replicas N (of FSDP: of shards).
      sync_every: inner steps H between outer steps, of DiLoCo and NoLoCo alike.
      group_size: replicas n that average together in NoLoCo.
      steps: inner steps of the run.
      fragments: equal parts F of the parameters, each with an outer step of its own every H inner steps.
      wire: the messages' wire format, one of `WIRES`. All-reduces and FSDP sum numbers in transit, so they send float32
        if the wire format is quantized.
      delay: inner steps with which an outer step's exchange overlaps; 0: all replicas wait for it.
      step_spread: standard deviation over mean of a step's computing time; 0 leaves waiting for stragglers out.
    """

    params: float = 125e6
    bandwidth: float = 1e9
    latency: float = 0.04
    step_time: float = 1.0
    replicas: int = 16
    sync_every: int = defaults_of("sync_every")["noloco"]
    group_size: int = defaults_of("group_size")["noloco"]
    steps: int = TrainConfig.num_steps
    fragments: int = OuterConfig.fragments
    wire: str = defaults_of("wire")["noloco"]
    delay: int = OuterConfig.delay
    step_spread: float = 0.0

    def check(self) -> None:
        """Check the fields' ranges and that they fit together.

        Raises:
          UserError: if a field is out of its range or two disagree.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, str):
                continue
            flag = "--" + field.name.replace("_", "-")
            if field.name in ("latency", "step_spread", "delay"):
                if not 0 <= value < math.inf:
                    raise UserError(f"{flag}={value}: must be zero or greater, and finite")
            elif not 0 < value < math.inf:
                raise UserError(f"{flag}={value}: must be greater than zero and finite")
        if self.replicas < 2:
            raise UserError(f"--replicas={self.replicas}: one replica sends nothing, give at least 2")
        if not 2 <= self.group_size <= self.replicas:
            raise UserError(
                f"--group-size={self.group_size} does not fit --replicas={self.replicas}: choose from 2 to the replicas"
            )
        if self.wire not in WIRES:
            raise UserError(f"--wire={self.wire}: choose one of {', '.join(WIRES)}")
        if self.wire in MODULO_BITS and self.group_size > 2:
            raise UserError(f"--wire={self.wire} is for pairs and --group-size={self.group_size}: use --wire=int8")
        if self.delay > self.sync_every:
            raise UserError(
                f"--delay={self.delay} is more than the --sync-every={self.sync_every} steps after which a fragment "
                "has its next outer step: lower it"
            )
        if self.step_spread and (self.fragments > 1 or self.delay):
            raise UserError(
                f"--step-spread={self.step_spread} draws the waiting at outer steps of whole models without a delay: "
                "leave it out, or --fragments and --delay"
            )
        if self.step_spread and self.replicas * self.sync_every > _MAX_STEPS_A_ROUND:
            raise UserError(
                f"--replicas={self.replicas} times --sync-every={self.sync_every} is more than {_MAX_STEPS_A_ROUND} "
                "steps to simulate in a round: lower one of them or leave out --step-spread"
            )


@dataclass(frozen=True)
class Cost:
    """Communication of a method.

    Attributes:
      method: one of `METHODS`.
      every: mean inner steps between its exchanges; below 1 if several follow one inner step.
      bytes_per_sync: bytes sent by a replica in one exchange, averaged over replicas.
      bytes_in_all: bytes sent by a replica in the whole run.
      seconds_per_sync: link time of one exchange.
      exposed_per_step: seconds of link time that computing does not hide, averaged over inner steps.
      waiting_per_step: seconds of waiting for stragglers, averaged over inner steps.
      compute_share: computing time over all time.
    """

    method: str
    every: float
    bytes_per_sync: float
    bytes_in_all: float
    seconds_per_sync: float
    exposed_per_step: float
    waiting_per_step: float
    compute_share: float

    @property
    def bytes_per_step(self) -> float:
        """Return the bytes sent by a replica, averaged over inner steps."""
        return self.bytes_per_sync / self.every


def all_reduce(setting: Setting, fragments: int = 1) -> tuple[float, float]:
    """Return the bytes that a replica sends in one all-reduce of a fragment, and its seconds."""
    size, n = _message_bytes(setting, "float32", fragments), setting.replicas
    sent = 2 * (n - 1) / n * size
    return sent, 2 * _hops(n) * setting.latency + _transfer(setting, sent)


def sharded_step(setting: Setting, fragments: int = 1) -> tuple[float, float]:
    """Return bytes and seconds of a step of FSDP: two all-gathers of the weights, a reduce-scatter of the gradients.

    3(N−1)/N · V bytes and 3 ⌈log₂ N⌉ latency, as one collective of each kind for the whole model. Real programs go
    layer by layer and pay the latency once a layer.
    """
    size, n = _message_bytes(setting, "float32", fragments), setting.replicas
    sent = 3 * (n - 1) / n * size
    return sent, 3 * _hops(n) * setting.latency + _transfer(setting, sent)


def group_exchange(setting: Setting, fragments: int = 1) -> tuple[float, float]:
    """Return the bytes that a replica sends in NoLoCo's outer step, on average, and its seconds (`exchange.groups`).

    A replica sends a message of a fragment's V bytes to each other member of its group, in turn. A modulo format sends
    two, one after the other: the first agrees on the windows of the second. In groups of n > 2, all of that size, an
    n-th of the message goes to each member and the float32 means of a share come back, if that is less. A replica of
    the remainder group sends to fewer.
    """
    size, (n, replicas) = _message_bytes(setting, setting.wire, fragments), (setting.group_size, setting.replicas)
    rest = replicas % n
    if n > 2 and rest == 0 and goes_by_shares(setting.wire, n):
        sent = (n - 1) * (size + _message_bytes(setting, "float32", fragments)) / n  # there and back
        return sent, 2 * (n - 1) * setting.latency + _transfer(setting, sent)
    others = ((replicas - rest) * (n - 1) + rest * (rest - 1)) / replicas
    windows = setting.latency if setting.wire in MODULO_BITS else 0.0
    return others * size, (n - 1) * (windows + setting.latency + _transfer(setting, size))


_EXCHANGES: dict[str, Callable[[Setting, int], tuple[float, float]]] = {
    "FSDP": sharded_step,
    "DDP": all_reduce,
    "DiLoCo": all_reduce,
    "NoLoCo": group_exchange,
}


def costs(setting: Setting, seed: int = 0) -> list[Cost]:
    """Return the cost of each of `METHODS`, waiting for stragglers included."""
    setting.check()
    waiting = dict.fromkeys(METHODS, 0.0)
    if setting.step_spread:
        rest = (setting.group_size, setting.step_time, setting.step_spread, seed)
        waiting["FSDP"] = waiting["DDP"] = waiting_per_step(setting.replicas, 1, *rest)[0]
        waiting["DiLoCo"], waiting["NoLoCo"] = waiting_per_step(setting.replicas, setting.sync_every, *rest)
    return [cost_of(setting, method, waiting[method]) for method in METHODS]


def cost_of(setting: Setting, method: str, waiting: float = 0.0) -> Cost:
    """Return the cost of a method that waits for stragglers by `waiting` seconds a step."""
    outer = method in OUTER_METHODS
    interval, fragments, delay = (setting.sync_every, setting.fragments, setting.delay) if outer else (1, 1, 0)
    every = interval / fragments
    sent, seconds = _EXCHANGES[method](setting, fragments)
    exposed = exposed_seconds(seconds, every, delay, setting.step_time) / every
    share = setting.step_time / (setting.step_time + exposed + waiting)
    return Cost(method, every, sent, sent * (setting.steps * fragments // interval), seconds, exposed, waiting, share)


def exposed_seconds(seconds: float, every: float, delay: int, step_time: float) -> float:
    """Return the seconds of an exchange that computing does not hide.

    The exchange overlaps with `delay` inner steps, or with those until the next exchange needs the link if these are
    fewer; the next one then begins later. Outer steps count as evenly spaced, which is exact if F divides H or H
    divides F; otherwise a run waits for an exchange less than a tenth of a step longer (a test replays it).
    """
    left = seconds - min(delay, every) * step_time
    return left if left > 1e-9 * seconds else 0.0  # drops the rounding error of the subtraction


def exposed_share(setting: Setting) -> float:
    """Return the share of the wall-clock time that NoLoCo spends waiting for the links, 0 to 1."""
    return 1 - cost_of(setting, "NoLoCo").compute_share


def smallest_delay(setting: Setting, method: str = "NoLoCo") -> int | None:
    """Return the fewest inner steps that hide an exchange; None if none do before the next exchange."""
    return _first(
        range(setting.sync_every + 1),
        lambda steps: cost_of(replace(setting, delay=steps), method).exposed_per_step == 0,
    )


def shortest_interval(setting: Setting) -> int | None:
    """Return the smallest `sync_every` with which some delay hides every exchange of NoLoCo."""
    return _first(
        range(1, _LONGEST),
        lambda steps: cost_of(replace(setting, sync_every=steps, delay=steps), "NoLoCo").exposed_per_step == 0,
    )


def fitting(setting: Setting) -> Setting:
    """Return the nearest setting in which NoLoCo's exchanges are hidden, with the smallest delay for that.

    It keeps the wire format if possible, else uses the widest narrower one that fits. If none fits, it uses the
    narrowest at the shortest interval.
    """
    wires = wires_for(setting.group_size)
    narrower = setting
    for wire in wires[wires.index(setting.wire) :]:
        narrower = replace(setting, wire=wire)
        if (delay := smallest_delay(narrower)) is not None:
            return replace(narrower, delay=delay)
    interval = shortest_interval(narrower)
    if interval is None:
        raise UserError(f"no --sync-every up to {_LONGEST} hides an exchange on this link: raise --bandwidth")
    longer = replace(narrower, sync_every=interval, delay=0)
    return replace(longer, delay=smallest_delay(longer) or 0)


def wires_for(group_size: int) -> list[str]:
    """Return the wire formats that groups of this size can use, by decreasing bits a weight."""
    fitting = [wire for wire in WIRES if group_size == 2 or wire not in MODULO_BITS]
    return sorted(fitting, key=lambda wire: -block_bytes(wire) / block_of(wire))


def _first(candidates: Sequence[int], holds: Callable[[int], bool]) -> int | None:
    """Return the first candidate for which `holds` is true, by bisection; it must then hold for all later ones."""
    index = bisect_left(candidates, True, key=holds)
    return candidates[index] if index < len(candidates) else None


def _message_bytes(setting: Setting, wire: str, fragments: int) -> float:
    """Return the bytes of a fragment, without the padding of an array's last block."""
    return setting.params / fragments * block_bytes(wire) / block_of(wire)


def _transfer(setting: Setting, size: float) -> float:
    return 8 * size / setting.bandwidth


def _hops(n: int) -> int:
    """Return the number of sequential messages of a reduce-scatter or all-gather by halving or doubling."""
    return (n - 1).bit_length()
