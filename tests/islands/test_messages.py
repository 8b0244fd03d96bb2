"""Message headers: encoding, validation, compatibility with other versions, and comparison of identities."""

import dataclasses
import json
from typing import Any

import pytest

from noloco_jax.islands.protocol import messages
from noloco_jax.islands.protocol.members import Certificate, Entry, News
from noloco_jax.islands.protocol.messages import Caller, ExchangeId, HeaderError, Hello, Identity, Outcome
from support.island_world import differing
from support.paths import ROOT

IDENTITY = Identity("run", {"seed": "1"}, "model", "roster", "codec", "pace", "bytes", first_weights="norm 1")
CALLER = Caller(IDENTITY, "paris", "oslo", 3, 7)
XID = ExchangeId(7, "paris", 3, 2)
ENTRY = Entry(4, "oslo", "127.0.0.1:7070", 20, -1, 1764000000000, 1764000000001, "aa" * 70)
OWN = Entry(-1, "oslo", "127.0.0.1:7071", 0, -1, 0, 1764000000002, "aa" * 70, Certificate("b" * 700))
HELLO = Hello(CALLER, XID, 1000)
ALL = [
    HELLO,
    Hello(CALLER, XID, 1000, messages.Timing(2.5, None, messages.Speed("oslo", 0.25, 7))),
    messages.Accept(3, 7, 1000),
    messages.Accept(3, 7, 1000, messages.Timing(2.5, messages.Speed("oslo", 0.25, 7), messages.Speed("rome", 0.1, 6))),
    messages.Busy(0.5),
    messages.AtRound(-1),
    messages.AtRound(6, messages.Timing(0.5, messages.Speed("oslo", 0.25, 7), None)),
    messages.NotPartner("not in this round"),
    messages.Wrong("model is a, yours is b"),
    messages.Done(Outcome.COMMITTED),
    messages.Message(XID),
    messages.Received(XID, True),
    messages.Commit(XID),
    messages.StatusRequest(IDENTITY, XID),
    messages.StatusRequest(),
    messages.Status(1, 2, True, False, 3, 4, 0.5, "oslo", Outcome.FORGOTTEN),
    messages.StateRequest(CALLER, True),
    messages.State(7, True),
    messages.StateRequest(CALLER, True, messages.Share(0, True)),
    messages.State(7, True, messages.Share(4095, False)),
    messages.Leave(CALLER, finished=True),
    messages.Windows(XID),
    messages.StatusRequest(news=News((ENTRY, OWN), "0" * 16), before=2**62),
]
FROZEN = json.loads((ROOT / "tests/golden/headers.json").read_text())


def test_every_kind_of_header_is_covered():
    assert {type(header) for header in ALL} == set(messages.KINDS.values())


@pytest.mark.parametrize("header", ALL, ids=lambda header: type(header).__name__)
def test_headers_survive_a_round_trip_through_json(header):
    assert messages.from_json(json.loads(json.dumps(messages.to_json(header)))) == header


def changed(**values):
    return {**json.loads(json.dumps(messages.to_json(HELLO))), **values}


def caller_with(config):
    caller = changed()["caller"]
    return caller | {"identity": caller["identity"] | {"config": config}}


@pytest.mark.parametrize(
    "values",
    [
        None,
        [],
        {},
        {"kind": []},
        {"kind": "Nonsense"},
        {"kind": "Hello", "tokens": 1},
        changed(tokens=1.0),
        changed(tokens=True),
        changed(tokens=-2),
        changed(tokens=2**63),
        changed(xid=[7, 1, "paris", 3]),
        changed(xid=[7, 1, "p" * 257, 3, 2]),
        changed(xid="paris"),
        changed(caller=None),
        changed(caller=caller_with({"seed": 1})),
        changed(caller=caller_with("seed")),
        changed(caller=caller_with(dict.fromkeys(map(str, range(257)), ""))),
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
def test_an_invalid_header_is_refused(values):
    with pytest.raises(HeaderError):
        messages.from_json(values)


@pytest.mark.parametrize("header", ALL, ids=lambda header: type(header).__name__)
def test_fields_of_a_newer_version_are_ignored(header):
    def with_more(value):
        if not isinstance(value, dict):
            return value
        more = {name: one if name == "config" else with_more(one) for name, one in value.items()}
        return more | {"field_of_a_newer_version": [{"a": 1}]}

    sent = json.loads(json.dumps(messages.to_json(header)))
    assert messages.from_json(with_more(sent)) == header


def without_later(read: Any, values: Any) -> Any:
    """Return what was read without the fields, here and in objects within, that the earlier release did not send."""
    if not isinstance(values, dict):
        return read
    return {name: without_later(read[name], value) for name, value in values.items()}


@pytest.mark.parametrize("values", FROZEN, ids=lambda values: values["kind"])
def test_headers_of_an_earlier_release_are_read(values):
    """Headers of protocol 4, and of 5 with news (`tests/golden/headers.json`): a field added later needs a default."""
    read = json.loads(json.dumps(messages.to_json(messages.from_json(values))))
    assert without_later(read, values) == values


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Identity)])
def test_a_difference_between_identities_is_named_with_both_values(field):
    other = differing(IDENTITY, field)
    mine = {"config": "seed: 1"}.get(field, f"{field}: {getattr(IDENTITY, field)}")
    theirs = {"config": "2", "protocol": "9"}.get(field, "other")
    hint = " (install one version of noloco_jax on both)" if field == "protocol" else ""
    assert IDENTITY.difference(other, "paris") == f"{mine} here, {theirs} at paris{hint}"
    assert IDENTITY.difference(dataclasses.replace(other, **{field: getattr(IDENTITY, field)}), "paris") is None


def test_nothing_else_is_compared_if_the_protocols_differ():
    other = dataclasses.replace(differing(IDENTITY, "protocol"), config={"seed": "7"}, run="other")
    difference = IDENTITY.difference(other, "paris")
    assert difference is not None and "protocol" in difference and "seed" not in difference and "run:" not in difference


def test_many_differences_fit_a_header_and_are_counted():
    fields = {f"{'f' * 40}{number}": "1" * 100 for number in range(9)}
    one = dataclasses.replace(IDENTITY, config=fields)
    line = one.difference(dataclasses.replace(one, config={name: "2" * 100 for name in fields}), "p" * 63)
    assert line is not None and line.endswith("; and 8 more")
    assert messages.from_json(messages.to_json(messages.Wrong(line))) == messages.Wrong(line)


@pytest.mark.parametrize("field", ["tokenizer", "first_weights"])
def test_an_island_without_a_tokenizer_or_first_weights_is_compatible_with_any(field):
    assert IDENTITY.difference(dataclasses.replace(IDENTITY, **{field: ""}), "paris") is None
