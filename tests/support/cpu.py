"""Plugin that prints the tests' CPU seconds, waited-for children included: by folder, and of the costliest files."""

import os
from collections import Counter
from pathlib import PurePath

import pytest

FILES = 25  # that are listed


def seconds() -> float:
    """Return the CPU seconds of this process and of the children that it has waited for."""
    return sum(os.times()[:4])


class Cpu:
    """Count of CPU seconds; a test's setup, call and teardown each tell those since the one before."""

    def __init__(self) -> None:
        self._last = seconds()
        self._by_file: Counter[str] = Counter()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self):
        report = yield
        now = seconds()
        report.cpu_seconds, self._last = now - self._last, now
        return report

    def pytest_runtest_logreport(self, report) -> None:
        self._by_file[report.nodeid.partition("::")[0]] += report.cpu_seconds

    def pytest_terminal_summary(self, terminalreporter) -> None:
        by_folder: Counter[str] = Counter()
        for file, spent in self._by_file.items():
            by_folder[PurePath(file).parent.name] += spent
        terminalreporter.section("CPU seconds")
        folders = ", ".join(f"{folder} {spent:.0f}" for folder, spent in by_folder.most_common())
        terminalreporter.write_line(f"{by_folder.total():.0f} in all: {folders}")
        for file, spent in self._by_file.most_common(FILES):
            terminalreporter.write_line(f"{spent:6.1f} {file}")
