"""Island in a user's own loop: any model, inner optimizer and tree of arrays, averaged with peers over the network."""

import dataclasses
import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from noloco_jax.cluster.workdir_lock import WorkdirLock
from noloco_jax.errors import UserError
from noloco_jax.exchange.mean import MeanExchange
from noloco_jax.islands.catch_up import CaughtUp
from noloco_jax.islands.checkpoints import OwnCheckpoints
from noloco_jax.islands.final_merge import FinalMerge
from noloco_jax.islands.forms import Form, summary
from noloco_jax.islands.fresh import Fresh, begins_anew
from noloco_jax.islands.keys import AUTHORITY, credentials_for
from noloco_jax.islands.membership import digest, incarnation_of, run_identity, write_incarnation
from noloco_jax.islands.network import Link, Plan
from noloco_jax.islands.node import Settings
from noloco_jax.islands.payload import StateForms, codec_of, specs_of
from noloco_jax.islands.peers import FIRST_WEIGHTS
from noloco_jax.islands.programs import SoloPrograms, solo_of
from noloco_jax.islands.roster import MEMBERS_FILE, Roster, newest, parse_address, read_run
from noloco_jax.islands.steps import IslandSteps
from noloco_jax.islands.sync import IslandSync
from noloco_jax.metrics.divergence import is_finite
from noloco_jax.outer.fragments import described
from noloco_jax.outer.pairing import Pairing, RandomPairing, largest_group
from noloco_jax.outer.rule import OuterState, at_num_outer_steps
from noloco_jax.outer.transform import OuterOptimizer
from noloco_jax.spmd.programs import TrainState, outer_axes, shardings_of

PyTree = Any


class Island:
    """Island of a user's own training loop, in which NoLoCo's outer steps are exchanges with other processes.

        with nj.Island("roster.toml", "paris", keys="keys/paris", workdir="runs/paris",
                       outer=nj.noloco(sync_every=50, fragments=8, wire="modulo4")) as island:
            params, rest, step = island.begin(params, rest)
            while step < num_steps:
                params, rest = train_step(params, rest, next(batches))
                params, rest, step = island.step(params, rest)
            merged = island.merge(params)

    It trains like an island of `python -m noloco_jax.island train`: nobody waits for a peer, corrections enter when
    they have arrived, and an island that was away continues from a peer's state.

    Args:
      roster: path of the roster, the same for all islands, or a `Roster`; or the `members.json` that
        `python -m noloco_jax.island invite` made for this island.
      name: this island's name in it.
      workdir: folder of this island's checkpoints.
      outer: `noloco` without a pairing, for random pairs of the islands, or with one of as many replicas.
      keys: folder of this island's keys (`python -m noloco_jax.island keys` makes them); None: without TLS, if all
        islands are on this machine.
      samples_per_step: samples of an inner step, by which exchanges of unequal islands are weighed.
      common: further values that must be equal on all islands, such as {"lr": 1e-3}: an island with another value is
        refused, by name.
      catch_up: "weights": an island that was away continues from a peer's weights, with `rest` as given to `begin`
        where it holds arrays of the weights' shapes (moments, and what lies beside them), and takes shorter steps at
        first; all other parts of `rest` are the peer's. "whole": from a peer's weights and `rest`.
      listen: the address of this machine to listen at, "host:port"; None: the port that others dial, at all of the
        machine's addresses.
      save_every: inner steps between checkpoints; 0: only `save`.
      keep: number of checkpoints to keep.
      linger: seconds for which `merge` waits for islands that are later.
      log_every: inner steps between two lines on exchanges.
      report: called with lines for people.

    Raises:
      UserError: for a roster, a name or keys that are not right.
      ValueError: for an outer optimizer that islands cannot follow.
    """

    def __init__(
        self,
        roster: str | Path | Roster,
        name: str,
        *,
        workdir: str | Path,
        outer: OuterOptimizer,
        keys: str | Path | None = None,
        samples_per_step: int = 1,
        common: Mapping[str, Any] | None = None,
        catch_up: str = "weights",
        listen: str | None = None,
        save_every: int = 1000,
        keep: int = 2,
        linger: float = 600.0,
        log_every: int = 1,
        report: Callable[[str], None] = print,
    ):
        self._name, self._workdir = name, Path(workdir)
        folder = None if keys is None else Path(keys)
        if not isinstance(roster, Roster):
            roster = read_run(Path(roster), _authority(folder))
        self._credentials = credentials_for(roster, name, folder)
        authority = None if self._credentials is None else self._credentials.authority
        self._roster = newest(self._workdir / MEMBERS_FILE, roster, authority)
        if catch_up not in ("weights", "whole"):
            raise ValueError(f"catch_up is {catch_up!r}: give 'weights' or 'whole'")
        self._listen = None if listen is None else parse_address(listen)
        self._takes_whole_state = catch_up == "whole"
        self._pairing = _checked(outer, roster.num_founders)
        self._outer, self._common = outer, dict(common or {})
        self._samples, self._save_every, self._keep = samples_per_step, save_every, keep
        self._linger, self._log_every, self._report = linger, log_every, report
        self._lock = WorkdirLock(self._workdir)
        self._link: Link | None = None
        self._checkpoints: OwnCheckpoints | None = None
        self._seconds_before = 0.0
        self._finished = self._was_removed = self._is_over = False

    def __enter__(self) -> "Island":
        self._lock.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._is_over:
            return
        self._is_over = True
        try:
            if self._link is not None:
                self._link.leave(finished=self._finished)
                self._link.close()
            if self._checkpoints is not None:
                self._checkpoints.close()
        finally:
            self._lock.__exit__(*error)

    def begin(self, params: PyTree, rest: PyTree = ()) -> tuple[PyTree, PyTree, int]:
        """Join the peers and return the state to train from: the newest checkpoint's, a peer's, or the one given.

        It is called once, before the first `step`, and waits until the island may train: from its checkpoint, from a
        peer's state, or, in a run that begins, together with the others, for which it waits two minutes at most.

        Args:
          params: weights to average, real arrays of JAX (under any sharding of this process) or NumPy. All islands
            give the same values, from one seed: an island that begins with others is refused.
          rest: what travels with them, such as the optimizer's state: arrays, numbers, random keys.

        Returns:
          params, rest, and the inner steps that they have behind them.

        Raises:
          UserError: if the checkpoint is damaged or of other arrays, if the island's name or address is in use, if most
            of the others refuse it, or if it has no weights and the others have finished.
          ValueError: for leaves of other types, or if it was called before.
        """
        if self._link is not None:
            raise ValueError("the island has begun already: call begin once, before the first step")
        self._params, self._rest = Form(params, "params", is_computed=True), Form(rest, "rest")
        shapes = self._params.shapes(leading=(1,))
        outer_shapes = self._shapes_of_outer(shapes)
        solo = solo_of(self._outer, shapes, outer_shapes)
        self._places = TrainState(self._params.shapes(), self._rest.shapes(), outer_shapes)
        first = self._rest.arrays(rest)
        self._fresh = Fresh(jax.tree.leaves(first), begins_anew(first, self._places.params))
        arrays = {f"{part}{name}": spec for part, form in self._forms.items() for name, spec in form.specs.items()}
        arrays |= {f"outer {i}": spec for i, spec in enumerate(specs_of(outer_shapes))}
        self._checkpoints = OwnCheckpoints(self._workdir, arrays | self._fragments(outer_shapes), self._keep)
        state, step, saved = self._start(params, rest)
        is_first = saved is None and self._roster.member(self._name).id < self._roster.num_founders
        incarnation, began_before = incarnation_of(self._workdir)
        schedule = self._outer.steps.schedule
        plan = Plan(
            name=self._name,
            roster=self._roster,
            credentials=self._credentials,
            identity=self._identity(arrays, summary(state.params) if is_first and not began_before else ""),
            partner=self._partner,
            codec=codec_of(solo.wire, solo.message, solo.payload, solo.dims),
            forms=StateForms(specs_of(self._places), len(jax.tree.leaves(self._places.params)), self._carried),
            settings=Settings(2 * self._outer.steps.fragments.count, self._takes_whole_state, self._fits),
            workdir=self._workdir,
            incarnation=incarnation,
            steps_per_round=schedule.gap,
            began_before=began_before,
            saved=saved,
            details=json.dumps({"config": None}),
            listen=self._listen,
        )
        self._link = link = Link(plan, self._report)
        opened = link.open()
        steps = IslandSteps(
            link, self._compiled(solo), self._from_peer, lambda step: schedule.sync_every * self._samples
        )
        while not opened(1.0):
            pass
        merge = FinalMerge(steps, self._name, self._linger, lambda: False, self._report)
        size = sum(spec.nbytes for spec in specs_of(solo.payload))
        self._sync = IslandSync(self._name, schedule, steps, size, lambda state: None, merge, self._log_every)
        begun = link.begin()
        while not begun(1.0):
            pass
        write_incarnation(self._workdir, incarnation)
        self._began = time.monotonic()
        state, self._step, _ = self._sync.before_step(state, step, _one)
        self._state_of_outer = state.outer
        self._tell()
        return self._params.given(state.params), self._rest.given(state.inner), self._step

    def step(self, params: PyTree, rest: PyTree = ()) -> tuple[PyTree, PyTree, int]:
        """Count an inner step: start the exchange that is due after it, and apply what has arrived of earlier ones.

        It does not wait for peers. The arrays given are not donated.

        Args:
          params: weights after the inner step, of the form given to `begin`.
          rest: likewise.

        Returns:
          params and rest to continue from, and the inner steps that they have behind them: one more than before, or
          another number where the state is a peer's, as this island was too far behind.

        Raises:
          UserError: if a checkpoint is due, and the weights are not finite.
          ValueError: for trees of another form.
        """
        state = self._state(params, rest)
        step = self._step + 1
        after, _ = self._sync.after_step(state, step, 1)
        if self._save_every and step % self._save_every == 0:
            after = self._saved(after, step)
        after, step, _ = self._sync.before_step(after, step, _one)
        self._tell()
        self._step, self._state_of_outer = step, after.outer
        if after.params is state.params:  # nothing was due and nothing has arrived
            return params, rest, step
        return self._params.given(after.params), self._rest.given(after.inner), step

    def save(self, params: PyTree, rest: PyTree = ()) -> tuple[PyTree, PyTree]:
        """Save a checkpoint and return the state that it holds, in which what has arrived is applied.

        Raises as `step` does.
        """
        after = self._saved(self._state(params, rest), self._step)
        self._state_of_outer = after.outer
        return self._params.given(after.params), self._rest.given(after.inner)

    @property
    def is_removed(self) -> bool:
        """True once `island remove` has ended this island's membership: end the loop then."""
        return self._link is not None and self._link.is_removed

    def record(self, **figures: float) -> None:
        """Show figures of the training to those who watch: `loss`, `perplexity`, `tokens_per_second`."""
        if self._link is None:
            raise ValueError("the island has not begun: call begin first")
        self._link.record({name: float(value) for name, value in figures.items()})

    def merge(self, params: PyTree) -> PyTree:
        """End the training: return the mean of all islands' last weights, without those that are not done in time.

        Weights that are not finite are left out. An island that was removed gets its own back, at once.
        """
        arrays = jax.tree.map(jnp.asarray, self._params.arrays(params))
        state = TrainState(arrays, (), self._state_of_outer)
        merged = self._sync.finish(state, self._step)
        self._state_of_outer = merged.outer  # corrections that arrived meanwhile took the former one's place
        self._finished = True
        self._tell()
        return self._params.given(merged.params)

    @property
    def _forms(self) -> dict[str, Form]:
        return {"params": self._params, "rest": self._rest}

    def _state(self, params: PyTree, rest: PyTree) -> TrainState:
        if self._link is None:
            raise ValueError("the island has not begun: call begin first")
        return TrainState(self._params.arrays(params), self._rest.arrays(rest), self._state_of_outer)

    def _start(self, params: PyTree, rest: PyTree) -> tuple[TrainState, int, Mapping[str, Any] | None]:
        """Return the state of the newest checkpoint, or the one given, its step, and the protocol's state in it."""
        assert self._checkpoints is not None
        step = self._checkpoints.latest_step()
        if step is None:
            return self._begun(self._params.arrays(params), self._rest.arrays(rest)), 0, None
        arrays, run = self._checkpoints.restore(step, jax.tree.leaves(self._places))
        self._seconds_before = run["seconds"]
        self._report(f"resumes from the checkpoint of step {step}")
        return self._placed(arrays), step, run["saved"]

    def _saved(self, state: TrainState, step: int) -> TrainState:
        assert self._checkpoints is not None
        state, saved = self._sync.settle(state)
        if not is_finite(jax.tree.map(jnp.asarray, (state.params, state.outer))):
            raise UserError(
                f"{self._name}'s weights after step {step} have values that are not finite, and are not saved: lower "
                "the learning rate, and go on from the checkpoint before, or from a peer in an empty workdir"
            )
        if saved is not None:  # else a peer's state is about to replace this one
            seconds = self._seconds_before + time.monotonic() - self._began
            self._checkpoints.save(step, jax.tree.leaves(state), {"saved": saved, "seconds": seconds})
        return state

    def _tell(self) -> None:
        if self.is_removed and not self._was_removed:
            self._was_removed = True
            self._report(f"{self._name} was removed from the run, and trains alone: end the loop")
        for news in self._sync.news(self._seconds_before + time.monotonic() - self._began):
            if news.line:
                self._report(news.line)

    def _fits(self, round: int, step: int) -> bool:
        return 0 < step < 2**31 and round + 1 == self._outer.steps.schedule.total(step)

    def _partner(self, active: Sequence[str], round: int, name: str) -> str | None:
        pairing, me = _resized(self._pairing, len(active)), active.index(name)
        fragment, draw = self._outer.steps.fragments.of(round)
        groups = pairing.pool[int(pairing.pool_index(draw, fragment))]
        return next((active[i] for group in groups if me in group for i in group if i != me), None)

    def _identity(self, arrays: Mapping[str, Any], first_weights: str) -> dict[str, str]:
        steps = self._outer.steps
        rule = {field.name: getattr(steps.rule, field.name) for field in dataclasses.fields(steps.rule)}  # type: ignore[arg-type]
        values = {f"outer.{name}": _shown(value) for name, value in rule.items()}
        values |= {
            "outer.sync_every": str(steps.schedule.sync_every),
            "outer.pairing": digest(_described(self._pairing)),
        }
        values |= {"outer.wire": self._wire, "outer.fragments": described(steps.fragments.count)}
        values |= {f"common.{name}": json.dumps(value) for name, value in self._common.items()}
        values |= {"arrays": digest([f"{name} {spec}" for name, spec in arrays.items()])}
        return run_identity(self._roster) | values | ({FIRST_WEIGHTS: first_weights} if first_weights else {})

    def _fragments(self, state: OuterState) -> dict[str, str]:
        """Return the fragments to which windows in a checkpoint belong, if there are any."""
        count = self._outer.steps.fragments.count
        return {"fragments": described(count)} if count > 1 and state.windows is not None else {}

    def _init(self, lifted: PyTree) -> Any:
        return jax.vmap(self._outer.init, out_axes=outer_axes(self._outer))(lifted)

    def _shapes_of_outer(self, params: PyTree) -> OuterState:
        """Return shapes, dtypes and shardings of the outer state: what is like a parameter lies as it does."""
        shapes: Any = jax.eval_shape(self._init, params)
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

    def _compiled(self, solo: SoloPrograms) -> SoloPrograms:
        """Compile the programs for parameters without the leading axis of one."""
        params, _, outer = self._places
        placed = shardings_of((params, outer))

        def step(params: PyTree, outer: OuterState) -> Any:
            lifted, outer, sent, norm = solo.step(jax.tree.map(lambda x: x[None], params), outer)
            return jax.tree.map(lambda x: x[0], lifted), outer, sent, norm

        def apply(params: PyTree, outer: OuterState, correction: PyTree, number: jax.Array) -> Any:
            lifted, outer = solo.apply(jax.tree.map(lambda x: x[None], params), outer, correction, number)
            return jax.tree.map(lambda x: x[0], lifted), outer

        number = jax.ShapeDtypeStruct((), np.int32)
        return dataclasses.replace(
            solo,
            step=jax.jit(step, donate_argnums=1, out_shardings=(*placed, None, None)).lower(params, outer).compile(),
            apply=jax.jit(apply, donate_argnums=1, out_shardings=placed)
            .lower(params, outer, solo.correction, number)
            .compile(),
        )

    def _begun(self, params: PyTree, rest: PyTree) -> TrainState:
        """Return a state with these weights, of which no outer step was taken."""
        make = jax.jit(self._init, out_shardings=shardings_of(self._places.outer))
        return TrainState(params, rest, make(jax.tree.map(lambda x: x[None], params)))

    @property
    def _wire(self) -> str:
        return self._outer.steps.exchange.wire.name  # type: ignore[attr-defined]

    @property
    def _carried(self) -> list[int]:
        """Numbers of the state's arrays that travel with the weights."""
        first, count = len(jax.tree.leaves(self._places.params)), len(jax.tree.leaves(self._places.inner))
        return [first + number for number in range(count) if number not in self._fresh]

    def _from_peer(self, caught_up: CaughtUp) -> TrainState:
        """Return the state of a peer on this island's devices."""
        params, rest, _ = self._places
        round, _, given, whole = caught_up
        if whole:
            state = self._placed([given[number] for number in range(len(jax.tree.leaves(self._places)))])
            assert state.outer is not None
            return state._replace(outer=at_num_outer_steps(state.outer, round + 1))
        first, count = len(jax.tree.leaves(params)), len(jax.tree.leaves(rest))
        leaves = [given[number] for number in range(first)]
        for number in range(count):
            fresh = self._fresh.leaf(number)
            leaves.append(given[first + number] if fresh is None else fresh)
        state = self._begun(*self._placed(leaves, TrainState(params, rest, None))[:2])
        assert state.outer is not None
        return state._replace(outer=at_num_outer_steps(state.outer, round + 1))

    def _placed(self, leaves: Any, places: TrainState | None = None) -> TrainState:
        """Return a state on this island's devices; numbers and NumPy arrays beside the weights stay on the host."""
        places = places or self._places
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


def _authority(folder: Path | None) -> bytes | None:
    """Return the certificate of the run's authority in a folder of keys, or None."""
    path = None if folder is None else folder / AUTHORITY
    return path.read_bytes() if path is not None and path.exists() else None


def _shown(value: Any) -> str:
    """Return a setting of the outer optimizer, or some values of its schedule, for islands to compare."""
    if not callable(value):
        return str(value)
    schedule: Callable[[Any], Any] = value
    numbers = (0, 1, 10, 100, 1_000, 10_000)
    return ", ".join(f"{float(schedule(np.int32(number))):.6g} in round {number + 1}" for number in numbers)


def _checked(outer: OuterOptimizer, count: int) -> Pairing:
    """Return the pairing of an outer optimizer; raise `ValueError` where islands cannot follow it."""
    if not isinstance(outer, OuterOptimizer) or not isinstance(outer.steps.exchange, MeanExchange):
        raise ValueError("islands meet in pairs: give outer=noloco_jax.noloco(...)")
    if outer.steps.schedule.delay:
        raise ValueError(
            f"delay={outer.steps.schedule.delay} is not for islands: leave it out, corrections enter when they arrive"
        )
    pairing: Any = outer.steps.exchange.pairing
    if pairing is None:
        return RandomPairing(count)
    if pairing.num_replicas != count or largest_group(pairing) > 2:
        raise ValueError(
            f"the pairing is of {pairing.num_replicas} replicas in groups of {largest_group(pairing)}, and the roster "
            f"has {count} islands, which meet in pairs: leave the pairing out"
        )
    return pairing


@functools.lru_cache(maxsize=8)
def _resized(pairing: Pairing, count: int) -> Pairing:
    """Return the pairing of another number of islands, as members come and go: random pairs of the same seed."""
    if pairing.num_replicas == count:
        return pairing
    if not isinstance(pairing, RandomPairing):
        return RandomPairing(count)
    order = "passes" if pairing.order == "hypercube" and count & (count - 1) else pairing.order
    return RandomPairing(count, seed=pairing.seed, order=order)


def _described(pairing: Pairing) -> list[Any]:
    """Return what two pairings must have equal, as far as a few passes of their pool tell."""
    return [pairing.pool, [int(pairing.pool_index(draw, 0)) for draw in range(2 * len(pairing.pool))]]


def _one(step: int) -> int:
    """Return the most steps of the schedule that an inner step stands for."""
    return 1
