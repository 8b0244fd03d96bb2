"""Errors of calls between two islands; each message is one line that names the other island."""

from noloco_jax.errors import TransientError, UserError


class PeerError(TransientError):
    """Base of errors of a call between two islands. Training continues; the same call may succeed later."""


class UnreachableError(PeerError):
    """No connection: the name is unknown, the port is dead, the network or the process is away."""


class LateError(PeerError):
    """Timeout: the call's deadline, or the time given to a frame, passed."""


class BrokenError(PeerError):
    """Interrupted call or damaged data; nothing of the message was handed on."""


class DamagedError(BrokenError):
    """Data that came and are not what was sent, such as a wrong digest."""


class EndedError(PeerError):
    """Proper end of the call by the peer, where more was expected."""


class BusyError(PeerError):
    """Overload of the peer: try again later."""


class RefusedError(PeerError):
    """Refusal by either side: keys, names or data are not as they must be."""

    exit_status = UserError.exit_status
