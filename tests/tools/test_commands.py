"""Common rules of all tools' command lines."""

import runpy
import sys
import warnings

import pytest

from noloco_jax.errors import main_with_errors
from support.paths import TOOLS


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
