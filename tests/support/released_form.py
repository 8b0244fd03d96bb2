"""Form of what islands tell each other, which two versions of the program that speak one protocol must have in common.

    cd tests; PYTHONPATH=.:.. python -m support.released_form > golden/protocol5.json

writes it, once for each version of the protocol.
"""

import dataclasses
import hashlib
import json
import re
import typing
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pyarrow as pa

from noloco_jax.config import from_dict
from noloco_jax.exchange import windows
from noloco_jax.exchange.blocks import block_counts
from noloco_jax.exchange.modulo import Modulo
from noloco_jax.exchange.wire import to_code, wire_of
from noloco_jax.island.membership import common_values
from noloco_jax.islands import channel, frames
from noloco_jax.islands.certificates import make_authority, make_certificate, pem_of, pem_of_key
from noloco_jax.islands.entries import own_address, signed
from noloco_jax.islands.frames import ArraySpec
from noloco_jax.islands.keys import Credentials
from noloco_jax.islands.partners import partner_in
from noloco_jax.islands.protocol import messages
from noloco_jax.islands.protocol.bounds import Bounds, Distance
from noloco_jax.islands.protocol.island import Journal
from noloco_jax.islands.protocol.members import OPEN, Entry, Members
from noloco_jax.islands.protocol.messages import ExchangeId, Outcome
from noloco_jax.islands.roster import Address, Island, Roster
from noloco_jax.islands.state_shares import layouts_of
from noloco_jax.wires import WIRES

NAMES = ("bergen", "lisbon", "milan", "oslo", "paris", "rome")
RUN = "released"
SHAPES = {"kernel": (4, 40, 96), "norm": (7,)}
ORDERS = ("passes", "independent", "hypercube")
LIMITS = ("LONGEST_TEXT", "MOST_FIELDS", "MOST_FACTORS", "LONGEST_CERTIFICATE", "MOST_ENTRIES")
_XID = ExchangeId(7, "paris", 1764000000000, 2)
JOURNAL = Journal(
    9,
    True,
    {_XID: Outcome.COMMITTED},
    5,
    ((_XID._replace(round=8), "rome"),),
    {_XID: (0.5, 1.0)},
    Bounds(None).to_json(),
    {"rome": (Distance(3, 1.5), 40)},
)


def form() -> dict[str, Any]:
    """Return the form, as JSON values that are the same in every process."""
    made = {
        "protocol": messages.VERSION,
        "headers": headers(),
        "outcomes": sorted(messages.Outcome),
        "limits": [getattr(messages, name) for name in LIMITS],
        "journal": JOURNAL.to_json(),
        "defaults": defaults(),
        "roster": roster().version,
        "view": Members(NAMES, lambda entry: True, [Entry(6, "vienna", "a:1", 9, OPEN, 5, 7, "aa")]).view,
        "partners": {f"{order}, {count}": partners(order, count) for order in ORDERS for count in (4, 6)},
        "opening": channel.encode(channel.Opening("exchange", "paris", "rome", 9.5, {"kind": "Busy"})).decode(),
        "frame": frame(),
        "payloads": {wire: payload(wire) for wire in WIRES},
        "shares": {wire: shares(wire) for wire in WIRES},
    }
    return json.loads(json.dumps(made))


def headers() -> dict[str, dict[str, list[Any]]]:
    """Return kind -> field -> its type, and True if it must be there, of headers and of what they hold."""
    found: dict[str, dict[str, list[Any]]] = {}

    def walk(kind: Any) -> None:
        if kind.__name__ in found:
            return
        is_tuple = not dataclasses.is_dataclass(kind)
        required = kind._fields if is_tuple else [f.name for f in dataclasses.fields(kind) if _is_required(f)]
        types = typing.get_type_hints(kind)
        found[kind.__name__] = {name: [_named(type_), name in required] for name, type_ in types.items()}
        for type_ in types.values():
            for inner in (type_, *typing.get_args(type_)):
                if dataclasses.is_dataclass(inner) or hasattr(inner, "_fields"):
                    walk(inner)

    for kind in messages.KINDS.values():
        walk(kind)
    return found


def _named(type_: Any) -> str:
    """Return a type's name without its modules, which may change."""
    return re.sub(r"[\w.]*\.(?=\w)", "", type_.__name__ if isinstance(type_, type) else str(type_))


def _is_required(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING


def defaults() -> dict[str, Any]:
    """Return path -> default of the fields that islands must have equal and leave out where they are at it."""

    def leaves(values: dict[str, Any], group: str = "") -> Iterator[tuple[str, Any]]:
        for name, value in values.items():
            yield from leaves(value, f"{group}{name}.") if isinstance(value, dict) else [(f"{group}{name}", value)]

    return dict(leaves(common_values(from_dict({"method": "noloco"}))))


def roster() -> Roster:
    return Roster(RUN, tuple(Island(name, Address("127.0.0.1", 7070 + i)) for i, name in enumerate(NAMES)))


def entries() -> dict[str, Any]:
    """Return the authority's certificate, an entry that it signed, and a member's own statement."""
    authority, key = make_authority(RUN)
    certificate, own_key = make_certificate("oslo", 90, authority, key)
    oslo = Credentials(pem_of(authority), pem_of(certificate), pem_of_key(own_key))
    made = [
        signed(Entry(6, "vienna", "10.0.0.7:7070", 30, OPEN, 1764000000000, 1764000000001), RUN, key),
        own_address("oslo", "10.0.0.8:7070", 0, RUN, oslo),
    ]
    return {"authority": pem_of(authority).decode(), "signed": [dataclasses.asdict(entry) for entry in made]}


def partners(order: str, count: int) -> list[str | None]:
    """Return the first island's partners in 24 rounds."""
    founders = 4 if order == "hypercube" else count  # to which others come
    config = from_dict({"num_replicas": founders, "seed": 3, "outer": {"order": order, "fragments": 2}})
    return [partner_in(Members(NAMES[:count]), NAMES[0], config)(round) for round in range(24)]


class _Stream:
    """Stand-in for a Flight stream."""

    def __init__(self):
        self.sent: list[str] = []

    def write_metadata(self, content: bytes) -> None:
        self.sent.append(bytes(content).hex())

    def write_batch(self, batch: pa.RecordBatch) -> None:
        self.sent.append(batch.column(0).to_numpy().tobytes().hex())


def frame() -> list[str]:
    """Return the bytes of a frame's messages."""
    stream = _Stream()
    frames.write_frame(stream, "frame", {"round": 7}, [np.arange(5, dtype=np.float32), np.arange(3, dtype=np.int8)])
    return stream.sent


def arrays() -> list[np.ndarray]:
    """Return float32 values that no rounding of another compiler changes."""
    made = []
    for shape in SHAPES.values():
        numbers = np.arange(np.prod(shape)).reshape(shape)
        made.append(((numbers * 37 % 101 - 50) / 64).astype(np.float32))
    return made


def payload(name: str) -> list[str]:
    """Return the bytes that travel of a message, array by array, of long ones the digest."""
    wire, message = wire_of(name), [x[None] for x in arrays()]
    if not isinstance(wire, Modulo):
        encode = jax.jit(lambda message: [jax.vmap(lambda x: wire.encode(to_code(wire, x)))(x) for x in message])
        return [shown(np.asarray(x)) for x in encode(message)]
    counts = [block_counts(x.shape[1:], x.ndim - 2) for x in message]
    proposed = [np.full((1, *count), 100, np.uint8) for count in counts]
    cuts = [x.ndim - 2 for x in message]
    encode = jax.jit(jax.vmap(lambda one, of_pair: windows.encoded(wire, one, of_pair, cuts)))
    return [shown(np.asarray(x)) for x in encode(message, proposed)]


def shares(wire: str) -> list[str]:
    """Return the layout of a state of which weights travel, and the bytes of each array of each share."""
    state = [*arrays(), *(np.full_like(x, 0.5) for x in arrays()), np.int32(7)]
    layout = layouts_of(state, len(SHAPES), wire).weights
    content = layout.encode(dict(enumerate(arrays())))
    specs = [str(spec) for number in range(layout.count + 1) for spec in layout.specs(number)]
    return [*specs, *(shown(layout.share(content, number)) for number in range(1, layout.count + 1))]


def shown(array: np.ndarray) -> str:
    content = array.tobytes()
    text = content.hex() if len(content) <= 64 else hashlib.sha256(content).hexdigest()
    return f"{ArraySpec(array.shape, array.dtype)} {text}"


def main() -> None:
    print(json.dumps(form() | {"entries": entries()}, indent=1))


if __name__ == "__main__":
    main()
