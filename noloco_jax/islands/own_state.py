"""State of an island in a user's own loop: weights, `rest` and the outer optimizer's, on the user's devices."""

from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from noloco_jax.islands.catch_up import CaughtUp
from noloco_jax.islands.membership import digest
from noloco_jax.islands.payload import ArraySpec, StateCodec, specs_of
from noloco_jax.islands.programs import LocalPrograms, build_own, compile_local
from noloco_jax.islands.tree_spec import TreeSpec
from noloco_jax.optim.fragments import described
from noloco_jax.optim.outer_step import OuterOptimizer
from noloco_jax.optim.rule import OuterState, at_num_outer_steps
from noloco_jax.spmd.programs import TrainState, shardings_of

PyTree = Any
_FRESH = (
    "where this island takes a peer's weights, True begins all of rest anew with the values given to begin, and False "
    "takes all of it from the peer, as large as it is, and believes what is finite; a tree of both that begins like "
    "rest does either by part, as fresh=(True, False) for optax.adam(schedule)"
)


class OwnState:
    """Specs of the state of a user's loop: shapes and shardings, and how a state is made of given or received arrays.

    Args:
      outer: the outer optimizer.
      params: the weights.
      rest: what travels with them.
      fresh: what of `rest` begins anew with these values, see `Island.begin`; None: not given.

    Attributes:
      params, rest: specs of the user's trees.
      described_fresh: what of `rest` begins anew, for islands to compare.
      places: shapes, dtypes and shardings of the state.
      local: programs of local steps and corrections, not compiled.
    """

    def __init__(self, outer: OuterOptimizer, params: PyTree, rest: PyTree, fresh: PyTree | None):
        self._outer = outer
        self.params, self.rest = TreeSpec(params, "params", is_computed=True), TreeSpec(rest, "rest")
        shapes = self.params.shapes()
        outer_shapes = self._shapes_of_outer(shapes)
        self.local = build_own(outer, shapes, outer_shapes)
        self.places = TrainState(shapes, self.rest.shapes(), outer_shapes)
        self._fresh = fresh_values(self.rest.arrays(rest), fresh)
        count = len(self.rest.specs)
        which = f" ({digest([*self._fresh])})" if 0 < len(self._fresh) < count else ""
        self.described_fresh = f"{len(self._fresh)} of {count} arrays of rest{which}"

    @property
    def specs(self) -> dict[str, ArraySpec]:
        """Return the spec of every array of the state, by its name."""
        named = {f"params{name}": spec for name, spec in self.params.specs.items()}
        named |= {f"rest{name}": spec for name, spec in self.rest.specs.items()}
        return named | {f"outer {i}": spec for i, spec in enumerate(specs_of(self.places.outer))}

    @property
    def saved_specs(self) -> dict[str, ArraySpec | str]:
        """Return what a checkpoint must have equal: the specs, and the fragments to which saved windows belong."""
        specs: dict[str, ArraySpec | str] = dict(self.specs)
        count = self._outer.steps.fragments.count
        assert self.places.outer is not None
        return specs if count == 1 or self.places.outer.windows is None else {**specs, "fragments": described(count)}

    @property
    def state_codec(self) -> StateCodec:
        """Return the codec of the state."""
        first, count = (len(jax.tree.leaves(tree)) for tree in self.places[:2])
        carried = [first + number for number in range(count) if number not in self._fresh]
        return StateCodec(specs_of(self.places), first, carried)

    def begun(self, params: PyTree, rest: PyTree) -> TrainState:
        """Return a state with these arrays, of which no outer step was taken."""
        make = jax.jit(self._outer.init, out_shardings=shardings_of(self.places.outer))
        return TrainState(params, rest, make(params))

    def placed(self, leaves: Any, places: TrainState | None = None) -> TrainState:
        """Return a state on this island's devices; numbers and NumPy arrays of `rest` stay on the host."""
        places = places or self.places
        state = jax.tree.structure(places).unflatten(leaves)

        def put(x: Any, like: Any) -> Any:
            return jax.device_put(x, like.sharding)

        def of_rest(x: Any, like: Any) -> Any:
            return np.asarray(x) if like.sharding is None else put(x, like)

        return TrainState(
            jax.tree.map(put, state.params, places.params),
            jax.tree.map(of_rest, state.inner, places.inner),
            jax.tree.map(put, state.outer, places.outer),
        )

    def from_peer(self, caught_up: CaughtUp) -> TrainState:
        """Return the state of a peer on this island's devices."""
        params, rest, _ = self.places
        round, _, given = caught_up
        first, count = len(jax.tree.leaves(params)), len(jax.tree.leaves(rest))
        leaves = {first + number: x for number, x in self._fresh.items()} | given
        placed = self.placed([leaves[number] for number in range(first + count)], TrainState(params, rest, None))
        state = self.begun(placed.params, placed.inner)
        assert state.outer is not None
        return state._replace(outer=at_num_outer_steps(state.outer, round + 1))

    def compiled(self) -> LocalPrograms:
        """Compile the programs."""
        return compile_local(self.local, self.places.params, self.places.outer)

    def _shapes_of_outer(self, params: PyTree) -> OuterState:
        """Return shapes, dtypes and shardings of the outer state: what is like a parameter lies as it does."""
        shapes: Any = jax.eval_shape(self._outer.init, params)
        first = jax.tree.leaves(params)[0].sharding
        whole = NamedSharding(first.mesh, P()) if isinstance(first, NamedSharding) else first

        def placed(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        placed_state: Any = optax.tree.map_params(
            self._outer,
            lambda x, like: placed(x, like.sharding),
            shapes,
            params,
            transform_non_params=lambda x: placed(x, whole),
        )
        return placed_state._replace(windows=jax.tree.map(lambda x: placed(x, whole), shapes.windows))


def fresh_values(rest: PyTree, fresh: PyTree | None) -> dict[int, np.ndarray]:
    """Return the number and first value of every leaf of `rest` that begins anew.

    Raises `ValueError` where `rest` has leaves and `fresh` is no prefix of it, or has other flags than True and False.
    """
    leaves = jax.tree.leaves(rest)
    if fresh is None and leaves:
        raise ValueError(f"fresh is missing, as rest has {len(leaves)} arrays: {_FRESH}")
    for flag in jax.tree.leaves(fresh):
        if not isinstance(flag, bool):
            raise ValueError(f"fresh holds {type(flag).__name__} in the place of True or False: {_FRESH}")
    try:
        flags = jax.tree.leaves(jax.tree.broadcast(fresh, rest)) if leaves else []
    except ValueError as error:
        raise ValueError(f"fresh={fresh!r} does not begin like rest ({error}): {_FRESH}") from None
    found = {}
    for number, (x, flag) in enumerate(zip(leaves, flags, strict=True)):
        if flag:
            values = np.array(x)
            # Zeros of NumPy's own take no memory until they are used.
            found[number] = values if values.any() else np.zeros_like(values)
    return found
