"""Errors that a user can mend, and how the command lines report them."""

import contextlib
import sys
import warnings
from collections.abc import Callable


class UserError(Exception):
    """Wrong input: the message is one line that names the thing and says what to do."""

    exit_status = 2


class StartError(UserError):
    """A run's processes did not come together: the input may be right, and the same command do once they all come."""

    exit_status = 1


class TransientError(UserError):
    """Something outside the run failed and may work again: the input is right, and the same command may succeed."""

    exit_status = 1


def described(error: BaseException) -> str:
    """Return an error's type and message in one line, the type alone where there is no message to print."""
    try:
        message = " ".join(str(error).split())
    except Exception:  # of the error's own __str__
        message = ""
    return ": ".join(filter(None, (type(error).__name__, message)))


def main_with_errors(main: Callable[[], int | None]) -> None:
    """Runs a command's `main` and exits with its status, or with a `UserError`'s, after one line of it to stderr.

    Warnings for users are lines too, without the place in the code that they come from.
    """
    warnings.showwarning = _show_warning
    try:
        status = main()
    except UserError as error:
        tell(f"error: {error}")
        status = error.exit_status
    sys.exit(status or 0)


def tell(line: str) -> None:
    """Write a line to standard error; where nothing can be written, as after its terminal is gone, go on without."""
    with contextlib.suppress(OSError, AttributeError):  # the latter where it was closed from the start
        sys.stderr.write(f"{line}\n")  # at once: a library's threads may be writing too
        sys.stderr.flush()


_show_as_python_does = warnings.showwarning


def _show_warning(message, category, filename, lineno, file=None, line=None):
    if category is UserWarning and file is None:
        tell(f"warning: {message}")
    else:
        _show_as_python_does(message, category, filename, lineno, file, line)
