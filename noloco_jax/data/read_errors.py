"""Errors of reading data files: transient ones are retried, damaged files are refused or skipped."""

import errno
from collections.abc import Callable
from time import sleep
from typing import TypeVar

from noloco_jax.errors import TransientError, UserError, tell

T = TypeVar("T")

# What a network file system reports while a server restarts, a mount comes back or a file is replaced.
TRANSIENT_ERRNOS = (errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.ENOENT)
RETRY_DELAYS = (0.1, 0.4, 1.0, 2.0, 4.0)  # seconds


class DamagedFileError(UserError):
    """The bytes of a data file arrived and cannot be decoded."""


def read_with_retries(read: Callable[[], T], path: str) -> T:
    """The result of `read`, which is called again after each of `RETRY_DELAYS` while its error is a transient one.

    Args:
      read: reads from the file `path`. It must be able to start again after an `OSError`.

    Raises:
      TransientError: if the error was still there at the last attempt.
      UserError: for any other error of the operating system.
      OSError: one without a number, as decoders raise it.
    """
    delays = iter(RETRY_DELAYS)
    while True:
        try:
            return read()
        except OSError as error:
            if error.errno is None:
                raise
            reason = error.strerror or str(error)
            if error.errno not in TRANSIENT_ERRNOS:
                raise UserError(f"{path} cannot be read ({reason}): make it readable") from None
            delay = next(delays, None)
            if delay is None:
                raise TransientError(
                    f"{path} cannot be read ({reason}), not even after {sum(RETRY_DELAYS):g} seconds of retries: "
                    "the same command continues once the file is back"
                ) from None
        sleep(delay)


_reported: set[str] = set()


def stop_or_skip(error: UserError, on_bad_shard: str) -> None:
    """Raises `error` if `on_bad_shard` is "stop"; "skip" reports it to stderr, once in a process."""
    if on_bad_shard == "stop":
        raise error
    if str(error) not in _reported:
        _reported.add(str(error))
        tell(f"warning: skipped, as data.on_bad_shard='skip' says: {error}")
