"""Write a trained model as a folder that `transformers` loads: a Llama, Mistral, Qwen 2 or 3.

    python -m noloco_jax.export --workdir=DIR --out=DIR2                 # the merged model: the mean of all replicas
    python -m noloco_jax.export --workdir=DIR --out=DIR2 --replica=2     # one replica
    python -m noloco_jax.export --workdir=DIR --push=USER/NAME           # to the Hugging Face hub

The newest checkpoint of the run is taken, with the run's tokenizer where that is a Hugging Face one; `--tokenizer`
names it where it has moved, and another one is refused. No accelerator is used, so that a run may be training on them.
"""

import argparse
import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax

from noloco_jax.checkpoint.trained_model import load_for_export, tokenizer_of, write_model_folder
from noloco_jax.config import load_saved, make_parser
from noloco_jax.data import check_vocabulary
from noloco_jax.errors import TransientError, UserError, described
from noloco_jax.files import folder_of_flag
from noloco_jax.model.huggingface import check_has_format, check_new_folder


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


def check_push(repository: str) -> None:
    """Raise `UserError` for a name that the hub does not allow, or without a login; nothing is written."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise UserError(f"--push={repository} is no name on the hub ({error}): give USER/NAME") from None
    if repository.count("/") != 1:
        raise UserError(f"--push={repository} names no owner: give USER/NAME")
    with _hub_errors(repository):
        HfApi().whoami()


def push_folder(folder: Path, repository: str, message: str, *, private: bool) -> str:
    """Upload a folder as one commit of a model's repository, which is made when missing; return the commit's URL."""
    from huggingface_hub import HfApi

    api = HfApi()
    with _hub_errors(repository):
        api.create_repo(repository, private=private, exist_ok=True)
        return str(api.upload_folder(repo_id=repository, folder_path=folder, commit_message=message))


@contextlib.contextmanager
def _hub_errors(repository: str) -> Iterator[None]:
    """Sort the errors of `huggingface_hub` and of its HTTP library."""
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled

    login = "log in by `hf auth login`, or set HF_TOKEN to a token that may write there"
    try:
        yield
    except LocalTokenNotFoundError:
        raise UserError(f"the hub asks for a login to write {repository}: {login}") from None
    except OfflineModeIsEnabled:
        raise UserError(f"{repository} cannot be pushed while HF_HUB_OFFLINE is set: unset it") from None
    except Exception as error:  # its HTTP library's own errors mean that the hub did not answer
        status = error.response.status_code if isinstance(error, HfHubHTTPError) and error.response is not None else 500
        if status < 500 and status not in (408, 409, 429):
            raise UserError(f"the hub refuses {repository} (HTTP status {status}): {login}") from None
        raise TransientError(f"{repository} could not be pushed ({described(error)[:200]}): try again") from None
