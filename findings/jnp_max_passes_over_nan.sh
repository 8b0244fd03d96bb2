#!/usr/bin/env bash
# jnp.max and jnp.min of float32 return NaN for arrays with a NaN, like numpy's, but on the CPU only up to 4,095 numbers:
# from 4,096 on they pass over it, and so does a sum of jax.nn.relu. Seen with jax 0.10.2, 0.11.0 and 0.12.0;
# 0.7.2 to 0.10.1 return NaN. bfloat16, float16, argmax, sort, top_k, cummax and jnp.clip return NaN at every size.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet jax==0.10.2 jaxlib==0.10.2 numpy==2.2.6
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax, jax.numpy as jnp, numpy as np

print("jax", jax.__version__, "numpy", np.__version__)
functions = {
    "numpy.max": np.max,
    "jnp.max": jnp.max,
    "jnp.min": jnp.min,
    "sum of relu": jax.jit(lambda x: jax.nn.relu(x).sum()),
    "jnp.sum": jnp.sum,
    "jnp.argmax": lambda x: x[jnp.argmax(x)],
}
seen = {}
for size in (4095, 4096):
    x = np.ones(size, np.float32)
    x[7] = np.nan
    seen[size] = {name: float(function(x)) for name, function in functions.items()}
    print(f"{size} numbers, one of them NaN:", seen[size])
assert all(map(np.isnan, seen[4095].values()))
passed_over = [name for name, value in seen[4096].items() if not np.isnan(value)]
assert passed_over == ["jnp.max", "jnp.min", "sum of relu"], passed_over
PYTHON
