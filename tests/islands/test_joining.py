"""Islands that join a running group over TLS, change their address and are removed."""

import dataclasses
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from noloco_jax.config import TrainConfig, save_config
from noloco_jax.errors import UserError
from noloco_jax.island import joining
from noloco_jax.island.command import main as island
from noloco_jax.island.members import lead
from noloco_jax.island.mode import IslandMode
from noloco_jax.islands.entries import check_of, members_at, own_address, read_members, signed, write_members
from noloco_jax.islands.keys import authority_key, load_keys, make_keys, signing_alone
from noloco_jax.islands.protocol.events import Told
from noloco_jax.islands.protocol.members import OPEN, Entry, Members, News
from noloco_jax.islands.query import About
from noloco_jax.islands.roster import Address, Island, Roster
from support.island_nodes import IDENTITY
from support.paths import ROOT
from support.rosters import on_loopback, written
from support.sites import Site, side_by_side

RUN, ROUND = "test", 0.4  # seconds
FOUNDERS = ("paris", "rome")


class Running:
    """Sites that train in threads until the end of a test, and the folder of their keys."""

    def __init__(self, folder: Path):
        self.folder, self.sites = folder, {}
        *founders, _ = listed = on_loopback(*FOUNDERS, "oslo", run=RUN).islands
        self.ports = {name: address.port for name, address in listed}
        self.roster = Roster(RUN, tuple(founders))
        written(self.roster, folder / "roster.toml")
        self.keys = folder / "keys"
        assert island(["keys", f"--roster={folder / 'roster.toml'}", f"--out={self.keys}"]) == 0
        self.over = threading.Event()
        self.threads: list[threading.Thread] = []

    def entry(self, id: int, name: str, from_round: int, until_round: int = OPEN) -> Entry:
        address = f"127.0.0.1:{self.ports[name]}"
        entry = Entry(id, name, address, from_round, until_round, 0, time.time_ns() // 1_000_000)
        return signed(entry, RUN, authority_key(self.keys))

    def give_keys(self, name: str) -> None:
        """Make keys for a name that has no entry."""
        make_keys(Roster(RUN, (Island(name, Address("127.0.0.1", self.ports[name])),)), self.keys, 30)

    def site(self, name: str, *entries: Entry) -> Site:
        file, credentials = self.folder / name / "members.json", load_keys(self.keys / name, name)
        members = members_at(file, self.roster, credentials)
        members.merge(entries)
        arguments = {"credentials": credentials, "members": members, "members_file": file, "incarnation": 1}
        return Site(name, self.roster, identity=IDENTITY, **arguments)

    def start(self, name: str, *entries: Entry) -> Site:
        site = self.sites[name] = self.site(name, *entries)
        thread = threading.Thread(target=self._train, args=(site,), daemon=True)
        thread.start()
        self.threads.append(thread)
        return site

    def start_founders(self) -> None:
        for name in FOUNDERS:
            self.start(name)
        self.wait(lambda: self.met("paris", "rome"))

    def _train(self, site: Site) -> None:
        site.open()
        while not self.over.is_set():
            site.train(1, ROUND)
        site.close()

    def wait(self, condition, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, [site.lines for site in self.sites.values()]
            time.sleep(0.05)

    def met(self, name: str, other: str, after: int = -1) -> bool:
        return any(
            one.partner == other and one.outcome != "alone" and one.round > after for one in self.sites[name].met
        )


@pytest.fixture
def running(tmp_path) -> Iterator[Running]:
    made = Running(tmp_path)
    yield made
    made.over.set()
    for thread in made.threads:
        thread.join(30)


def test_an_island_with_a_signed_entry_exchanges_with_all_until_its_removal(running):
    running.start_founders()
    running.give_keys("oslo")
    running.start("oslo", running.entry(2, "oslo", running.sites["paris"].round + 12))
    running.wait(lambda: running.met("oslo", "paris") and running.met("oslo", "rome"))
    assert not running.sites["paris"].heals and running.sites["oslo"].heals
    for name in FOUNDERS:  # each has stored the entry for its next start
        credentials = load_keys(running.keys / name, name)
        assert members_at(running.folder / name / "members.json", running.roster, credentials).id_of("oslo") == 2

    ends = running.sites["paris"].round + 12
    tombstone = running.entry(2, "oslo", 0, ends)
    running.sites["rome"].agent._handle(Told(News((tombstone,))))
    running.wait(lambda: running.sites["paris"].round > ends + 4)
    assert not any(running.met(name, "oslo", ends - 1) for name in FOUNDERS)
    assert running.met("paris", "rome", ends)


def test_an_island_with_a_certificate_but_no_valid_entry_is_refused(running):
    running.start_founders()
    running.give_keys("oslo")
    forged = dataclasses.replace(running.entry(2, "oslo", 0), signature="00")
    members = Members(FOUNDERS, lambda entry: True, [forged])
    site = Site("oslo", running.roster, credentials=load_keys(running.keys / "oslo", "oslo"), members=members)
    site.agent.network.roster = dataclasses.replace(
        running.roster, islands=(*running.roster.islands, Island("oslo", Address("127.0.0.1", running.ports["oslo"])))
    )
    site.agent.open()
    try:
        assert site.agent.admitted(20)  # no peer answers, so that none can refuse
        site.agent.ready()
        running.wait(lambda: any("made out to 'oslo'" in line for line in running.sites["paris"].lines))
        assert running.sites["paris"].agent.incarnation == 1
        assert not any("oslo" in running.sites[name].agent.network.clients for name in FOUNDERS)
    finally:
        site.agent.close()


def test_a_member_announces_its_own_new_address(running):
    running.start_founders()
    rome, paris = (load_keys(running.keys / name, name) for name in ("rome", "paris"))
    moved = own_address("rome", "127.0.0.1:1", 0, RUN, rome)
    assert check_of(RUN, paris)(moved)
    running.sites["rome"].agent._handle(Told(News((moved,))))
    running.wait(lambda: running.sites["paris"].agent.network.roster.address("rome") == Address("127.0.0.1", 1))
    before = running.sites["paris"].round
    running.wait(lambda: running.met("paris", "rome", before))  # rome dials, as nobody listens at the new address


def test_news_that_a_last_call_brings_to_a_closed_island_change_nothing(running):
    """Guard a regression: they raised an error in the thread of the call, as no thread writes members any more."""
    site = running.site("paris")
    site.agent.open()
    site.agent.close()
    moved = own_address("rome", "127.0.0.1:1", 0, RUN, load_keys(running.keys / "rome", "rome"))
    site.agent._handle(Told(News((moved,))))
    assert not (running.folder / "paris" / "members.json").exists()


def test_invitations_and_removals_reach_all_members_before_they_take_effect(running, capsys):
    running.start_founders()
    address, keys = f"--address=127.0.0.1:{running.ports['oslo']}", f"--keys={running.keys}"
    before = running.sites["paris"].round
    assert island(["invite", "--name=oslo", address, keys]) == 0
    out = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "told to paris, rome" in out and "island join --entry=oslo/members.json --via=paris" in out
    (entry,) = read_members(running.keys / "oslo/members.json").entries
    assert entry.id == 2 and before + lead(3) < entry.from_round <= running.sites["paris"].round + 1 + lead(3)
    assert all(running.sites[name].agent._protocol.members.entries == (entry,) for name in FOUNDERS)

    assert island(["remove", "oslo", keys, "--from_round=500"]) == 0
    entries = running.sites["rome"].agent._protocol.members.entries
    assert [(one.id, one.from_round, one.until_round) for one in entries] == [(2, entry.from_round, 499)]
    assert island(["invite", "--name=oslo", address, keys, "--from_round=600"]) == 0  # a second invitation keeps the id
    (entry,) = running.sites["rome"].agent._protocol.members.entries
    assert (entry.id, entry.from_round, entry.until_round) == (2, 599, OPEN)


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("invite --name=rome --address=127.0.0.1:1", "rome is a member already: give another --name"),
        ("invite --name=Oslo --address=127.0.0.1:1", "name = 'Oslo': give a DNS label"),
        ("invite --name=oslo --address=127.0.0.1:0", "others cannot dial port 0"),
        ("invite --name=oslo --address=PARIS", "is that of paris: give the new member its own"),
        ("invite --name=oslo --address=127.0.0.1:1", "so that their round is unknown: give --from_round=N"),
        ("invite --name=oslo --address=127.0.0.1:1 --from_round=0", "rounds are counted from 1"),
        ("invite --name=oslo --address=127.0.0.1:1 --days=0", "give 1 to 3650"),
        ("remove rom --from_round=9", "did you mean 'rome'?"),
        ("remove rome", "so that their round is unknown: give --from_round=N"),
        ("remove rome --from_round=9", "give the same command again once one answers"),
    ],
)
def test_an_invalid_invite_or_remove_command_is_refused_with_the_reason(running, command, line):
    words = command.replace("PARIS", f"127.0.0.1:{running.ports['paris']}").split()
    with pytest.raises(UserError, match=re.escape(line)):
        island([*words, f"--keys={running.keys}"])


def test_a_removal_given_again_keeps_its_round_or_takes_an_earlier_one(running):
    """Guard a regression: given again rounds later, it made the removed island a member until a new end."""

    def ends(*flags: str) -> int:
        with pytest.raises(UserError, match="give the same command again once one answers"):
            island(["remove", "rome", f"--keys={running.keys}", *flags])
        (entry,) = read_members(running.keys / "members.json").entries
        return entry.until_round

    assert ends("--from_round=20") == ends() == ends("--from_round=20") == 19
    with pytest.raises(UserError, match=r"no member from round 20 on, and a later end would make it one until then"):
        island(["remove", "rome", f"--keys={running.keys}", "--from_round=60"])
    assert ends("--from_round=15") == ends() == 14


def test_a_removal_while_islands_train_holds_from_a_later_round_on(running):
    running.start_founders()
    before = running.sites["paris"].round
    assert island(["remove", "rome", f"--keys={running.keys}"]) == 0
    (entry,) = running.sites["paris"].agent._protocol.members.entries
    assert before + lead(2) < entry.until_round


@pytest.fixture
def waiting(running) -> Iterator[Site]:
    """Island paris after its last round; rome has gone without having finished."""
    paris, rome = (running.site(name) for name in FOUNDERS)
    side_by_side(paris.open, rome.open)
    side_by_side(lambda: paris.train(3, ROUND), lambda: rome.train(2, ROUND))
    rome.close()
    paris.agent.leave(finished=True)
    assert paris.agent.unfinished() == ["rome"]
    yield paris
    paris.close()


def test_a_removal_frees_islands_that_have_finished_and_wait_for_the_removed_one(running, waiting, capsys):
    assert island(["remove", "rome", f"--keys={running.keys}"]) == 0
    assert "rome is removed: no member from round 3 on; told to paris" in capsys.readouterr().out
    assert waiting.agent.unfinished() == []


def test_a_removal_in_a_round_that_never_comes_is_brought_forward_when_given_again(running, waiting):
    assert island(["remove", "rome", f"--keys={running.keys}", "--from_round=40"]) == 0
    assert waiting.agent.unfinished() == ["rome"]
    assert island(["remove", "rome", f"--keys={running.keys}"]) == 0
    assert waiting.agent.unfinished() == []


def test_an_invitation_that_fails_as_nobody_answers_makes_no_keys(running):
    with pytest.raises(UserError, match="so that their round is unknown"):
        island(["invite", "--name=oslo", "--address=127.0.0.1:1", f"--keys={running.keys}"])
    assert not (running.keys / "oslo").exists()


@pytest.mark.parametrize(
    ("entry", "line"),
    [
        ("roster.toml", "roster.toml is no members.json: give the one that `island invite` wrote beside the island's"),
        ("config.json", "config.json is no members.json: give the one that `island invite` wrote"),
        ("keys/members.json", "keys/cert.pem cannot be read (No such file or directory): give the members.json that"),
    ],
)
def test_an_entry_that_is_another_file_is_refused_with_the_one_that_is_wanted(running, entry, line):
    (running.folder / "config.json").write_text("{}")
    with pytest.raises(UserError, match=re.escape(line)):
        island(["join", f"--entry={running.folder / entry}", "--via=paris", f"--workdir={running.folder / 'oslo'}"])


def moved(running: Running, address: str, version: int) -> None:
    """Have oslo state its address, by a clock of its own, where invitations and removals are made."""
    path = running.keys / "members.json"
    statement = own_address("oslo", address, version - 1, RUN, load_keys(running.keys / "oslo", "oslo"))
    write_members(path, running.roster, [*read_members(path).entries, statement])


def address_of_oslo(running: Running) -> str:
    return members_at(
        running.keys / "members.json", running.roster, load_keys(running.keys / "paris", "paris")
    ).address_of("oslo")


def test_the_address_of_a_new_invitation_counts_also_after_a_statement_by_a_fast_clock(running):
    flags = ["--name=oslo", f"--keys={running.keys}", "--from_round=9"]
    assert island(["invite", "--address=127.0.0.1:1", *flags]) == 0
    moved(running, "127.0.0.1:2", version=time.time_ns() // 1_000_000 + 86_400_000)
    with pytest.raises(UserError, match="none of the islands answers"):
        island(["remove", "oslo", f"--keys={running.keys}", "--from_round=20"])
    assert island(["invite", "--address=127.0.0.1:3", *flags]) == 0
    assert address_of_oslo(running) == "127.0.0.1:3"


def test_a_member_that_moved_is_reached_at_its_new_address_until_its_removal(running):
    assert island(["invite", "--name=oslo", "--address=127.0.0.1:1", f"--keys={running.keys}", "--from_round=9"]) == 0
    moved(running, "127.0.0.1:2", version=time.time_ns() // 1_000_000)
    with pytest.raises(UserError, match="none of the islands answers"):
        island(["remove", "oslo", f"--keys={running.keys}", "--from_round=20"])
    assert address_of_oslo(running) == "127.0.0.1:2"


def test_a_command_waits_for_another_one_and_reads_the_members_that_it_leaves(running):
    """The islands of one number would read the same data, and the newest entry alone counts."""
    flags = ["--name=lima", "--address=127.0.0.1:1", f"--keys={running.keys}", "--from_round=9"]
    command = [sys.executable, "-m", "noloco_jax.island", "invite", *flags]
    with signing_alone(running.keys):
        other = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        assert other.stderr is not None
        assert other.stderr.readline() == f"waits for another command that signs with the keys in {running.keys}\n"
        assert not read_members(running.keys / "members.json").entries
        write_members(running.keys / "members.json", running.roster, [running.entry(2, "oslo", 8)])
    assert other.wait(60) == 0
    other.stderr.close()
    entries = read_members(running.keys / "members.json").entries
    assert {(entry.id, entry.name) for entry in entries} == {(2, "oslo"), (3, "lima")}


@pytest.mark.parametrize("missing", ["ca-key.pem", "members.json"])
def test_a_missing_signing_key_or_member_list_is_named(running, missing):
    (running.keys / missing).unlink()
    with pytest.raises(UserError, match=f"{missing} is missing"):
        island(["remove", "rome", f"--keys={running.keys}"])


def test_the_keys_of_an_invited_member_can_be_replaced(running, capsys):
    assert island(["invite", "--name=oslo", "--address=127.0.0.1:1", f"--keys={running.keys}", "--from_round=9"]) == 0
    before = load_keys(running.keys / "oslo", "oslo")
    other = running.keys / "oslo" / "newest.json"
    other.write_text("{}")
    keys = ["keys", f"--roster={running.folder / 'roster.toml'}", f"--out={running.keys}", "--replace=oslo"]
    assert island(keys) == 0
    assert load_keys(running.keys / "oslo", "oslo") != before
    assert read_members(running.keys / "members.json").entries
    assert read_members(running.keys / "oslo" / "members.json").entries  # what `island join` begins from
    assert other.read_text() == "{}"


def test_an_invitation_after_a_removal_makes_new_keys(running):
    flags = ["--name=rome", f"--address=127.0.0.1:{running.ports['oslo']}", f"--keys={running.keys}", "--days=10"]
    before = load_keys(running.keys / "rome", "rome")
    with pytest.raises(UserError, match="give the same command again once one answers"):
        island(["remove", "rome", f"--keys={running.keys}", "--from_round=20"])
    assert island(["invite", *flags, "--from_round=80"]) == 0
    after = load_keys(running.keys / "rome", "rome")
    left = x509.load_pem_x509_certificate(after.certificate).not_valid_after_utc - datetime.now(UTC)
    assert after.certificate != before.certificate and 8 < left.days < 11


@pytest.mark.parametrize(("given", "expected"), [((), "time"), (("--pace=steps",), "steps")])
def test_a_joining_island_takes_its_pace_from_a_flag_or_a_peer_and_keeps_it(
    running, tmp_path, monkeypatch, given, expected
):
    """The pace is asked for once: at a later start the member that answered may be offline."""
    asked: list[str] = []
    taken: list[str] = []

    def about(clients: Mapping[str, Any], seconds: float) -> dict[str, About]:
        asked.extend(clients)
        identity = dataclasses.replace(IDENTITY, pace="time")
        return {name: About(identity, {"num_replicas": 2}, None, 0, True) for name in clients}

    def train(config: TrainConfig, workdir: Path, *, mode: IslandMode, **choices: Any) -> int:
        save_config(config, workdir)
        taken.append(mode._member.pace)
        return 0

    monkeypatch.setattr(joining, "introduce", lambda *_: None)
    monkeypatch.setattr(joining, "ask_about", about)
    monkeypatch.setattr(joining, "train", train)
    where = f"--address=127.0.0.1:{running.ports['oslo']}"
    assert island(["invite", "--name=oslo", where, f"--keys={running.keys}", "--from_round=5"]) == 0
    flags = [f"--entry={running.keys / 'oslo/members.json'}", "--via=paris", f"--workdir={tmp_path / 'oslo'}", *given]
    assert island(["join", *flags]) == 0
    assert island(["join", *flags]) == 0
    assert taken == [expected] * 2 and asked == ["paris"]
