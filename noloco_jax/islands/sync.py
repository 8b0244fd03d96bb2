"""Exchanges of an island as a run's `Sync`: with other processes, over the network, never waited for."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from noloco_jax.formatting import format_bytes
from noloco_jax.islands.agent import Met
from noloco_jax.islands.log import IslandLog
from noloco_jax.islands.protocol.messages import Status
from noloco_jax.islands.steps import IslandSteps
from noloco_jax.outer.pairing import Round
from noloco_jax.schedule import SyncSchedule
from noloco_jax.spmd.programs import TrainState
from noloco_jax.train.messages import Messages
from noloco_jax.train.sync import News, OuterSteps

_LAST_SECONDS = 10.0  # for the last exchange of a run


class IslandSync:
    """Exchanges of an island, overlapped with its training.

    Args:
      schedule: when outer steps are due.
      steps: its outer steps.
      log: its event log; None in all of the island's processes but the first.
      messages: its traffic.
      linger: state after the last step -> None, serving its weights to islands that are later.
      merge: (state, last step) -> the state with the mean of all islands' weights; None unless the run ends with it.
    """

    def __init__(
        self,
        schedule: SyncSchedule,
        steps: IslandSteps,
        log: IslandLog | None,
        messages: Messages,
        linger: Callable[[TrainState], None],
        merge: Callable[[TrainState, int], TrainState] | None,
    ):
        self._steps, self._log, self._messages = steps, log, messages
        self._linger, self._merge = linger, merge
        self._schedule = schedule
        self._lines: list[News] = []
        self._met: list[Met] = []  # outcomes of which `news` is to tell
        self._bytes: int | float = 0  # of messages exchanged since `bytes_sent`

    def before_step(self, state: TrainState, step: int, most: Callable[[int], int]) -> tuple[TrainState, int, int]:
        state, behind = self._steps.enter(state, step)
        if behind != step:
            self._lines.append(
                News(f"after step {step}: training continues from another island's weights, after step {behind}")
            )
        state, stride = self._steps.advance(state, behind, most(behind))
        return state, behind, stride

    def after_step(self, state: TrainState, step: int, stride: int) -> tuple[TrainState, OuterSteps | None]:
        state = self._steps.warm_up(state)
        assert state.outer is not None
        count = self._schedule.total(step) - self._schedule.total(step - stride)
        if count == 0:
            return state, None
        first = int(state.outer.num_outer_steps)
        jax.block_until_ready(state.params)
        started = time.perf_counter()
        state = self._steps.take(state, step, count)
        seconds = time.perf_counter() - started
        if self._log is not None:
            for number in range(first, first + count):
                exposed = self._steps.seconds_exposed - self._steps.gave_way
                self._log.round(number, step, self._steps.gave_way, exposed)
        return state, OuterSteps(first, count, seconds, None)

    def finish(self, state: TrainState, step: int) -> TrainState:
        state = self._steps.settle(state, _LAST_SECONDS)
        return state if self._merge is None else self._merge(state, step)

    def settle(self, state: TrainState) -> tuple[TrainState, dict[str, Any] | None]:
        return self._steps.at_rest(state)

    def leave(self, finished: bool) -> None:
        if self._steps.agent is not None:
            self._steps.agent.leave(finished=finished)

    @property
    def end_reason(self) -> str | None:
        name = "this island" if self._log is None else self._log.name
        return f"{name} was removed from the run" if self._steps.is_removed else None

    def groups(self, number: int) -> Round | None:
        return None

    def bytes_sent(self) -> int | float:
        self._take_met()
        sent, self._bytes = self._bytes, 0
        return sent

    def news(self, seconds: float) -> Sequence[News]:
        lines, self._lines = self._lines, []
        if self._steps.agent is None or self._log is None:
            return lines
        self._take_met()
        met, self._met = self._met, []
        if not met:
            return lines
        status = self._steps.agent.status()
        for one in met:
            size = self._messages.outer_step
            self._log.exchange(one, self._sent(one))
            figures = self._figures(one, status, self._log, seconds)
            lines.append(News(_line(one, status, size), "exchange", figures))
        return lines

    def close(self, state: TrainState, finished: bool) -> None:
        if self._log is not None:
            self._log.end(finished)
        if finished and self._merge is None:
            self._linger(state)

    def _take_met(self) -> None:
        if self._steps.agent is not None:
            met = self._steps.agent.take_met()
            self._met += met
            self._bytes += sum(map(self._sent, met))

    def _sent(self, met: Met) -> int | float:
        """Return the bytes of a message that its partner has received."""
        was_exchanged = met.outcome in ("met", "late") or not met.factor
        return self._messages.outer_step if was_exchanged else 0

    def _figures(self, met: Met, status: Status, log: IslandLog, seconds: float) -> dict[str, Any]:
        """Return what became of a message, and what the exchanges have come to with it, for metrics."""
        return {
            **dataclasses.asdict(met),
            "participation": status.committed / status.due if status.due else 1.0,
            "committed": status.committed,
            "due": status.due,
            "one_sided_commits": log.one_sided,
            "seconds_exposed": self._steps.seconds_exposed,
            "goodput": log.goodput(seconds),
        }


def _line(met: Met, status: Status, size: int | float) -> str:
    """Return round, partner, what came of it, bytes, and participation so far, for people."""
    steps = "1 step" if met.steps_late == 1 else f"{met.steps_late} steps"
    exchanged = f"met {met.partner} after {steps}, {format_bytes(size)} each way"
    what = {
        "met": exchanged,
        "late": exchanged,
        "healed": f"these weights came from {met.partner}",
        "alone": f"alone{f', without {met.partner}' if met.partner else ''}: {met.reason}",
    }[met.outcome]
    sided = ", one-sided" if met.one_sided else ""
    clipped = f", clipped to {100 * met.factor:.2g} %" if 0 < met.factor < 1 else ""
    share = f", participation {100 * status.committed / status.due:.0f} %" if status.due else ""
    return f"round {met.round + 1}: {what}{clipped}{sided}{share}"
