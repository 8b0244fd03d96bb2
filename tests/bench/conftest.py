"""Runs that are measured once for all tests of the benchmark."""

from dataclasses import replace
from pathlib import Path

import pytest


@pytest.fixture
def config_file(tmp_path) -> Path:
    from support import processes  # imports jax

    return processes.write_config(tmp_path / "made")


@pytest.fixture(scope="session")
def fast_matrices():
    from noloco_jax.bench import rates, worker

    assert worker.matrix_side  # not patched: the notes name the side of a user's matrices
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rates, "matrix_side", lambda backend: 64)
        patch.setattr(rates, "_MATRIX_SECONDS", 0.01)
        yield


@pytest.fixture(scope="session")
def result(fast_matrices, tmp_path_factory) -> dict:
    from noloco_jax.bench.worker import measure
    from support import benchmarks, processes

    data = processes.write_config(tmp_path_factory.mktemp("run") / "made").parent / "data"
    config = benchmarks.small(data=benchmarks.SMALL["data"] | {"path": str(data)})
    return measure(config, benchmarks.QUICK)


@pytest.fixture(scope="session")
def ddp_result(fast_matrices, tmp_path_factory) -> dict:
    """Result of a run without data, with a trace."""
    from noloco_jax.bench.worker import measure
    from support import benchmarks

    return measure(benchmarks.small(method="ddp"), replace(benchmarks.QUICK, profile=tmp_path_factory.mktemp("trace")))
