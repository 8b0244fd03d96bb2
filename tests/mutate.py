"""Mutation tests: `python -m tests.mutate [PACKAGE ...]` breaks the code on purpose and shows what no test notices.

Every mutant of `tests/mutants.toml` is applied, one at a time, to a copy of the working tree, and the default tests of
its package run there with `-x`, the test that it names first. A mutant that no test fails with has survived. Results
are kept in `.mutants.json`, so that a run that was stopped goes on, and mutants whose files are unchanged are skipped.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.util import cache_from_source
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MUTANTS = ROOT / "tests" / "mutants.toml"
RESULTS = ROOT / ".mutants.json"

KILLED, SURVIVED, GONE, BROKEN = "killed", "SURVIVED", "GONE", "BROKEN"
_USAGE, _NO_TESTS = 4, 5  # pytest's exit statuses for tests that are not there


@dataclass(frozen=True)
class Mutant:
    """One deliberate error.

    Attributes:
      package: folder under `tests` whose tests must fail with it.
      file: path from the root of the project.
      old: text that stands in the file exactly once.
      new: text in its place.
      test: where a test is expected to fail, as pytest takes it, below `tests`: it runs first, and the package if it
        passes or is gone. Empty: the package alone.
    """

    package: str
    file: str
    old: str
    new: str
    test: str = ""

    def applied(self, text: str) -> str | None:
        """Return the mutated text, or None if `old` is not there exactly once."""
        return text.replace(self.old, self.new) if text.count(self.old) == 1 else None

    def __str__(self) -> str:
        old, new = (" ".join(text.split()) for text in (self.old, self.new))
        return f"{self.file}: {old!r} -> {new!r}"


@dataclass(frozen=True)
class Result:
    """Outcome of a mutant: one of the constants above, the tests that failed (or why it is broken), and the seconds."""

    outcome: str
    detail: str = ""
    seconds: float = 0.0


def read_mutants(path: Path) -> list[Mutant]:
    """Read the mutants of a file.

    Raises:
      SystemExit: for a mutant with other fields, or without an effect.
    """
    mutants = []
    for number, entry in enumerate(tomllib.loads(path.read_text())["mutant"], 1):
        try:
            mutants.append(Mutant(**entry))
        except TypeError as error:
            sys.exit(f"error: {path.name}, mutant {number}: {error}")
        if mutants[-1].old == mutants[-1].new:
            sys.exit(f"error: {path.name}, mutant {number}: old and new are equal")
    return mutants


def digest(root: Path, mutant: Mutant) -> str:
    """Digest a mutant, its file and the tests of its package: a result holds while these are unchanged."""
    found = hashlib.sha256(json.dumps(asdict(mutant)).encode())
    for path in [root / mutant.file, *sorted((root / "tests" / mutant.package).rglob("*.py"))]:
        found.update(path.read_bytes() if path.exists() else b"missing")
    return found.hexdigest()[:24]


class Copy:
    """Copy of the working tree's files, without those that git ignores.

    Args:
      root: the working tree, which may change from here on.
      folder: an empty folder for the copy.
    """

    def __init__(self, root: Path, folder: Path):
        self.folder = folder
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.run(listed, cwd=root, check=True, capture_output=True, text=True).stdout.split("\0"):
            if name and (root / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, folder / name)

    def run(self, mutant: Mutant) -> Result:
        """Apply a mutant, run the tests, and undo it."""
        start, path = time.monotonic(), self.folder / mutant.file
        original = path.read_text() if path.exists() else ""
        mutated = mutant.applied(original)
        if mutated is None:
            return Result(GONE)
        self._write(path, mutated)
        try:
            status, failed = self.pytest(["-x", f"tests/{mutant.test}"]) if mutant.test else (0, [])
            if status in (0, _NO_TESTS, _USAGE):
                status, failed = self.pytest(["-x", f"tests/{mutant.package}"])
        finally:
            self._write(path, original)
        if status == -signal.SIGTERM:
            sys.exit("error: pytest was terminated: run the command again, which continues")
        outcome = {0: SURVIVED, _NO_TESTS: BROKEN, _USAGE: BROKEN}.get(status, KILLED)
        return Result(outcome, " ".join(failed), time.monotonic() - start)

    def pytest(self, arguments: Iterable[str]) -> tuple[int, list[str]]:
        """Run tests; return pytest's exit status and the ids of those that failed."""
        options = ["-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-rfE", "--tb=no"]
        command = ["nice", "-n", "19", sys.executable, *options, *arguments]
        variables = os.environ | {"PYTHONPATH": str(self.folder)}
        run = subprocess.run(command, cwd=self.folder, env=variables, capture_output=True, text=True)
        failed = re.findall(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", run.stdout, re.MULTILINE)
        return run.returncode, failed or [f"pytest's exit status {run.returncode}"] * bool(run.returncode)

    def _write(self, path: Path, text: str) -> None:
        # Python takes bytecode for current if its source has the same size and second of change.
        path.write_text(text)
        Path(cache_from_source(str(path))).unlink(missing_ok=True)


def failing_without(copy: Copy, results: Iterable[Result]) -> set[str]:
    """Return the tests among those that killed mutants which fail in the unchanged code too."""
    tests = sorted({result.detail for result in results if "::" in result.detail})
    return set(copy.pytest(tests)[1]) if tests else set()


def run_mutants(mutants: list[Mutant], known: dict[str, dict], root: Path = ROOT) -> dict[Mutant, Result]:
    """Run mutants that have no known result, and add these to `known`; print each as it comes."""
    results, fresh = {}, {}
    with tempfile.TemporaryDirectory(prefix="mutants_") as folder:
        copy = Copy(root, Path(folder) / "main")
        if (data := root.parent / "shared").exists():  # without these files some tests skip, and prove nothing
            (Path(folder) / "shared").symlink_to(data.resolve())
        for number, mutant in enumerate(mutants, 1):
            key = digest(copy.folder, mutant)
            if key in known:
                results[mutant] = Result(**known[key])
                continue
            result = results[mutant] = fresh[mutant] = copy.run(mutant)
            print(
                f"{number}/{len(mutants)} {result.outcome} {mutant} [{result.seconds:.0f} s] {result.detail}",
                flush=True,
            )
            known[key] = asdict(result)
            RESULTS.write_text(json.dumps(known, indent=0))
        bad = failing_without(copy, fresh.values())
        for mutant, result in fresh.items():
            if result.detail in bad:
                results[mutant] = Result(BROKEN, f"{result.detail} fails without it too", result.seconds)
                del known[digest(copy.folder, mutant)]
    RESULTS.write_text(json.dumps(known, indent=0))
    return results


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutate", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("package", nargs="*", help="folders under tests/ whose mutants to run; all without one")
    parser.add_argument("--again", action="store_true", help="forget earlier results")
    options = parser.parse_args(arguments)
    mutants = read_mutants(MUTANTS)
    packages = {mutant.package for mutant in mutants}
    if unknown := set(options.package) - packages:
        parser.error(f"no mutants of {', '.join(sorted(unknown))}: there are those of {', '.join(sorted(packages))}")
    chosen = [mutant for mutant in mutants if not options.package or mutant.package in options.package]
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() and not options.again else {}
    start = time.monotonic()
    results = run_mutants(chosen, known)
    for outcome in (SURVIVED, GONE, BROKEN):
        for mutant, result in results.items():
            if result.outcome == outcome:
                print(f"{outcome} ({mutant.package}) {mutant} {result.detail}".rstrip())
    counts = {
        outcome: sum(result.outcome == outcome for result in results.values())
        for outcome in (KILLED, SURVIVED, GONE, BROKEN)
    }
    summary = ", ".join(f"{count} {outcome.lower()}" for outcome, count in counts.items() if count)
    print(f"{len(results)} mutants in {time.monotonic() - start:.0f} s: {summary}")
    return 0 if counts[KILLED] == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
