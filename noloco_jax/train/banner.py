"""Banner of a run: a row for each subject."""

import importlib.metadata
import platform

import jax

from noloco_jax.config import DataConfig, TrainConfig, unused_settings
from noloco_jax.formatting import format_bytes, format_count, format_memory, format_si
from noloco_jax.metrics.peaks import peak_of
from noloco_jax.model.architecture import num_active_params, num_params
from noloco_jax.optim.methods import METHODS
from noloco_jax.spmd.programs import Programs
from noloco_jax.train.bytes_sent import BytesSent, num_outer_steps


def banner_rows(
    config: TrainConfig, programs: Programs, bytes_sent: BytesSent, memory: tuple[int, int]
) -> list[tuple[str, object]]:
    """Return (label, value) rows: versions, devices, mode, parameters, tokens a step, memory, bytes sent."""
    return [
        ("versions", _versions()),
        ("devices", f"{_devices(programs)}: {_mode(config, programs)}"),
        ("method", _method(config)),
        ("parameters", _parameters(config)),
        ("batch", _batch(config)),
        *([("data", _mixture(config.data))] if config.data.kind == "mixture" else []),
        ("memory", _memory(memory)),
        ("messages", _messages(config, bytes_sent)),
        *_peak(config, programs),
    ]


def _versions() -> str:
    versions = (f"{name} {importlib.metadata.version(name)}" for name in ("jax", "flax", "optax"))
    return f"Python {platform.python_version()}, {' '.join(versions)}"


def _devices(programs: Programs) -> str:
    device, size = programs.mesh.devices.flat[0], programs.mesh.size
    count = f"{size}" if size == jax.device_count() else f"{size} of {jax.device_count()}"
    return f"{count} x {device.device_kind}, {jax.process_count()} process(es)"


def _mode(config: TrainConfig, programs: Programs) -> str:
    shape = dict(programs.mesh.shape)
    slots = config.num_replicas // shape["replica"]
    if programs.mesh.size == 1:
        replicas = f"{config.num_replicas} replicas" if config.num_replicas > 1 else "one replica"
        return f"virtual: {replicas} on one device"
    axes = " x ".join(f"{axis} {size}" for axis, size in shape.items() if size > 1)
    return f"mesh {axes}" + (f", {slots} replicas on each" if slots > 1 else "")


def _method(config: TrainConfig) -> str:
    """Describe the method, and set fields that have no effect."""
    unused = ", ".join(unused_settings(config))
    described = METHODS[config.method].describe(config.num_replicas, config.outer)
    return described + (f"; without effect: {unused}" if unused else "")


def _parameters(config: TrainConfig) -> str:
    total, without_embeddings = num_params(config.model)
    active = num_active_params(config.model)
    of_token = f", {format_count(active)} used by a token" if active < total else ""
    return f"{format_count(total)} a replica, {format_count(without_embeddings)} without embedding and head{of_token}"


def _batch(config: TrainConfig) -> str:
    data = config.data
    within = ", attention inside documents" if data.document_mask else ""
    return (
        f"{format_count(config.tokens_per_step)} tokens a step: {config.num_replicas} replicas x {data.batch_size} "
        f"sequences x {data.sequence_length}{within}"
    )


def _mixture(data: DataConfig) -> str:
    """Format a line for every source, with its share of the tokens."""
    total = sum(source.weight for source in data.mixture.values())
    return "\n".join(
        f"{100 * source.weight / total:.3g} % {name}: {source.kind} in {source.path}"
        for name, source in data.mixture.items()
    )


def _memory(memory: tuple[int, int]) -> str:
    state, activations = memory
    return (
        f"estimated at {format_memory(state + activations)} a device: {format_memory(state)} of state and gradients, "
        f"{format_memory(activations)} of activations"
    )


def _messages(config: TrainConfig, bytes_sent: BytesSent) -> str:
    if config.schedule is not None and not num_outer_steps(config):
        return f"none, as {config.num_steps} steps have no outer step: lower outer.sync_every={config.outer.sync_every}"
    occasions = {"outer step": bytes_sent.outer_step, "inner step": bytes_sent.inner_step}
    sent = [f"{format_bytes(number)} per {occasion}" for occasion, number in occasions.items() if number]
    return f"a replica sends others {' and '.join(sent)}, on average" if sent else "none"


def _peak(config: TrainConfig, programs: Programs) -> list[tuple[str, str]]:
    """Return a row with the peak rate that MFU refers to, if it is known for the devices."""
    peak = peak_of(programs.mesh.devices.flat[0].device_kind, config.model.dtype)
    return [("peak", f"{format_si(peak.flops_per_second, 'FLOP/s')} a device: {peak.source}")] if peak else []
