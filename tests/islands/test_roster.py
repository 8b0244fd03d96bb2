"""The roster file, which lists the islands of a run."""

from pathlib import Path

import pytest

from noloco_jax.errors import UserError
from noloco_jax.islands.certificates import make_authority, pem_of
from noloco_jax.islands.roster import (
    MAX_BYTES,
    Address,
    BadRosterError,
    Member,
    Roster,
    changes,
    newest,
    parse_address,
    parse_document,
    read_members,
    read_roster,
    write_members,
)

RIGHT = """
run = "c4-125m"

[[island]]
name = "paris"
address = "paris.example.org:7070"

[[island]]
name = "berlin-2"
address = "[2001:db8::7]:7071"
"""


def write_roster(folder: Path, text: str) -> Path:
    path = folder / "roster.toml"
    path.write_text(text)
    return path


def test_an_islands_place_in_the_file_is_its_replica(tmp_path):
    roster = read_roster(write_roster(tmp_path, RIGHT))
    assert (roster.run, roster.names) == ("c4-125m", ("paris", "berlin-2"))
    assert [roster.member(name).id for name in roster.names] == [0, 1]
    assert roster.member("berlin-2").address == Address("2001:db8::7", 7071)


def test_an_address_is_unchanged_by_parsing_and_formatting():
    for text in ("paris.example.org:7070", "[2001:db8::7]:7071", "10.0.0.7:1", "gpu_3:65535"):
        assert str(parse_address(text)) == text


@pytest.mark.parametrize(
    ("host", "is_loopback"),
    [
        *(("127.0.0.1", True), ("127.3.2.1", True), ("::1", True), ("localhost", True)),
        *(("10.0.0.1", False), ("localhost.example.org", False), ("0.0.0.0", False), ("::", False)),
    ],
)
def test_loopback_addresses_are_those_that_no_other_machine_reaches(host, is_loopback):
    assert Address(host, 1).is_loopback is is_loopback


def test_the_digest_of_founders_depends_only_on_the_names_and_their_order(tmp_path):
    founders = read_roster(write_roster(tmp_path, RIGHT)).founders
    same = RIGHT.replace("paris.example.org:7070", "10.0.0.7:7000")
    assert read_roster(write_roster(tmp_path, same)).founders == founders
    head, first, second = RIGHT.split("[[island]]")
    for other in (
        RIGHT.replace("c4-125m", "c4-1b"),
        RIGHT.replace("berlin-2", "berlin-3"),
        "[[island]]".join([head, second + "\n", first]),
    ):
        assert read_roster(write_roster(tmp_path, other)).founders != founders


@pytest.mark.parametrize(
    ("former", "new", "said"),
    [
        ("address = ", "adress = ", "[[island]] 1: unknown key 'adress': did you mean 'address'?"),
        ('run = "c4-125m"', "", "'run' is missing"),
        ('name = "paris"', "", "[[island]] 1: 'name' is missing"),
        ('"c4-125m"', '"c4/125m"', "run = 'c4/125m': give a name of letters"),
        ("berlin-2", "paris", "[[island]] 1 and 2 both have name = 'paris': give each its own"),
        ("[2001:db8::7]:7071", "PARIS.example.org:7070", "[[island]] 1 and 2 both have address = 'PARIS.example.org:"),
        ("berlin-2", "Berlin", "[[island]] 2: name = 'Berlin': give a DNS label"),
        ("berlin-2", "b" * 64, "give a DNS label, up to 63"),
        ('"berlin-2"', "2", "[[island]] 2: name = 2: give a DNS label"),
        (":7070", "", "[[island]] 1: 'paris.example.org' is no address: give \"host:port\""),
        (":7070", ":0", "[[island]] 1: address = 'paris.example.org:0': others cannot dial port 0"),
        ("[2001:db8::7]", "2001:db8::7", "is no address"),
        ("paris.example.org", "10.0.0.300", "'10.0.0.300' is neither a DNS name nor an IP address"),
        ('"paris.example.org:7070"', "7070", '[[island]] 1: address = 7070: give "host:port"'),
        ("[[island]]", "[island]", "is not TOML"),
    ],
)
def test_a_mistake_is_reported_in_one_line_that_names_file_and_entry(former, new, said, tmp_path):
    assert former in RIGHT
    with pytest.raises(UserError) as error:
        read_roster(write_roster(tmp_path, RIGHT.replace(former, new)))
    assert said in str(error.value) and str(tmp_path / "roster.toml") in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (RIGHT[: RIGHT.rindex("[[island]]")].encode(), "it has 1 island, and a run has two at least"),
        (b'run = "r"\n[island]\nname = "paris"\naddress = "a:1"\n', r"give one \[\[island\]\] for each"),
        (b'run = "\xe9"', r"roster.toml is not UTF-8"),
        (None, r"roster.toml cannot be read"),
    ],
    ids=["one island", "no list", "latin", "no file"],
)
def test_a_file_without_two_islands_is_refused(content, said, tmp_path):
    if content is not None:
        (tmp_path / "roster.toml").write_bytes(content)
    with pytest.raises(UserError, match=said):
        read_roster(tmp_path / "roster.toml")


def test_an_unknown_name_is_answered_with_the_nearest(tmp_path):
    roster = read_roster(write_roster(tmp_path, RIGHT))
    with pytest.raises(UserError, match="has no island 'pari': did you mean 'paris'"):
        roster.member("pari")
    with pytest.raises(UserError, match="has no island 'x': it has paris, berlin-2"):
        roster.member("x")


@pytest.fixture(scope="module")
def authority():
    certificate, key = make_authority("run")
    return pem_of(certificate), key


def signed(key, **fields) -> Roster:
    rows = tuple(Member(i, name, Address("10.0.0.1", 7000 + i)) for i, name in enumerate(("paris", "berlin")))
    made = Roster("run", rows, 2)
    return made.changed(made.members[1]._replace(**fields)).signed(key)


def test_a_signed_roster_comes_back_as_it_was(authority, tmp_path):
    pem, key = authority
    roster = (
        signed(key, until_round=7, issued=123).changed(Member(2, "oslo", Address("", 0), from_round=40)).signed(key)
    )
    assert roster.version == 2
    assert parse_document(roster.document, "run", pem) == roster
    write_members(tmp_path / "members.json", roster)
    assert read_members(tmp_path / "members.json", "run", pem) == roster


def test_members_of_a_round_are_those_between_their_first_and_last(authority):
    _, key = authority
    roster = signed(key, until_round=10).changed(Member(2, "oslo", Address("h", 1), from_round=5))
    assert [roster.active(round) for round in (0, 5, 9, 10)] == [
        ("paris", "berlin"),
        ("paris", "berlin", "oslo"),
        ("paris", "berlin", "oslo"),
        ("paris", "oslo"),
    ]
    assert not roster.is_over("berlin", 9) and roster.is_over("berlin", 10) and roster.is_over("nobody", 0)
    assert roster.founders == signed(key).founders


def test_a_roster_that_another_has_signed_or_changed_is_refused(authority):
    pem, key = authority
    document = signed(key).document
    with pytest.raises(BadRosterError, match="has not signed it"):
        parse_document(signed(make_authority("run")[1]).document, "run", pem)
    with pytest.raises(BadRosterError, match="of the run 'run'"):
        parse_document(document, "other", pem)
    for position in range(0, len(document), 7):
        changed = bytearray(document)
        changed[position] ^= 1
        with pytest.raises(BadRosterError):
            parse_document(bytes(changed), "run", pem)
    for garbage in (b"", b"x", bytes(100), bytes(MAX_BYTES + 1)):
        with pytest.raises(BadRosterError):
            parse_document(garbage, "run", pem)


def test_a_roster_of_two_rows_with_one_name_is_refused(authority):
    pem, key = authority
    rows = (Member(0, "paris", Address("h", 1)), Member(1, "paris", Address("h", 2)))
    with pytest.raises(BadRosterError, match="one name or one id"):
        parse_document(Roster("run", rows, 2, 1).signed(key).document, None, pem)


def test_the_higher_version_wins_and_that_of_other_founders_is_refused(authority, tmp_path):
    pem, key = authority
    roster, path = signed(key), tmp_path / "members.json"
    first = Roster("run", tuple(member._replace(address=Address("h", 1)) for member in roster.members), 2)
    assert newest(path, first, pem) is first
    write_members(path, roster)
    assert newest(path, first, pem) == roster
    assert newest(path, roster.changed(roster.members[0]), pem).version == 2
    other = Roster("run", (*first.members, Member(2, "rome", Address("h", 3))), 3)
    with pytest.raises(UserError, match="is of the islands paris, berlin, and the roster has paris, berlin, rome"):
        newest(path, other, pem)
    with pytest.raises(UserError, match="give --keys"):
        newest(path, first, None)
    path.write_text("{}")
    with pytest.raises(UserError, match="bring back a copy"):
        newest(path, first, pem)


def test_changes_are_told_in_a_line_each(authority):
    _, key = authority
    former = signed(key)
    moved = former.changed(former.members[0]._replace(address=Address("h", 1)))
    removed = moved.changed(moved.members[1]._replace(until_round=9))
    joined = removed.changed(Member(2, "oslo", Address("", 0), from_round=5))
    assert changes(former, joined.changed(joined.members[0]._replace(issued=1))) == [
        "paris is at h:1 from now on",
        "berlin is removed: no member from round 10 on",
        "oslo, which only dials out, is a member from round 6 on",
    ]
    assert changes(former, former.changed(former.members[0]._replace(issued=1))) == [
        "paris has new keys: every older certificate is refused"
    ]
