"""Console output of a run, on a terminal and without one."""

import errno
import io
import os
import re
import subprocess
import sys

import pytest
from rich.console import Console

from noloco_jax.metrics.console import Progress, banner, make_console

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


@pytest.mark.parametrize(
    ("count", "seconds", "text"),
    [(1, 0.0123, "  1 outer step in 12.3 ms"), (40, 0.5, "  40 outer steps in 500 ms"), (2, 0.0, "  2 outer steps")],
)
def test_outer_steps_end_the_line_of_the_step_after_which_they_are_reported(count, seconds, text):
    console = plain_console()
    progress = Progress(1000, console=console)
    progress.update(149, 1.0, 1e-3, 10.0)
    progress.update(150, 1.0, 1e-3, 10.0, count, seconds)
    before, after = shown(console).splitlines()
    assert before.split("ETA")[1].count(" ") == 1 and after.endswith(text)


WHOLE = "perplexity 5.450 (replicas 5.400 to 5.500), merged 5.210, spread 3.10e-04"
INFINITE = {"perplexity": None, "perplexity_replicas": [5.4, None], "perplexity_merged": 5.0, "replica_spread": None}


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (VALUES, WHOLE),
        (VALUES | {"perplexity_by_source": {"web": 6.1, "own": None}}, f"{WHOLE}, on web 6.100, on own inf"),
        (VALUES | {"replica_spread": 0.0}, "perplexity 5.450"),
        (INFINITE, "perplexity inf (replicas 5.400 to inf), merged 5.000, spread inf"),
        ({"island": "paris", "perplexity": 5.4}, "perplexity 5.400 of island paris"),
        (
            {"island": "paris", "perplexity": 5.4, "perplexity_by_source": {"web": 6.1}},
            "perplexity 5.400 of island paris, on web 6.100",
        ),
    ],
    ids=["replicas", "mixture", "equal replicas", "not finite", "island", "island's mixture"],
)
def test_an_evaluation_is_one_line(values, text):
    console = plain_console()
    Progress(1000, console=console).evaluation(500, values)
    assert shown(console) == f"step  500/1000  {text}\n"


def test_on_a_terminal_messages_are_printed_above_a_one_line_progress_bar():
    console = terminal()
    with Progress(100, console=console) as progress:
        progress.update(50, loss=2.5, lr=1e-3, tokens_per_second=2e6)
        progress.note("one more")
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown(console))
    last = text.replace("\r", "\n").strip().splitlines()[-1]
    assert "one more\n" in text
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
