"""Console output of a run, on a terminal and without one."""

import errno
import io
import os
import re
import subprocess
import sys

import pytest
from rich.console import Console

from noloco_jax.metrics.console import Progress, banner, make_console, results_table

VALUES = {
    "perplexity": 5.45,
    "perplexity_replicas": [5.4, 5.5],
    "perplexity_merged": 5.21,
    "replica_spread": 3.1e-4,
}


def plain_console() -> Console:
    return Console(file=io.StringIO(), highlight=False, markup=False, soft_wrap=True)


def terminal() -> Console:
    return Console(
        file=io.StringIO(),
        highlight=False,
        markup=False,
        soft_wrap=True,
        force_terminal=True,
        width=120,
        _environ={"TERM": "xterm"},
    )


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_banner_aligns_values_and_their_continuation_lines():
    console = plain_console()
    banner([("devices", "1 cpu"), ("a", "[red]x\ny"), ("none", "")], console)
    assert shown(console) == "devices  1 cpu\na        [red]x\n         y\nnone     \n\n"


def test_without_a_terminal_a_line_is_written_every_log_every_steps_and_at_the_end():
    console, clock = plain_console(), Clock()
    with Progress(25, log_every=10, console=console, clock=clock) as progress:
        for step in range(1, 26):
            clock.now += 0.5
            progress.update(step, loss=1 / step, lr=1e-3, tokens_per_second=12_345)
    lines = shown(console).splitlines()
    assert [line.split()[1] for line in lines] == ["10/25", "20/25", "25/25"]
    assert lines[1] == "step 20/25  loss 0.0500  lr 1.00e-03  12.3k tokens/s  ETA 0:02"


def test_without_a_terminal_the_first_line_is_written_after_ten_seconds():
    console, clock = plain_console(), Clock()
    with Progress(100, log_every=50, console=console, clock=clock) as progress:
        for step in range(1, 101):
            clock.now += 4.0
            progress.update(step, loss=1.0, lr=1e-3, tokens_per_second=10.0)
    assert [line.split()[1] for line in shown(console).splitlines()] == ["3/100", "50/100", "100/100"]


def test_without_a_terminal_no_control_characters_are_written():
    console = plain_console()
    with Progress(2, console=console) as progress:
        progress.update(1, 1.0, 1e-3, 10.0)
        progress.outer(1, 1, 0, [[0, 1]], 0.5)
        progress.evaluation(1, VALUES)
    results_table(VALUES, console)
    assert "\x1b" not in shown(console) and "\r" not in shown(console)


@pytest.mark.parametrize(
    ("groups", "seconds", "text"),
    [
        ([[0, 2], [1, 3]], 0.0123, "outer step 3: 0-2 1-3, 12.3 ms"),
        ([[0, 2], [1]], 2.0, "outer step 3: 0-2 (1), 2 s"),
        ([list(range(64))], 90.0, "outer step 3: 64 replicas, 90 s"),
        ([[2 * i, 2 * i + 1] for i in range(32)], 0.5, "30-31 and 16 more groups, 500 ms"),
    ],
)
def test_an_outer_step_line_shows_the_groups_and_the_duration(groups, seconds, text):
    console = plain_console()
    Progress(1000, console=console).outer(150, 1, 2, groups, seconds)
    assert shown(console).startswith("step  150/1000  outer step 3: ") and text in shown(console)


def test_several_outer_steps_share_a_line_with_the_groups_of_the_last():
    console = plain_console()
    Progress(1000, console=console).outer(150, 40, 79, [[0, 1]], 0.5)
    assert shown(console) == "step  150/1000  outer steps 41 to 80, the last: 0-1, 500 ms in all\n"


def test_an_evaluation_line_shows_replicas_merged_model_and_spread():
    console = plain_console()
    Progress(1000, console=console).evaluation(500, VALUES)
    assert shown(console) == (
        "step  500/1000  perplexity 5.450 (replicas 5.400 to 5.500), merged 5.210, spread 3.10e-04\n"
    )


BY_SOURCE = {"perplexity_by_source": {"web": 6.1, "own": None}, "perplexity_merged_by_source": {"web": 5.9, "own": 3.2}}


def test_an_evaluation_line_ends_with_the_perplexity_of_each_source():
    console = plain_console()
    progress = Progress(1000, console=console)
    progress.evaluation(500, VALUES | BY_SOURCE)
    progress.evaluation(500, {"island": "paris", "perplexity": 5.4, "perplexity_by_source": {"web": 6.1}})
    whole, island = shown(console).splitlines()
    assert whole.endswith("spread 3.10e-04, on web 6.100, on own inf")
    assert island.endswith("perplexity 5.400 of island paris, on web 6.100")


def test_the_sources_of_a_mixture_are_columns_of_the_results_table():
    console = plain_console()
    results_table(VALUES | BY_SOURCE, console)
    for row in ("model perplexity web own", "mean of the replicas 5.450 6.100 inf", "merged model 5.210 5.900 3.200"):
        assert row in rows(console)


def test_non_finite_figures_are_shown_as_infinite():
    console = plain_console()
    values = {"perplexity": None, "perplexity_replicas": [5.4, None], "perplexity_merged": 5.0, "replica_spread": None}
    Progress(10, console=console).evaluation(5, values)
    results_table(values, console)
    assert "perplexity inf (replicas 5.400 to inf)" in shown(console)


def test_on_a_terminal_messages_are_printed_above_a_one_line_progress_bar():
    console = terminal()
    with Progress(100, console=console) as progress:
        progress.update(50, loss=2.5, lr=1e-3, tokens_per_second=2e6)
        progress.outer(50, 1, 0, [[0, 1]], 0.01)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown(console))
    last = text.replace("\r", "\n").strip().splitlines()[-1]
    assert "outer step 1: 0-1, 10 ms\n" in text
    assert last.startswith("step  50/100 ") and last.rstrip().endswith(
        "loss 2.5000  lr 1.00e-03  2M tokens/s  ETA -:--"
    )
    assert len(last) <= 120


def test_on_a_terminal_the_cursor_is_restored_when_the_run_fails():
    console = terminal()
    with pytest.raises(KeyboardInterrupt), Progress(100, console=console):
        raise KeyboardInterrupt
    assert shown(console).rindex("\x1b[?25h") > shown(console).rindex("\x1b[?25l")


def test_the_eta_counts_from_the_step_of_the_resume():
    console, clock = plain_console(), Clock()
    progress = Progress(120, start_step=100, console=console, clock=clock)
    progress.update(101, 1.0, 1e-3, 10.0)
    clock.now = 60.0
    progress.update(111, 1.0, 1e-3, 10.0)
    assert shown(console).splitlines()[-1].endswith("ETA 0:54")


def rows(console: Console) -> list[str]:
    return [" ".join(re.findall(r"[\w.+-]+", line)) for line in shown(console).splitlines()]


def test_the_results_table_lists_replicas_their_mean_merged_model_and_spread():
    console = plain_console()
    results_table(VALUES, console)
    for row in (
        "replica 0 5.400",
        "replica 1 5.500",
        "mean of the replicas 5.450",
        "merged model 5.210",
        "replica spread 3.10e-04",
    ):
        assert row in rows(console)


def test_an_island_shows_only_its_own_perplexity_under_its_name():
    console = plain_console()
    values = {"island": "paris", "perplexity": 5.4}
    results_table(values, console)
    assert [row for row in rows(console) if re.search(r"\d", row)] == ["island paris 5.400"]
    console = plain_console()
    Progress(8, console=console).evaluation(4, values)
    assert shown(console) == "step 4/8  perplexity 5.400 of island paris\n"


def test_the_results_table_of_many_replicas_shows_the_best_and_the_worst():
    console = plain_console()
    results_table(VALUES | {"perplexity_replicas": [5.0 + i for i in range(64)]}, console)
    assert "best of 64 replicas 5.000" in rows(console) and "worst of 64 replicas 68.000" in rows(console)


def test_characters_missing_from_the_stdout_encoding_are_replaced(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", stream)
    make_console().print("café [x]")
    assert stream.buffer.getvalue() == b"caf? [x]\n"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.EPIPE, "Broken pipe"), (errno.EIO, "Input/output error"), (errno.ENOSPC, "No space left")],
)
@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_failing_stdout_is_warned_about_once_and_no_longer_written(monkeypatch, capsys, number, words, is_terminal):
    class Failing(io.StringIO):
        def flush(self) -> None:
            raise OSError(number, os.strerror(number))

        def isatty(self) -> bool:
            return is_terminal

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout", Failing())
    with Progress(8, console=make_console()) as progress:
        progress.note("one")
        progress.note("two")
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: standard output cannot be written ({words}")


def test_a_full_stdout_does_not_change_the_exit_status_of_a_command():
    """Python flushes what it has buffered once more at its end, and exits with 120 if that fails."""
    command = [sys.executable, "-c", "from noloco_jax.metrics.console import make_console; make_console().print('one')"]
    buffered = os.environ | {"PYTHONUNBUFFERED": ""}
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, env=buffered, stdout=full, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 0
    assert (
        ended.stderr.startswith("warning: standard output cannot be written (No space left")
        and ended.stderr.count("\n") == 1
    )
