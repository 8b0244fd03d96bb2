"""Exit statuses of errors, 1 where a retry may help and 2 where it does not, and common rules of all command lines."""

import os
import re
import runpy
import subprocess
import sys
import threading
import warnings

import pytest
from jax.errors import JaxRuntimeError

from noloco_jax import errors
from noloco_jax.errors import TransientError, UserError, log_if_slow, main_with_errors
from support.paths import ROOT, TOOLS


def ended(error: BaseException) -> int:
    def main() -> int:
        raise error

    with pytest.raises(SystemExit) as caught:
        main_with_errors(main)
    return int(caught.value.code or 0)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UserError("a flag"), 2),
        (TransientError("a disk"), 1),
        (OSError(5, "Input/output error"), 1),
        (KeyError("a fault of the code"), 2),
        (JaxRuntimeError("INTERNAL: CUDA error: uncorrectable ECC error encountered"), 1),
        (JaxRuntimeError("INVALID_ARGUMENT: Argument does not match host shape"), 2),
        (JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8589934592 bytes."), 2),
        (MemoryError(), 2),
        (KeyboardInterrupt(), 130),
    ],
    ids=lambda value: f"{type(value).__name__} {value}"[:60],
)
def test_only_errors_that_may_pass_have_the_status_of_a_retry(error, status):
    assert ended(error) == status


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"),
            r"error: out of memory \(RESOURCE_EXHAUSTED: .*raise --config.num_microbatches[^\n]*\n$",
        ),
        (KeyError("cause"), r"(?s)Traceback .*KeyError: 'cause'"),
        (UserError("a is wrong", "b is too"), "error: a is wrong\nerror: b is too\n$"),
    ],
)
def test_a_mistake_or_lack_of_memory_is_one_line_and_a_fault_of_the_code_keeps_its_traceback(error, said, capsys):
    ended(error)
    assert re.match(said, capsys.readouterr().err)


def run_program(program: str) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    return done.returncode, done.stdout, done.stderr


def test_an_early_ctrl_c_is_one_line_without_a_traceback():
    program = """
import os, signal
from noloco_jax.errors import main_with_errors
main_with_errors(lambda: os.kill(os.getpid(), signal.SIGINT))
"""
    assert run_program(program) == (130, "", "stopped by Ctrl-C\n")


STOPPED = "error: nothing reads the standard output any more, so the command stopped\n"


@pytest.mark.parametrize("tool", TOOLS)
def test_bad_input_ends_a_command_with_one_line_and_exit_status_2(tool, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [tool, "--no_such_flag"])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_module(f"noloco_jax.{tool}", run_name="__main__")
    captured = capsys.readouterr()
    assert (exit_.value.code, captured.out) == (2, "")
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1


def test_a_warning_is_one_line_without_a_source_location(capsys):
    def main() -> None:
        warnings.warn("weights do not stay together", stacklevel=1)

    with warnings.catch_warnings(), pytest.raises(SystemExit):
        warnings.simplefilter("always")
        main_with_errors(main)
    assert capsys.readouterr().err == "warning: weights do not stay together\n"


@pytest.mark.parametrize(
    ("body", "unbuffered", "status", "told"),
    [("print('x')", "", 3, ""), ("print('x', flush=True)", "", 1, STOPPED), ("print('x')", "1", 1, STOPPED)],
)
def test_a_reader_that_leaves_ends_no_command_in_a_traceback(body, unbuffered, status, told):
    code = f"import noloco_jax.errors as e\ndef main():\n input(); {body}; return 3\ne.main_with_errors(main)"
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with subprocess.Popen([sys.executable, "-c", code], text=True, env=environment, **streams) as command:
        assert command.stdout is not None
        command.stdout.close()  # as `head` does after its lines
        _, error = command.communicate("go\n")
    assert (command.returncode, error) == (status, told)


def test_a_slow_action_is_reported_once(monkeypatch):
    monkeypatch.setattr(errors, "SILENT_SECONDS", 0.05)
    lines, told = [], threading.Event()
    with log_if_slow("reading", lambda line: lines.append(line) or told.set()):
        assert told.wait(300)
    assert lines == ["reading"]


def test_an_action_that_ends_or_fails_before_is_never_reported(monkeypatch):
    monkeypatch.setattr(errors, "SILENT_SECONDS", 60.0)
    lines, before = list[str](), {*threading.enumerate()}
    with log_if_slow("reading", lines.append):
        pass
    with pytest.raises(ZeroDivisionError), log_if_slow("reading", lines.append):
        raise ZeroDivisionError
    for timer in {*threading.enumerate()} - before:  # one that was not cancelled reports
        timer.join(300)
    assert lines == []
