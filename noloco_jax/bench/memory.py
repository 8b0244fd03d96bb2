"""Memory of a device in the course of a run."""

from typing import Any

import jax
import numpy as np

from noloco_jax.spmd.programs import Programs

PyTree = Any


def program_memory(programs: Programs) -> dict[str, dict[str, int]]:
    """Bytes on one device while the inner or the outer program runs, from what the compiler says of the two.

    `total` is arguments + outputs − aliased (an argument that is donated becomes an output in its place) + temporaries;
    `beside` is the part of the training state that lies on the device and that the program does not touch.

    Args:
      programs: with both compiled.
    """
    beside = {"inner_step": programs.resting.outer, "outer_step": programs.resting.inner}
    return {
        name: _analysis(programs.compiled[name]) | {"beside": _on_device(state)}
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


def _on_device(tree: PyTree) -> int:
    """Bytes that a tree of shapes with shardings has in one device's own memory."""
    total = 0
    for x in jax.tree.leaves(tree):
        own = next(iter(x.sharding.device_set)).default_memory().kind
        if x.sharding.memory_kind in (None, own):
            total += int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize
    return total


def compiled_peak(memory: dict[str, dict[str, int]]) -> int:
    """The most bytes on one device that `program_memory` comes to."""
    return max(program["total"] + program["beside"] for program in memory.values())


def measured_peak(devices: list) -> int | None:
    """The most bytes that the fullest of the devices has held; None where they do not count them, such as the CPU."""
    stats = [device.memory_stats() for device in devices]
    return max(entry["peak_bytes_in_use"] for entry in stats) if all(stats) else None
