"""Multiplication by a weight matrix, with its gradient written in the order that the CPU compiles well."""

import jax
import jax.numpy as jnp


@jax.custom_vjp
def dense(x_BTI: jax.Array, kernel_IO: jax.Array) -> jax.Array:
    """Returns `x_BTI @ kernel_IO`, both of one dtype.

    A product over positions needs one of its operands transposed, and on the CPU the transposition fuses with the
    elementwise chain before it, which then runs through memory with a stride. JAX's own derivative transposes the
    output's cotangent, four times as wide as the input in a Llama's gate and up projections; here the narrower of the
    two is transposed. On other backends nothing changes.
    """
    return x_BTI @ kernel_IO


def _forward(x_BTI: jax.Array, kernel_IO: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return x_BTI @ kernel_IO, (x_BTI, kernel_IO)


def _backward(saved: tuple[jax.Array, jax.Array], d_y_BTO: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_BTI, kernel_IO = saved
    if x_BTI.shape[-1] <= d_y_BTO.shape[-1]:
        d_kernel_IO = jnp.einsum("bti,bto->io", x_BTI, d_y_BTO)
    else:
        # Behind a barrier, or XLA moves the last transposition to the wide operand again.
        d_kernel_OI = jnp.einsum("bto,bti->oi", d_y_BTO, x_BTI)
        d_kernel_IO = jax.lax.optimization_barrier(d_kernel_OI).T
    return jnp.einsum("bto,io->bti", d_y_BTO, kernel_IO), d_kernel_IO


dense.defvjp(_forward, _backward)
