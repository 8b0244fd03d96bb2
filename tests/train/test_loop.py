"""Saves, evaluations and metrics of the training loop, over fake programs that compile nothing."""

import json
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

from noloco_jax.checkpoint.totals import Totals
from noloco_jax.config import TrainConfig, from_dict
from noloco_jax.errors import UserError
from noloco_jax.metrics.console import Progress
from noloco_jax.metrics.flops import model_flops_per_token
from noloco_jax.metrics.writer import METRICS_FILE, MetricWriter
from noloco_jax.spmd.programs import StepMetrics, TrainState
from noloco_jax.train import loop, parts, step_log, sync
from noloco_jax.train.messages import Messages


class Programs:
    """Fake steps: the loss is the step number, or NaN at step `nan_at`; step `lost_at` makes the weights non-finite."""

    def __init__(self, nan_at: int | None, lost_at: int | None):
        self._nan_at, self._lost_at = nan_at, lost_at

    outer_step = correct_step = moved = None

    def inner_step(self, params: Any, inner: Any, batch: Any, step: np.int32) -> Any:
        loss = jnp.asarray([jnp.nan if step == self._nan_at else float(step)])
        if step == self._lost_at:
            params = {"w": jnp.asarray([1.0, jnp.nan])}
        return params, inner, StepMetrics(loss=loss, grad_norm=loss)


class Batches:
    """Empty batches, with an error in place of batch `damaged_at`."""

    def __init__(self, damaged_at: int | None):
        self._damaged_at, self._taken = damaged_at, 0

    def __next__(self) -> None:
        self._taken += 1
        if self._taken == self._damaged_at:
            raise UserError("a file is damaged")

    def get_state(self) -> dict[int, dict]:
        return {}


class Recorder:
    """Record of saves and evaluations in order; requests a stop at step `stop_at`."""

    def __init__(self, stop_at: int | None, start: int):
        self.done: list[tuple[str, int]] = []
        self.totals = Totals()
        self.beside: Any = None
        self.saved_totals: list[Totals] = []
        self._stop_at, self._step = stop_at, start

    def save(self, step: int, state: Any, data: Any, totals: Totals, beside: Any) -> None:
        self.done.append(("save", step))
        self.beside = beside
        self.totals = totals
        self.saved_totals.append(totals)

    def is_due(self) -> bool:
        self._step += 1
        return self._step == self._stop_at


CONFIG = from_dict(
    {"method": "local", "num_replicas": 1, "num_steps": 6, "eval_every": 3, "checkpoint_every": 3, "log_every": 1}
    | {"inner": {"warmup_steps": 0}}
)


NOTHING = Totals()


class Result:
    """Result of a run of CONFIG: saves and evaluations, metrics lines, and the outcome or error."""

    def __init__(
        self,
        workdir,
        monkeypatch,
        start=0,
        evaluate_first=False,
        stop_at=None,
        nan_at=None,
        lost_at=None,
        damaged_at=None,
        totals=NOTHING,
        peak=None,
        merging=0,
        config=CONFIG,
        exchanges=None,
    ):
        recorder = Recorder(stop_at, start)
        with MetricWriter(workdir, resume_step=start or None, tensorboard=False) as metrics:

            def evaluate(run: Any, state: Any, step: int, log: Any) -> dict[str, Any]:
                recorder.done.append(("evaluate", step))
                return {}

            monkeypatch.setattr(loop, "_evaluate", evaluate)
            run: Any = {"evaluate": None, "metrics": metrics}
            run |= {"programs": Programs(nan_at, lost_at), "batches": Batches(damaged_at), "stop": recorder}
            run |= {
                "totals": totals,
                "messages": Messages(100, 7, merging),
                "peak_flops_per_second": peak,
            }
            run |= {"checkpoints": recorder, "progress": Progress(6, console=Console(quiet=True))}
            run |= {"sync": exchanges or sync.CollectiveSync(config, run["programs"])}
            self.outcome, self.error = None, None
            try:
                outer: Any = SimpleNamespace(num_outer_steps=0)
                state: Any = TrainState(None, None, outer)
                self.outcome = loop.train_steps(
                    parts.Run(config=config, **run), state, start, evaluate_first=evaluate_first
                )
            except UserError as error:
                self.error = str(error)
        self.done, self.totals, self.beside = recorder.done, recorder.totals, recorder.beside
        self.saved_totals = recorder.saved_totals
        self.lines = [json.loads(line) for line in (workdir / METRICS_FILE).read_text().splitlines()]


def test_the_evaluation_of_a_step_precedes_its_save(tmp_path, monkeypatch):
    """A run killed in between resumes from before this step, so it evaluates and saves it again."""
    result = Result(tmp_path, monkeypatch)
    assert result.done == [("evaluate", 3), ("save", 3), ("evaluate", 6), ("save", 6)]
    assert result.outcome is not None and result.outcome.finished


@pytest.mark.parametrize("step", [2, 3, 6])
def test_a_stop_request_saves_without_evaluating(tmp_path, monkeypatch, step):
    result = Result(tmp_path, monkeypatch, stop_at=step)
    assert result.outcome is not None and not result.outcome.finished
    assert [entry for entry in result.done if entry[1] == step] == [("save", step)]
    assert [line["step"] for line in result.lines] == list(range(1, step + 1))


@pytest.mark.parametrize("step", [3, 6])
def test_the_next_start_runs_the_skipped_evaluation_first(tmp_path, monkeypatch, step):
    result = Result(tmp_path, monkeypatch, start=step, evaluate_first=True)
    assert result.done[0] == ("evaluate", step)
    assert result.outcome is not None and result.outcome.finished


@pytest.mark.parametrize(
    ("step", "config", "expected"),
    [(3, {}, True), (4, {}, False), (6, {}, True), (9, {}, False), (5, {"num_steps": 5}, True)],
    ids=["every third", "between", "the last", "beyond", "the last of others"],
)
def test_evaluations_are_due_every_eval_every_steps_and_at_the_last(step, config, expected):
    values: dict[str, Any] = {"method": "local", "num_replicas": 1, "num_steps": 6, "eval_every": 3}
    run: TrainConfig = from_dict(values | {"inner": {"warmup_steps": 0}} | config)
    assert loop.is_evaluated(run, step) == expected


def test_an_error_keeps_the_metrics_of_all_earlier_steps(tmp_path, monkeypatch):
    result = Result(tmp_path, monkeypatch, damaged_at=5)
    assert result.error == "a file is damaged"
    assert [line["step"] for line in result.lines] == [1, 2, 3, 4]


def test_a_nan_loss_ends_the_run_and_is_written(tmp_path, monkeypatch):
    result = Result(tmp_path, monkeypatch, nan_at=2)
    assert result.error is not None and "the loss is nan at step 2" in result.error
    assert [(line["step"], line["loss"]) for line in result.lines] == [(1, 1.0), (2, None)]


def test_a_nan_loss_before_any_update_is_not_blamed_on_the_learning_rate(tmp_path, monkeypatch):
    result = Result(tmp_path, monkeypatch, nan_at=1)
    assert result.error is not None and "at the first step, before any update: the initial weights or" in result.error
    assert "inner.lr" not in result.error


@pytest.mark.parametrize(("stop_at", "saved"), [(None, [3]), (5, [3])])
def test_non_finite_weights_are_never_saved(tmp_path, monkeypatch, stop_at, saved):
    """The loss of that step is still finite, since it is computed with the weights before the update."""
    result = Result(tmp_path, monkeypatch, lost_at=stop_at or 6, stop_at=stop_at)
    assert result.error is not None and f"the state after step {stop_at or 6} has values that are not" in result.error
    assert [step for action, step in result.done if action == "save"] == saved


def test_totals_continue_from_the_checkpoint(tmp_path, monkeypatch):
    first = Result(tmp_path, monkeypatch, stop_at=3)
    assert [line["tokens"] for line in first.lines] == [CONFIG.tokens_per_step * step for step in (1, 2, 3)]
    assert first.totals.tokens == 3 * CONFIG.tokens_per_step
    second = Result(tmp_path, monkeypatch, start=3, totals=first.totals)
    assert [line["step"] for line in second.lines] == [1, 2, 3, 4, 5, 6]
    assert [line["tokens"] for line in second.lines] == [CONFIG.tokens_per_step * step for step in range(1, 7)]
    for name in ("seconds", "seconds_waiting_for_data", "seconds_in_outer_steps"):
        values = [line[name] for line in second.lines]
        assert values == sorted(values)
    assert second.lines[3]["seconds"] > first.totals.seconds >= second.lines[2]["seconds"] > 0
    times = [line["time"] for line in second.lines]
    assert times == sorted(times)


def test_the_last_line_includes_the_bytes_of_the_final_merge(tmp_path, monkeypatch):
    without = Result(tmp_path / "without", monkeypatch)
    merged = Result(tmp_path / "merged", monkeypatch, merging=10**6)
    sent, sent_merged = ([line["bytes_sent_total"] for line in each.lines] for each in (without, merged))
    assert sent_merged == [*sent[:-1], sent[-1] + 10**6]


def test_the_last_step_is_logged_regardless_of_log_every(tmp_path, monkeypatch):
    config = replace(CONFIG, log_every=4)
    assert [line["step"] for line in Result(tmp_path, monkeypatch, config=config).lines] == [4, 6]


def test_log_replicas_writes_the_loss_of_each_replica(tmp_path, monkeypatch):
    assert "loss_replicas" not in Result(tmp_path, monkeypatch).lines[0]
    config = replace(CONFIG, log_replicas=True)
    assert [line["loss_replicas"] for line in Result(tmp_path, monkeypatch, config=config).lines[:2]] == [
        {"0": 1.0},
        {"0": 2.0},
    ]


def test_mfu_is_written_only_if_the_device_peak_is_known(tmp_path, monkeypatch):
    assert "mfu" not in Result(tmp_path, monkeypatch).lines[0]
    line = Result(tmp_path, monkeypatch, peak=1e15).lines[-1]
    assert line["mfu"] == pytest.approx(line["tokens_per_second"] * model_flops_per_token(CONFIG) / 1e15)


@pytest.mark.parametrize(
    "devices", [(8, 1), (4, 2), (2, 4)], ids=["a replica a device", "over two devices", "over four"]
)
def test_losses_are_keyed_by_replica_number_on_any_device_layout(devices):
    mesh = jax.make_mesh(devices, ("replica", "stage"), (AxisType.Auto,) * 2)
    losses = jax.device_put(np.arange(8.0), NamedSharding(mesh, P("replica")))
    assert step_log._by_replica(losses) == {replica: float(replica) for replica in range(8)}


class SlowSync:
    """Fake sync of an island with a stride of up to three inner steps; records the calls of the loop."""

    end_reason: str | None = None

    def __init__(self):
        self.strides: list[tuple[int, int]] = []
        self.calls: list[str] = []
        self.queued_news: list[sync.News] = []

    def before_step(self, state: Any, step: int, most: Callable[[int], int]) -> tuple[Any, int, int]:
        return state, step, min(3, most(step))

    def after_step(self, state: Any, step: int, stride: int) -> tuple[Any, None]:
        self.strides.append((step, stride))
        return state, None

    def finish(self, state: Any, step: int) -> Any:
        self.calls.append("finish")
        return state

    def settle(self, state: Any) -> tuple[Any, dict[str, Any]]:
        self.calls.append("settle")
        return state, {"journal": len(self.strides)}

    def leave(self, finished: bool) -> None:
        self.calls.append("leave")

    def groups(self, number: int) -> None:
        return None

    def bytes_sent(self) -> int | None:
        return None

    def news(self, seconds: float) -> list[sync.News]:
        queued, self.queued_news = self.queued_news, []
        return queued

    def close(self, state: Any, finished: bool) -> None:
        pass


def test_a_stride_of_several_steps_skips_no_evaluation_save_or_log_line(tmp_path, monkeypatch):
    shape = {"num_replicas": 2, "num_steps": 20, "eval_every": 8, "checkpoint_every": 10, "log_every": 7}
    slow = SlowSync()
    result = Result(tmp_path, monkeypatch, config=from_dict(shape | {"inner": {"warmup_steps": 0}}), exchanges=slow)
    expected_actions = [("evaluate", 8), ("save", 10), ("evaluate", 16), ("evaluate", 20), ("save", 20)]
    assert result.done == expected_actions
    assert slow.strides == [(3, 3), (6, 3), (8, 2), (10, 2), (13, 3), (16, 3), (19, 3), (20, 1)]
    written = {json.loads(line)["step"] for line in (tmp_path / METRICS_FILE).read_text().splitlines()}
    assert written >= {8, 16, 20}  # the first steps after 7 and 14, and the last step


def test_a_stride_after_catching_up_skips_no_evaluation_save_or_end(tmp_path, monkeypatch):
    class Jumping(SlowSync):
        def before_step(self, state: Any, step: int, most: Callable[[int], int]) -> tuple[Any, int, int]:
            step = {3: 7, 8: 18}.get(step, step)
            return state, step, min(3, most(step))

    shape = {"num_replicas": 2, "num_steps": 20, "eval_every": 8, "checkpoint_every": 10}
    jumping = Jumping()
    result = Result(tmp_path, monkeypatch, config=from_dict(shape | {"inner": {"warmup_steps": 0}}), exchanges=jumping)
    assert jumping.strides == [(3, 3), (8, 1), (20, 2)]
    assert result.done == [("evaluate", 8), ("evaluate", 20), ("save", 20)]


def test_a_removed_island_saves_after_the_current_step_and_stops(tmp_path, monkeypatch):
    class Removed(SlowSync):
        @property
        def end_reason(self) -> str | None:
            return "removed" if self.strides and self.strides[-1][0] >= 6 else None

    shape = {"num_replicas": 2, "num_steps": 20, "eval_every": 6, "checkpoint_every": 10}
    removed = Removed()
    result = Result(tmp_path, monkeypatch, config=from_dict(shape | {"inner": {"warmup_steps": 0}}), exchanges=removed)
    assert result.done == [("save", 6)] and removed.calls == ["leave", "settle"]


def test_a_checkpoint_of_an_island_counts_the_tokens_of_its_executed_steps(tmp_path, monkeypatch):
    config = from_dict({"num_replicas": 2, "num_steps": 6, "checkpoint_every": 3, "inner": {"warmup_steps": 0}})
    before = Totals(tokens=7)
    result = Result(tmp_path, monkeypatch, config=config, exchanges=SlowSync(), totals=before)
    assert result.done[-1] == ("save", 6)
    assert result.totals.tokens == before.tokens + 2 * config.tokens_per_step  # two inner steps are executed


def test_an_island_counts_the_bytes_of_the_messages_that_were_exchanged(tmp_path, monkeypatch):
    """No byte counts of a message that its partner never had; others arrive steps later."""
    sent = [0, 5, 0, 0, 7, 11]

    class Exchanging(SlowSync):
        def __init__(self):
            super().__init__()
            self.sent = iter(sent)

        def before_step(self, state: Any, step: int, most: Callable[[int], int]) -> tuple[Any, int, int]:
            return state, step, 1

        def after_step(self, state: Any, step: int, stride: int) -> tuple[Any, sync.OuterSteps | None]:  # type: ignore[override]
            return state, None if step % 2 else sync.OuterSteps(step // 2 - 1, 1, 0.0, None)

        def bytes_sent(self) -> int:
            return next(self.sent)

    shape = {"num_replicas": 2, "num_steps": 6, "log_every": 1, "outer": {"sync_every": 2}}
    config = from_dict(shape | {"inner": {"warmup_steps": 0}})
    before = Totals(bytes_sent_total=3)
    result = Result(tmp_path, monkeypatch, config=config, exchanges=Exchanging(), totals=before)
    inner_steps = [7] * 6  # bytes of each, see Result
    assert [line["bytes_sent_total"] for line in result.lines] == (3 + np.cumsum(np.add(sent, inner_steps))).tolist()
    assert [line["bytes_sent"] for line in result.lines if "bytes_sent" in line] == [5, 0, 18]


def test_the_last_save_settles_exchanges_after_finish_and_leave(tmp_path, monkeypatch):
    slow = SlowSync()
    result = Result(tmp_path, monkeypatch, exchanges=slow)
    assert slow.calls == ["settle", "finish", "leave", "settle"]  # saves after steps 3 and 6
    assert result.beside == {"journal": 2}


def test_exchange_news_are_written_as_separate_metrics_lines(tmp_path, monkeypatch):
    slow = SlowSync()
    slow.queued_news = [sync.News("met rome", "exchange", {"round": 4}), sync.News("for people alone")]
    result = Result(tmp_path, monkeypatch, exchanges=slow)
    assert [line["round"] for line in result.lines if line["kind"] == "exchange"] == [4]
    assert {line["kind"] for line in result.lines} == {"exchange", "train"}


def test_outer_steps_that_no_line_has_yet_are_logged_by_the_next_start():
    """Every inner step is followed by an outer step."""
    exchanges = SimpleNamespace(groups=lambda number: ((0, 1),))
    state: Any = SimpleNamespace(outer=SimpleNamespace(num_outer_steps=np.int32(19)))
    found = {
        count: step_log._unlogged(SimpleNamespace(sync=exchanges, totals=Totals(unlogged_outer_steps=count)), state)  # type: ignore[arg-type]
        for count in (0, 3)
    }
    assert found[0] is None
    assert found[3] is not None and (found[3].first, found[3].count) == (16, 3)


WARM = {"inner": {"warmup_steps": 0}}


def test_outer_steps_are_logged_together_and_a_save_counts_those_not_logged(tmp_path, monkeypatch):
    class EveryStep(sync.Sync):
        def after_step(self, state: Any, step: int, stride: int) -> tuple[Any, sync.OuterSteps | None]:  # type: ignore[override]
            return state, sync.OuterSteps(step - 1, 1, 0.0, None)

        def finish(self, state: Any, step: int) -> Any:
            return state

        def groups(self, number: int) -> Any:
            return ((0, 1),)

    config = from_dict({"num_replicas": 2, "num_steps": 6, "log_every": 4, "checkpoint_every": 3} | WARM)
    result = Result(tmp_path, monkeypatch, config=config, exchanges=EveryStep())
    lines = [line for line in result.lines if line["kind"] == "train"]
    assert [(line["step"], line["outer_steps"], line["round"]) for line in lines] == [(4, 4, 3), (6, 2, 5)]
    assert [totals.unlogged_outer_steps for totals in result.saved_totals] == [3, 0]
