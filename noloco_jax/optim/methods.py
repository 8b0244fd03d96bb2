"""Table of training methods. A new method is a row here, a rule in `optim`, and a line in the tests' table."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from noloco_jax.optim.defaults import DEFAULTS
from noloco_jax.optim.schedule import SyncSchedule
from noloco_jax.optim.wire_sizes import CHUNK, MODULO_BITS, kept_of

if TYPE_CHECKING:
    from noloco_jax.optim.fragments import Fragments
    from noloco_jax.optim.neighbours import RandomNeighbours
    from noloco_jax.optim.outer_step import OuterOptimizer
    from noloco_jax.optim.pairing import RandomPairing


_ARGUMENTS = {"lr": "outer_lr", "momentum": "outer_momentum"}  # field of `outer` -> argument, where they differ
_OF_PAIRING = ("group_size", "order", "neighbours")  # fields that the pairing takes
Config = Any  # a `TrainConfig`; its module imports this table and so cannot be imported here


@dataclass(frozen=True)
class Method:
    """Row of a training method.

    Attributes:
      name: value of `config.method`.
      describe: config -> a line for people.
      mistakes: config -> messages on fields that do not fit the method.
      defaults: field of `outer` -> its default (None: derived from other fields); empty for methods without outer
        steps. The method ignores a field that only other rows have.
      pairing: config -> the pairing or graphs; None if all replicas or none exchange.
      num_partners: config -> number of other replicas to which a replica sends in an outer step; None if all or none.
      averages_gradients: True if gradients are averaged over all replicas at every step.
      outer_collectives: the collectives (JAX primitives) between replicas in an outer step.
      also_unused: further fields of the configuration that the method ignores; "outer." stands for all of that group.
      baseline: field -> its value when the method is compared with a noloco configuration, instead of `defaults`
        (DiLoCo's is the baseline of the paper's Section 4); None: the value in `defaults`.
      sync_factor: ratio of its `sync_every` to noloco's in such a comparison.
    """

    name: str
    describe: Callable[[Config], str]
    mistakes: Callable[[Config], Iterable[str]] = lambda config: ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    pairing: "Callable[[Config], RandomPairing | RandomNeighbours] | None" = None
    num_partners: Callable[[Config], int] | None = None
    averages_gradients: bool = False
    outer_collectives: tuple[str, ...] = ()
    also_unused: tuple[str, ...] = ()
    baseline: Mapping[str, Any] = field(default_factory=dict)
    sync_factor: int = 1

    @property
    def has_outer_steps(self) -> bool:
        return bool(self.defaults)

    def outer_optimizer(self, config: Config, axis_name: Any, fragments: "Fragments") -> "OuterOptimizer":
        """Build the method's transform from the fields of `outer` that it uses."""
        from noloco_jax.optim import transforms  # imported late, since the configuration reads this table without jax

        names = [name for name in (*self.defaults, "delay") if not self.is_unused(f"outer.{name}")]
        given = {_ARGUMENTS.get(name, name): getattr(config.outer, name) for name in names if name not in _OF_PAIRING}
        pairing = [] if self.pairing is None else [self.pairing(config)]
        return getattr(transforms, self.name)(*pairing, **given, axis_name=axis_name, fragments=fragments)

    def is_unused(self, field: str) -> bool:
        """Return True if the method ignores a field of the configuration, given by its dotted path."""
        group, _, name = field.rpartition(".")
        return field.startswith(self.also_unused) or (
            group == "outer" and name in METHOD_FIELDS and name not in self.defaults
        )


def _pairing(config: Config) -> "RandomPairing":
    """Build the pairing from the configuration alone, so that it is the same on any devices."""
    from noloco_jax.optim.pairing import RandomPairing

    return RandomPairing(config.num_replicas, config.outer.group_size, config.seed, config.outer.order)


def _describe_noloco(config: Config) -> str:
    outer = config.outer
    gamma = outer.lr if outer.consensus is None else outer.consensus
    of_what = " of corrections" if outer.momentum_of == "corrections" else ""
    return (
        f"noloco: groups of {outer.group_size} average {_when(config)} "
        f"(alpha {outer.momentum:g}{of_what}, beta {outer.lr:g}, gamma {gamma:g}){_what(config)}"
    )


def _when(config: Config) -> str:
    outer = config.outer
    each = f"each of {outer.fragments} fragments " if outer.fragments > 1 else ""
    return f"{each}every {_steps(outer.sync_every)}"


def _steps(count: int) -> str:
    return "step" if count == 1 else f"{count} steps"


def _what(config: Config) -> str:
    """Describe deviations of an outer step from the paper; empty if there are none."""
    outer = config.outer
    parts = [
        "in the order of a hypercube" if outer.order == "hypercube" else "",
        f"as {outer.wire}" if outer.wire not in (None, "float32") else "",
        f"applied {outer.delay} step{'s' if outer.delay > 1 else ''} later" if outer.delay else "",
        "merged at the end" if outer.final_merge else "",
    ]
    return "".join(f", {part}" for part in parts if part)


def _noloco_mistakes(config: Config) -> Iterator[str]:
    replicas, group_size = config.num_replicas, config.outer.group_size
    if replicas < 2:
        yield f"method='noloco' averages pairs and num_replicas={replicas}: use 2 or more, or method='local'"
    elif not 2 <= group_size <= replicas:
        yield f"outer.group_size={group_size} is not between 2 and num_replicas={replicas}: change one"
    if config.outer.order == "hypercube" and (replicas & (replicas - 1) or group_size != 2):
        yield (
            f"outer.order='hypercube' is for pairs of 2, 4, 8, ... replicas, here num_replicas={replicas} and "
            f"outer.group_size={group_size}: give outer.order='passes'"
        )
    if group_size > 2 and config.outer.wire in MODULO_BITS:
        yield (
            f"outer.wire={config.outer.wire!r} is for pairs and outer.group_size={group_size}: use outer.wire='int8'"
        )


def _describe_diloco(config: Config) -> str:
    outer = config.outer
    kind = "Nesterov" if outer.nesterov else "heavy ball"
    return f"diloco: all average {_when(config)} ({kind}, alpha {outer.momentum:g}, beta {outer.lr:g}){_what(config)}"


def _diloco_mistakes(config: Config) -> Iterator[str]:
    if config.outer.wire in MODULO_BITS:
        yield (
            f"outer.wire={config.outer.wire!r} is for pairs and method='diloco' averages all replicas: use "
            "outer.wire='int4'"
        )


def _neighbours(config: Config) -> "RandomNeighbours":
    from noloco_jax.optim.neighbours import RandomNeighbours

    return RandomNeighbours(config.num_replicas, config.outer.neighbours, config.seed, config.outer.order)


def _num_neighbours(config: Config) -> int:
    given = config.outer.neighbours
    return (config.num_replicas - 1).bit_length() if given is None else given


def _describe_epidemic(config: Config) -> str:
    number = _num_neighbours(config)
    others = f"{number} random others" if number > 1 else "a random other"
    return f"epidemic: each sends its weights to {others} and averages {_when(config)}{_what(config)}"


def _epidemic_mistakes(config: Config) -> Iterator[str]:
    replicas, outer = config.num_replicas, config.outer
    if replicas < 2:
        yield f"method='epidemic' sends to others and num_replicas={replicas}: use 2 or more"
    elif outer.neighbours is not None and outer.neighbours >= replicas:
        yield (
            f"outer.neighbours={outer.neighbours} is more than the others of num_replicas={replicas}: give at most "
            f"{replicas - 1}"
        )
    if outer.order == "hypercube":
        yield ("outer.order='hypercube' is for noloco's pairs and method='epidemic': give outer.order='passes'")
    if outer.wire in MODULO_BITS:
        yield (
            f"outer.wire={outer.wire!r} is for pairs, which send to each other, and method='epidemic': use "
            "outer.wire='int8'"
        )
    yield from _not_offloaded_mistakes(config)


def _describe_sparseloco(config: Config) -> str:
    outer = config.outer
    return (
        f"sparseloco: all send {kept_of(CHUNK, outer.top_k)} of {CHUNK} entries to all {_when(config)} "
        f"(alpha {outer.lr:g}){_what(config)}"
    )


def _sparseloco_mistakes(config: Config) -> Iterator[str]:
    yield from _wire_mistakes(config)
    if config.outer.delay:
        yield (
            f"outer.delay={config.outer.delay} goes with dense messages and method='sparseloco' has sparse ones: leave "
            "it at 0"
        )


def _wire_mistakes(config: Config) -> Iterator[str]:
    if config.outer.wire not in (None, "float32"):
        yield (
            f"outer.wire={config.outer.wire!r} is for dense messages and method={config.method!r} sends none: leave "
            "it at 'float32'"
        )


def _no_outer_steps_mistakes(config: Config) -> Iterator[str]:
    yield from _wire_mistakes(config)
    yield from _not_offloaded_mistakes(config)


def _not_offloaded_mistakes(config: Config) -> Iterator[str]:
    if config.outer.offload:
        yield f"outer.offload=True and method={config.method!r} has no outer state: leave it out"


METHODS: dict[str, Method] = {
    row.name: row
    for row in (
        Method(
            "noloco",
            _describe_noloco,
            _noloco_mistakes,
            defaults=DEFAULTS["noloco"],
            pairing=_pairing,
            num_partners=lambda config: config.outer.group_size - 1,
            outer_collectives=("ppermute",),
        ),
        Method(
            "diloco",
            _describe_diloco,
            _diloco_mistakes,
            defaults=DEFAULTS["diloco"],
            outer_collectives=("psum", "all_to_all", "all_gather"),  # the latter two if messages are quantized
            baseline={"lr": 0.7, "momentum": 0.3, "nesterov": False},
            sync_factor=2,
        ),
        Method(
            "epidemic",
            _describe_epidemic,
            _epidemic_mistakes,
            defaults=DEFAULTS["epidemic"],
            pairing=_neighbours,
            num_partners=_num_neighbours,
            outer_collectives=("ppermute",),
            also_unused=("outer.offload",),
        ),
        Method(
            "sparseloco",
            _describe_sparseloco,
            _sparseloco_mistakes,
            defaults=DEFAULTS["sparseloco"],
            outer_collectives=("all_gather",),
            also_unused=("outer.delay",),
            baseline={"lr": None},
        ),
        Method(
            "ddp",
            lambda config: "ddp: gradients averaged every step",
            _no_outer_steps_mistakes,
            averages_gradients=True,
            also_unused=("outer.",),
        ),
        Method("local", lambda config: "local: replicas never meet", _no_outer_steps_mistakes, also_unused=("outer.",)),
    )
}
METHOD_FIELDS = tuple(dict.fromkeys(name for row in METHODS.values() for name in row.defaults))


def defaults_of(field: str) -> dict[str, Any]:
    """Map each method that uses a field of `outer` to its default there."""
    return {name: row.defaults[field] for name, row in METHODS.items() if field in row.defaults}


def schedule_of(config: Config) -> SyncSchedule | None:
    """Return the schedule of a run's outer steps; None if its method has none."""
    if not method_of(config).has_outer_steps:
        return None
    return SyncSchedule(config.outer.sync_every, config.outer.fragments, config.outer.delay)


def has_delay(config: Config) -> bool:
    """Return True if the method has outer steps, and their corrections are due some inner steps later."""
    return METHODS[config.method].has_outer_steps and config.outer.delay > 0


def method_of(config: Config) -> Method:
    """Return the row of a configuration's method."""
    return METHODS[config.method]
