"""Packs the arrays of a message into few larger ones, so that small arrays do not each cost a message's latency."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any

# Arrays of at least this size travel by themselves, without being copied; smaller ones together, up to this size.
BUCKET_BYTES = 2**27


def bucketing(
    tree: PyTree, kept_dims: int = 0, bucket_bytes: int = BUCKET_BYTES
) -> tuple[Callable[[PyTree], list[jax.Array]], Callable[[list[jax.Array]], PyTree]]:
    """Return the functions that pack trees like this one into buckets, and that make trees of buckets again.

    Args:
      tree: arrays of any shapes and dtypes; those of one bucket share a dtype.
      kept_dims: so many dimensions at the end of every array stay as they are, and are equal within a bucket. The
        others become one, in front of them. Trees and buckets may have other sizes there than `tree`.
      bucket_bytes: how large a bucket of several arrays may be.
    """
    leaves, structure = jax.tree.flatten(tree)
    heads = [leaf.shape[: leaf.ndim - kept_dims] for leaf in leaves]
    groups = _groups(leaves, kept_dims, bucket_bytes)

    def pack(tree: PyTree) -> list[jax.Array]:
        arrays = jax.tree.leaves(tree)

        def bucket(members: list[int]) -> jax.Array:
            if len(members) == 1:
                return arrays[members[0]]
            return jnp.concatenate([arrays[i].reshape(-1, *arrays[i].shape[len(heads[i]) :]) for i in members])

        return [bucket(members) for members in groups]

    def unpack(buckets: list[jax.Array]) -> PyTree:
        restored: list[Any] = [None] * len(leaves)
        for members, bucket in zip(groups, buckets, strict=True):
            if len(members) == 1:
                restored[members[0]] = bucket
                continue
            start = 0
            for i in members:
                rows = math.prod(heads[i])
                part = jax.lax.slice_in_dim(bucket, start, start + rows)
                restored[i] = part.reshape(*heads[i], *bucket.shape[1:])
                start += rows
        return structure.unflatten(restored)

    return pack, unpack


def unbucketed(tree: PyTree) -> tuple[Callable[[PyTree], list[jax.Array]], Callable[[list[jax.Array]], PyTree]]:
    """Likewise, with every array by itself and as it is."""
    return jax.tree.leaves, jax.tree.structure(tree).unflatten


def _groups(leaves: list[jax.Array], kept_dims: int, bucket_bytes: int) -> list[list[int]]:
    """The leaves of every bucket, by index, in their order."""
    groups: list[list[int]] = []
    filling: dict[tuple, tuple[list[int], int]] = {}
    for i, leaf in enumerate(leaves):
        size = leaf.size * leaf.dtype.itemsize
        if size >= bucket_bytes:
            groups.append([i])
            continue
        kind = leaf.dtype, leaf.shape[leaf.ndim - kept_dims :]
        members, held = filling.get(kind, ([], 0))
        if not members or held + size > bucket_bytes:
            members, held = [], 0
            groups.append(members)
        members.append(i)
        filling[kind] = members, held + size
    return groups
