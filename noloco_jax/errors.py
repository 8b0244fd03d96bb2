"""Errors that a user can mend, and lines to standard error: reports of errors, warnings and slow actions."""

import contextlib
import importlib
import os
import select
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator

INTERRUPTED = 130  # the status that shells give after Ctrl-C
RESTART = 75  # EX_TEMPFAIL: stopped by SIGTERM or SIGHUP with everything saved; the same command resumes
SILENT_SECONDS = 10.0  # after which people wonder
_DEVICE_ERRORS = ("JaxRuntimeError", "XlaRuntimeError")  # known by name: jax need not be imported
_OF_THE_PROGRAM = ("INVALID_ARGUMENT", "UNIMPLEMENTED", "FAILED_PRECONDITION", "OUT_OF_RANGE", "NOT_FOUND")


class UserError(Exception):
    """Wrong input, one mistake or several: a message is one line that names the thing and says what to do."""

    exit_status = 2

    def __str__(self) -> str:
        return ". Also: ".join(map(str, self.args))


class TransientError(UserError):
    """Something outside the run failed and may work again: the input is right, and the same command may succeed."""

    exit_status = 1


class Mistakes:
    """Mistakes in one input, which `raise_all` reports together."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def __bool__(self) -> bool:
        return bool(self.messages)

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note a `UserError` of the body instead of raising it."""
        try:
            yield
        except UserError as error:
            self.note(*error.args)

    def note(self, *messages: str) -> None:
        self.messages += messages

    def raise_all(self) -> None:
        """Raise one `UserError` of everything that was noted, if anything was."""
        if self.messages:
            raise UserError(*dict.fromkeys(self.messages))


def described(error: BaseException) -> str:
    """Return an error's type and message in one line; the type alone if the message is empty."""
    try:
        message = " ".join(str(error).split())
    except Exception:  # of the error's own __str__
        message = ""
    return ": ".join(filter(None, (type(error).__name__, message)))


def main_with_errors(main: Callable[[], int | None]) -> None:
    """Run a command's `main` and exit with its status, or with a `UserError`'s, after one line of it to stderr.

    Warnings for users are lines too, without the place in the code that they come from.
    """
    warnings.showwarning = _show_warning
    try:
        status = main()
    except UserError as error:
        for message in error.args:
            tell(f"error: {message}")
        status = error.exit_status
    except KeyboardInterrupt:
        tell("stopped by Ctrl-C")
        status = INTERRUPTED
    except BrokenPipeError as error:
        if _output_is_lost():
            tell("error: nothing reads the standard output any more, so the command stopped")
            status = 1
        else:
            status = report(error)
    except Exception as error:
        status = report(error)
    _output_is_lost()  # rather than at the interpreter's exit, which prints the error and changes the status
    sys.exit(status or 0)


def report(error: BaseException) -> int:
    """Report an error that is no `UserError` to stderr, and return the exit status: 1 if a retry may help, else 2.

    Failures of storage, networks and devices may pass. Lack of memory and faults of the code come again.
    """
    text = " ".join(str(error).split())
    if "RESOURCE_EXHAUSTED" in text or isinstance(error, MemoryError):
        tell(
            f"error: out of memory ({text[:300] or 'on the host'}): raise --config.num_microbatches, lower "
            "--config.data.batch_size, or spread a replica over more devices by --config.mesh"
        )
        return 2
    traceback.print_exception(error)
    if type(error).__name__ in _DEVICE_ERRORS:
        return 2 if text.startswith(_OF_THE_PROGRAM) else 1
    return 1 if isinstance(error, OSError) else 2


def _output_is_lost() -> bool:
    """Flush standard output; return True, and drop the rest of it, where its reader is gone, as after `| head`."""
    try:
        poll = select.poll()
        poll.register(sys.stdout, 0)  # for errors alone
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.flush()
        if not poll.poll(0):
            return False
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (AttributeError, ValueError, OSError):  # no standard output or none of the system's, or another error
        return False
    return True


def run_command(module: str) -> None:
    """Import `module` and run its `main` as `main_with_errors` does; a missing package is one line too.

    Importing here rather than in `__main__` is what lets a package that is not installed be reported so.
    """

    def import_and_run() -> int | None:
        try:
            return importlib.import_module(module).main()
        except ModuleNotFoundError as error:
            if (error.name or "noloco_jax").startswith("noloco_jax"):
                raise  # a fault of the code, not of the installation
            packages = "pip install noloco-jax, or in a clone pip install -e ."
            raise UserError(f"this needs {error.name}, which is not installed: {packages}") from None

    main_with_errors(import_and_run)


def tell(line: str) -> None:
    """Write a line to standard error; where nothing can be written, as after its terminal is gone, continue without."""
    with contextlib.suppress(OSError, AttributeError):  # the latter where it was closed from the start
        sys.stderr.write(f"{line}\n")  # at once: a library's threads may be writing too
        sys.stderr.flush()


@contextlib.contextmanager
def log_if_slow(line: str, report: Callable[[str], None] = tell) -> Iterator[None]:
    """Report a line, once, if the body takes more than `SILENT_SECONDS`."""
    timer = threading.Timer(SILENT_SECONDS, report, [line])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


_show_as_python_does = warnings.showwarning


def _show_warning(message, category, filename, lineno, file=None, line=None):
    if category is UserWarning and file is None:
        tell(f"warning: {message}")
    else:
        _show_as_python_does(message, category, filename, lineno, file, line)
