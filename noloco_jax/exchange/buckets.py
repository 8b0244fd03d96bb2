"""Packs the arrays of a message into few larger ones, so that small arrays do not each cost a message's latency."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any

# Arrays of at least this size travel by themselves, without being copied; smaller ones together, up to this size.
BUCKET_BYTES = 2**27


def packed(
    tree: PyTree, block: int = 1, bucket_bytes: int = BUCKET_BYTES
) -> tuple[list[jax.Array], Callable[[list[jax.Array]], PyTree]]:
    """The tree's arrays in buckets, and what makes a tree like it of buckets like these.

    Args:
      tree: arrays of any shapes and dtypes; those of one bucket share a dtype.
      block: each array in a bucket of several is filled up with zeros to a multiple of so many elements.
      bucket_bytes: how large a bucket of several arrays may be.
    """
    leaves, structure = jax.tree.flatten(tree)
    groups = _groups(leaves, bucket_bytes)

    def pack(members: list[int]) -> jax.Array:
        if len(members) == 1:
            return leaves[members[0]]
        return jnp.concatenate([jnp.pad(jnp.ravel(leaves[i]), (0, -leaves[i].size % block)) for i in members])

    def unpack(buckets: list[jax.Array]) -> PyTree:
        restored: list[Any] = [None] * len(leaves)
        for members, bucket in zip(groups, buckets, strict=True):
            if len(members) == 1:
                restored[members[0]] = bucket
                continue
            start = 0
            for i in members:
                part = jax.lax.slice_in_dim(bucket, start, start + leaves[i].size)
                restored[i] = part.reshape(leaves[i].shape)
                start += leaves[i].size + -leaves[i].size % block
        return structure.unflatten(restored)

    return [pack(members) for members in groups], unpack


def _groups(leaves: list[jax.Array], bucket_bytes: int) -> list[list[int]]:
    """The leaves of every bucket, by index, in their order."""
    groups: list[list[int]] = []
    filling: dict[jnp.dtype, tuple[list[int], int]] = {}
    for i, leaf in enumerate(leaves):
        size = leaf.size * leaf.dtype.itemsize
        if size >= bucket_bytes:
            groups.append([i])
            continue
        members, held = filling.get(leaf.dtype, ([], 0))
        if not members or held + size > bucket_bytes:
            members, held = [], 0
            groups.append(members)
        members.append(i)
        filling[leaf.dtype] = members, held + size
    return groups
