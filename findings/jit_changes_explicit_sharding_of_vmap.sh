#!/usr/bin/env bash
# On a mesh with explicit axes, the sharding of an array is part of its type. `jax.vmap(init)` over a sharded array gives a
# counter made in `init` the sharding of the mapped axis; `jax.jit(jax.vmap(init))` of the same function does not, and the
# next `vmap` over both results is then a ValueError, as for the state of optax.adam (jax 0.10.2 and 0.12.0).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet jax==0.10.2 jaxlib==0.10.2 numpy==2.2.6
JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=4 "$folder/venv/bin/python" - <<'PYTHON'
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

print("jax", jax.__version__)
mesh = jax.make_mesh((4,), ("copies",))
seen = {}


def init(weights):
    return jnp.zeros_like(weights), jnp.zeros([], jnp.int32)  # a moment and a counter


with jax.set_mesh(mesh):
    weights = jax.device_put(jnp.zeros((4, 8)), NamedSharding(mesh, P("copies")))
    for name, make in (("vmap", jax.vmap(init)), ("jit of vmap", jax.jit(jax.vmap(init)))):
        moment, counter = make(weights)
        try:
            used = str(jax.typeof(jax.vmap(lambda m, c: m.sum() + c)(moment, counter)))
        except ValueError as error:
            used = f"ValueError: {error}"
        seen[name] = str(jax.typeof(moment)), str(jax.typeof(counter)), used
        print(f"{name}: moment {seen[name][0]}, counter {seen[name][1]}; used in another vmap: {used}")
assert seen["vmap"][1] == "int32[4@copies]" and seen["jit of vmap"][1] == "int32[4]", seen
assert seen["jit of vmap"][2].startswith("ValueError: Mapped away dimension"), seen
PYTHON
