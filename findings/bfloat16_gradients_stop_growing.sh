#!/usr/bin/env bash
# jnp.sum and matrix products of bfloat16 accumulate in float32, and 16,384 ones give 16,384. The gradients of a lookup and
# of a broadcast bias are sums too, which JAX itself writes, but in bfloat16: the gradient of an embedding's row that is
# looked up 16,384 times stops at 256, and that of a bias of attention's values is half of what it should be (jax 0.10.2).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet jax==0.10.2 jaxlib==0.10.2 numpy==2.2.6
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import jax, jax.numpy as jnp, numpy as np

print("jax", jax.__version__)
ids = jnp.zeros(16384, int)


def total(table):
    return jnp.take(table, ids, axis=0).sum(dtype=jnp.float32)


of_rows = {dtype: float(jax.jit(jax.grad(total))(jnp.ones((4, 8), dtype))[0, 0]) for dtype in ("float32", "bfloat16")}
of_sum = float(jnp.sum(jnp.ones(16384, jnp.bfloat16)))
print("sum of 16384 ones in bfloat16:", of_sum)
print("gradient of a row that is looked up 16384 times:", of_rows)

random = np.random.default_rng(0)
scores = jnp.asarray(random.random((64, 256, 256)) / 256, jnp.bfloat16)
values, answers = (jnp.asarray(random.random((64, 256, 16)), jnp.bfloat16) for _ in range(2))


# The bias is float32. Layers that compute in bfloat16, such as flax.nnx.Linear(dtype=bfloat16), cast it before they add it.
def attended(bias, values, scores, answers, dtype):
    biased = (values + bias.astype(dtype)).astype(jnp.bfloat16)
    return (jnp.einsum("bts,bsk->btk", scores, biased) * answers).sum(dtype=jnp.float32)


exact = np.einsum("bts,btk->k", np.asarray(scores, np.float64), np.asarray(answers, np.float64))
of_bias = {}
for dtype in (jnp.float32, jnp.bfloat16):
    gradient = jax.jit(jax.grad(attended), static_argnums=4)(jnp.zeros(16), values, scores, answers, dtype)
    of_bias[dtype.__name__] = float(np.linalg.norm(gradient) / np.linalg.norm(exact))
print("share of its length that a bias's gradient keeps, by the dtype in which it is added:", of_bias)
assert of_sum == 16384 and of_rows == {"float32": 16384, "bfloat16": 256}
assert abs(of_bias["float32"] - 1) < 0.01 and of_bias["bfloat16"] < 0.6, of_bias
PYTHON
