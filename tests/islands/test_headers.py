"""Headers: what is sent arrives as it was, and nothing else is taken for a header."""

import dataclasses
import json

import pytest

from noloco_jax.islands.protocol import headers
from noloco_jax.islands.protocol.headers import Caller, ExchangeId, HeaderError, Hello, Identity, Outcome

IDENTITY = Identity("run", "config", "model", "roster", "codec", "pace")
CALLER = Caller(IDENTITY, "paris", "oslo", 3, 7)
XID = ExchangeId(7, "paris", 3, 2)
HELLO = Hello(CALLER, XID, 1000)
ALL = [
    HELLO,
    Hello(CALLER, XID, 1000, headers.Timing(2.5, None, headers.Speed("oslo", 0.25, 7))),
    headers.Accept(3, 7, 1000),
    headers.Accept(3, 7, 1000, headers.Timing(2.5, headers.Speed("oslo", 0.25, 7), headers.Speed("rome", 0.1, 6))),
    headers.Busy(0.5),
    headers.AtRound(-1),
    headers.AtRound(6, headers.Timing(0.5, headers.Speed("oslo", 0.25, 7), None)),
    headers.NotPartner("not in this round"),
    headers.Wrong("model is a, yours is b"),
    headers.Done(Outcome.COMMITTED),
    headers.Message(XID),
    headers.Received(XID, True),
    headers.Commit(XID),
    headers.StatusRequest(IDENTITY, XID),
    headers.StatusRequest(),
    headers.Status(1, 2, True, False, 3, 4, 0.5, "oslo", Outcome.FORGOTTEN),
    headers.StateRequest(CALLER, True),
    headers.State(7, True),
    headers.Leave(CALLER, finished=True),
    headers.Windows(XID),
]


def test_every_kind_is_tried():
    assert {type(header) for header in ALL} == set(headers.KINDS.values())


@pytest.mark.parametrize("header", ALL, ids=lambda header: type(header).__name__)
def test_what_is_sent_arrives(header):
    assert headers.from_json(json.loads(json.dumps(headers.to_json(header)))) == header


def changed(**values):
    return {**json.loads(json.dumps(headers.to_json(HELLO))), **values}


@pytest.mark.parametrize(
    "values",
    [
        None,
        [],
        {},
        {"kind": []},
        {"kind": "Nonsense"},
        changed(more=1),
        {"kind": "Hello", "tokens": 1},
        changed(tokens=1.0),
        changed(tokens=True),
        changed(tokens=-2),
        changed(tokens=2**63),
        changed(xid=[7, 1, "paris", 3]),
        changed(xid=[7, 1, "p" * 257, 3, 2]),
        changed(xid="paris"),
        changed(caller=None),
        changed(timing={"ago": -1.0, "own": None, "fastest": None}),
        changed(timing={"ago": 1.0, "own": None}),
        changed(timing={"ago": 1.0, "own": ["oslo", 1.0, 7], "fastest": None}),
        {"kind": "Busy", "seconds": float("nan")},
        {"kind": "Busy", "seconds": 10**400},
        {"kind": "Busy", "seconds": -1.0},
        {"kind": "Done", "outcome": "perhaps"},
        {"kind": "Done", "outcome": ["committed"]},
    ],
)
def test_what_no_island_sends_is_refused(values):
    with pytest.raises(HeaderError):
        headers.from_json(values)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Identity)])
def test_a_difference_is_named_with_both_values(field):
    other = dataclasses.replace(IDENTITY, **{field: 9 if field == "protocol" else "other"})
    line = IDENTITY.difference(other)
    assert line is not None and line.startswith(f"{field} is {getattr(IDENTITY, field)}, yours is ")
    assert IDENTITY.difference(dataclasses.replace(other, **{field: getattr(IDENTITY, field)})) is None
