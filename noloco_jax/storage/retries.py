"""Retries of what fails for a while."""

import errno
from collections.abc import Callable, Sequence
from time import sleep
from typing import TypeVar

from noloco_jax.errors import TransientError, UserError, tell

T = TypeVar("T")

# What a network file system reports while a server restarts, a mount comes back or a file is replaced.
TRANSIENT_ERRNOS = (errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.ENOENT)
RETRY_DELAYS = (0.1, 0.4, 1.0, 2.0, 4.0)  # seconds
_TOLD_SECONDS = 8.0  # least delay of which people are told


def with_retries(
    act: Callable[[], T],
    path: str,
    *,
    delays: Sequence[float] = RETRY_DELAYS,
    transient: Sequence[int] = TRANSIENT_ERRNOS,
) -> T:
    """Call `act`, again after each of `delays` while its error is a transient one, and return its result.

    Args:
      act: reads the file `path`. It must be able to start again after an `OSError`.
      path: the file, for people.
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
            return act()
        except OSError as error:
            if error.errno is None:
                raise
            reason = error.strerror or str(error)
            if error.errno not in transient:
                raise UserError(f"{path} cannot be read ({reason}): make it accessible") from None
            delay = next(left, None)
            if delay is None:
                raise TransientError(
                    f"{path} cannot be read ({reason}), not even after {sum(delays):g} seconds of retries: "
                    "the same command continues once the storage is back"
                ) from None
            if delay >= _TOLD_SECONDS:
                tell(f"{path} cannot be read ({reason}): trying again in {delay:g} s")
        sleep(delay)
