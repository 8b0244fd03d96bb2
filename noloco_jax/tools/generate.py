"""Continue a text with a trained model, greedily or by sampling.

python -m noloco_jax.generate --workdir=DIR --prompt="def "                         # the mean of a run's replicas
python -m noloco_jax.generate --model=FOLDER --prompt="Once" --temperature=0.8      # a Hugging Face folder
"""

import argparse
import math
import warnings
from collections.abc import Sequence

import numpy as np

from noloco_jax.checkpoint.given_model import GivenModel, define_model_flags, opened_model
from noloco_jax.config import make_parser
from noloco_jax.errors import UserError
from noloco_jax.model.architecture import check_generates
from noloco_jax.model.decode import generate
from noloco_jax.optim import prng
from noloco_jax.train.sample import prompt_ids

_LEAST_TEMPERATURE = 1e-6  # logits over less overflow
_MAX_NEW_TOKENS = 200


def main(argv: Sequence[str] | None = None) -> int:
    """Print the prompt and what follows it."""
    args = _parser().parse_args(argv)
    _check_values(args)
    with opened_model(args) as model:
        ids, max_new_tokens = _checked_prompt(args, model)
        _, params = model.load()
    tokenizer = model.tokenizer()
    ids_BS = generate(
        model.config,
        params,
        np.asarray([ids], np.int32),
        max_new_tokens=max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        key=prng.key(args.seed),
        eos_id=tokenizer.eos_id,
    )
    print(tokenizer.decode(np.asarray(ids_BS)[0]))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__ or "", prog="python -m noloco_jax.generate")
    define_model_flags(parser)
    parser.add_argument("--prompt", default="", help="the text to continue (default: none, from the beginning of text)")
    parser.add_argument(
        "--max_new_tokens",
        type=int,
        help=f"tokens to write (default {_MAX_NEW_TOKENS}, or what a sequence of training leaves after the prompt)",
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0 takes the likeliest token, above draws (default %(default)s)"
    )
    parser.add_argument("--top_k", type=int, help="draw among this many likeliest tokens (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default %(default)s)")
    return parser


def _check_values(args: argparse.Namespace) -> None:
    """Raise `UserError` for values that no model could make sense of."""
    if args.max_new_tokens is not None and args.max_new_tokens < 1:
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


def _checked_prompt(args: argparse.Namespace, model: GivenModel) -> tuple[list[int], int]:
    """Return the prompt as the model saw texts in training, and the tokens to write, before any weights are read."""
    check_generates(model.config)
    tokenizer = model.tokenizer()
    if args.top_k is not None and args.top_k > model.config.vocab_size:
        raise UserError(f"--top_k={args.top_k} is more than the vocabulary of {model.config.vocab_size}: lower it")
    ids = prompt_ids(tokenizer, args.prompt, add_bos=model.data.add_bos)
    if not ids:
        raise UserError(
            f"--prompt={args.prompt!r} is no token, and {tokenizer.name!r} no BOS to start from: give a prompt"
        )
    room = _MAX_NEW_TOKENS if model.trained_length is None else max(1, model.trained_length - len(ids))
    max_new_tokens = args.max_new_tokens or min(room, _MAX_NEW_TOKENS)
    length = model.trained_length
    if length is not None and len(ids) + max_new_tokens > length:
        warnings.warn(
            f"a prompt of {len(ids)} tokens and --max_new_tokens={max_new_tokens} are more than the {length} tokens of "
            "a sequence in training: text beyond them may be poor; shorten the prompt, or write less",
            stacklevel=2,
        )
    return ids, max_new_tokens
