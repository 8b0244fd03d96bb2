"""JAX's persistent compilation cache and the programs of several CPU devices, which must not be loaded from it."""

from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from noloco_jax.spmd.compile import may_be_cached, without_cache
from noloco_jax.train.command import main
from support.layouts import mesh_of


@pytest.fixture
def cache(tmp_path) -> Iterator[Path]:
    """Switch the cache on, which the tests' environment switches off, for programs of any size; yield its folder."""
    settings = {
        "jax_enable_compilation_cache": True,
        "jax_compilation_cache_dir": str(tmp_path / "cache"),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield tmp_path / "cache"
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def names(folder: Path) -> set[str]:
    return {path.name.partition("-")[0] for path in folder.glob("jit_*")}


def test_only_programs_of_one_device_are_cached_on_cpus():
    assert may_be_cached(mesh_of(1)) and not may_be_cached(mesh_of(2))


def test_programs_compiled_without_the_cache_are_not_kept_and_later_ones_are(cache):
    def one(x):
        return x + 1

    def two(x):
        return x + 2

    with without_cache():
        jax.jit(one).lower(jnp.zeros(3)).compile()
    jax.jit(two).lower(jnp.zeros(3)).compile()
    assert "jit_two" in names(cache) and "jit_one" not in names(cache)


@pytest.mark.parametrize(("replicas_axis", "is_cached"), [(1, True), (2, False)])
def test_a_run_on_several_cpu_devices_leaves_the_cache_out_and_says_so(cache, config, replicas_axis, is_cached, capsys):
    arguments = ["--config.num_steps=2", "--config.eval_every=0", f"--config.mesh.replica={replicas_axis}"]
    assert main([f"--config={config}", f"--workdir={cache.parent / 'run'}", *arguments]) == 0
    assert ("jit__inner_step" in names(cache)) is is_cached
    assert ("compilation cache is left out" in capsys.readouterr().out) is not is_cached
