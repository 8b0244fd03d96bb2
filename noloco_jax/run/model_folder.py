"""Export of a run's model as a folder that `transformers` loads: its weights, and the run's tokenizer."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from noloco_jax.config import DataConfig, TrainConfig
from noloco_jax.data import ByteTokenizer, Tokenizer, load_tokenizer, needs_tokenizer
from noloco_jax.errors import UserError
from noloco_jax.model.huggingface import save_folder
from noloco_jax.model.kind import num_params
from noloco_jax.storage.local_copies import named

PyTree = Any


def tokenizer_of(data: DataConfig) -> Tokenizer | None:
    """Return the tokenizer of a run's token ids; None if its data held ids of an unknown tokenizer, or are missing."""
    if data.tokenizer == ByteTokenizer.name:
        try:
            holds_text = needs_tokenizer(data)
        except UserError:  # the data may have been moved
            holds_text = False
        if not holds_text:
            return None
    return load_tokenizer(data.tokenizer)


def write_model_folder(
    folder: Path, params: PyTree, config: TrainConfig, tokenizer: Tokenizer | None, of: str
) -> Iterable[str]:
    """Write the folder; return lines that describe its content.

    Args:
      folder: path of the folder; it must not exist yet, or be empty.
      params: parameters of one model, as arrays.
      config: configuration of the run.
      tokenizer: tokenizer of the run; None if unknown.
      of: origin of the weights, for the first line.
    """
    save_folder(
        folder,
        params,
        config.model,
        None if tokenizer is None else tokenizer.name,
        max_position_embeddings=config.data.sequence_length,
        # What no document had was never trained.
        bos_id=tokenizer.bos_id if tokenizer is not None and config.data.add_bos else None,
        eos_id=tokenizer.eos_id if tokenizer is not None and config.data.add_eos else None,
    )
    lines = [f"written: {named(folder)}, {num_params(config.model)[0]:,} parameters, {of}"]
    if tokenizer is None:
        lines.append(
            "no tokenizer files, no BOS and no EOS: the run read token ids and data.tokenizer does not name their "
            "tokenizer, or its data are no longer there"
        )
    return lines
