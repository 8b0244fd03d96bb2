"""Print the CPU seconds of a fixed compilation and a fixed product: a measure of the machine, whatever the project.

The suite's CPU seconds of different days compare as multiples of it.
"""

import os
import time

os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "JAX_ENABLE_COMPILATION_CACHE": "false"}
os.environ |= dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")

import jax
import jax.numpy as jnp
import numpy as np


def loss(x: jax.Array) -> jax.Array:
    for number in range(36):  # unrolled: a program of a few thousand operations
        x = jnp.sort(jnp.sin(x @ x.T / (number + 1)) + x.mean(), axis=number % 2)
    return x.sum()


def main() -> None:
    start = time.process_time()
    jax.jit(jax.grad(loss)).lower(jnp.ones((16, 16))).compile()
    matrix = np.ones((2000, 2000), np.float32)
    for _ in range(18):
        matrix = matrix @ matrix / 2000
    print(f"{time.process_time() - start:.1f}")


if __name__ == "__main__":
    main()
