"""Compatibility of two versions with one protocol number: messages keep the form of the released version.

`tests/golden/protocol5.json` is the form of protocol 5. A change that fails here needs a new `VERSION`, with a golden
file of its own (`support.released_form`), because islands of the released version would misread it or not read it at
all. Allowed are new header fields with defaults, and new configuration fields whose defaults change nothing.
"""

import copy
import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest

import noloco_jax as nj
from noloco_jax.config import from_dict, load_config
from noloco_jax.island.membership import told_values
from noloco_jax.islands.entries import check_of
from noloco_jax.islands.keys import Credentials
from noloco_jax.islands.protocol import messages
from noloco_jax.islands.protocol.events import Apply
from noloco_jax.islands.protocol.island import Journal
from noloco_jax.islands.protocol.members import Entry
from noloco_jax.islands.protocol.messages import HeaderError, Hello, OtherProtocolError, entry_from_json
from noloco_jax.islands.roster import Address, Island, Roster
from noloco_jax.outer.noloco import NoLoCo
from support.island_nodes import ROUND, Call
from support.island_world import World
from support.paths import CONFIGS, GOLDEN
from support.released_form import JOURNAL, RUN, form

RELEASED = json.loads((GOLDEN / f"protocol{messages.VERSION}.json").read_text())
COMPARED = ("outcomes", "limits", "roster", "view", "partners", "opening", "frame", "payloads", "shares")


@pytest.fixture(scope="module")
def current() -> dict[str, Any]:
    return form()


@pytest.mark.parametrize("part", COMPARED)
def test_each_part_of_the_protocols_form_equals_the_released_version(current, part):
    assert current[part] == RELEASED[part]


def broken_headers(released: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """Return the headers and fields that one of the two versions sends in a form that the other does not read."""
    broken = sorted(released.keys() ^ current.keys())
    for kind in released.keys() & current.keys():
        before, now = released[kind], current[kind]
        for field in before.keys() | now.keys():
            is_new_with_default = field not in before and not now[field][1]
            was_optional = field not in now and not before[field][1]
            same = field in before and field in now and before[field] == now[field]
            if not (same or is_new_with_default or was_optional):
                broken.append(f"{kind}.{field}")
    return broken


def test_headers_are_compatible_with_the_released_version_in_both_directions(current):
    assert broken_headers(RELEASED["headers"], current["headers"]) == []


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda headers: headers["Hello"].pop("tokens"), "Hello.tokens"),
        (lambda headers: headers["Hello"].update(tokens=["float", True]), "Hello.tokens"),
        (lambda headers: headers["Hello"].update(weight=["float", True]), "Hello.weight"),
        (lambda headers: headers["Status"].update(view=["str", True]), "Status.view"),
        (lambda headers: headers.pop("Busy"), "Busy"),
        (lambda headers: headers.update(Ping={}), "Ping"),
        (lambda headers: headers["Hello"].update(weight=["float", False]), None),
        (lambda headers: headers["Status"].pop("view"), None),
    ],
)
def test_only_incompatible_header_changes_are_detected(change: Callable[[Any], None], found):
    changed = copy.deepcopy(RELEASED["headers"])
    change(changed)
    assert broken_headers(RELEASED["headers"], changed) == ([] if found is None else [found])


def test_omitted_defaults_equal_those_of_the_released_version(current):
    """An island substitutes its own default for a field that a peer omits."""
    assert {name: current["defaults"].get(name, "gone") for name in RELEASED["defaults"]} == RELEASED["defaults"]


def test_journals_of_the_released_version_are_resumed():
    assert Journal.from_json(RELEASED["journal"]) == JOURNAL


@pytest.mark.parametrize("values", RELEASED["entries"]["signed"], ids=["authority's", "own"])
def test_signatures_of_the_released_version_hold(values):
    """Signed messages may have no new field, as the released version would not know it."""
    check = check_of(RUN, Credentials(RELEASED["entries"]["authority"].encode(), b"", b""))
    entry = entry_from_json(values)
    assert check(entry) and not check(dataclasses.replace(entry, version=entry.version + 1))
    assert {field.name for field in dataclasses.fields(Entry)} == values.keys()


# Islands of two versions.


class TwoVersions(World):
    """World whose first half of the islands has the released version, the others a newer one with one field more.

    The released version drops unknown fields and does not send those in `without`.
    """

    without = ("news", "before", "share", "view", "members", "yours", "finished")

    def __init__(self, count: int, **arguments: Any):
        self.released = [f"i{number}" for number in range(count // 2)]
        self.calls_between_versions = 0
        super().__init__(count, **arguments)

    def _transmit(self, call: Call, side: int, header: Any, nth: int, opener: bool = False) -> None:
        sender, receiver = call.sides[1 - side].name, call.sides[side].name
        values = json.loads(json.dumps(messages.to_json(header)))
        if sender in self.released:
            values = {name: value for name, value in values.items() if name not in self.without}
        else:
            values = with_new_fields(values)
        self.calls_between_versions += (sender in self.released) != (receiver in self.released)
        super()._transmit(call, side, messages.from_json(values), nth, opener)


def with_new_fields(value: Any) -> Any:
    """Add a field of a newer version to every group of a header's values."""
    if not isinstance(value, dict):
        return value
    more = {name: one if name == "config" else with_new_fields(one) for name, one in value.items()}
    return more | {"field_of_a_newer_version": [{"a": 1}]}


def test_islands_of_two_versions_exchange_in_every_round():
    world = TwoVersions(4, starts=[0.0] * 4)
    world.run(20 * ROUND).finish()
    assert world.participation(2, 15) == 1.0
    applied = {(node.name, action.peer) for node in world.nodes.values() for action in node.applied}
    assert {("i0", "i3"), ("i3", "i0"), ("i1", "i2"), ("i2", "i1")} <= applied and world.calls_between_versions > 100


def test_a_newer_version_resumes_from_a_checkpoint_of_the_released_one():
    world = TwoVersions(4, starts=[0.0] * 4, downtime=0.2 * ROUND).run(8.5 * ROUND)
    node = world.nodes["i0"]
    world.crash(node, "kill")
    world.released.remove("i0")
    world.run(20 * ROUND).finish()
    assert node.process == 2 and not node.heals and not node.refused
    assert len([action for action in node.applied if isinstance(action, Apply) and action.xid.round > 12]) >= 4


# Identity.


def test_a_newer_versions_setting_is_no_difference_while_it_has_its_default(tmp_path, monkeypatch):
    @dataclasses.dataclass(frozen=True)
    class Newer(NoLoCo):
        decay_of_slow_weights: float = 1.0

    roster = Roster("own", tuple(Island(name, Address("127.0.0.1", 7070 + i)) for i, name in enumerate("ab")))
    outer = nj.noloco(sync_every=4)
    assert isinstance(outer.rule, NoLoCo)

    def identity(name: str, rule: Any) -> messages.Identity:
        island = nj.Island(roster, name, workdir=tmp_path / name, outer=outer)
        monkeypatch.setattr(island._outer, "rule", rule)
        return island._identity({})

    values = {field.name: getattr(outer.rule, field.name) for field in dataclasses.fields(outer.rule)}
    released, newer = identity("a", outer.rule), identity("b", Newer(**values))
    assert released.difference(newer, "b") is None and released.config["outer.outer_lr"] == "0.7"
    used = identity("b", Newer(**values, decay_of_slow_weights=0.5))
    assert released.difference(used, "b") == "outer.decay_of_slow_weights: the default here, 0.5 at b"


SCALING = {
    **{"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 64,
}
SOURCES = {"code": {"kind": "text", "path": "code", "weight": 2.0}, "web": {"kind": "c4", "path": "w", "weight": 1.0}}
GIVEN = {
    "rope_scaling": {"model": {"rope_scaling": SCALING}},
    "mixture": {"data": {"kind": "mixture", "mixture": SOURCES}},
}


@pytest.mark.parametrize("name", ["quickstart", "c4_125m", "c4_bytes", *GIVEN])
def test_the_configuration_is_sent_without_defaults_and_rebuilt_exactly(name):
    config = from_dict(GIVEN.get(name) or load_config(str(CONFIGS / f"{name}.py")))
    sent = json.loads(json.dumps(told_values(config)))
    assert from_dict(sent) == config
    assert "qk_norm" not in sent.get("model", {}) and sent["num_steps"] == config.num_steps


# Another protocol.


@pytest.mark.parametrize("values", [{"caller": {"identity": {"protocol": 9}}}, {"identity": {"protocol": 9}}])
@pytest.mark.parametrize("kind", [Hello.__name__, "KindOfANewerProtocol"])
def test_an_unreadable_header_of_another_protocol_is_refused_with_both_versions(kind, values):
    line = (
        f"protocol: 9 of the caller, {messages.VERSION} of the island called .install one version of noloco_jax on both"
    )
    with pytest.raises(OtherProtocolError, match=line):
        messages.from_json({"kind": kind, **values})


@pytest.mark.parametrize(
    "identity", [None, [], {}, {"protocol": "9"}, {"protocol": True}, {"protocol": messages.VERSION}]
)
def test_an_unreadable_header_that_names_no_other_protocol_is_a_header_error(identity):
    for values in ({"identity": identity}, {"caller": {"identity": identity}}, {"caller": identity}):
        with pytest.raises(HeaderError) as error:
            messages.from_json({"kind": "Hello", **values})
        assert not isinstance(error.value, OtherProtocolError)
