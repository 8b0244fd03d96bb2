"""Continue a text with a trained model, greedily or by sampling.

python -m noloco_jax.generate --workdir=DIR --prompt="def "                         # the mean of a run's replicas
python -m noloco_jax.generate --model=FOLDER --prompt="Once" --temperature=0.8      # a Hugging Face folder
"""

import argparse
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from noloco_jax import draws
from noloco_jax.config import ModelConfig, from_dict, load_saved, make_parser
from noloco_jax.data import Tokenizer, check_vocabulary, load_tokenizer
from noloco_jax.errors import UserError
from noloco_jax.formatting import format_memory
from noloco_jax.model.decode import generate
from noloco_jax.model.huggingface import config_from_folder, load_params
from noloco_jax.model.huggingface_config import CONFIG_FILE, max_positions, read_json
from noloco_jax.model.kind import Params, check_generates, kind_of
from noloco_jax.run.bucket_reading import readable_workdir
from noloco_jax.run.memory import device_memory
from noloco_jax.run.model_folder import tokenizer_of
from noloco_jax.run.sample import prompt_ids
from noloco_jax.run.trained_model import load_for_export
from noloco_jax.storage.local_copies import readable_folder, workdir_of_flag

_MODEL_SUFFIXES = (".json", ".safetensors", ".model", ".txt", ".jinja")
_LEAST_TEMPERATURE = 1e-6  # logits over less overflow


class _Loaded(NamedTuple):
    config: ModelConfig
    params: Params
    tokenizer: Tokenizer
    prompt_ids: list[int]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the prompt and what follows it."""
    args = _parser().parse_args(argv)
    _check(args)
    if args.model is not None:
        with readable_folder(args.model, _MODEL_SUFFIXES) as folder:
            loaded = _from_folder(args, folder)
    else:
        with readable_workdir(args.workdir) as workdir:
            loaded = _from_workdir(args, workdir)
    ids_BS = generate(
        loaded.config,
        loaded.params,
        np.asarray([loaded.prompt_ids], np.int32),
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        key=draws.key(args.seed),
        eos_id=loaded.tokenizer.eos_id,
    )
    print(loaded.tokenizer.decode(np.asarray(ids_BS)[0]))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__ or "", prog="python -m noloco_jax.generate")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--model", help="a Hugging Face folder of a Llama, Mistral, Qwen 2 or 3, weights as safetensors"
    )
    source.add_argument("--workdir", type=workdir_of_flag, help="a run's folder or address, with a checkpoint in it")
    parser.add_argument("--replica", type=int, help="of the run, counted from 0; without it, the mean of all replicas")
    parser.add_argument("--tokenizer", help='for --model without one: a tokenizer\'s name or folder, or "byte"')
    parser.add_argument("--prompt", default="", help="the text to continue (default: none, from the beginning of text)")
    parser.add_argument("--max_new_tokens", type=int, default=200, help="tokens to write (default %(default)s)")
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0 takes the likeliest token, above draws (default %(default)s)"
    )
    parser.add_argument("--top_k", type=int, help="draw among this many likeliest tokens (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default %(default)s)")
    return parser


def _check(args: argparse.Namespace) -> None:
    """Raise `UserError` for values that no model could make sense of."""
    if args.max_new_tokens < 1:
        raise UserError(f"--max_new_tokens={args.max_new_tokens} is below 1: raise it")
    if not (args.temperature == 0 or _LEAST_TEMPERATURE <= args.temperature < math.inf):
        raise UserError(
            f"--temperature={args.temperature} is neither 0 nor {_LEAST_TEMPERATURE} or more: give 0 for greedy, or "
            "around 1"
        )
    if args.top_k is not None and args.top_k < 1:
        raise UserError(f"--top_k={args.top_k} is below 1: raise it, or leave it out")
    if args.seed < 0:
        raise UserError(f"--seed={args.seed} is below 0: raise it")
    if args.model and args.replica is not None:
        raise UserError(f"--replica={args.replica} is of a run: give --workdir instead of --model, or leave it out")


def _from_folder(args: argparse.Namespace, folder: Path) -> _Loaded:
    config = from_dict({"model": config_from_folder(folder)}).model
    if args.tokenizer is None and not any(folder.glob("tokenizer*")):
        raise UserError(f'{folder} has no tokenizer: give --tokenizer, a name or folder, or "byte"')
    tokenizer = load_tokenizer(str(folder.absolute()) if args.tokenizer is None else args.tokenizer)
    add_bos = read_json(folder / CONFIG_FILE).get("bos_token_id", 0) is not None
    ids = _checked_prompt(args, config, tokenizer, add_bos=add_bos, trained_length=max_positions(folder))
    return _Loaded(config, load_params(folder, config), tokenizer, ids)


def _from_workdir(args: argparse.Namespace, workdir: Path) -> _Loaded:
    run = load_saved(workdir)
    tokenizer = tokenizer_of(run.data)
    if tokenizer is None:
        if args.tokenizer is None:
            raise UserError(
                f"the run in {args.workdir} read token ids, or its data are no longer there to tell: give --tokenizer, "
                'a name or folder, or "byte"'
            )
        tokenizer = load_tokenizer(args.tokenizer)
    elif args.tokenizer is not None:
        raise UserError(f"--tokenizer={args.tokenizer}: the run in --workdir brings its own, leave it out")
    ids = _checked_prompt(args, run.model, tokenizer, add_bos=run.data.add_bos, trained_length=run.data.sequence_length)
    return _Loaded(run.model, load_for_export(workdir, args.replica, tokenizer)[1], tokenizer, ids)


def _checked_prompt(
    args: argparse.Namespace, config: ModelConfig, tokenizer: Tokenizer, *, add_bos: bool, trained_length: int | None
) -> list[int]:
    """Return the prompt as the model saw texts in training, before any weights are read."""
    check_generates(config)
    check_vocabulary(tokenizer, config.vocab_size)
    if args.top_k is not None and args.top_k > config.vocab_size:
        raise UserError(f"--top_k={args.top_k} is more than the vocabulary of {config.vocab_size}: lower it")
    ids = prompt_ids(tokenizer, args.prompt, add_bos=add_bos)
    if not ids:
        raise UserError(
            f"--prompt={args.prompt!r} is no token, and {tokenizer.name!r} no BOS to start from: give a prompt"
        )
    _check_length(config, len(ids), args.max_new_tokens, trained_length)
    return ids


def _check_length(config: ModelConfig, prompt: int, new: int, trained_length: int | None) -> None:
    """Warn of positions that the model has not seen in training, the text's last tokens; `UserError` if none fit."""
    cache = jax.eval_shape(lambda: kind_of(config).empty_cache(config, 1, prompt + new))
    size, device = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache)), jax.local_devices()[0]
    available = device_memory(device)
    if available is not None and size > available:
        raise UserError(
            f"a prompt of {prompt} tokens and --max_new_tokens={new} need {format_memory(size)} for keys and values, "
            f"and the device has {format_memory(available)}: lower it"
        )
    if trained_length is not None and prompt + new > trained_length:
        warnings.warn(
            f"a prompt of {prompt} tokens and --max_new_tokens={new} are more than the {trained_length} tokens of a "
            "sequence in training: text beyond them may be poor; shorten the prompt, or write less",
            stacklevel=2,
        )
