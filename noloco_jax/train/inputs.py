"""Model, data and tokenizer of a run: checked before anything expensive, then opened."""

import jax
import jax.numpy as jnp
from rich.console import Console

from noloco_jax.config import TrainConfig
from noloco_jax.data import (
    ByteTokenizer,
    ReplicaStreams,
    RunData,
    Tokenizer,
    check_vocabulary,
    load_tokenizer,
    makes_same_ids,
)
from noloco_jax.errors import UserError, log_if_slow
from noloco_jax.metrics.evaluate import Validation, read_validation
from noloco_jax.model.architecture import Params, check_architecture, check_generates
from noloco_jax.model.huggingface import check_has_format, load_params
from noloco_jax.spmd.batches import replicas_read_here
from noloco_jax.spmd.programs import Programs
from noloco_jax.storage import is_remote, list_folder, local_folder
from noloco_jax.train.sample import sample_prompt


def check_inputs(config: TrainConfig, console: Console) -> tuple[RunData, Tokenizer | None]:
    """Check model, data and tokenizer before anything expensive; return the run's data and tokenizer.

    The tokenizer is None if the data are token ids and no text sample is wanted.
    """
    check_architecture(config.model, config.mesh.stage, config.data.document_mask)
    if config.sample_tokens:
        check_generates(config.model)
    if config.init_from:
        check_has_format(config.model)
        if is_remote(config.init_from):
            list_folder(config.init_from)
    with log_if_slow("looking at the data's files and the tokenizer", console.print):
        data = RunData(config.data, seed=config.seed, vocab_size=config.model.vocab_size)
        data.check(config.num_replicas)
        return data, _tokenizer(config, data)


def _tokenizer(config: TrainConfig, data: RunData) -> Tokenizer | None:
    if not data.needs_tokenizer and not config.sample_tokens:
        return None
    if config.data.tokenizer == ByteTokenizer.name and not data.needs_tokenizer:
        raise UserError(
            f"sample_tokens={config.sample_tokens} needs a tokenizer, and the data are token ids of a tokenizer that "
            "data.tokenizer='byte' does not name: name it, or set sample_tokens=0"
        )
    tokenizer = load_tokenizer(config.data.tokenizer)
    check_vocabulary(tokenizer, config.model.vocab_size)
    if config.sample_tokens:
        sample_prompt(config, tokenizer)
    return tokenizer


def open_inputs(
    config: TrainConfig,
    data: RunData,
    tokenizer: Tokenizer | None,
    programs: Programs,
    numbers: tuple[int, int],
    console: Console,
) -> tuple[Validation, ReplicaStreams]:
    """Read the validation batches, and open the training data of the replicas that this process reads.

    Args:
      config: the run of this process.
      data: its documents.
      tokenizer: its tokenizer, if it has one.
      programs: its programs.
      numbers: the number of the first replica here among those that share the data, and how many share them.
      console: where to print.
    """
    first, count = numbers
    with log_if_slow("reading the validation documents and opening those to train on", console.print):
        validation = read_validation(data, tokenizer, config.eval_batches)
        read_here = replicas_read_here(programs.mesh, config.num_replicas)
        return validation, data.streams(tokenizer, {replica: first + replica for replica in read_here}, count)


def given_weights(config: TrainConfig, tokenizer: Tokenizer | None) -> Params | None:
    """Return the weights of `init_from`; None where it is not set.

    Raises:
      UserError: if its folder holds a tokenizer of other token ids than the run's, or values that are not finite.
    """
    if not config.init_from:
        return None
    with local_folder(config.init_from, (".json", ".safetensors")) as folder:
        beside = load_tokenizer(str(folder.absolute())) if tokenizer and (folder / "tokenizer.json").exists() else None
        if tokenizer and beside and not makes_same_ids(tokenizer, beside):
            raise UserError(
                f"data.tokenizer={config.data.tokenizer!r} makes other token ids than the tokenizer that lies in "
                f"init_from={config.init_from!r}: give --config.data.tokenizer={config.init_from}, or move "
                "tokenizer.json away from the weights to train them on other ids"
            )
        params = load_params(folder, config.model)
    for path, x in jax.tree.leaves_with_path(params):
        if not bool(jnp.isfinite(x).all()):
            raise UserError(
                f"init_from={config.init_from!r} has values in {jax.tree_util.keystr(path)} that are not finite: "
                "replace them, as by the mean of the other rows of an embedding"
            )
    return params
