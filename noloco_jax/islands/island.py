"""Island in a user's own loop: any model, inner optimizer and tree of arrays, averaged with peers over the network."""

import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from noloco_jax.cluster.workdir_lock import WorkdirLock
from noloco_jax.errors import TransientError, UserError
from noloco_jax.islands import messages_pb2 as pb
from noloco_jax.islands.checkpoints import OwnCheckpoints
from noloco_jax.islands.final_merge import RunEnd
from noloco_jax.islands.keys import open_membership
from noloco_jax.islands.membership import digest, incarnation_of, run_identity, write_incarnation
from noloco_jax.islands.network import NetworkPlan, NetworkThread
from noloco_jax.islands.own_state import OwnState
from noloco_jax.islands.payload import codec_of, specs_of
from noloco_jax.islands.peers import FIRST_WEIGHTS
from noloco_jax.islands.roster import Roster, parse_address
from noloco_jax.islands.steps import IslandSteps
from noloco_jax.islands.sync import IslandSync
from noloco_jax.islands.tree_spec import summary
from noloco_jax.metrics.finite import is_finite
from noloco_jax.optim.exchange.mean import MeanExchange
from noloco_jax.optim.fragments import described
from noloco_jax.optim.outer_step import OuterOptimizer
from noloco_jax.optim.pairing import Pairing, RandomPairing, largest_group
from noloco_jax.spmd.programs import TrainState

PyTree = Any


class Island:
    """Island of a user's own training loop, in which NoLoCo's outer steps are exchanges with other processes.

        with nj.Island("roster.toml", "paris", keys="keys/paris", workdir="runs/paris",
                       outer=nj.noloco(sync_every=50, fragments=8, wire="modulo4")) as island:
            params, rest, step = island.begin(params, rest, fresh=True)
            while step < num_steps:
                params, rest = train_step(params, rest, next(batches))
                params, rest, step = island.step(params, rest)
            merged = island.merge(params)

    It trains like an island of `python -m noloco_jax.island train`: nobody waits for a peer, and corrections enter when
    they have arrived. An island that was away continues from a peer's weights and from what of `rest` is not `fresh`,
    and takes shorter steps at first.

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
        listen: str | None = None,
        save_every: int = 1000,
        keep: int = 2,
        linger: float = 600.0,
        log_every: int = 1,
        report: Callable[[str], None] = print,
    ):
        self._name, self._workdir = name, Path(workdir)
        self._roster, self._credentials = open_membership(
            roster if isinstance(roster, Roster) else Path(roster),
            name,
            None if keys is None else Path(keys),
            self._workdir,
        )
        self._listen = None if listen is None else parse_address(listen)
        self._pairing = checked_pairing(outer, self._roster.num_founders)
        self._outer, self._common = outer, dict(common or {})
        self._samples, self._save_every, self._keep = samples_per_step, save_every, keep
        self._linger, self._log_every, self._report = linger, log_every, report
        self._lock = WorkdirLock(self._workdir)
        self._link: NetworkThread | None = None
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
                if not self._finished:
                    is_gone = isinstance(error[1], UserError) and not isinstance(error[1], TransientError)
                    self._link.leave(pb.Status.GONE if is_gone else pb.Status.LEAVING)
                self._link.close()
            if self._checkpoints is not None:
                self._checkpoints.close()
        finally:
            self._lock.__exit__(*error)

    def begin(self, params: PyTree, rest: PyTree = (), *, fresh: PyTree | None = None) -> tuple[PyTree, PyTree, int]:
        """Join the peers and return the state to train from: the newest checkpoint's, a peer's, or the one given.

        It is called once, before the first `step`, and waits until the island may train: from its checkpoint, from a
        peer's state, or, in a run that begins, together with the others, for which it waits two minutes at most.

        Args:
          params: weights to average, real arrays of JAX (under any sharding of this process) or NumPy. All islands
            give the same values, from one seed: an island that begins with others is refused.
          rest: what travels with them, such as the optimizer's state: arrays, numbers, random keys.
          fresh: what of `rest` begins anew with these values where the weights are a peer's, instead of being sent:
            True, False, or a tree of both that begins like `rest`; equal on all islands, and needed where `rest` has
            leaves. What is sent is believed if it is finite. Name moments with their counter, as Adam's first updates
            are several times too large with fresh moments and a counter of many steps.

        Returns:
          params, rest, and the inner steps that they have behind them.

        Raises:
          UserError: if the checkpoint is damaged or of other arrays, if the island's name or address is in use, if most
            of the others refuse it, or if it has no weights and the others have finished and gone.
          ValueError: for leaves of other types, a `fresh` that is missing or another one, or if it was called before.
        """
        if self._link is not None:
            raise ValueError("the island has begun already: call begin once, before the first step")
        self._state = own = OwnState(self._outer, params, rest, fresh)
        schedule = self._outer.steps.schedule
        self._checkpoints = OwnCheckpoints(self._workdir, own.saved_specs, self._keep)
        state, step, saved = self._start(params, rest)
        is_first = saved is None and self._roster.member(self._name).id < self._roster.num_founders
        incarnation, began_before = incarnation_of(self._workdir)
        first_weights = summary(state.params) if is_first and not began_before else ""
        plan = NetworkPlan(
            name=self._name,
            roster=self._roster,
            credentials=self._credentials,
            identity=identity_of(self._roster, self._outer, self._pairing, self._common, own, first_weights),
            pairing=self._pairing,
            codec=codec_of(own.local.wire, own.local.message, own.local.payload, own.local.dims),
            state_codec=own.state_codec,
            sync_every=int(schedule.sync_every),
            num_fragments=schedule.fragments,
            fits=self._fits,
            workdir=self._workdir,
            incarnation=incarnation,
            began_before=began_before,
            saved=saved,
            details=json.dumps({"config": None}),
            listen=self._listen,
        )
        self._link = link = NetworkThread(plan, self._report)
        opened = link.open()
        outer_steps = IslandSteps(link, own.compiled(), own.from_peer, lambda step: schedule.sync_every * self._samples)
        opened.result()
        end = RunEnd(outer_steps, self._name, self._linger, lambda: False, self._report)
        size = sum(spec.nbytes for spec in specs_of(own.local.payload))
        self._sync = IslandSync(self._name, schedule, outer_steps, size, end, merges=True, log_every=self._log_every)
        link.begin().result()
        write_incarnation(self._workdir, incarnation)
        self._began = time.monotonic()
        state, self._step, _ = self._sync.before_step(state, step, _one)
        self._state_of_outer = state.outer
        self._log()
        return self._state.params.given(state.params), self._state.rest.given(state.inner), self._step

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
        state = self._train_state(params, rest)
        step = self._step + 1
        after, _ = self._sync.after_step(state, step, 1)
        if self._save_every and step % self._save_every == 0:
            after = self._saved(after, step)
        after, step, _ = self._sync.before_step(after, step, _one)
        self._log()
        self._step, self._state_of_outer = step, after.outer
        if after.params is state.params:  # nothing was due and nothing has arrived
            return params, rest, step
        return self._state.params.given(after.params), self._state.rest.given(after.inner), step

    def save(self, params: PyTree, rest: PyTree = ()) -> tuple[PyTree, PyTree]:
        """Save a checkpoint and return the state that it holds, in which what has arrived is applied.

        Raises as `step` does.
        """
        after = self._saved(self._train_state(params, rest), self._step)
        self._state_of_outer = after.outer
        return self._state.params.given(after.params), self._state.rest.given(after.inner)

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

        Weights that are not finite or out of line are left out. An island that was removed gets its own back, at once.
        """
        arrays = jax.tree.map(jnp.asarray, self._state.params.arrays(params))
        state = TrainState(arrays, (), self._state_of_outer)
        merged = self._sync.finish(state, self._step)
        self._state_of_outer = merged.outer  # corrections that arrived meanwhile took the former one's place
        self._finished = True
        self._log()
        return self._state.params.given(merged.params)

    def _train_state(self, params: PyTree, rest: PyTree) -> TrainState:
        if self._link is None:
            raise ValueError("the island has not begun: call begin first")
        own = self._state
        return TrainState(own.params.arrays(params), own.rest.arrays(rest), self._state_of_outer)

    def _start(self, params: PyTree, rest: PyTree) -> tuple[TrainState, int, Mapping[str, Any] | None]:
        """Return the state of the newest checkpoint, or the one given, its step, and the protocol's state in it."""
        own = self._state
        assert self._checkpoints is not None
        number = self._checkpoints.latest()
        if number is None:
            return own.begun(own.params.arrays(params), own.rest.arrays(rest)), 0, None
        arrays, run = self._checkpoints.restore(number, jax.tree.leaves(own.places))
        step, self._seconds_before = run["step"], run["seconds"]
        self._report(f"resumes from the checkpoint of step {step}")
        return own.placed(arrays), step, run["saved"]

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
            self._checkpoints.save(jax.tree.leaves(state), {"step": step, "saved": saved, "seconds": seconds})
        return state

    def _log(self) -> None:
        if self.is_removed and not self._was_removed:
            self._was_removed = True
            self._report(f"{self._name} was removed from the run, and trains alone: end the loop")
        for news in self._sync.news(self._seconds_before + time.monotonic() - self._began):
            if news.line:
                self._report(news.line)

    def _fits(self, round: int, step: int) -> bool:
        return 0 < step < 2**31 and round + 1 == self._outer.steps.schedule.total(step)


def _one(step: int) -> int:
    """Return the most steps of the schedule that an inner step stands for."""
    return 1


def checked_pairing(outer: OuterOptimizer, count: int) -> Pairing:
    """Return the pairing of an outer optimizer; raise `ValueError` where islands cannot follow it."""
    if not isinstance(outer, OuterOptimizer) or not isinstance(outer.steps.exchange, MeanExchange):
        raise ValueError("islands exchange in pairs: give outer=noloco_jax.noloco(...)")
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
            f"has {count} islands, which exchange in pairs: leave the pairing out"
        )
    return pairing


def identity_of(
    roster: Roster,
    outer: OuterOptimizer,
    pairing: Pairing,
    common: Mapping[str, Any],
    own: OwnState,
    first_weights: str,
) -> dict[str, str]:
    """Return the values that all islands of a run must have equal.

    `first_weights` is a summary of them, empty where they are not compared.
    """
    steps = outer.steps
    values = {f"outer.{field.name}": shown(getattr(steps.rule, field.name)) for field in dataclasses.fields(steps.rule)}  # type: ignore[arg-type]
    values["outer.sync_every"] = str(steps.schedule.sync_every)
    # As far as a few passes of a pool tell.
    draws = [int(pairing.pool_index(draw, 0)) for draw in range(2 * len(pairing.pool))]
    values["outer.pairing"] = digest([pairing.pool, draws])
    values["outer.wire"] = steps.exchange.wire.name  # type: ignore[attr-defined]
    values["outer.fragments"] = described(steps.fragments.count)
    values |= {f"common.{name}": json.dumps(value) for name, value in common.items()}
    values["arrays"] = digest([f"{name} {spec}" for name, spec in own.specs.items()])
    values["fresh"] = own.described_fresh
    return run_identity(roster) | values | ({FIRST_WEIGHTS: first_weights} if first_weights else {})


def shown(value: Any) -> str:
    """Return a setting of the outer optimizer, or some values of its schedule, for islands to compare."""
    if not callable(value):
        return str(value)
    schedule: Callable[[Any], Any] = value
    numbers = (0, 1, 10, 100, 1_000, 10_000)
    return ", ".join(f"{float(schedule(np.int32(number))):.6g} in round {number + 1}" for number in numbers)
