"""Trained models that a tool is given by its flags: the newest checkpoint of a run, or a Hugging Face folder."""

import argparse
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from noloco_jax.checkpoint.trained_model import load_for_export, tokenizer_of
from noloco_jax.config import DataConfig, ModelConfig, from_dict, load_saved
from noloco_jax.data import Tokenizer, check_vocabulary, load_tokenizer
from noloco_jax.errors import UserError
from noloco_jax.files import folder_of_flag
from noloco_jax.model.architecture import Params
from noloco_jax.model.huggingface import config_from_folder, load_params
from noloco_jax.model.huggingface_config import CONFIG_FILE, max_positions, read_json
from noloco_jax.storage import local_folder

_LENGTH_OF_FOLDERS = 2048  # tokens of a sequence at most, as a model may be meant for very long ones
_MODEL_SUFFIXES = (".json", ".safetensors", ".model", ".txt", ".jinja")


class GivenModel(NamedTuple):
    """A trained model, before its weights are read.

    Attributes:
      config: the model.
      data: data of its training; of a folder, where BOS and EOS stand, and a length that suits it.
      trained_length: tokens of its longest sequence in training; None if unknown.
      found_tokenizer: its tokenizer; None if unknown.
      without_tokenizer: why there is none, and what to do.
      seed: of its run, 0 of a folder.
      load: reads its weights while it is open, and returns what they are, for people, and the weights.
    """

    config: ModelConfig
    data: DataConfig
    trained_length: int | None
    found_tokenizer: Tokenizer | None
    without_tokenizer: str
    seed: int
    load: Callable[[], tuple[str, Params]]

    def tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer; raise `UserError` if it is unknown."""
        if self.found_tokenizer is None:
            raise UserError(self.without_tokenizer)
        return self.found_tokenizer


def define_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `opened_model` reads."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--model", help="a Hugging Face folder of a Llama, Mistral, Qwen 2 or 3, weights as safetensors"
    )
    source.add_argument("--workdir", type=folder_of_flag, help="a run's folder, with a checkpoint in it")
    parser.add_argument("--replica", type=int, help="of the run, counted from 0; without it, the mean of all replicas")
    parser.add_argument("--tokenizer", help='the model\'s tokenizer, where it brings none: a name or folder, or "byte"')


@contextlib.contextmanager
def opened_model(args: argparse.Namespace) -> Iterator[GivenModel]:
    """Give the model that the flags name, with files at an address copied for as long as it is open.

    Raises:
      UserError: if there is none, or --tokenizer or --replica do not belong to it.
    """
    if args.model is None:
        yield _of_run(args, args.workdir)
        return
    if args.replica is not None:
        raise UserError(f"--replica={args.replica} is of a run: give --workdir instead of --model, or leave it out")
    with local_folder(args.model, _MODEL_SUFFIXES) as folder:
        yield _of_folder(args, folder)


def _of_folder(args: argparse.Namespace, folder: Path) -> GivenModel:
    config = from_dict({"model": config_from_folder(folder)}).model
    special, length = read_json(folder / CONFIG_FILE), max_positions(folder)
    tokenizer = None
    if args.tokenizer is not None or any(folder.glob("tokenizer*")):
        tokenizer = (
            load_tokenizer(str(folder.absolute()))
            if args.tokenizer is None
            else load_tokenizer(args.tokenizer, "--tokenizer")
        )
        check_vocabulary(tokenizer, config.vocab_size)
    return GivenModel(
        config=config,
        data=DataConfig(
            sequence_length=min(length or _LENGTH_OF_FOLDERS, _LENGTH_OF_FOLDERS),
            add_bos=special.get("bos_token_id", 0) is not None,
            add_eos=special.get("eos_token_id", 0) is not None,
        ),
        trained_length=length,
        found_tokenizer=tokenizer,
        without_tokenizer=f'{folder} has no tokenizer: give --tokenizer, a name or folder, or "byte"',
        seed=0,
        load=lambda: (str(args.model), load_params(folder, config)),
    )


def _of_run(args: argparse.Namespace, workdir: Path) -> GivenModel:
    run = load_saved(workdir)
    tokenizer = tokenizer_of(run.data, workdir, args.tokenizer)
    if tokenizer is not None:
        check_vocabulary(tokenizer, run.model.vocab_size)

    def load() -> tuple[str, Params]:
        params, of = load_for_export(workdir, args.replica, tokenizer)
        return f"{args.workdir}, {of}", params

    return GivenModel(
        config=run.model,
        data=run.data,
        trained_length=run.data.sequence_length,
        found_tokenizer=tokenizer,
        without_tokenizer=(
            f"the run in {args.workdir} read token ids, or its data are no longer there to tell: give --tokenizer, "
            'a name or folder, or "byte"'
        ),
        seed=run.seed,
        load=load,
    )
