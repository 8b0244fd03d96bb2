"""Saves, evaluations and metrics of the training loop, over fake programs that compile nothing."""

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

from noloco_jax.checkpoint.record import Totals
from noloco_jax.config import TrainConfig, from_dict
from noloco_jax.errors import UserError
from noloco_jax.metrics.console import Progress
from noloco_jax.metrics.peaks import model_flops_per_token
from noloco_jax.metrics.writer import METRICS_FILE, MetricWriter
from noloco_jax.spmd.programs import StepMetrics, TrainState
from noloco_jax.train import context, loop, step_log, sync
from noloco_jax.train.bytes_sent import BytesSent


def config_of(**fields: Any) -> TrainConfig:
    """Return a run of six steps that evaluates and saves every third."""
    run = {"num_replicas": 2, "num_steps": 6, "eval_every": 3, "checkpoint_every": 3, "log_every": 1}
    return from_dict(run | {"inner": {"warmup_steps": 0}} | fields)


ALONE = {"method": "local", "num_replicas": 1}
CONFIG = config_of(**ALONE)
NOTHING = Totals()


class Exchanges(sync.Sync):
    """Fake exchanges of an island; each inner step stands for up to `stride` steps. They record the loop's calls."""

    def __init__(self, stride: int = 1, end_at: int | None = None, jumps: dict[int, int] | None = None):
        self._stride, self._end_at, self._jumps = stride, end_at, jumps or {}
        self.steps: list[tuple[int, int]] = []
        self.calls: list[str] = []
        self.queued_news: list[sync.SyncEvent] = []

    def before_step(self, state: Any, step: int, most: Callable[[int], int]) -> tuple[Any, int, int]:
        step = self._jumps.get(step, step)
        return state, step, min(self._stride, most(step))

    def after_step(self, state: Any, step: int, stride: int) -> tuple[Any, sync.OuterStepRecord | None]:
        self.steps.append((step, stride))
        return state, None

    def finish(self, state: Any, step: int) -> Any:
        self.calls.append("finish")
        return state

    def settle(self, state: Any) -> tuple[Any, dict[str, Any]]:
        self.calls.append("settle")
        return state, {"journal": len(self.steps)}

    def leave(self, finished: bool) -> None:
        self.calls.append("leave for good" if finished else "leave")

    @property
    def end_reason(self) -> str | None:
        return "removed" if self._end_at and self.steps and self.steps[-1][0] >= self._end_at else None

    def news(self, seconds: float) -> list[sync.SyncEvent]:
        queued, self.queued_news = self.queued_news, []
        return queued


class Result:
    """Run over fake programs, with saves and evaluations in order, the metrics lines, and the outcome or error.

    The loss of a step is its number. Steps are given at which the run is told to stop, the loss is NaN, the weights are
    lost, and the batch is damaged.
    """

    outer_step = correct_step = None  # of the fake programs

    def __init__(
        self,
        workdir,
        monkeypatch,
        config=CONFIG,
        exchanges=None,
        *,
        start=0,
        stop_at=None,
        nan_at=None,
        lost_at=None,
        damaged_at=None,
        totals=NOTHING,
        peak=None,
        merging=0,
    ):
        self._stop_at, self._nan_at, self._lost_at, self._damaged_at = stop_at, nan_at, lost_at, damaged_at
        self._asked, self._taken = start, 0
        self.done: list[tuple[str, int]] = []
        self.saved: list[tuple[Totals, Any]] = []
        self.outcome, self.error = None, None
        monkeypatch.setattr(loop, "_evaluate", lambda run, state, step, log: self.done.append(("evaluate", step)))
        fake: Any = self
        with MetricWriter(workdir, resume_step=start or None, tensorboard=False) as metrics:
            run = context.RunContext(
                config=config,
                programs=fake,
                batches=fake,
                evaluate=fake,
                checkpoints=fake,
                totals=totals,
                bytes_sent=BytesSent(100, 7, merging),
                peak_flops_per_second=peak,
                metrics=metrics,
                progress=Progress(6, console=Console(quiet=True)),
                stop=fake,
                sync=exchanges or sync.CollectiveSync(config, fake),
            )
            outer: Any = SimpleNamespace(num_outer_steps=0)
            state = TrainState(None, None, outer)
            try:
                self.outcome = loop.train_steps(run, state, start)
            except UserError as error:
                self.error = str(error)
        self.lines = [json.loads(line) for line in (workdir / METRICS_FILE).read_text().splitlines()]

    def inner_step(self, params: Any, inner: Any, batch: Any, step: np.int32) -> Any:
        loss = jnp.asarray([jnp.nan if step == self._nan_at else float(step)])
        if step == self._lost_at:
            params = {"w": jnp.asarray([1.0, jnp.nan])}
        return params, inner, StepMetrics(loss=loss, grad_norm=loss)

    def __next__(self) -> None:
        self._taken += 1
        if self._taken == self._damaged_at:
            raise UserError("a file is damaged")

    def get_state(self) -> dict[int, dict]:
        return {}

    def save(self, step: int, state: Any, data: Any, totals: Totals, sync_state: Any) -> None:
        self.done.append(("save", step))
        self.saved.append((totals, sync_state))

    def is_due(self) -> bool:
        self._asked += 1
        return self._asked == self._stop_at

    @property
    def totals(self) -> Totals:
        return self.saved[-1][0]


EVALUATE, SAVE = "evaluate", "save"


@pytest.mark.parametrize(
    ("fields", "stop_at", "done", "finished"),
    [
        ({}, None, [(EVALUATE, 3), (SAVE, 3), (EVALUATE, 6), (SAVE, 6)], True),
        ({}, 2, [(SAVE, 2)], False),
        ({}, 3, [(EVALUATE, 3), (SAVE, 3)], False),
        ({}, 6, [(EVALUATE, 3), (SAVE, 3), (EVALUATE, 6), (SAVE, 6)], True),
        ({"num_steps": 5}, None, [(EVALUATE, 3), (SAVE, 3), (EVALUATE, 5), (SAVE, 5)], True),
        ({"eval_every": 0}, None, [(SAVE, 3), (EVALUATE, 6), (SAVE, 6)], True),
    ],
    ids=["to the end", "stopped", "stopped at an evaluation", "stopped at the end", "an odd end", "one evaluation"],
)
def test_evaluations_precede_saves_and_a_stop_saves_at_once(tmp_path, monkeypatch, fields, stop_at, done, finished):
    """A run that is killed between them resumes from before this step, so it evaluates and saves it again."""
    result = Result(tmp_path, monkeypatch, config_of(**ALONE, **fields), stop_at=stop_at)
    assert result.done == done
    assert result.outcome is not None and result.outcome.finished == finished
    assert [line["step"] for line in result.lines] == list(range(1, done[-1][1] + 1))


@pytest.mark.parametrize(
    ("fault", "message", "logged"),
    [
        ({"damaged_at": 5}, "a file is damaged", 4),
        ({"nan_at": 2}, "the loss is nan at step 2: lower inner.lr", 2),
        ({"nan_at": 1}, "the loss is nan at the first step, before any update: the initial weights or", 1),
        ({"lost_at": 6}, "the state after step 6 has values that are not finite", 6),
        ({"lost_at": 5, "stop_at": 5}, "the state after step 5 has values that are not finite", 5),
    ],
    ids=str,
)
def test_an_error_keeps_the_metrics_of_all_steps_and_saves_no_bad_state(tmp_path, monkeypatch, fault, message, logged):
    """A step's loss is that of the weights before it: lost weights have a finite one."""
    result = Result(tmp_path, monkeypatch, **fault)
    assert result.error is not None and result.error.startswith(message)
    assert [line["step"] for line in result.lines] == list(range(1, logged + 1))
    assert [step for action, step in result.done if action == SAVE] == ([3] if logged > 3 else [])


def test_totals_continue_from_the_checkpoint(tmp_path, monkeypatch):
    first = Result(tmp_path, monkeypatch, stop_at=3)
    assert first.totals.tokens == 3 * CONFIG.tokens_per_step
    second = Result(tmp_path, monkeypatch, start=3, totals=first.totals)
    assert [line["tokens"] for line in second.lines] == [CONFIG.tokens_per_step * step for step in range(1, 7)]
    for name in ("seconds", "seconds_waiting_for_data", "seconds_in_outer_steps", "time"):
        values = [line[name] for line in second.lines]
        assert values == sorted(values)
    assert second.lines[3]["seconds"] > first.totals.seconds >= second.lines[2]["seconds"] > 0


def test_the_last_line_includes_the_bytes_of_the_final_merge(tmp_path, monkeypatch):
    without = Result(tmp_path / "without", monkeypatch)
    merged = Result(tmp_path / "merged", monkeypatch, merging=10**6)
    sent, sent_merged = ([line["bytes_sent_total"] for line in each.lines] for each in (without, merged))
    assert sent_merged == [*sent[:-1], sent[-1] + 10**6]


def test_weights_of_an_island_that_has_finished_end_the_run_without_another_step(tmp_path, monkeypatch):
    exchanges = Exchanges(jumps={3: 6})
    result = Result(tmp_path, monkeypatch, exchanges=exchanges)
    assert [step for step, _ in exchanges.steps] == [1, 2, 3]
    assert result.done == [(EVALUATE, 3), (SAVE, 3), (EVALUATE, 6), (SAVE, 6)]
    assert exchanges.calls == ["settle", "finish", "leave for good", "settle"]
    assert result.outcome is not None and result.outcome.finished and result.outcome.step == 6


def test_the_last_step_is_logged_regardless_of_log_every(tmp_path, monkeypatch):
    assert [line["step"] for line in Result(tmp_path, monkeypatch, config_of(**ALONE, log_every=4)).lines] == [4, 6]


def test_log_replicas_writes_the_loss_of_each_replica(tmp_path, monkeypatch):
    assert "loss_replicas" not in Result(tmp_path, monkeypatch).lines[0]
    lines = Result(tmp_path, monkeypatch, config_of(**ALONE, log_replicas=True)).lines
    assert [line["loss_replicas"] for line in lines[:2]] == [{"0": 1.0}, {"0": 2.0}]


def test_mfu_is_written_only_if_the_device_peak_is_known(tmp_path, monkeypatch):
    assert "mfu" not in Result(tmp_path, monkeypatch).lines[0]
    line = Result(tmp_path, monkeypatch, peak=1e15).lines[-1]
    assert line["mfu"] == pytest.approx(
        line["tokens_per_second"] * model_flops_per_token(CONFIG.model, CONFIG.data.sequence_length) / 1e15
    )


@pytest.mark.parametrize("devices", [(8, 1), (4, 2), (2, 4)], ids=["one a replica", "two", "four"])
def test_losses_are_keyed_by_replica_number_on_any_device_layout(devices):
    mesh = jax.make_mesh(devices, ("replica", "stage"), (AxisType.Auto,) * 2)
    losses = jax.device_put(np.arange(8.0), NamedSharding(mesh, P("replica")))
    assert step_log._by_replica(losses) == {replica: float(replica) for replica in range(8)}


LONG = {"num_steps": 20, "eval_every": 8, "checkpoint_every": 10, "log_every": 7}


@pytest.mark.parametrize(
    ("exchanges", "steps", "done", "logged"),
    [
        (
            {"stride": 3},
            [(3, 3), (6, 3), (8, 2), (10, 2), (13, 3), (16, 3), (19, 3), (20, 1)],
            [(EVALUATE, 8), (SAVE, 10), (EVALUATE, 16), (EVALUATE, 20), (SAVE, 20)],
            [8, 16, 20],  # the first steps after 7 and 14, and the last one
        ),
        (
            {"stride": 3, "jumps": {3: 7, 8: 18}},
            [(3, 3), (8, 1), (20, 2)],
            [(EVALUATE, 8), (EVALUATE, 20), (SAVE, 20)],
            [20],
        ),
        ({"stride": 3, "end_at": 5}, [(3, 3), (6, 3)], [(SAVE, 6)], []),
    ],
    ids=["long strides", "catching up", "removed"],
)
def test_an_island_skips_no_evaluation_save_or_end(tmp_path, monkeypatch, exchanges, steps, done, logged):
    """Strides end at what is due; an island that catches up goes on from a later step, one that is removed ends."""
    fake = Exchanges(**exchanges)
    result = Result(tmp_path, monkeypatch, config_of(**LONG), fake)
    assert (fake.steps, result.done) == (steps, done)
    assert [line["step"] for line in result.lines] == logged


def test_the_last_save_settles_exchanges_after_finish_and_leave(tmp_path, monkeypatch):
    fake = Exchanges()
    result = Result(tmp_path, monkeypatch, CONFIG, fake)
    assert fake.calls == ["settle", "finish", "leave for good", "settle"]  # saves after steps 3 and 6
    assert result.saved[-1][1] == {"journal": 6}
    removed = Exchanges(end_at=2)
    Result(tmp_path, monkeypatch, CONFIG, removed)
    assert removed.calls == ["leave", "settle"]


def test_a_checkpoint_of_an_island_counts_the_tokens_of_its_executed_steps(tmp_path, monkeypatch):
    config = config_of()
    result = Result(tmp_path, monkeypatch, config, Exchanges(stride=3), totals=Totals(tokens=7))
    assert result.totals.tokens == 7 + 2 * config.tokens_per_step  # two inner steps are executed


class Counted(Exchanges):
    """Outer step k follows inner step `every` · k; `sent` are the bytes that have arrived after each inner step."""

    def __init__(self, every: int, sent: list[int] | None = None):
        super().__init__()
        self._every, self._sent = every, sent

    def after_step(self, state: Any, step: int, stride: int) -> tuple[Any, sync.OuterStepRecord | None]:
        return state, None if step % self._every else sync.OuterStepRecord(step // self._every - 1, 1, 0.0)

    def bytes_sent(self) -> int | None:
        return self._sent.pop(0) if self._sent else None


def test_an_island_counts_the_bytes_of_the_messages_that_were_exchanged(tmp_path, monkeypatch):
    """No byte counts of a message that its partner never had; others arrive steps later."""
    sent = [0, 5, 0, 0, 7, 11]
    config, exchanges = config_of(outer={"sync_every": 2}), Counted(2, [*sent])
    result = Result(tmp_path, monkeypatch, config, exchanges, totals=Totals(bytes_sent_total=3))
    inner_steps = [7] * 6  # bytes of each, see Result
    assert [line["bytes_sent_total"] for line in result.lines] == (3 + np.cumsum(np.add(sent, inner_steps))).tolist()
    assert [line["bytes_sent"] for line in result.lines if "bytes_sent" in line] == [5, 0, 18]


def test_exchange_news_are_written_as_separate_metrics_lines(tmp_path, monkeypatch):
    fake = Exchanges()
    fake.queued_news = [sync.SyncEvent("met rome", "exchange", {"round": 4}), sync.SyncEvent("for people alone")]
    result = Result(tmp_path, monkeypatch, CONFIG, fake)
    assert [line["round"] for line in result.lines if line["kind"] == "exchange"] == [4]
    assert {line["kind"] for line in result.lines} == {"exchange", "train"}


def test_outer_steps_that_no_line_has_yet_are_logged_by_the_next_start():
    state: Any = SimpleNamespace(outer=SimpleNamespace(num_outer_steps=np.int32(19)))
    run: Any = SimpleNamespace(totals=NOTHING)
    assert step_log._unlogged(run, state) is None
    run.totals = Totals(unlogged_outer_steps=3)
    assert step_log._unlogged(run, state) == sync.OuterStepRecord(16, 3, 0.0)


def test_outer_steps_are_logged_together_and_a_save_counts_those_not_logged(tmp_path, monkeypatch):
    result = Result(tmp_path, monkeypatch, config_of(log_every=4), Counted(1))
    assert [(line["step"], line["outer_steps"], line["round"]) for line in result.lines] == [(4, 4, 4), (6, 2, 6)]
    assert [totals.unlogged_outer_steps for totals, _ in result.saved] == [3, 0]
