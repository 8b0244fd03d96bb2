"""Reading data files: transient errors are retried, damaged files refused or skipped."""

import errno
from collections.abc import Callable, Sequence
from time import sleep
from typing import TypeVar

from noloco_jax.errors import TransientError, UserError, tell

T = TypeVar("T")

# What a network file system reports while a server restarts, a mount comes back or a file is replaced.
TRANSIENT_ERRNOS = (errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.ENOENT)
RETRY_DELAYS = (0.1, 0.4, 1.0, 2.0, 4.0)  # seconds


class DamagedFileError(UserError):
    """A data file whose bytes arrived and cannot be decoded."""


def read_with_retries(
    read: Callable[[], T],
    path: str,
    *,
    delays: Sequence[float] = RETRY_DELAYS,
    transient: Sequence[int] = TRANSIENT_ERRNOS,
) -> T:
    """Call `read`, again after each of `delays` while its error is a transient one, and return its result.

    Args:
      read: reads from the file `path`. It must be able to start again after an `OSError`.
      delays: seconds.
      transient: the numbers of such errors.

    Raises:
      TransientError: if the error was still there at the last attempt.
      UserError: for any other error of the operating system.
      OSError: one without a number, as decoders raise it.
    """
    left = iter(delays)
    while True:
        try:
            return read()
        except OSError as error:
            if error.errno is None:
                raise
            reason = error.strerror or str(error)
            if error.errno not in transient:
                raise UserError(f"{path} cannot be read ({reason}): make it readable") from None
            delay = next(left, None)
            if delay is None:
                raise TransientError(
                    f"{path} cannot be read ({reason}), not even after {sum(delays):g} seconds of retries: "
                    "the same command continues once the file is back"
                ) from None
        sleep(delay)


_reported: set[str] = set()


def stop_or_skip(error: UserError, on_bad_shard: str) -> None:
    """Raise `error` if `on_bad_shard` is "stop"; "skip" reports it to stderr, once in a process."""
    if on_bad_shard == "stop":
        raise error
    if str(error) not in _reported:
        _reported.add(str(error))
        tell(f"warning: skipped, as data.on_bad_shard='skip' says: {error}")
