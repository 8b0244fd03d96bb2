"""One model of a run: its weights from the newest checkpoint, its tokenizer, and the folder that it is exported to."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from noloco_jax.checkpoint.record import GIVEN_FOLDER, TOKENIZER_FOLDER
from noloco_jax.checkpoint.saved import Saved
from noloco_jax.checkpoint.store import Checkpointer
from noloco_jax.config import DataConfig, ModelConfig, load_saved
from noloco_jax.data import ByteTokenizer, RunData, Tokenizer, load_tokenizer
from noloco_jax.errors import UserError
from noloco_jax.model.architecture import num_params
from noloco_jax.model.huggingface import save_folder
from noloco_jax.model.huggingface_config import CONFIG_FILE, max_positions

PyTree = Any


def load_for_export(
    workdir: str | Path, replica: int | None = None, tokenizer: Tokenizer | None = None
) -> tuple[PyTree, str]:
    """Load one model of a run's newest checkpoint; the run may be training.

    One array of all replicas is read at a time, which Orbax may hold twice while it decodes it.

    Args:
      workdir: the run's folder.
      replica: number of the replica; None: the merged model, the plain mean of all.
      tokenizer: the tokenizer to use with the model, which must be the run's; None: unchecked.

    Returns:
      The parameters without a replica axis, as numpy arrays, and which model of the run it is, for people: "the mean of
      4 replicas", "replica 2".

    Raises:
      UserError: if there is no checkpoint, or no such replica, or the tokenizer differs.
    """
    checkpointer = Checkpointer(workdir, load_saved(workdir), read_only=True)

    def read(saved: Saved | None) -> tuple[PyTree, int]:
        if saved is None:
            raise UserError(f"{Path(workdir)} holds no checkpoint: train first, or give another folder")
        if tokenizer is not None:
            saved.check_tokenizer(tokenizer)
        num_replicas = saved.shape.num_replicas
        if replica is not None and not 0 <= replica < num_replicas:
            raise UserError(f"replica {replica} does not exist: the run has 0 to {num_replicas - 1}")
        return saved.params(one), num_replicas

    def one(x: np.ndarray) -> np.ndarray:
        if replica is not None:
            return x[[replica]]  # a copy, since a slice would keep the others in memory
        return x.mean(axis=0, dtype=np.float32, keepdims=True).astype(x.dtype, copy=False)

    params, num_replicas = checkpointer.read_newest(read)
    checkpointer.close()
    of = f"the mean of {num_replicas} replicas" if num_replicas > 1 else "its only replica"
    return jax.tree.map(lambda x: x[0], params), of if replica is None else f"replica {replica}"


def data_facts(workdir: Path) -> Mapping[str, Any]:
    """Return the facts on the data of a run's newest checkpoint, see `RunData.facts`; empty if there is none."""
    with Checkpointer(workdir, load_saved(workdir), read_only=True) as checkpoints:
        return checkpoints.read_newest(lambda saved: {} if saved is None else saved.source)


def tokenizer_of(data: DataConfig, workdir: Path | None, given: str | None = None) -> Tokenizer | None:
    """Return the tokenizer of a run's token ids; None if its data held ids of an unknown tokenizer, or are missing.

    Args:
      data: the run's.
      workdir: its folder, which may hold a copy of the tokenizer; None: unknown.
      given: what `--tokenizer` names; None: the run's own.
    """
    if given is not None:
        return load_tokenizer(given, "--tokenizer")
    if workdir is not None and (workdir / TOKENIZER_FOLDER).is_dir():
        return load_tokenizer(str((workdir / TOKENIZER_FOLDER).absolute()))
    if data.tokenizer == ByteTokenizer.name:
        try:
            holds_text = RunData(data, seed=0).needs_tokenizer
        except UserError:  # the data may have been moved
            holds_text = False
        if not holds_text:
            return None
    return load_tokenizer(data.tokenizer)


def write_model_folder(
    folder: Path,
    params: PyTree,
    model: ModelConfig,
    data: DataConfig,
    tokenizer: Tokenizer | None,
    of: str,
    init_from: str,
    workdir: Path | None,
) -> Iterable[str]:
    """Write the folder; return lines that describe its content.

    Args:
      folder: path of the folder; it must not exist yet, or be empty.
      params: parameters of one model, as arrays.
      model, data: of the run.
      tokenizer: tokenizer of the run; None if unknown.
      of: origin of the weights, for the first line.
      init_from: the run's field.
      workdir: the run's folder, with copies of the configurations beside `init_from`; None: unknown.
    """
    given = _given_folder(init_from, workdir)
    length = data.sequence_length
    save_folder(
        folder,
        params,
        model,
        tokenizer,
        # A model that began as another keeps that one's length where it is longer than the sequences of training.
        max_position_embeddings=length if given is None else max(length, max_positions(given) or 0),
        # What no document had was never trained.
        bos_id=tokenizer.bos_id if tokenizer is not None and data.add_bos else None,
        eos_id=tokenizer.eos_id if tokenizer is not None and data.add_eos else None,
        given=given,
    )
    lines = [f"written: {folder}, {num_params(model)[0]:,} parameters, {of}"]
    if init_from and given is None:
        lines.append(
            f"max_position_embeddings is {length}, the sequences of training, and generation_config.json is new: "
            f"init_from={init_from!r} is not a local folder here; copy both from that model"
        )
    if tokenizer is None:
        lines.append(
            "no tokenizer files, no BOS and no EOS: the run read token ids and data.tokenizer does not name their "
            "tokenizer, or its data are no longer there: give --tokenizer"
        )
    return lines


def _given_folder(init_from: str, workdir: Path | None) -> Path | None:
    """Return a folder with the configurations of the model that a run began as; None: it began as none, or is gone."""
    folders = [] if workdir is None else [workdir / GIVEN_FOLDER]
    folders += [Path(init_from).expanduser()] if init_from else []
    return next((folder for folder in folders if (folder / CONFIG_FILE).is_file()), None)
