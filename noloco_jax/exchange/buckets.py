"""Bucketing of a message's arrays, so that small arrays do not each cost a message's latency."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from noloco_jax.exchange.axes import ReplicaAxes, num_parts

PyTree = Any

# Arrays of at least this size are sent by themselves without a copy; smaller ones share buckets of up to this size.
BUCKET_BYTES = 2**27


def bucketing(
    tree: PyTree, kept_dims: int = 0, bucket_bytes: int = BUCKET_BYTES
) -> tuple[Callable[[PyTree], list[jax.Array]], Callable[[list[jax.Array]], PyTree]]:
    """Return a function that packs trees like this one into buckets, and its inverse.

    Args:
      tree: arrays of any shapes and dtypes; those of one bucket share a dtype.
      kept_dims: number of trailing dimensions that stay as they are and are equal within a bucket. The others are
        merged into one in front of them. Packed trees may have other sizes in the trailing dimensions than `tree`.
      bucket_bytes: maximum size of a bucket of several arrays, in bytes.
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


def bucketing_over(
    axes: ReplicaAxes, tree: PyTree, kept_dims: int = 0
) -> tuple[Callable[[PyTree], list[jax.Array]], Callable[[list[jax.Array]], PyTree]]:
    """Return the functions of `bucketing` for an exchange over these axes.

    Buckets hold one unchanged array each if nothing is sent, or if packing would move data inside a sharded replica.
    """
    if axes.num_devices == 1 or num_parts() > 1:
        return jax.tree.leaves, jax.tree.structure(tree).unflatten
    return bucketing(tree, kept_dims)


def _groups(leaves: list[jax.Array], kept_dims: int, bucket_bytes: int) -> list[list[int]]:
    """Return the leaf indices of every bucket, in order."""
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
