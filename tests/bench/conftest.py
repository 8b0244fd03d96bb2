"""Runs that are measured once for all tests of the benchmark."""

from pathlib import Path

import pytest


@pytest.fixture
def config_file(tmp_path) -> Path:
    from support import processes  # imports jax

    return processes.write_config(tmp_path / "made")


@pytest.fixture(scope="session")
def result(tmp_path_factory) -> dict:
    from noloco_jax.tools.bench.measure import measure
    from support import benchmarks, processes

    data = processes.write_config(tmp_path_factory.mktemp("run") / "made").parent / "data"
    config = benchmarks.small(data=benchmarks.SMALL["data"] | {"path": str(data)})
    return measure(config, steps=3, data_seconds=0.05)


@pytest.fixture(scope="session")
def ddp_result(tmp_path_factory) -> dict:
    """Result of a run without data, with a trace."""
    from noloco_jax.tools.bench.measure import measure
    from support import benchmarks

    profile = tmp_path_factory.mktemp("trace")
    return measure(benchmarks.small(method="ddp"), steps=3, data_seconds=0.05, profile=profile)
