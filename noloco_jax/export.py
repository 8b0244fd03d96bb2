"""Writes a trained model as a folder that `transformers` loads as a LlamaForCausalLM.

    python -m noloco_jax.export --workdir=DIR --out=DIR2                 # the merged model: the mean of all replicas
    python -m noloco_jax.export --workdir=DIR --out=DIR2 --replica=2     # one replica

The newest checkpoint of the run is taken, with the run's tokenizer where that is a Hugging Face one. No accelerator is
used, so that a run may be training on them.
"""

import argparse
from collections.abc import Sequence

import jax

from noloco_jax.config import DataConfig, load_saved, make_parser
from noloco_jax.data import ByteTokenizer, Tokenizer, load_tokenizer, needs_tokenizer
from noloco_jax.errors import UserError, main_with_errors
from noloco_jax.files import folder_of_flag
from noloco_jax.model.huggingface import check_new_folder, save_folder
from noloco_jax.model.llama import num_params
from noloco_jax.run.checkpoint import load_for_export


def main(argv: Sequence[str] | None = None) -> int:
    """Exports, and says what was written."""
    args = _parser().parse_args(argv)
    check_new_folder(args.out)
    tokenizer = _tokenizer_of(load_saved(args.workdir).data)
    jax.config.update("jax_platforms", "cpu")  # accelerators may be a training's
    config, params = load_for_export(args.workdir, args.replica, tokenizer)
    save_folder(
        args.out,
        params,
        config.model,
        None if tokenizer is None or tokenizer.name == "byte" else tokenizer.name,
        max_position_embeddings=config.data.sequence_length,
        bos_id=None if tokenizer is None else tokenizer.bos_id,
        eos_id=None if tokenizer is None else tokenizer.eos_id,
    )
    of = "the mean of all replicas" if args.replica is None else f"replica {args.replica}"
    print(f"written: {args.out}, {num_params(config.model)[0]:,} parameters, {of}")
    if tokenizer is None:
        print("no tokenizer files, no BOS and no EOS: the run read token ids, and data.tokenizer does not say whose")
    elif tokenizer.name == "byte":
        print(
            "no tokenizer files: the model reads bytes, which no Hugging Face tokenizer does "
            f"(ids 0 to 255 are UTF-8 bytes, BOS is {tokenizer.bos_id}, EOS is {tokenizer.eos_id})"
        )
    return 0


def _tokenizer_of(data: DataConfig) -> Tokenizer | None:
    """The tokenizer of a run's token ids; None where its data held ids, of a tokenizer that the run was not told."""
    if data.tokenizer == ByteTokenizer.name:
        try:
            holds_text = needs_tokenizer(data)
        except UserError:  # the data may be elsewhere by now
            holds_text = False
        if not holds_text:
            return None
    return load_tokenizer(data.tokenizer)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__ or "", prog="python -m noloco_jax.export")
    parser.add_argument("--workdir", required=True, type=folder_of_flag, help="a run's folder, with a checkpoint in it")
    parser.add_argument("--out", required=True, type=folder_of_flag, help="the folder to write, new or empty")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--replica", type=int, help="export this replica's weights, counted from 0")
    which.add_argument("--merged", action="store_true", help="export the mean of all replicas' weights (the default)")
    return parser


if __name__ == "__main__":
    main_with_errors(main)
