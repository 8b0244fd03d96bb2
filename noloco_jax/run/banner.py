"""What a run says of itself: the banner before, the table, the curves and a sample of text after."""

import importlib.metadata
import platform
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from noloco_jax.config.fields import TrainConfig
from noloco_jax.data import Tokenizer
from noloco_jax.errors import UserError
from noloco_jax.model.decode import generate
from noloco_jax.model.llama import num_params
from noloco_jax.run.console import results_table
from noloco_jax.run.curves import plot_curves
from noloco_jax.spmd.programs import Programs

PyTree = Any


def banner_rows(config: TrainConfig, programs: Programs) -> list[tuple[str, object]]:
    """(label, value) rows: versions, devices, mode, parameters, tokens a step, memory, bytes that replicas send."""
    total, without_embeddings = num_params(config.model)
    tokens = config.num_replicas * config.data.batch_size * config.data.sequence_length
    state, activations = memory_estimate(config, programs)
    versions = " ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "flax", "optax"))
    device, size = programs.mesh.devices.flat[0], programs.mesh.size
    devices = f"{size}" if size == jax.device_count() else f"{size} of {jax.device_count()}"
    return [
        ("versions", f"Python {platform.python_version()}, {versions}"),
        ("devices", f"{devices} x {device.device_kind}, {jax.process_count()} process(es)"),
        ("mode", _mode(config, programs)),
        ("method", _method(config)),
        ("parameters", f"{_si(total)} a replica, {_si(without_embeddings)} without embedding and head"),
        ("batch", f"{_si(tokens)} tokens a step: {config.num_replicas} replicas x {config.data.batch_size} sequences x "
                  f"{config.data.sequence_length}"),
        ("memory", f"about {_bytes(state + activations)} a device: {_bytes(state)} of state and gradients, "
                   f"{_bytes(activations)} of activations"),
        ("messages", _messages(config)),
    ]  # fmt: skip


def _mode(config: TrainConfig, programs: Programs) -> str:
    shape = dict(programs.mesh.shape)
    slots = config.num_replicas // shape["replica"]
    if programs.mesh.size == 1:
        return f"virtual: {config.num_replicas} replicas on one device"
    axes = " x ".join(f"{axis} {size}" for axis, size in shape.items() if size > 1)
    return f"mesh {axes}" + (f", {slots} replicas on each" if slots > 1 else "")


def _method(config: TrainConfig) -> str:
    outer = config.outer
    if config.method == "noloco":
        gamma = outer.lr if outer.consensus is None else outer.consensus
        return (
            f"noloco: groups of {outer.group_size} average every {outer.sync_every} steps "
            f"(alpha {outer.momentum:g}, beta {outer.lr:g}, gamma {gamma:g})"
        )
    if config.method == "diloco":
        kind = "Nesterov" if outer.nesterov else "heavy ball"
        return (
            f"diloco: all average every {outer.sync_every} steps ({kind}, alpha {outer.momentum:g}, beta {outer.lr:g})"
        )
    return {"ddp": "ddp: gradients averaged every step", "local": "local: replicas never meet"}[config.method]


def bytes_sent(config: TrainConfig) -> int:
    """Bytes that a replica sends at an outer step (for ddp: at every step), an all-reduce counted as a ring."""
    numel = num_params(config.model)[0]
    ring = 2 * 4 * numel * (config.num_replicas - 1) // config.num_replicas
    message = numel * jnp.dtype(config.outer.wire).itemsize
    return {"noloco": message * (config.outer.group_size - 1), "diloco": ring, "ddp": ring, "local": 0}[config.method]


def _messages(config: TrainConfig) -> str:
    sent = bytes_sent(config)
    if not sent:
        return "none"
    return f"a replica sends {_bytes(sent)} " + ("every step" if config.method == "ddp" else "per outer step")


def memory_estimate(config: TrainConfig, programs: Programs) -> tuple[int, int]:
    """Bytes on one device: of the state and the gradients, and (roughly) of what the backward pass keeps."""

    def on_one_device(tree: PyTree) -> int:
        leaves = jax.tree.leaves(tree)
        return sum(int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize for x in leaves)

    state = programs.state._replace(outer=None) if config.outer.offload else programs.state
    held = on_one_device(state) + on_one_device(programs.state.params)
    model, data, shape = config.model, config.data, programs.mesh.shape
    width = {"float32": 4, "bfloat16": 2}[model.dtype]
    everything = 10 * model.hidden_size + 4 * model.intermediate_size
    kept = {"none": everything, "dots": 6 * model.hidden_size, "full": 0, "stage": 0}
    kept_a_token = model.num_layers * (kept[model.remat] + model.hidden_size) * width
    logits = 4 * min(data.batch_size * data.sequence_length * model.vocab_size, 2**26)
    tokens = data.batch_size // config.num_microbatches * data.sequence_length
    return held, (tokens * kept_a_token // shape["stage"] + logits) // shape["fsdp"] // shape["tensor"]


def sample_prompt(config: TrainConfig, tokenizer: Tokenizer) -> list[int]:
    """The tokens that the sample of the end begins with.

    Raises:
      UserError: if there are none.
    """
    prompt = [int(i) for i in tokenizer.encode(config.sample_prompt)]
    if config.data.add_bos and tokenizer.bos_id is not None:
        prompt = [tokenizer.bos_id, *prompt]
    if not prompt:
        raise UserError(
            f"sample_tokens={config.sample_tokens} and sample_prompt={config.sample_prompt!r} is no token, and no BOS "
            "precedes it: give a prompt, or sample_tokens=0"
        )
    return prompt


def sample_text(config: TrainConfig, tokenizer: Tokenizer, params: PyTree) -> str:
    """What a model writes after the config's prompt.

    Args:
      config: `sample_prompt` and `sample_tokens` say what.
      tokenizer: of the run.
      params: of one model, no replica axis.
    """
    ids = generate(
        config.model,
        params,
        np.asarray([sample_prompt(config, tokenizer)], np.int32),
        max_new_tokens=config.sample_tokens,
        temperature=0.7,
        key=jax.random.key(config.seed),
        eos_id=tokenizer.eos_id,
    )
    return tokenizer.decode([int(i) for i in np.asarray(ids)[0]])


def show_results(console: Console, workdir: Path, values: dict[str, Any], sample: str | None) -> None:
    """Prints the last evaluation and the sample, and draws the curves."""
    results_table(values, console)
    if sample is not None:
        console.print("the merged model writes:", style="bold")
        console.print(sample)
    console.print(f"curves: {plot_curves(workdir)}")


def _si(number: float) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:g}"


def _bytes(number: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:g} bytes"
