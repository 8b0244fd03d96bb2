"""Models pushed to the Hugging Face hub."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from noloco_jax.errors import TransientError, UserError, described


def check_push(repository: str) -> None:
    """Raise `UserError` for a name that is none of the hub's, or without a login there; nothing is written."""
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
        raise UserError(f"the hub takes {repository} from nobody without a login: {login}") from None
    except OfflineModeIsEnabled:
        raise UserError(f"{repository} cannot be pushed while HF_HUB_OFFLINE is set: unset it") from None
    except Exception as error:  # its HTTP library's own errors mean that the hub did not answer
        status = error.response.status_code if isinstance(error, HfHubHTTPError) and error.response is not None else 500
        if status < 500 and status not in (408, 409, 429):
            raise UserError(f"the hub refuses {repository} (HTTP status {status}): {login}") from None
        raise TransientError(f"{repository} could not be pushed ({described(error)[:200]}): try again") from None
