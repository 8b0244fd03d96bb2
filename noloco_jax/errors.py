"""Errors that a user can mend, and how the command lines report them."""

import sys
from collections.abc import Callable


class UserError(Exception):
    """Wrong input: the message is one line that names the thing and says what to do."""


def main_with_errors(main: Callable[[], int | None]) -> None:
    """Runs a command's `main` and exits with its status; a `UserError` prints one line to stderr and exits with 2."""
    try:
        status = main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        status = 2
    sys.exit(status or 0)
