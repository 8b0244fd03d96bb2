"""What may go wrong between two islands, told apart: each error is one line that names the other island."""

from noloco_jax.errors import TransientError, UserError


class PeerError(TransientError):
    """A call between two islands did not come to its end. Training goes on; the same call may succeed later."""


class UnreachableError(PeerError):
    """Nobody answered: the name is unknown, the port is dead, the network or the process is away."""


class LateError(PeerError):
    """The call's deadline, or the time given to a frame, passed."""


class BrokenError(PeerError):
    """The call ended in the middle, or what came is damaged; nothing of the message was handed on."""


class EndedError(PeerError):
    """The other island ended the call properly, and more was expected of it."""


class BusyError(PeerError):
    """The other island has too much to do just now."""


class RefusedError(PeerError):
    """One of the two refuses the other: keys, names or what it sends are not as they must be."""

    exit_status = UserError.exit_status
