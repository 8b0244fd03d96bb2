"""The mutation tool, on a project of one function."""

import subprocess
from pathlib import Path

import pytest

from support.paths import ROOT
from tests import mutate

SUM = 'def total(numbers):\n    """Add."""\n    return 0 + sum(numbers)\n'
TEST = "from arithmetic import total\n\n\ndef test_numbers_are_added():\n    assert total([1, 2]) == 3\n"


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """Make a git repository of one module with one test, and let the tool keep its results there."""
    (tmp_path / "tests" / "sums").mkdir(parents=True)
    (tmp_path / "arithmetic.py").write_text(SUM)
    (tmp_path / "tests" / "sums" / "test_total.py").write_text(TEST)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    monkeypatch.setattr(mutate, "RESULTS", tmp_path / "results.json")
    return tmp_path


def outcomes(project: Path, *mutants: mutate.Mutant, known: dict | None = None) -> list[str]:
    return [
        found.outcome for found in mutate.run_mutants(list(mutants), {} if known is None else known, project).values()
    ]


def mutant(old: str, new: str, test: str = "") -> mutate.Mutant:
    return mutate.Mutant("sums", "arithmetic.py", old, new, test)


def test_a_mutant_is_killed_survives_or_is_gone(project):
    wrong = mutant("0 + sum", "1 + sum", "sums/test_other.py")  # its test is gone: those of the package run
    assert outcomes(project, wrong, mutant("Add.", "Sum."), mutant("product", "sum")) == ["killed", "SURVIVED", "GONE"]
    assert (project / "arithmetic.py").read_text() == SUM


def test_a_test_that_fails_without_the_mutant_kills_nothing(project):
    (project / "tests" / "sums" / "test_total.py").write_text(TEST.replace("== 3", "== 4"))
    assert outcomes(project, mutant("Add.", "Sum.")) == ["BROKEN"]


def test_a_known_result_holds_until_the_file_or_its_tests_change(project, monkeypatch):
    known: dict = {}
    harmless = mutant("Add.", "Sum.")
    assert outcomes(project, harmless, known=known) == ["SURVIVED"]
    with monkeypatch.context() as patch:
        patch.setattr(mutate.Copy, "pytest", None)
        assert outcomes(project, harmless, known=known) == ["SURVIVED"]
    (project / "tests" / "sums" / "test_total.py").write_text(TEST.replace("== 3", '== 3 and "Add" in total.__doc__'))
    assert outcomes(project, harmless, known=known) == ["killed"]


def test_every_mutant_of_the_project_changes_a_text_that_is_there_once():
    mutants = mutate.read_mutants(mutate.MUTANTS)
    assert len(set(mutants)) == len(mutants)
    gone = [
        str(one)
        for one in mutants
        if not (ROOT / one.file).exists() or one.applied((ROOT / one.file).read_text()) is None
    ]
    assert not gone
