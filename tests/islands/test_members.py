"""Changing membership: entries, active members, pairing, and the spread of news in a simulated world."""

import dataclasses
import itertools
import random

import pytest

from noloco_jax.config import from_dict
from noloco_jax.islands.partners import partner_in
from noloco_jax.islands.protocol.events import Opened, Ready, RoundEnded, Send, Start, Tick, Told
from noloco_jax.islands.protocol.island import Island
from noloco_jax.islands.protocol.members import GRACE, PAGE, Members, News
from noloco_jax.islands.protocol.messages import Accept, Caller, ExchangeId, Hello, NotPartner
from support.changing_world import ChangingWorld, entry, is_signed, moved
from support.island_nodes import IDENTITY, ROUND

FOUNDERS = ("paris", "berlin", "rome", "oslo")
CONFIG = from_dict({"num_replicas": 4, "seed": 1})


def members(*entries) -> Members:
    return Members(FOUNDERS, is_signed, entries)


# Entries.


def test_active_members_follow_from_rounds_and_ids():
    known = members(entry(5, "cairo", 30), entry(4, "lima", 20, 40), entry(1, "berlin", 0, 25))
    assert known.active(0) == FOUNDERS
    assert known.active(20) == (*FOUNDERS, "lima")
    assert known.active(25) == ("paris", "rome", "oslo", "lima")
    assert known.active(30) == ("paris", "rome", "oslo", "lima", "cairo")
    assert known.active(40) == ("paris", "rome", "oslo", "cairo")


def test_a_membership_is_over_only_from_its_until_round_on():
    known = members(entry(2, "rome", 0, 9), entry(5, "cairo", 5))
    assert [known.is_over("rome", round) for round in (0, 8, 9, 99)] == [False, False, True, True]
    assert not any(known.is_over(name, round) for name in ("paris", "cairo", "nobody") for round in (0, 4, 99))


def test_merging_entries_is_idempotent_and_independent_of_their_order():
    entries = [
        entry(4, "lima", 20),
        entry(4, "lima", 20, 50, version=2),
        entry(2, "rome", 0, 9),
        moved("oslo", "o:2", 7),
    ]
    views = set()
    for order in itertools.permutations([*entries, entries[0]]):
        known = members()
        for one in order:
            known.merge([one])
        views.add((known.view, known.active(30), known.address_of("oslo")))
    assert len(views) == 1


def test_a_tombstone_beats_a_stale_entry():
    known = members(entry(4, "lima", 20, 50, version=2))
    assert known.merge([entry(4, "lima", 20, version=1)]) == []
    assert "lima" not in known.active(50)


@pytest.mark.parametrize(
    "forged",
    [
        entry(4, "lima", 20, signature=""),
        entry(4, "lima", 20, signature="signed by lima"),
        moved("rome", "evil:1", 9, signature="signed by oslo"),
        entry(1, "rome", 20),  # a founder's id under another name
        entry(7, "rome", 20),  # a founder's name under another id
        entry(-1, "lima", 20),
        entry(4, "lima", 20, version=1 << 42),
    ],
)
def test_a_forged_or_invalid_entry_is_refused(forged):
    known = members()
    assert known.merge([forged]) == [] and known.view == members().view


def test_the_newest_address_wins_regardless_of_its_signer():
    known = members(entry(4, "lima", 20, version=3), moved("lima", "lima:2", 2))
    assert known.address_of("lima") == "lima:1"
    known.merge([moved("lima", "lima:3", 4)])
    assert known.address_of("lima") == "lima:3"
    assert known.address_of("paris") == ""


def test_a_returning_member_keeps_its_id():
    known = members(entry(4, "lima", 20, 30), entry(5, "cairo", 25), entry(4, "lima", 60, version=2))
    assert [known.active(round) for round in (24, 59)] == [FOUNDERS, (*FOUNDERS, "cairo")]
    assert known.active(60) == (*FOUNDERS, "lima", "cairo")
    assert known.id_of("lima") == 4


def test_paged_news_delivers_every_missing_entry():
    generator = random.Random(0)
    for _ in range(20):
        entries = [entry(4 + number, f"m{number}", 9, version=generator.randrange(1, 200)) for number in range(150)]
        mine, theirs = (members(*generator.sample(entries, generator.randrange(150))) for _ in range(2))
        before, pages = None, 0
        while True:
            page = theirs.news(before)
            assert len(page.entries) <= PAGE
            mine.merge(page.entries)
            before, pages = mine.differs_before(page), pages + 1
            if before is None:
                break
        assert {one.id for one in theirs.entries} <= {one.id for one in mine.entries}
        assert pages <= 150 // PAGE + 1


@pytest.mark.parametrize("order", ["passes", "hypercube", "independent"])
def test_every_round_pairs_all_active_members_but_an_odd_one(order):
    """One of 4 founders leaves and two join: 4, 5, 4 and 5 members."""
    config = from_dict({"num_replicas": 4, "outer": {"order": order}})
    known = members(entry(4, "lima", 20), entry(5, "cairo", 60), entry(1, "berlin", 0, 40))
    partners = {name: partner_in(known, name, config) for name in (*FOUNDERS, "lima", "cairo")}
    for round in range(80):
        active = known.active(round)
        pairs = {name: partner(round) for name, partner in partners.items()}
        assert all(pairs[name] is None for name in pairs if name not in active)
        assert all(pairs[other] == name for name, other in pairs.items() if other is not None)
        assert sum(pairs[name] is None for name in active) == len(active) % 2


def test_founders_are_paired_like_the_replicas_of_one_program():
    from noloco_jax.methods import method_of

    config = from_dict({"num_replicas": 4, "outer": {"order": "hypercube"}})
    for round in range(12):
        groups = method_of(config).groups(config, round)
        met = {frozenset((name, partner_in(members(), name, config)(round))) for name in FOUNDERS}
        assert met == {frozenset(FOUNDERS[i] for i in group) for group in groups}


# One island.


def partner_of_paris(known: Members) -> str | None:
    return partner_in(known, "paris", CONFIG)(0)


def trained(known: Members) -> Island:
    """Return island paris after round 0; its partner oslo has not answered yet."""
    assert partner_of_paris(known) == "oslo"
    island = Island("paris", FOUNDERS[1:], IDENTITY, partner_in(known, "paris", CONFIG), 1, members=known)
    for time, event in ((0.0, Start()), (10.0, Tick()), (10.0, Ready()), (20.0, Tick()), (20.0, RoundEnded(0, 3, 1.0))):
        island.handle(event, time)
    return island


def answer_to(island: Island, peer: str):
    """Return the island's answer to a peer that dials for round 0."""
    hello = Hello(Caller(IDENTITY, peer, "paris", 1, 0), ExchangeId(0, peer, 1, 1), 1)
    return next(action.header for action in island.handle(Opened(peer, peer, hello), 20.1) if isinstance(action, Send))


def test_a_round_keeps_its_partner_when_the_membership_changes():
    island = trained(members())
    newcomers = [entry(4 + k, f"m{k}", 0) for k in range(9)]
    count = next(k for k in range(9) if partner_of_paris(members(*newcomers[:k])) not in (None, "oslo"))
    island.handle(Told(News(tuple(newcomers[:count]))), 20.05)
    other = partner_of_paris(island.members)
    assert other not in (None, "oslo")
    refused = answer_to(island, str(other))
    assert isinstance(refused, NotPartner) and refused.reason == f"not in this round, of {4 + count} members there"
    assert isinstance(answer_to(island, "oslo"), Accept)


def test_accepted_and_refused_callers_both_receive_the_news():
    island = trained(members(entry(4, "lima", 50)))
    for peer, kind in (("oslo", Accept), ("rome", NotPartner)):
        answer = answer_to(island, peer)
        assert isinstance(answer, kind) and answer.news == island.members.news()


def test_a_removed_member_remains_a_peer_for_the_grace_rounds():
    island = trained(members(entry(2, "rome", 0, 3)))
    for round in range(1, 3 + GRACE):
        assert "rome" in island.peers
        island.handle(RoundEnded(round, 3, 1.0), 20.0 + 10 * round)
    island.handle(RoundEnded(3 + GRACE, 3, 1.0), 300.0)
    assert set(island.peers) == {"berlin", "oslo"}


# A simulated world.


def test_a_joining_member_exchanges_with_all_without_disturbing_them():
    world = ChangingWorld(4, durations=[ROUND] * 4)
    world.run(4.5 * ROUND)
    world.join("new", 12)
    world.run(24 * ROUND).finish()
    assert len(set(world.views().values())) == 1
    new = world.nodes["new"]
    assert [heal.round in (11, 12) for heal in new.heals] == [True]  # catching up earlier, it would drift away alone
    assert not any(world.nodes[name].heals for name in world.founders)
    assert min(action.xid.round for action in new.applied) >= 12
    assert {action.peer for action in new.applied} == set(world.founders)
    assert world.participation(0, 22) == 1.0


def test_a_removed_member_exchanges_with_nobody_from_its_removal_on():
    world = ChangingWorld(5, durations=[ROUND] * 5)
    world.run(4.5 * ROUND)
    world.remove("i1", 12, told="i3")
    world.run(30 * ROUND).finish()
    assert len(set(world.views().values())) == 1
    assert max(action.xid.round for action in world.nodes["i1"].applied) == 11
    assert world.participation(0, 28) == 1.0
    others = [world.nodes[name] for name in world.founders if name != "i1"]
    # Four members remain, so that each has a partner in every round.
    assert all(sum(action.xid.round >= 12 for action in node.applied) >= 15 for node in others)


def test_a_new_address_spreads_and_survives_a_restart():
    world = ChangingWorld(6, durations=[ROUND] * 6)
    world.run(2.5 * ROUND)
    world.tell("i2", moved("i2", "elsewhere:9", 5))
    world.run(8.5 * ROUND)
    world.crash(world.nodes["i4"], "kill")
    world.run(12 * ROUND).finish()
    machines = [node.machine for node in world.nodes.values()]
    assert {machine.members.address_of("i2") for machine in machines if machine is not None} == {"elsewhere:9"}


def test_news_reaches_n_members_in_about_2_log2_n_rounds():
    world = ChangingWorld(32, durations=[ROUND] * 32)
    world.run(3.5 * ROUND)
    told = world.entry("new", 40)
    world.tell("i7", told)
    world.run(13.6 * ROUND)
    assert len(set(world.views().values())) == 1


def test_peers_with_different_member_lists_do_not_exchange_and_report_it():
    world = ChangingWorld(4, durations=[ROUND] * 4)
    world.run(2.5 * ROUND)
    world.tell("i0", world.entry("new", 3))  # active before the news can reach all
    world.run(20 * ROUND).finish()  # also checks that nothing was applied on one side alone
    assert len(set(world.views().values())) == 1
    reasons = [drop.reason for node in world.nodes.values() for drop in node.drops if drop.peer != "new"]
    assert any("members there" in reason for reason in reasons)
    for node in world.nodes.values():
        for action in node.applied:
            assert action.xid in world.nodes[action.peer].weights


def test_a_member_that_joins_during_a_partition_is_known_to_all_after_it():
    world = ChangingWorld(6, durations=[ROUND] * 6)
    world.cuts.append((3.2 * ROUND, 14.2 * ROUND, frozenset({"i0", "i1", "i2", "new"})))
    world.run(4.5 * ROUND)
    made = world.join("new", 8)
    world.run(13 * ROUND)
    known = {node.name: made in node.machine.members.entries for node in world.nodes.values() if node.machine}
    assert known == {name: name in ("i0", "i1", "i2", "new") for name in world.names}
    world.run(40 * ROUND).finish()
    assert len(set(world.views().values())) == 1
    met = {action.peer for action in world.nodes["new"].applied if action.xid.round > 16}
    assert met == set(world.founders)


def test_a_returning_member_learns_more_entries_than_one_header_holds():
    world = ChangingWorld(4, durations=[ROUND] * 4, downtime=12 * ROUND)
    world.run(3.5 * ROUND)
    world.crash(world.nodes["i3"], "kill")
    for number in range(3 * PAGE):
        world.tell("i0", dataclasses.replace(world.entry(f"m{number}", 500), id=10 + number))
    world.run(40 * ROUND)
    machine = world.nodes["i3"].machine
    assert machine is not None and len(machine.members.entries) == 3 * PAGE
    assert len(set(world.views().values())) == 1


def test_a_stranger_with_a_forged_entry_is_not_admitted():
    world = ChangingWorld(3, durations=[ROUND] * 3)
    world.run(3.5 * ROUND)
    world.join("new", 8)
    world.add("thief", [dataclasses.replace(world.entry("thief", 5), signature="signed by thief")])
    world.run(20 * ROUND)
    assert world.nodes["new"].heals and not world.nodes["thief"].heals and not world.nodes["thief"].applied
    assert all("thief" not in node.machine.members.present(9) for node in world.nodes.values() if node.machine)
