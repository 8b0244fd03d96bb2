"""Averaging of the inner optimizer's moments over the groups of an outer step, at once or as a late correction.

A moment decays by a factor d with every inner step, and what an averaging has changed in it decays as well. A
correction c that is applied τ inner steps after its exchange is therefore applied as d^τ c, which gives the moments
that the averaging itself would have given with the same gradients. Islands apply theirs when they arrive, after as many
inner steps as that took.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from noloco_jax.outer.fragments import Fragments

PyTree = Any
_FIRST, _SECOND = "mu", "nu"  # names of Adam's moments in an optimizer's state
# Of others of Optax's too, none below 0.
_SECONDS = {_SECOND, "nu_max", "n", "sum_of_squares", "grad_sum_sq", "exp_avg_sq", "e_g", "e_x"}
_FACTORED, _UNFACTORED = "v_row", "v"  # Adafactor's; Adan has a `v` too, which may be below 0
_ADAMS_DECAYS = {_FIRST: 0.9, _SECOND: 0.999}  # Optax's, for an optimizer whose own are not known


class LateMoments(NamedTuple):
    """State of an inner optimizer whose moments are corrected some inner steps after their exchange.

    Attributes:
      inner: the optimizer's own state.
      correction: a tree like it without what is no moment: of every fragment the correction that is not applied yet,
        else zeros.
    """

    inner: PyTree
    correction: PyTree


@dataclass(frozen=True)
class Moments:
    """Averaging of the moments of one fragment of one replica.

    A second moment is averaged as its square root. If only one of a pair has seen a row (such as a rare token), the
    mean halves that row's first moment, and it also halves the root that Adam divides it by. A mean of logarithms
    would bring that root near zero. Two properties of exact means hold for quantized ones too: no root comes out below
    half of one's own, nor below `least_root` of its first moment. A wire format rounds the two by themselves: where it
    keeps a first moment and rounds the root to zero, Adam would divide by nearly zero.

    Attributes:
      params: the parameters of a replica or their shapes; a leaf of the inner state is a moment if its path ends with a
        parameter's and it has as many dimensions.
      fragments: cut of the parameters, and of their moments, into fragments.
      exchange: (tree, number of the outer step, movement of its numbers, hidden dimensions) -> the mean of the group.
        The movement is taken as the full value.
      delay: inner steps from the exchange to the correction; 0: the mean is applied at once.
      decays: name of a moment in the optimizer's state -> its decay in an inner step; without them nothing is late, and
        the optimizer is taken for Optax's Adam, or another whose own roots are shorter.
      factored: paths of Adafactor's states in the inner state, see `factored_in`.
    """

    params: PyTree
    fragments: Fragments
    exchange: Callable[[PyTree, Any, PyTree, PyTree], PyTree]
    delay: int = 0
    decays: Mapping[str, float] = field(default_factory=dict)
    factored: frozenset[tuple] = frozenset()

    def share(self, inner: PyTree, number: jax.Array) -> PyTree:
        """Average the moments in outer step `number`; with a delay, keep the correction. Return the inner state."""
        if self.delay:
            return self.keep(inner, self.correction(self.sent(inner, number), number), number)
        sent = self.sent(inner, number)
        mean = self.exchange(sent, number, sent, self.cuts(sent))
        return self._replaced(inner, self._received(mean, sent), number)

    def sent(self, inner: PyTree, number: jax.Array) -> PyTree:
        """Return the tree that outer step `number` averages over the group."""
        moments = moments_of(inner.inner if self.delay else inner, self.params)
        return self._by_kind(lambda x: x, jnp.sqrt, self.fragments.part(moments, self.cuts(moments), number))

    @functools.cached_property
    def _parameters(self) -> frozenset[tuple]:
        return frozenset(path for path, _ in jax.tree.leaves_with_path(self.params))

    def _name(self, path: tuple) -> Any:
        """Return the name of the moment at a path: that of the key in front of the parameter's own path."""
        place = self._place(path)
        return getattr(path[place], "name", None) if place >= 0 else None

    def _place(self, path: tuple) -> int:
        return next(start for start in range(len(path) + 1) if path[start:] in self._parameters) - 1

    def correction(self, sent: PyTree, number: jax.Array) -> PyTree:
        """Average what `sent` returned; return the difference of the moments from this replica's own."""
        return self.change(sent, self.exchange(sent, number, sent, self.cuts(sent)))

    def change(self, sent: PyTree, mean: PyTree) -> PyTree:
        """Return the difference of the moments that the group's mean of `sent` gives from this replica's own."""
        own = self._by_kind(lambda x: x, jnp.square, sent)
        return jax.tree.map(jnp.subtract, self._received(mean, sent), own)

    def keep(self, inner: LateMoments, correction: PyTree, number: jax.Array) -> LateMoments:
        """Store the correction of outer step `number` until it is due."""
        kept = self.fragments.put(inner.correction, correction, self.cuts(inner.correction), number)
        return inner._replace(correction=kept)

    def enter(self, inner: LateMoments, number: jax.Array) -> LateMoments:
        """Apply the correction that outer step `number` has left, if any, `delay` inner steps after it."""
        correction = self.fragments.part(inner.correction, self.cuts(inner.correction), number)
        emptied = self.keep(inner, jax.tree.map(jnp.zeros_like, correction), number)
        return emptied._replace(inner=self.corrected(inner.inner, correction, number, self.delay))

    def corrected(self, inner: PyTree, correction: PyTree, number: jax.Array, age: Any) -> PyTree:
        """Return the inner state with the correction of outer step `number` applied, `age` inner steps after it."""
        moments = moments_of(inner, self.params)
        moments = self.fragments.part(moments, self.cuts(moments), number)

        def one(path: tuple, moment: jax.Array, correction: jax.Array) -> jax.Array:
            result = moment + self.decays[self._name(path)] ** age * correction
            # Without rounding errors it is no less, since a second moment falls at most by its decay.
            return jnp.maximum(result, moment / 4) if self._is_second(path) else result

        corrected = jax.tree.map_with_path(one, moments, correction)
        return self._replaced(inner, self._not_below_first(corrected, jnp.square), number)

    def cuts(self, moments: PyTree) -> PyTree:
        """Return the dimension along which each moment is cut into fragments, and into the blocks of wire formats."""
        cuts = dict(jax.tree.leaves_with_path(self.fragments.cuts(self.params)))
        return jax.tree.map_with_path(lambda path, x: _of_parameter(path, cuts), moments)

    @property
    def least_root(self) -> float:
        """The least root of a second moment, as a share of its first moment's size, that any gradients give.

        By Cauchy and Schwarz, for the decays b and d of both: sqrt((1 - d) (1 - b²/d)) / (1 - b). It holds for the
        means of a group and for the inner steps after them too.
        """
        decays = {**_ADAMS_DECAYS, **self.decays}
        first, second = decays[_FIRST], decays[_SECOND]
        if not 0 <= first * first < second < 1:
            return 0.0
        return math.sqrt((1 - second) * (1 - first * first / second)) / (1 - first)

    def _received(self, mean: PyTree, sent: PyTree) -> PyTree:
        """Return the moments that the group's mean of `sent` gives."""
        roots = jax.tree.map_with_path(
            lambda path, mean, own: jnp.maximum(mean, own / 2) if self._is_second(path) else mean, mean, sent
        )
        return self._by_kind(lambda x: x, jnp.square, self._not_below_first(roots, lambda x: x, sent))

    def _not_below_first(
        self, moments: PyTree, power: Callable[[jax.Array], jax.Array], own: PyTree | None = None
    ) -> PyTree:
        """Raise second moments, `power` of their roots, to the least that their first ones allow.

        Of an optimizer whose decays are not known, to no larger a share of these than this replica's `own` roots are.
        """
        firsts = {path: x for path, x in jax.tree.leaves_with_path(moments) if not self._is_second(path)}
        owns = {} if own is None or self.decays else dict(jax.tree.leaves_with_path(own))

        def one(path: tuple, x: jax.Array) -> jax.Array:
            beside = self._of_first(path)
            if not self._is_second(path) or beside not in firsts:
                return x
            least = self.least_root * jnp.abs(firsts[beside])
            if beside in owns:
                size = jnp.abs(owns[beside])
                share = jnp.where(size > 0, owns[path] / jnp.where(size > 0, size, 1), jnp.inf)
                least = jnp.minimum(self.least_root, share) * jnp.abs(firsts[beside])
            return jnp.maximum(x, power(least).astype(x.dtype))

        return jax.tree.map_with_path(one, moments)

    def _by_kind(self, first: Callable[..., Any], second: Callable[..., Any], moments: PyTree) -> PyTree:
        """Map the first moments by one function and the second ones by another."""
        return jax.tree.map_with_path(lambda path, x: (second if self._is_second(path) else first)(x), moments)

    def _is_second(self, path: tuple) -> bool:
        name, place = self._name(path), self._place(path)
        return name in _SECONDS or (name == _UNFACTORED and path[:place] in self.factored)

    def _of_first(self, path: tuple) -> tuple:
        """Return the path of the first moment beside a second one's."""
        place = self._place(path)
        return (*path[:place], jax.tree_util.GetAttrKey(_FIRST), *path[place + 1 :]) if place >= 0 else path

    def _replaced(self, inner: PyTree, part: PyTree, number: jax.Array) -> PyTree:
        moments = moments_of(inner, self.params)
        moments = self.fragments.put(moments, part, self.cuts(moments), number)
        of_path = dict(jax.tree.leaves_with_path(moments))
        return jax.tree.map_with_path(lambda path, x: of_path.get(path, x), inner)


def with_late_moments(inner: optax.GradientTransformation, is_late: bool) -> optax.GradientTransformation:
    """Return the optimizer with a place for corrections of its moments that are not due yet, if `is_late`."""
    if not is_late:
        return inner

    def init(params: PyTree) -> LateMoments:
        state = inner.init(params)
        return LateMoments(state, jax.tree.map(jnp.zeros_like, moments_of(state, params)))

    def update(updates: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, Any]:
        updates, own = inner.update(updates, state.inner, params)
        return updates, state._replace(inner=own)

    return optax.GradientTransformation(init, update)


def factored_in(inner: PyTree) -> frozenset[tuple]:
    """Return the paths of Adafactor's states in an inner state: `v` in them is a second moment that is not factored."""
    paths = (path for path, _ in jax.tree.leaves_with_path(inner))
    return frozenset(
        path[:place] for path in paths for place, key in enumerate(path) if getattr(key, "name", None) == _FACTORED
    )


def moments_of(inner: PyTree, params: PyTree) -> PyTree:
    """Return an inner state without the leaves that are no moments of these parameters."""
    parameters = dict(jax.tree.leaves_with_path(params))

    def one(path: tuple, x: Any) -> Any:
        like = _of_parameter(path, parameters)
        if like is None or x.ndim != like.ndim or not jnp.issubdtype(x.dtype, jnp.inexact):
            return None
        return x if x.size > 1 or like.size == 1 else None  # factored moments have an array of one element elsewhere

    return jax.tree.map_with_path(one, inner)


def _of_parameter(path: tuple, of_parameter: dict[tuple, Any]) -> Any:
    """Look up the value of the parameter whose path is a suffix of `path`; None if there is none."""
    ends = (of_parameter.get(path[start:]) for start in range(len(path) + 1))
    return next((found for found in ends if found is not None), None)
