"""What the command lines of all tools have in common."""

import runpy
import sys

import pytest

from support.paths import ROOT, TOOLS


@pytest.mark.parametrize("tool", TOOLS)
def test_a_command_ends_with_2_and_one_line_on_bad_input(tool, monkeypatch, capsys):
    if not (ROOT / "noloco_jax" / tool).is_dir():
        monkeypatch.delitem(sys.modules, f"noloco_jax.{tool}", raising=False)  # runpy warns of a second import
    monkeypatch.setattr(sys, "argv", [tool, "--no_such_flag"])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_module(f"noloco_jax.{tool}", run_name="__main__")
    captured = capsys.readouterr()
    assert (exit_.value.code, captured.out) == (2, "")
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
