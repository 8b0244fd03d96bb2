"""Programs that JAX's compilation cache keeps for later starts."""

from collections.abc import Iterator

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from noloco_jax.spmd.compile import keep_programs
from support import processes

SETTINGS = (
    *("jax_enable_compilation_cache", "jax_compilation_cache_dir", "jax_compilation_cache_max_size"),
    "jax_persistent_cache_min_compile_time_secs",
)


@pytest.fixture
def settings(tmp_path, monkeypatch) -> Iterator[None]:
    """Switch the cache on, which the tests' environment switches off, and restore JAX's settings at the end."""
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.config.update("jax_enable_compilation_cache", True)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.mark.usefixtures("settings")
@pytest.mark.parametrize("given", [None, "elsewhere"])
def test_programs_are_kept_in_the_users_cache_directory_or_where_jax_is_told(given, tmp_path):
    jax.config.update("jax_compilation_cache_dir", given)
    keep_programs()
    assert getattr(jax.config, SETTINGS[1]) == (given or str(tmp_path / "noloco_jax" / "programs"))


@pytest.mark.usefixtures("settings")
def test_a_cache_that_is_switched_off_keeps_nothing():
    jax.config.update("jax_enable_compilation_cache", False)
    keep_programs()
    assert getattr(jax.config, SETTINGS[1]) is None


def test_a_run_with_programs_from_the_cache_trains_bitwise_as_one_that_compiled_them(tmp_path, monkeypatch):
    """Of several devices and of the hosts: with several messages an outer step they gave NaN or hung."""
    monkeypatch.setattr(processes.platforms, "programs", lambda folder: str(tmp_path / "programs"))
    config = processes.write_config(tmp_path / "run")
    flags = ["--config.num_steps=8", "--config.outer.wire=modulo4", "--config.outer.fragments=2"]
    cold, warm = (
        processes.trained(config, name, *flags, "--config.outer.delay=2", devices=4) for name in ("cold", "warm")
    )
    kept = {path.name.partition("-")[0] for path in (tmp_path / "programs").glob("jit_*")}
    assert {"jit__inner_step", "jit_exchanged"} <= kept
    for name, x in processes.weights(cold).items():
        assert (processes.weights(warm)[name] == x).all(), name
