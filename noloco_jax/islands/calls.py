"""What a call says of itself before anything else, and the limits of calls."""

import json
from typing import Any, NamedTuple

from noloco_jax.islands.peer_errors import RefusedError

MAX_OPENING_BYTES = 64 << 10
MAX_ACTION_BYTES = 1 << 20
MAX_SECONDS = 86400.0


class Opening(NamedTuple):
    """The first words of a call.

    Attributes:
      call: "exchange", "state", or the name of an action.
      caller: the island that calls; its certificate has to say the same.
      callee: the island that it means to call.
      seconds: within which the whole call is to be over.
      body: what the call is about: an exchange's hello, a request for state, an action's argument.
    """

    call: str
    caller: str
    callee: str
    seconds: float
    body: dict[str, Any]


def encode(opening: Opening) -> bytes:
    """An opening as JSON."""
    return json.dumps(opening._asdict(), allow_nan=False).encode()


def decode(content: bytes | None, limit: int = MAX_OPENING_BYTES) -> Opening:
    """The opening in `content`; raises `RefusedError` for anything else, and for more than `limit` bytes."""
    if content is None or len(content) > limit:
        raise RefusedError(f"a call's opening is JSON of up to {limit} bytes")
    try:
        fields = json.loads(content)
        opening = Opening(**fields)
        seconds = float(opening.seconds)
        right = isinstance(opening.body, dict) and 0 < seconds <= MAX_SECONDS
        right = right and all(isinstance(x, str) for x in (opening.call, opening.caller, opening.callee))
    except (ValueError, TypeError, RecursionError):
        right = False
    if not right:
        raise RefusedError(
            "a call opens with name, caller, callee, seconds and body: it is of another version or program"
        )
    return opening
