"""What a message is while it travels: its own float32, or a code of fewer bits."""

from typing import Any, Protocol

import jax
import jax.numpy as jnp

PyTree = Any


class Wire(Protocol):
    """A code for arrays on their way to another replica.

    Attributes:
      exact: whether `decode` gives back every value.
    """

    exact: bool

    def encode(self, x: jax.Array) -> PyTree:
        """What is sent of an array."""
        ...

    def decode(self, code: PyTree, like: jax.Array) -> jax.Array:
        """Q(x): the array that the code stands for, of the shape and dtype of `like`."""
        ...


class Float32:
    """Arrays as they are."""

    exact = True

    def encode(self, x: jax.Array) -> PyTree:
        return x

    def decode(self, code: PyTree, like: jax.Array) -> jax.Array:
        del like
        return code


class BFloat16:
    """Real numbers rounded to bfloat16, two bytes each."""

    exact = False

    def encode(self, x: jax.Array) -> PyTree:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(
                f"wire='bfloat16' rounds real numbers and the parameters hold {x.dtype}: use wire='float32'"
            )
        # As bits: a backend that has no messages of this type, like the CPU, would widen them to float32.
        return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)

    def decode(self, code: PyTree, like: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(code, jnp.bfloat16).astype(like.dtype)


WIRES: dict[str, Wire] = {"float32": Float32(), "bfloat16": BFloat16()}


def wire_of(name: str) -> Wire:
    """The code of that name.

    Raises:
      ValueError: if there is none.
    """
    if name not in WIRES:
        raise ValueError(f"wire is {name!r}: choose from {', '.join(map(repr, WIRES))}")
    return WIRES[name]
