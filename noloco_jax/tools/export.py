"""Write a trained model as a folder that `transformers` loads: a Llama, Mistral, Qwen 2 or 3.

    python -m noloco_jax.export --workdir=DIR --out=DIR2                 # the merged model: the mean of all replicas
    python -m noloco_jax.export --workdir=DIR --out=DIR2 --replica=2     # one replica
    python -m noloco_jax.export --workdir=DIR --push=USER/NAME           # to the Hugging Face hub

The newest checkpoint of the run is taken, with the run's tokenizer where that is a Hugging Face one; `--tokenizer`
names it where it has moved, and another one is refused. No accelerator is used, so that a run may be training on them.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax

from noloco_jax.checkpoint.trained_model import load_for_export, tokenizer_of, write_model_folder
from noloco_jax.config import load_saved, make_parser
from noloco_jax.data import check_vocabulary
from noloco_jax.errors import UserError
from noloco_jax.files import folder_of_flag
from noloco_jax.model.huggingface import check_has_format, check_new_folder
from noloco_jax.storage.hub import check_push, push_folder


def main(argv: Sequence[str] | None = None) -> int:
    """Export, and print what was written."""
    args = _parser().parse_args(argv)
    if args.out is None and args.push is None:
        raise UserError("where to is missing: give --out=FOLDER, --push=USER/NAME or both")
    if args.out is not None:
        check_new_folder(args.out)
    if args.push is not None:
        check_push(args.push)
    jax.config.update("jax_platforms", "cpu")  # accelerators may be a training's
    saved = load_saved(args.workdir)
    check_has_format(saved.model)
    tokenizer = tokenizer_of(saved.data, args.workdir, args.tokenizer)
    if tokenizer is not None:
        check_vocabulary(tokenizer, saved.model.vocab_size)
    params, of = load_for_export(args.workdir, args.replica, tokenizer)
    with tempfile.TemporaryDirectory(prefix="noloco_jax-") as root:
        folder = args.out or Path(root, "model")
        written, *notes = write_model_folder(
            folder, params, saved.model, saved.data, tokenizer, of, saved.init_from, args.workdir
        )
        if args.out is not None:  # it stays, whatever becomes of the push
            print(written)
        if args.push is not None:
            print(f"pushed: {push_folder(folder, args.push, f'noloco_jax: {of}', private=args.private)}")
    for note in notes:
        print(note)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__ or "", prog="python -m noloco_jax.export")
    parser.add_argument("--workdir", required=True, type=folder_of_flag, help="a run's folder, with a checkpoint in it")
    parser.add_argument("--out", type=folder_of_flag, help="the folder to write, new or empty")
    parser.add_argument("--push", metavar="USER/NAME", help="commit the model to this repository on the hub")
    parser.add_argument("--private", action="store_true", help="make that repository private where it is new")
    parser.add_argument("--tokenizer", help="the run's tokenizer, where it is no longer where it was: a name or folder")
    parser.add_argument("--replica", type=int, help="export this replica, counted from 0 (default: their mean)")
    return parser
