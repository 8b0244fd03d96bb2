"""What each method's communication costs a training step on given links: seconds, bytes, share of the step.

The model: a message of V bytes takes latency + 8V / bandwidth; a replica sends and receives at the full bandwidth at
the same time and all replicas do so at once; nothing overlaps with computing.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from noloco_jax.config import OuterConfig
from noloco_jax.errors import UserError
from noloco_jax.simulate.blocking import waiting_per_step

ALL_REDUCES = ("halving", "ring", "tree")
METHODS = ("FSDP", "DDP", "DiLoCo", "NoLoCo")
_FLOAT_BYTES = 4
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
      bytes_per_param: in a message; 4 is float32.
      all_reduce: "halving" (recursive halving and doubling: the best known in latency and in bytes), "ring", or
        "tree" (the paper's).
      step_spread: standard deviation over mean of a step's computing time; 0 leaves waiting for stragglers out.
    """

    params: float = 125e6
    bandwidth: float = 1e9
    latency: float = 0.04
    step_time: float = 1.0
    replicas: int = 16
    sync_every: int = OuterConfig.sync_every
    group_size: int = OuterConfig.group_size
    bytes_per_param: float = 4.0
    all_reduce: str = "halving"
    step_spread: float = 0.0

    def check(self) -> None:
        """Raises UserError if a field is out of its range or two disagree."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, str):
                continue
            if field.name in ("latency", "step_spread"):
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
      every: inner steps between its communications.
      bytes_per_sync: sent by a replica at each of them, on average over replicas.
      seconds_per_sync: on the links.
      seconds_per_step: on the links, spread over the inner steps between two communications.
      waiting_per_step: for slower replicas, seconds; 0 without a spread.
      compute_share: of the wall clock spent computing, 0 to 1.
    """

    method: str
    every: int
    bytes_per_sync: float
    seconds_per_sync: float
    seconds_per_step: float
    waiting_per_step: float
    compute_share: float

    @property
    def bytes_per_step(self) -> float:
        """Sent by a replica, averaged over inner steps."""
        return self.bytes_per_sync / self.every


def all_reduce(setting: Setting) -> tuple[float, float]:
    """Bytes sent by a replica (on average) and seconds of one all-reduce of the model's V bytes over N replicas.

    halving  2⌈log₂ N⌉ latency + 2(N−1)/N · V/bandwidth
    ring     2(N−1) latency    + 2(N−1)/N · V/bandwidth
    tree     2⌈log₂ N⌉ (latency + V/bandwidth): the paper's 2 t log₂ N, the whole model up and down the tree
    """
    size, n = _model_bytes(setting), setting.replicas
    sent = 2 * (n - 1) / n * size
    if setting.all_reduce == "tree":
        return sent, 2 * _log2(n) * _message(setting, size)
    return sent, 2 * _hops(setting) * setting.latency + _transfer(setting, sent)


def sharded_step(setting: Setting) -> tuple[float, float]:
    """Bytes and seconds of a step of FSDP: all-gather of the weights forward and backward, reduce-scatter of gradients.

    3(N−1)/N · V bytes and 3 ⌈log₂ N⌉ latency (ring: 3(N−1)), as one collective of each kind for the whole model:
    layer by layer, as real programs have it, the latency comes once a layer.
    """
    size, n = _model_bytes(setting), setting.replicas
    sent = 3 * (n - 1) / n * size
    return sent, 3 * _hops(setting) * setting.latency + _transfer(setting, sent)


def group_exchange(setting: Setting) -> tuple[float, float]:
    """Bytes sent by a replica (on average) and seconds of NoLoCo's outer step, as `exchange.groups` does it.

    One message of V bytes to each other member of the group, in turn. In groups of n > 2 equal sizes an n-th of it to
    each, and the float32 means of a share back, where that is less. A replica of a rest has fewer to send to.
    """
    size, (n, replicas) = _model_bytes(setting), (setting.group_size, setting.replicas)
    rest = replicas % n
    share = (size + _FLOAT_BYTES * setting.params) / n  # there and back
    if n > 2 and rest == 0 and share <= size:
        return (n - 1) * share, 2 * (n - 1) * setting.latency + _transfer(setting, (n - 1) * share)
    others = ((replicas - rest) * (n - 1) + rest * (rest - 1)) / replicas
    return others * size, (n - 1) * _message(setting, size)


_EXCHANGES: dict[str, Callable[[Setting], tuple[float, float]]] = {
    "FSDP": sharded_step,
    "DDP": all_reduce,
    "DiLoCo": all_reduce,
    "NoLoCo": group_exchange,
}


def costs(setting: Setting, seed: int) -> list[Cost]:
    """What each of `METHODS` costs on these links."""
    setting.check()
    waiting = _waiting(setting, seed)
    return [_cost(setting, method, waiting[method]) for method in METHODS]


def link_seconds_per_step(setting: Setting, method: str) -> float:
    """Seconds that a method's communication adds to a step, without waiting for stragglers."""
    return _cost(setting, method, waiting=0.0).seconds_per_step


def compute_share(setting: Setting, method: str) -> float:
    """Share of the wall clock spent computing, without waiting for stragglers."""
    return _cost(setting, method, waiting=0.0).compute_share


def with_replicas(setting: Setting, replicas: int) -> Setting:
    """The same with another number of replicas, the group no larger than that."""
    return replace(setting, replicas=replicas, group_size=min(setting.group_size, replicas))


def with_bandwidth(setting: Setting, bandwidth: float) -> Setting:
    """The same with another bandwidth, bits per second."""
    return replace(setting, bandwidth=bandwidth)


def _cost(setting: Setting, method: str, waiting: float) -> Cost:
    every = setting.sync_every if method in ("DiLoCo", "NoLoCo") else 1
    sent, seconds = _EXCHANGES[method](setting)
    lost = seconds / every + waiting
    share = setting.step_time / (setting.step_time + lost)
    return Cost(method, every, sent, seconds, seconds / every, waiting, share)


def _waiting(setting: Setting, seed: int) -> dict[str, float]:
    if setting.step_spread == 0:
        return dict.fromkeys(METHODS, 0.0)
    rest = (setting.group_size, setting.step_time, setting.step_spread, seed)
    every_step, _ = waiting_per_step(setting.replicas, 1, *rest)
    diloco, noloco = waiting_per_step(setting.replicas, setting.sync_every, *rest)
    return {"FSDP": every_step, "DDP": every_step, "DiLoCo": diloco, "NoLoCo": noloco}


def _model_bytes(setting: Setting) -> float:
    return setting.params * setting.bytes_per_param


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
