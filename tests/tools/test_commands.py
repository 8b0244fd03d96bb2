"""Common rules of all tools' command lines."""

import os
import runpy
import subprocess
import sys
import warnings

import pytest

from noloco_jax.errors import main_with_errors
from support.paths import TOOLS

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
