"""What each method's communication costs a training step on given links: seconds, bytes, share of the step.

The model: a message of V bytes takes latency + 8V / bandwidth; a replica sends and receives at the full bandwidth at
the same time and all replicas do so at once. An exchange runs beside the `delay` inner steps after it, one exchange at
a time, and nothing else overlaps with computing.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from noloco_jax.config import OuterConfig, TrainConfig
from noloco_jax.errors import UserError
from noloco_jax.methods import defaults_of
from noloco_jax.schedule import SyncSchedule
from noloco_jax.simulate.blocking import waiting_per_step
from noloco_jax.wires import FLOAT_BYTES, MODULO_BITS, WIRES, block_bytes, block_of, goes_by_shares

ALL_REDUCES = ("halving", "ring", "tree")
METHODS = ("FSDP", "DDP", "DiLoCo", "NoLoCo")
OUTER_METHODS = ("DiLoCo", "NoLoCo")
# Draws of a step's time in one round of the waiting simulation: above it a run would take minutes.
_MAX_STEPS_A_ROUND = 5_000_000


@dataclass(frozen=True)
class Setting:
    """A model, a set of replicas and their links.

    Attributes:
      params: parameters of the model.
      bandwidth: of a replica's link, bits per second each way.
      latency: of a message, one way, seconds.
      step_time: computing time of an inner step, seconds.
      replicas: number of replicas N (of FSDP: of shards).
      sync_every: inner steps H between outer steps, of DiLoCo and NoLoCo alike.
      group_size: replicas n that average together in NoLoCo.
      steps: inner steps of the run.
      fragments: equal parts F of the parameters, each with its own outer steps, one in every H inner steps.
      wire: in which messages travel, one of `WIRES`. All-reduces and FSDP add numbers up on their way: they travel as
        float32 where the wire is a code.
      delay: inner steps beside which an outer step's exchange runs; 0: all wait for it.
      all_reduce: "halving" (recursive halving and doubling: the best known in latency and in bytes), "ring", or
        "tree" (the paper's).
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
    all_reduce: str = "halving"
    step_spread: float = 0.0

    def check(self) -> None:
        """Raises UserError if a field is out of its range or two disagree."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, str):
                continue
            if field.name in ("latency", "step_spread", "delay"):
                if not 0 <= value < math.inf:
                    raise UserError(f"{_flag(field.name)}={value}: must be zero or greater, and finite")
            elif not 0 < value < math.inf:
                raise UserError(f"{_flag(field.name)}={value}: must be greater than zero and finite")
        if self.replicas < 2:
            raise UserError(f"--replicas={self.replicas}: one replica sends nothing, give at least 2")
        if not 2 <= self.group_size <= self.replicas:
            raise UserError(
                f"--group-size={self.group_size} does not fit --replicas={self.replicas}: choose from 2 to the replicas"
            )
        if self.all_reduce not in ALL_REDUCES:
            raise UserError(f"--all-reduce={self.all_reduce}: choose one of {', '.join(ALL_REDUCES)}")
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
    """What a method costs.

    Attributes:
      method: one of `METHODS`.
      every: inner steps between its communications, in the mean; below 1 where several follow one inner step.
      bytes_per_sync: sent by a replica at each of them, on average over replicas.
      bytes_in_all: sent by a replica in the whole run.
      seconds_per_sync: on the links.
      exposed_per_step: seconds of them that computing does not hide, spread over the inner steps.
      waiting_per_step: for slower replicas, seconds; 0 without a spread.
      compute_share: of the wall clock spent computing, 0 to 1.
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
        """Sent by a replica, averaged over inner steps."""
        return self.bytes_per_sync / self.every


def all_reduce(setting: Setting, fragments: int = 1) -> tuple[float, float]:
    """Bytes sent by a replica (on average) and seconds of one all-reduce of a fragment's V bytes over N replicas.

    halving  2⌈log₂ N⌉ latency + 2(N−1)/N · V/bandwidth
    ring     2(N−1) latency    + 2(N−1)/N · V/bandwidth
    tree     2⌈log₂ N⌉ (latency + V/bandwidth): the paper's 2 t log₂ N, all of it up and down the tree
    """
    size, n = _message_bytes(setting, _summed_wire(setting), fragments), setting.replicas
    sent = 2 * (n - 1) / n * size
    if setting.all_reduce == "tree":
        return sent, 2 * _log2(n) * _message(setting, size)
    return sent, 2 * _hops(setting) * setting.latency + _transfer(setting, sent)


def sharded_step(setting: Setting, fragments: int = 1) -> tuple[float, float]:
    """Bytes and seconds of a step of FSDP: all-gather of the weights forward and backward, reduce-scatter of gradients.

    3(N−1)/N · V bytes and 3 ⌈log₂ N⌉ latency (ring: 3(N−1)), as one collective of each kind for the whole model:
    layer by layer, as real programs have it, the latency comes once a layer.
    """
    size, n = _message_bytes(setting, _summed_wire(setting), fragments), setting.replicas
    sent = 3 * (n - 1) / n * size
    return sent, 3 * _hops(setting) * setting.latency + _transfer(setting, sent)


def group_exchange(setting: Setting, fragments: int = 1) -> tuple[float, float]:
    """Bytes sent by a replica (on average) and seconds of NoLoCo's outer step, as `exchange.groups` does it.

    One message of a fragment's V bytes to each other member of the group, in turn; by a modulo wire two one after the
    other, the first of which settles the windows of the second. In groups of n > 2 equal sizes an
    n-th of it to each, and the float32 means of a share back, where that is less. A replica of a rest has fewer to
    send to.
    """
    size, (n, replicas) = _message_bytes(setting, setting.wire, fragments), (setting.group_size, setting.replicas)
    rest = replicas % n
    if n > 2 and rest == 0 and goes_by_shares(setting.wire, n):
        sent = (n - 1) * (size + _message_bytes(setting, "float32", fragments)) / n  # there and back
        return sent, 2 * (n - 1) * setting.latency + _transfer(setting, sent)
    others = ((replicas - rest) * (n - 1) + rest * (rest - 1)) / replicas
    windows = setting.latency if setting.wire in MODULO_BITS else 0.0
    return others * size, (n - 1) * (windows + _message(setting, size))


_EXCHANGES: dict[str, Callable[[Setting, int], tuple[float, float]]] = {
    "FSDP": sharded_step,
    "DDP": all_reduce,
    "DiLoCo": all_reduce,
    "NoLoCo": group_exchange,
}


def costs(setting: Setting, seed: int) -> list[Cost]:
    """What each of `METHODS` costs on these links."""
    setting.check()
    waiting = _waiting(setting, seed)
    return [cost_of(setting, method, waiting[method]) for method in METHODS]


def cost_of(setting: Setting, method: str, waiting: float = 0.0) -> Cost:
    """What a method costs on these links, and `waiting` seconds a step for stragglers."""
    schedule = _schedule_of(setting, method)
    every = schedule.gap
    sent, seconds = _EXCHANGES[method](setting, schedule.fragments)
    exposed = exposed_seconds(seconds, schedule, setting.step_time) / every
    share = setting.step_time / (setting.step_time + exposed + waiting)
    return Cost(method, every, sent, sent * schedule.total(setting.steps), seconds, exposed, waiting, share)


def exposed_seconds(seconds: float, schedule: SyncSchedule, step_time: float) -> float:
    """What computing does not hide of an exchange of so many seconds.

    It runs beside `delay` inner steps, or beside those until the next exchange wants the link if these are fewer: that
    one begins later then. Outer steps count as evenly spaced, which they are where F divides H or H divides F; where
    they are not, a run waits for an exchange less than a tenth of a step more (a test replays it).
    """
    left = seconds - min(schedule.delay, schedule.gap) * step_time
    return left if left > 1e-9 * seconds else 0.0  # no rest of the subtraction


def with_replicas(setting: Setting, replicas: int) -> Setting:
    """The same with another number of replicas, the group no larger than that."""
    return replace(setting, replicas=replicas, group_size=min(setting.group_size, replicas))


def _schedule_of(setting: Setting, method: str) -> SyncSchedule:
    if method in OUTER_METHODS:
        return SyncSchedule(setting.sync_every, setting.fragments, setting.delay)
    return SyncSchedule(1)


def _waiting(setting: Setting, seed: int) -> dict[str, float]:
    if setting.step_spread == 0:
        return dict.fromkeys(METHODS, 0.0)
    rest = (setting.group_size, setting.step_time, setting.step_spread, seed)
    every_step, _ = waiting_per_step(setting.replicas, 1, *rest)
    diloco, noloco = waiting_per_step(setting.replicas, setting.sync_every, *rest)
    return {"FSDP": every_step, "DDP": every_step, "DiLoCo": diloco, "NoLoCo": noloco}


def _message_bytes(setting: Setting, wire: str, fragments: int) -> float:
    """Of one of so many fragments, without what fills up the last block of an array."""
    return setting.params / fragments * block_bytes(wire) / block_of(wire)


def _summed_wire(setting: Setting) -> str:
    return setting.wire if setting.wire in FLOAT_BYTES else "float32"


def _transfer(setting: Setting, size: float) -> float:
    return 8 * size / setting.bandwidth


def _message(setting: Setting, size: float) -> float:
    return setting.latency + _transfer(setting, size)


def _log2(n: int) -> int:
    return (n - 1).bit_length()


def _hops(setting: Setting) -> int:
    """Messages in a row of a reduce-scatter or an all-gather; a tree serves an all-reduce only."""
    return setting.replicas - 1 if setting.all_reduce == "ring" else _log2(setting.replicas)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
