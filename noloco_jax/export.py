"""Writes a trained model as a folder that `transformers` loads as a LlamaForCausalLM.

    python -m noloco_jax.export --workdir=DIR --out=DIR2                 # the merged model: the mean of all replicas
    python -m noloco_jax.export --workdir=DIR --out=DIR2 --replica=2     # one replica

The newest checkpoint of the run is taken, with the run's tokenizer where that is a Hugging Face one. No accelerator is
used, so that a run may be training on them.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import jax

from noloco_jax.config import load_saved, make_parser
from noloco_jax.data import load_tokenizer
from noloco_jax.errors import main_with_errors
from noloco_jax.model.huggingface import check_new_folder, save_folder
from noloco_jax.model.llama import num_params
from noloco_jax.run.checkpoint import load_for_export


def main(argv: Sequence[str] | None = None) -> int:
    """Exports, and says what was written."""
    args = _parser().parse_args(argv)
    check_new_folder(args.out)
    tokenizer = load_tokenizer(load_saved(args.workdir).data.tokenizer)
    jax.config.update("jax_platforms", "cpu")  # accelerators may be a training's
    config, params = load_for_export(args.workdir, args.replica, tokenizer)
    save_folder(
        args.out,
        params,
        config.model,
        None if tokenizer.name == "byte" else tokenizer.name,
        max_position_embeddings=config.data.sequence_length,
        bos_id=tokenizer.bos_id,
        eos_id=tokenizer.eos_id,
    )
    of = "the mean of all replicas" if args.replica is None else f"replica {args.replica}"
    print(f"written: {args.out}, {num_params(config.model)[0]:,} parameters, {of}")
    if tokenizer.name == "byte":
        print(
            "no tokenizer files: the model reads bytes, which no Hugging Face tokenizer does "
            f"(ids 0 to 255 are UTF-8 bytes, BOS is {tokenizer.bos_id}, EOS is {tokenizer.eos_id})"
        )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__ or "", prog="python -m noloco_jax.export")
    parser.add_argument("--workdir", required=True, type=Path, help="a run's folder, with a checkpoint in it")
    parser.add_argument("--out", required=True, type=Path, help="the folder to write, new or empty")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--replica", type=int, help="export this replica's weights, counted from 0")
    which.add_argument("--merged", action="store_true", help="export the mean of all replicas' weights (the default)")
    return parser


if __name__ == "__main__":
    main_with_errors(main)
