"""Device memory of a run: estimated, from the compiler's memory analysis, and measured."""

import math
import warnings
from typing import Any

import jax
import numpy as np

from noloco_jax.config import ModelConfig
from noloco_jax.cores import usable_memory
from noloco_jax.formatting import format_memory
from noloco_jax.spmd.losses import activation_bytes, replicas_at_once
from noloco_jax.spmd.programs import Programs

PyTree = Any


def memory_estimate(
    programs: Programs, model: ModelConfig, num_microbatches: int, stages: int, offload: bool
) -> tuple[int, int]:
    """Estimate bytes on one device: (state and gradients, activations kept for the backward pass, roughly).

    Without stages the activations are those of one micro-batch of one replica at a time, on a GPU of small replicas of
    all (`replicas_at_once`). With stages they are those of all micro-batches of all replicas that share the device,
    and, if stages have devices of their own, also of the ticks in which they idle.

    Args:
      programs: of the run.
      model: its model.
      num_microbatches: parts of a replica's batch.
      stages: pipeline stages of a replica, of which one device may hold several.
      offload: the outer state is in host memory between outer steps.
    """

    def on_one_device(tree: PyTree) -> int:
        leaves = jax.tree.leaves(tree)
        return sum(int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize for x in leaves)

    state = programs.state._replace(outer=None) if offload else programs.state
    held = on_one_device(state) + on_one_device(programs.state.params)
    shape, (num_replicas, sequences, length) = programs.mesh.shape, programs.batch["input_ids"].shape
    tokens = sequences // num_microbatches * length
    kept, logits = activation_bytes(model, tokens, programs.mesh.devices.flat[0].platform)
    if stages > 1:
        turns = num_microbatches + shape["stage"] - 1 if shape["stage"] > 1 else num_microbatches
        kept *= turns * (num_replicas // shape["replica"])
    else:
        at_once = replicas_at_once(model, programs.mesh, num_replicas, tokens)
        kept, logits = at_once * kept, at_once * logits
    return held, (kept // shape["stage"] + logits) // shape["fsdp"] // shape["tensor"]


def checkpoint_bytes(programs: Programs) -> int:
    """Return the bytes of a checkpoint's arrays, of all replicas, before compression."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(programs.between_steps))


def check_memory(estimate: int) -> None:
    """Warn if the bytes that are estimated exceed the memory of this process's first device."""
    available = device_memory(jax.local_devices()[0])
    if available is not None and estimate > available and jax.process_index() == 0:
        warnings.warn(
            f"the run is estimated at {format_memory(estimate)} a device, and the first one here has "
            f"{format_memory(available)}: it may not fit; raise num_microbatches, lower data.batch_size or the model's "
            "sizes, or spread a replica over devices (mesh)",
            stacklevel=2,
        )


def device_memory(device: Any) -> int | None:
    """Return a device's memory in bytes, for a CPU device an equal share of the host's; None if it is not reported."""
    if device.platform == "cpu":
        return usable_memory() // jax.local_device_count()
    return (device.memory_stats() or {}).get("bytes_limit")


def program_memory(programs: Programs) -> dict[str, dict[str, int]]:
    """Return bytes on one device while each compiled program runs, from the compiler's memory analysis.

    `total` is arguments + outputs − aliased (a donated argument becomes an output in place) + temporaries; `beside` is
    the training state that stays on the device without being an argument. The merged model is evaluated beside all of
    the state.
    """
    params, inner, outer = programs.between_steps
    beside: dict[str, PyTree] = {
        "inner_step": outer,
        "outer_step": inner,
        "evaluate": (params, inner, outer),
        "merge": (inner, outer),
        "spread": (inner, outer),
    }
    return {
        name: _analysis(programs.compiled[name]) | {"beside": _bytes_on_device(state)}
        for name, state in beside.items()
        if name in programs.compiled
    }


def _analysis(program: Any) -> dict[str, int]:
    analysis = program.memory_analysis()
    parts = {
        "arguments": analysis.argument_size_in_bytes,
        "outputs": analysis.output_size_in_bytes,
        "aliased": analysis.alias_size_in_bytes,
        "temporaries": analysis.temp_size_in_bytes,
    }
    return parts | {"total": sum(parts.values()) - 2 * parts["aliased"]}


def _bytes_on_device(tree: PyTree) -> int:
    """Return the bytes that a tree of shapes with shardings occupies in one device's own memory."""
    total = 0
    for x in jax.tree.leaves(tree):
        own = next(iter(x.sharding.device_set)).default_memory().kind
        if x.sharding.memory_kind in (None, own):
            total += int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize
    return total


def compiled_peak(memory: dict[str, dict[str, int]]) -> int:
    """Return the largest memory of any program in `program_memory`, in bytes on one device."""
    return max(program["total"] + program["beside"] for program in memory.values())


def measured_peak(devices: list) -> int | None:
    """Return the peak bytes of the fullest device; None if devices do not report them, like the CPU."""
    stats = [device.memory_stats() for device in devices]
    return max(entry["peak_bytes_in_use"] for entry in stats) if all(stats) else None
