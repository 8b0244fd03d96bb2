"""Islands that come, move and go among real ones, over TLS."""

import dataclasses
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from noloco_jax.islands.certificates import make_authority, make_certificate, pem_of, pem_of_key
from noloco_jax.islands.entries import check_of, members_at, own_address, signed
from noloco_jax.islands.keys import Credentials
from noloco_jax.islands.protocol.members import OPEN, Entry, Members
from noloco_jax.islands.roster import Address, Island, Roster
from support.island_nodes import IDENTITY
from support.ports import free_ports
from support.sites import Site

RUN, ROUND = "test", 0.4  # seconds
FOUNDERS = ("paris", "rome")
CA, CA_KEY = make_authority(RUN)


def keys_of(name: str) -> Credentials:
    certificate, key = make_certificate(name, 90, CA, CA_KEY)
    return Credentials(pem_of(CA), pem_of(certificate), pem_of_key(key))


KEYS = {name: keys_of(name) for name in (*FOUNDERS, "oslo")}


class Running:
    """Sites that train in threads until the end of a test."""

    def __init__(self, folder: Path):
        self.folder, self.sites = folder, {}
        self.ports = dict(zip(KEYS, free_ports(len(KEYS)), strict=True))
        self.roster = Roster(RUN, tuple(Island(name, Address("127.0.0.1", self.ports[name])) for name in FOUNDERS))
        self.over = threading.Event()
        self.threads: list[threading.Thread] = []

    def entry(self, id: int, name: str, from_round: int, until_round: int = OPEN) -> Entry:
        address = f"127.0.0.1:{self.ports[name]}"
        entry = Entry(id, name, address, from_round, until_round, 0, time.time_ns() // 1_000_000)
        return signed(entry, RUN, CA_KEY)

    def start(self, name: str, *entries: Entry) -> Site:
        file = self.folder / name / "members.json"
        members = members_at(file, self.roster, KEYS[name])
        members.merge(entries)
        arguments = {"credentials": KEYS[name], "members": members, "members_file": file, "incarnation": 1}
        site = self.sites[name] = Site(name, self.roster, identity=IDENTITY, **arguments)
        thread = threading.Thread(target=self._train, args=(site,), daemon=True)
        thread.start()
        self.threads.append(thread)
        return site

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


def test_who_brings_an_entry_is_met_by_all_and_who_is_removed_by_nobody(running):
    for name in FOUNDERS:
        running.start(name)
    running.wait(lambda: running.met("paris", "rome"))
    running.start("oslo", running.entry(2, "oslo", running.sites["paris"].round + 12))
    running.wait(lambda: running.met("oslo", "paris") and running.met("oslo", "rome"))
    assert not running.sites["paris"].heals and running.sites["oslo"].heals
    for name in KEYS:  # each keeps it for its next start
        file = running.folder / name / "members.json"
        assert name == "oslo" or members_at(file, running.roster, KEYS["paris"]).id_of("oslo") == 2

    ends = running.sites["paris"].round + 12
    tombstone = running.entry(2, "oslo", 0, ends)
    running.sites["rome"].agent.tell(tombstone)
    running.wait(lambda: running.sites["paris"].round > ends + 4)
    assert not any(running.met(name, "oslo", ends - 1) for name in FOUNDERS)
    assert running.met("paris", "rome", ends)


def test_a_stranger_with_a_certificate_and_no_entry_is_refused(running):
    running.start("paris")
    running.start("rome")
    running.wait(lambda: running.met("paris", "rome"))
    forged = dataclasses.replace(running.entry(2, "oslo", 0), signature="00")
    members = Members(FOUNDERS, lambda entry: True, [forged])
    site = Site("oslo", running.roster, credentials=KEYS["oslo"], members=members)
    site.agent._roster = dataclasses.replace(
        running.roster, islands=(*running.roster.islands, Island("oslo", Address("127.0.0.1", running.ports["oslo"])))
    )
    site.agent.open()
    try:
        assert site.agent.admitted(20)  # as nobody answers
        site.agent.ready()
        running.wait(lambda: any("made out to 'oslo'" in line for line in running.sites["paris"].lines))
        assert running.sites["paris"].agent.incarnation == 1
        assert not any("oslo" in running.sites[name].agent.clients for name in FOUNDERS)
    finally:
        site.agent.close()


def test_a_member_that_moves_tells_its_new_address_itself(running):
    for name in FOUNDERS:
        running.start(name)
    running.wait(lambda: running.met("paris", "rome"))
    moved = own_address("rome", "127.0.0.1:1", 0, RUN, KEYS["rome"])
    assert check_of(RUN, KEYS["paris"])(moved)
    running.sites["rome"].agent.tell(moved)
    running.wait(lambda: running.sites["paris"].agent._roster.address("rome") == Address("127.0.0.1", 1))
    before = running.sites["paris"].round
    running.wait(lambda: running.met("paris", "rome", before))  # rome dials, as nobody listens at the new address
