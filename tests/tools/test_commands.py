"""What all tools have in common: how they end on bad input, and that none needs another."""

import ast
import runpy
import sys
from pathlib import Path

import pytest

from support.paths import ROOT

TOOLS = ("train", "bench", "compare", "inspect", "simulate", "lateness", "export", "generate")
PACKAGE = ROOT / "noloco_jax"


@pytest.mark.parametrize("tool", TOOLS)
def test_a_command_ends_with_2_and_one_line_on_bad_input(tool, monkeypatch, capsys):
    if not (PACKAGE / tool).is_dir():
        monkeypatch.delitem(sys.modules, f"noloco_jax.{tool}", raising=False)  # runpy warns of a second import
    monkeypatch.setattr(sys, "argv", [tool, "--no_such_flag"])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_module(f"noloco_jax.{tool}", run_name="__main__")
    captured = capsys.readouterr()
    assert (exit_.value.code, captured.out) == (2, "")
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1


def files_of(tool: str) -> list[Path]:
    return sorted((PACKAGE / tool).rglob("*.py")) if (PACKAGE / tool).is_dir() else [PACKAGE / f"{tool}.py"]


def imports(path: Path) -> set[str]:
    """The modules that a file imports anywhere in it, `from a import b` as both a and a.b."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@pytest.mark.parametrize("tool", TOOLS)
def test_no_tool_imports_a_tool(tool):
    others = {f"noloco_jax.{other}" for other in TOOLS if other != tool}
    if tool == "lateness":
        others.remove("noloco_jax.train")  # whose loop it runs, with processes that are late
    for path in files_of(tool):
        used = {".".join(name.split(".")[:2]) for name in imports(path)}
        assert not used & others, path


def test_nothing_imports_a_command_line():
    for path in PACKAGE.rglob("*.py"):
        assert not any("__main__" in name for name in imports(path)), path
