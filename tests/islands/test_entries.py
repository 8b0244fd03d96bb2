"""Entries: fields that a signature covers, permitted signers, and the file that stores them."""

import dataclasses

import pytest
from cryptography import x509

from noloco_jax.errors import UserError
from noloco_jax.islands.certificates import make_authority, make_certificate, pem_of, pem_of_key
from noloco_jax.islands.entries import (
    check_of,
    describe,
    known_roster,
    members_at,
    now_version,
    own_address,
    read_members,
    signed,
    write_members,
)
from noloco_jax.islands.keys import Credentials
from noloco_jax.islands.protocol.members import OPEN, Entry, Members
from noloco_jax.islands.roster import NONE, Address, Island, Roster

RUN = "test"
ROSTER = Roster(RUN, (Island("paris", Address("127.0.0.1", 7070)), Island("rome", Address("127.0.0.1", 7071))))
CA, CA_KEY = make_authority(RUN)


def keys_of(name: str, authority: x509.Certificate = CA, authority_key=CA_KEY) -> Credentials:
    certificate, key = make_certificate(name, 90, authority, authority_key)
    return Credentials(pem_of(authority), pem_of(certificate), pem_of_key(key))


PARIS, OSLO = keys_of("paris"), keys_of("oslo")
ENTRY = signed(Entry(2, "oslo", "10.0.0.7:7070", 30, OPEN, 0, 1000), RUN, CA_KEY)
OWN = own_address("oslo", "10.0.0.8:7070", 0, RUN, OSLO)
is_signed = check_of(RUN, PARIS)


def test_entries_signed_by_the_authority_or_the_member_itself_are_accepted():
    assert is_signed(ENTRY) and is_signed(OWN)


@pytest.mark.parametrize("entry", [ENTRY, OWN], ids=["authority's", "own"])
@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Entry)])
def test_a_signature_covers_every_field(entry, field):
    value = getattr(entry, field)
    texts = {"address": "10.0.0.9:7070", "name": "rome"}
    other = value + 1 if isinstance(value, int) else texts.get(field, value[2:] or "00")
    assert not is_signed(dataclasses.replace(entry, **{field: other}))


@pytest.mark.parametrize(
    "forged",
    [
        signed(dataclasses.replace(ENTRY, signature=""), RUN, make_authority(RUN)[1]),
        signed(dataclasses.replace(ENTRY, signature=""), "another run", CA_KEY),
        own_address("paris", "10.0.0.8:7070", 0, RUN, OSLO),
        own_address("oslo", "10.0.0.8:7070", 0, RUN, keys_of("oslo", *make_authority(RUN))),
        own_address("oslo", "10.0.0.8:0", 0, RUN, OSLO),
        signed(dataclasses.replace(ENTRY, address="nowhere"), RUN, CA_KEY),
        signed(dataclasses.replace(ENTRY, name="Oslo"), RUN, CA_KEY),
        dataclasses.replace(ENTRY, certificate=OWN.certificate),
        dataclasses.replace(ENTRY, signature="no hex"),
        dataclasses.replace(OWN, certificate="no certificate"),
    ],
)
def test_forged_and_invalid_entries_are_refused(forged):
    assert not is_signed(forged)


def test_no_entry_is_accepted_without_keys():
    assert not check_of(RUN, None)(ENTRY)


def test_versions_grow_even_if_the_clock_was_set_back():
    assert now_version(1 << 41) == (1 << 41) + 1
    assert now_version() > 1_700_000_000_000


def test_a_line_on_a_member_is_a_sentence_also_where_it_only_dials_out():
    told = [describe(dataclasses.replace(ENTRY, address=address)) for address in (ENTRY.address, NONE)]
    about = ("oslo at 10.0.0.7:7070", "oslo, which only dials out,")
    assert told == [f"{who} is a member from round 31 on" for who in about]


def test_members_are_read_back_from_their_file(tmp_path):
    path = tmp_path / "run" / "members.json"
    write_members(path, ROSTER, [OWN, ENTRY])
    assert read_members(path) == (ROSTER, (OWN, ENTRY))
    members = members_at(path, ROSTER, PARIS)
    assert members.active(30) == ("paris", "rome", "oslo")
    assert known_roster(ROSTER, members, 0).address("oslo") == Address("10.0.0.8", 7070)
    assert known_roster(ROSTER, members, 0).address("rome") == Address("127.0.0.1", 7071)


def test_a_missing_file_yields_the_founders(tmp_path):
    assert members_at(tmp_path / "members.json", ROSTER, PARIS).entries == ()


@pytest.mark.parametrize("content", ["", "{}", '{"run": "test", "founders": [["a", 1]], "entries": []}', "[1]"])
def test_a_damaged_file_is_reported(tmp_path, content):
    (tmp_path / "members.json").write_text(content)
    with pytest.raises(UserError, match="is damaged: bring back a copy"):
        members_at(tmp_path / "members.json", ROSTER, PARIS)


def test_a_roster_extended_after_the_file_was_written_is_refused(tmp_path):
    write_members(tmp_path / "members.json", ROSTER, [ENTRY])
    longer = Roster(RUN, (*ROSTER.islands, Island("oslo", Address("127.0.0.1", 7072))))
    with pytest.raises(UserError, match="give the roster that the run began with"):
        members_at(tmp_path / "members.json", longer, PARIS)


def test_a_removed_member_leaves_the_roster_a_few_rounds_later():
    gone = signed(Entry(1, "rome", "", 0, 20, 0, 1000), RUN, CA_KEY)
    members = Members(ROSTER.names, is_signed, [gone])
    assert known_roster(ROSTER, members, 20).names == ("paris", "rome")
    assert known_roster(ROSTER, members, 40).names == ("paris",)
