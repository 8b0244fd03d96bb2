"""Exchanges of an island as a run's `Sync`: with other processes, over the network, never waited for."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from noloco_jax.formatting import format_bytes
from noloco_jax.islands import messages_pb2 as pb
from noloco_jax.islands.final_merge import RunEnd
from noloco_jax.islands.interfaces import RoundOutcome
from noloco_jax.islands.steps import IslandSteps
from noloco_jax.optim.schedule import SyncSchedule
from noloco_jax.spmd.programs import TrainState
from noloco_jax.train.sync import OuterStepRecord, SyncEvent

_LAST_SECONDS = 10.0  # for the last exchange of a run


class IslandSync:
    """Exchanges of an island, overlapped with its training.

    Args:
      schedule: when outer steps are due.
      num_bytes: of a message.
      merges: True if the run ends with the mean of all islands' weights.
      log_every: inner steps between two lines for people on exchanges; metrics have them all.
    """

    def __init__(
        self,
        name: str,
        schedule: SyncSchedule,
        steps: IslandSteps,
        num_bytes: int,
        end: RunEnd,
        *,
        merges: bool = False,
        log_every: int = 1,
    ):
        self._name, self._steps, self._num_bytes = name, steps, num_bytes
        self._schedule, self._end, self._merges, self._log_every = schedule, end, merges, log_every
        self._lines: list[SyncEvent] = []
        self._outcomes: list[RoundOutcome] = []  # outcomes that `news` has not returned yet
        self._unlogged: list[RoundOutcome] = []  # of them those without a line yet
        self._step = self._logged_at = 0
        self._is_last = False  # True once no donor's weights can take these ones' place
        self._bytes: int | float = 0  # of messages exchanged since `bytes_sent`

    def before_step(
        self, state: TrainState, step: int, max_stride: Callable[[int], int]
    ) -> tuple[TrainState, int, int]:
        state, behind = self._steps.apply_arrived(state, step)
        if behind != step:
            self._lines.append(
                SyncEvent(f"after step {step}: training continues from another island's weights, after step {behind}")
            )
        if not (longest := max_stride(behind)):  # those weights are the last ones
            return state, behind, 0
        state, stride = self._steps.advance(state, behind, longest)
        return state, behind, stride

    def after_step(self, state: TrainState, step: int, stride: int) -> tuple[TrainState, OuterStepRecord | None]:
        self._step = step
        state = self._steps.warm_up(state)
        assert state.outer is not None
        count = self._schedule.total(step) - self._schedule.total(step - stride)
        if count == 0:
            return state, None
        first = int(state.outer.num_outer_steps)
        jax.block_until_ready(state.params)
        started = time.perf_counter()
        state = self._steps.outer_step(state, step, count)
        return state, OuterStepRecord(first, count, time.perf_counter() - started)

    def finish(self, state: TrainState, step: int) -> TrainState:
        self._is_last, self._step = True, step
        state = self._steps.settle(state, _LAST_SECONDS)
        self._logged_at = -self._log_every  # what has not been logged yet is logged now
        return self._end.merge(state, step) if self._merges else state

    def settle(self, state: TrainState) -> tuple[TrainState, dict[str, Any] | None]:
        return self._steps.between_steps(state, is_last=self._is_last)

    def wait(self) -> None:
        """Return at once: an island waits for no exchange."""

    def leave(self, finished: bool) -> None:
        if self._steps.link is None or (finished and self._merges):  # the merge has told the peers
            return
        self._steps.link.leave(pb.Status.FINISHED if finished else pb.Status.LEAVING)

    @property
    def end_reason(self) -> str | None:
        return f"{self._name} was removed from the run" if self._steps.is_removed else None

    def bytes_sent(self) -> int | float:
        self._take_outcomes()
        sent, self._bytes = self._bytes, 0
        return sent

    def news(self, seconds: float) -> Sequence[SyncEvent]:
        lines, self._lines = self._lines, []
        if self._steps.link is None:
            return lines
        self._take_outcomes()
        outcomes, self._outcomes = self._outcomes, []
        if not outcomes:
            return lines
        status = self._steps.link.status()
        lines += [SyncEvent("", "exchange", self._figures(one, status)) for one in outcomes]
        self._unlogged += outcomes
        ended = any(one.outcome == "caught up" for one in outcomes)
        is_due = self._step - self._logged_at >= self._log_every or self._step < self._logged_at
        if is_due or ended:
            self._logged_at = self._step
            lines.append(SyncEvent(self._line(status)))
            self._unlogged = []
        return lines

    def close(self, state: TrainState, finished: bool) -> None:
        if finished and not self._merges:
            self._end.linger(state, self._step)

    def _take_outcomes(self) -> None:
        if self._steps.link is not None:
            outcomes = self._steps.link.take_outcomes()
            self._outcomes += outcomes
            self._bytes += self._num_bytes * sum(one.outcome in ("met", "late") or not one.factor for one in outcomes)

    def _figures(self, outcome: RoundOutcome, status: pb.Status) -> dict[str, Any]:
        """Return the outcome of a message, and the totals of the exchanges with it, for metrics."""
        return {
            **outcome._asdict(),
            "round": outcome.round + 1,  # counted from 1, as everywhere in what a run says
            "participation": status.committed / status.due if status.due else 1.0,
            "committed": status.committed,
            "due": status.due,
            "one_sided": status.one_sided,
            "seconds_exposed": self._steps.seconds_exposed,
            "seconds_paused": self._steps.seconds_paused,
        }

    def _line(self, status: pb.Status) -> str:
        """Return a line on the exchanges since the last one, for people."""
        outcomes = self._unlogged
        rounds = (
            f"round {outcomes[0].round + 1}"
            if len(outcomes) == 1
            else f"rounds {outcomes[0].round + 1} to {outcomes[-1].round + 1}"
        )
        exchanged = [one for one in outcomes if one.outcome in ("met", "late")]
        parts = []
        if exchanged:
            late = sum(one.steps_late or 0 for one in exchanged) / len(exchanged)
            names = ", ".join(dict.fromkeys(one.partner for one in exchanged))
            size = format_bytes(self._num_bytes)
            parts.append(f"exchanged with {names} after {late:.3g} step{'s' * (late != 1)}, {size} each way")
        reasons: dict[str, int] = {}
        for one in outcomes:
            if one.outcome == "alone":
                text = f"{f'without {one.partner}' if one.partner else 'no partner'}: {one.reason}"
                reasons[text] = reasons.get(text, 0) + 1
            elif one.outcome == "caught up":
                parts.append(f"these weights came from {one.partner}")
        parts += [
            f"{count} alone, {text}" if len(outcomes) > 1 else f"alone, {text}" for text, count in reasons.items()
        ]
        if scaled := [one.factor for one in exchanged if 0 < one.factor < 1]:
            parts.append(f"scaled to {100 * min(scaled):.2g} %")
        if one_sided := sum(one.one_sided for one in outcomes):
            parts.append(f"{one_sided} one-sided")
        if status.due:
            parts.append(f"participation {100 * status.committed / status.due:.0f} %")
        return f"{rounds}: {', '.join(parts)}"
