"""Table of training methods. A new method is a row here, a rule in `optim`, and a line in the tests' table."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from noloco_jax.optim.defaults import DEFAULTS
from noloco_jax.optim.fits import exchange_of_groups, fits_hypercube, is_without_effect, messages_of_groups, misfits
from noloco_jax.optim.wire_sizes import CHUNK, kept_of

if TYPE_CHECKING:
    from noloco_jax.optim.fragments import Fragments
    from noloco_jax.optim.neighbours import RandomNeighbours
    from noloco_jax.optim.outer_step import OuterOptimizer
    from noloco_jax.optim.pairing import RandomPairing


_ARGUMENTS = {"lr": "outer_lr", "momentum": "outer_momentum"}  # field of `outer` -> argument, where they differ
_OF_PAIRING = ("group_size", "order", "neighbours")  # fields that the pairing takes
Outer = Any  # an `OuterConfig`; its module imports this table and so cannot be imported here


@dataclass(frozen=True)
class Method:
    """Row of a training method.

    Attributes:
      name: value of `config.method`.
      describe: (number of replicas, outer) -> a line for people.
      exchange: the method's exchange, see `fits.Fit`; "pairs" also where the groups may be larger.
      defaults: field of `outer` -> its default (None: derived from other fields); empty for methods without outer
        steps. The method ignores a field that only other rows have.
      number_mistakes: (number of replicas, outer) -> messages on numbers that do not fit each other.
      pairing: (number of replicas, seed, outer) -> the pairing or graphs; None if all replicas or none exchange.
      num_messages: (number of replicas, outer) -> messages of the parameters' size that a replica sends in an outer
        step of all fragments; None if all or no replicas exchange.
      averages_gradients: True if gradients are averaged over all replicas at every step.
      outer_collectives: the collectives (JAX primitives) between replicas in an outer step.
      baseline: field -> its value when the method is compared with a noloco configuration, instead of `defaults`
        (DiLoCo's is the baseline of the paper's Section 4); None: the value in `defaults`.
      sync_factor: ratio of its `sync_every` to noloco's in such a comparison.
    """

    name: str
    describe: Callable[[int, Outer], str]
    exchange: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    number_mistakes: Callable[[int, Outer], Iterable[str]] = lambda num_replicas, outer: ()
    pairing: "Callable[[int, int, Outer], RandomPairing | RandomNeighbours] | None" = None
    num_messages: Callable[[int, Outer], float] | None = None
    averages_gradients: bool = False
    outer_collectives: tuple[str, ...] = ()
    baseline: Mapping[str, Any] = field(default_factory=dict)
    sync_factor: int = 1

    @property
    def has_outer_steps(self) -> bool:
        return bool(self.defaults)

    def mistakes(self, num_replicas: int, outer: Outer) -> Iterator[str]:
        """Yield a message on each field that does not fit the method."""
        if numbers := [*self.number_mistakes(num_replicas, outer)]:
            yield from numbers
            return
        exchange, given = self.exchange, f"method={self.name!r}"
        if exchange == "pairs" and exchange_of_groups(num_replicas, outer.group_size) == "groups":
            exchange, given = "groups", f"outer.group_size={outer.group_size} of num_replicas={num_replicas}"
        yield from misfits(exchange, vars(outer), given, lambda option, value: f"outer.{option}={value!r}")

    def outer_optimizer(
        self, outer: Outer, num_replicas: int, seed: int, axis_name: Any, fragments: "Fragments"
    ) -> "OuterOptimizer":
        """Build the method's transform from the fields of `outer` that it uses.

        The pairing does not depend on the devices, so that it is the same on any.
        """
        from noloco_jax.optim import transforms  # imported late, since the configuration reads this table without jax

        names = [name for name in (*self.defaults, "delay") if not self.is_unused(f"outer.{name}")]
        given = {_ARGUMENTS.get(name, name): getattr(outer, name) for name in names if name not in _OF_PAIRING}
        pairing = [] if self.pairing is None else [self.pairing(num_replicas, seed, outer)]
        return getattr(transforms, self.name)(*pairing, **given, axis_name=axis_name, fragments=fragments)

    def is_unused(self, field: str) -> bool:
        """Return True if the method ignores a field of the configuration, given by its dotted path."""
        group, _, name = field.rpartition(".")
        if group != "outer":
            return False
        is_of_others = name in METHOD_FIELDS and name not in self.defaults
        return not self.has_outer_steps or is_of_others or is_without_effect(self.exchange, name)


def _pairing(num_replicas: int, seed: int, outer: Outer) -> "RandomPairing":
    from noloco_jax.optim.pairing import RandomPairing

    return RandomPairing(num_replicas, outer.group_size, seed, outer.order)


def _describe_noloco(num_replicas: int, outer: Outer) -> str:
    gamma = outer.lr if outer.consensus is None else outer.consensus
    of_what = " of corrections" if outer.momentum_of == "corrections" else ""
    return (
        f"noloco: groups of {outer.group_size} average {_when(outer)} "
        f"(alpha {outer.momentum:g}{of_what}, beta {outer.lr:g}, gamma {gamma:g}){_what(outer)}"
    )


def _when(outer: Outer) -> str:
    each = f"each of {outer.fragments} fragments " if outer.fragments > 1 else ""
    return f"{each}every {'step' if outer.sync_every == 1 else f'{outer.sync_every} steps'}"


def _what(outer: Outer) -> str:
    """Describe deviations of an outer step from the paper; empty if there are none."""
    parts = [
        "in the order of a hypercube" if outer.order == "hypercube" else "",
        f"as {outer.wire}" if outer.wire not in (None, "float32") else "",
        f"applied {outer.delay} step{'s' if outer.delay > 1 else ''} later" if outer.delay else "",
        "merged at the end" if outer.final_merge else "",
    ]
    return "".join(f", {part}" for part in parts if part)


def _noloco_mistakes(num_replicas: int, outer: Outer) -> Iterator[str]:
    if num_replicas < 2:
        yield f"method='noloco' averages pairs and num_replicas={num_replicas}: use 2 or more, or method='local'"
    elif not 2 <= outer.group_size <= num_replicas:
        yield f"outer.group_size={outer.group_size} is not between 2 and num_replicas={num_replicas}: change one"
    if outer.order == "hypercube" and not fits_hypercube(num_replicas, outer.group_size):
        yield (
            f"outer.order='hypercube' is for powers of two, here num_replicas={num_replicas} and "
            f"outer.group_size={outer.group_size}: give outer.order='passes'"
        )


def _describe_diloco(num_replicas: int, outer: Outer) -> str:
    kind = "Nesterov" if outer.nesterov else "heavy ball"
    return f"diloco: all average {_when(outer)} ({kind}, alpha {outer.momentum:g}, beta {outer.lr:g}){_what(outer)}"


def _neighbours(num_replicas: int, seed: int, outer: Outer) -> "RandomNeighbours":
    from noloco_jax.optim.neighbours import RandomNeighbours

    return RandomNeighbours(num_replicas, outer.neighbours, seed, outer.order)


def _num_neighbours(num_replicas: int, outer: Outer) -> int:
    return (num_replicas - 1).bit_length() if outer.neighbours is None else outer.neighbours


def _describe_epidemic(num_replicas: int, outer: Outer) -> str:
    number = _num_neighbours(num_replicas, outer)
    others = f"{number} random others" if number > 1 else "a random other"
    return f"epidemic: each sends its weights to {others} and averages {_when(outer)}{_what(outer)}"


def _epidemic_mistakes(num_replicas: int, outer: Outer) -> Iterator[str]:
    if num_replicas < 2:
        yield f"method='epidemic' sends to others and num_replicas={num_replicas}: use 2 or more"
    elif outer.neighbours is not None and outer.neighbours >= num_replicas:
        yield (
            f"outer.neighbours={outer.neighbours} is more than the others of num_replicas={num_replicas}: give at most "
            f"{num_replicas - 1}"
        )


def _describe_sparseloco(num_replicas: int, outer: Outer) -> str:
    return (
        f"sparseloco: all send {kept_of(CHUNK, outer.top_k)} of {CHUNK} entries to all {_when(outer)} "
        f"(alpha {outer.lr:g}){_what(outer)}"
    )


METHODS: dict[str, Method] = {
    row.name: row
    for row in (
        Method(
            "noloco",
            _describe_noloco,
            "pairs",
            DEFAULTS["noloco"],
            _noloco_mistakes,
            pairing=_pairing,
            num_messages=lambda num_replicas, outer: messages_of_groups(num_replicas, outer.group_size),
            outer_collectives=("ppermute",),
        ),
        Method(
            "diloco",
            _describe_diloco,
            "all",
            DEFAULTS["diloco"],
            outer_collectives=("psum", "all_to_all", "all_gather"),  # the latter two if messages are quantized
            baseline={"lr": 0.7, "momentum": 0.3, "nesterov": False},
            sync_factor=2,
        ),
        Method(
            "epidemic",
            _describe_epidemic,
            "graph",
            DEFAULTS["epidemic"],
            _epidemic_mistakes,
            pairing=_neighbours,
            num_messages=_num_neighbours,
            outer_collectives=("ppermute",),
        ),
        Method(
            "sparseloco",
            _describe_sparseloco,
            "sparse",
            DEFAULTS["sparseloco"],
            outer_collectives=("all_gather",),
            baseline={"lr": None},
        ),
        Method(
            "ddp", lambda num_replicas, outer: "ddp: gradients averaged every step", "none", averages_gradients=True
        ),
        Method("local", lambda num_replicas, outer: "local: replicas never meet", "none"),
    )
}
METHOD_FIELDS = tuple(dict.fromkeys(name for row in METHODS.values() for name in row.defaults))
