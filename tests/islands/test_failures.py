"""Failures of the design's table (§12): one test for each row."""

import dataclasses
import re
from typing import Any

import pytest

from noloco_jax.islands.protocol.events import (
    Apply,
    Arrived,
    Broken,
    Close,
    Content,
    Drop,
    Keep,
    Open,
    Opened,
    Ready,
    RoundEnded,
    Send,
    Start,
    Tell,
    Tick,
)
from noloco_jax.islands.protocol.island import Island
from noloco_jax.islands.protocol.messages import (
    PAST_INCARNATION,
    Accept,
    AtRound,
    Busy,
    Caller,
    Commit,
    Done,
    ExchangeId,
    Hello,
    Identity,
    Leave,
    Message,
    NotPartner,
    Outcome,
    Received,
    Speed,
    Status,
    StatusRequest,
    Timing,
)
from support.island_world import IDENTITY, ROUND, Fault, World, differing

FOREVER = None


def drops(world: World, name: str) -> list[str]:
    return [drop.reason for drop in world.nodes[name].drops]


def lags(world: World, name: str) -> dict[int, int]:
    return {action.xid.round: action.lag for action in world.nodes[name].applied}


def rounds_of(world: World) -> list[set[int]]:
    return [set(lags(world, name)) for name in world.names]


@pytest.mark.parametrize("action", ["kill", "vanish"])
def test_a_dead_partner_costs_only_its_own_exchanges(action):
    world = World(2, downtime=FOREVER)
    world.at(5.0, world.crash, world.nodes["i1"], action)
    world.run(65.0).finish()
    assert world.nodes["i0"].round == 5
    assert rounds_of(world)[0] == set()
    assert drops(world, "i0") == ["not committed in time"] * 4  # rounds 0 to 3; the last two are still waited for


@pytest.mark.parametrize(
    ("kind", "moment"),
    [("Message", "before it is sent"), ("Received", "before it is sent"), ("Received", "before it arrives")],
)
def test_an_island_that_dies_before_the_commit_leaves_no_correction(kind, moment):
    world = World(2, [Fault(kind, 0, "kill", moment)], downtime=FOREVER).run(45.0).finish()
    (alive,) = [node for node in world.nodes.values() if node.machine is not None]
    assert alive.weights == {}


def test_a_lost_commit_is_recovered():
    world = World(2, [Fault("Commit", 0, "drop")]).run(35.0).finish()
    assert 0 in lags(world, "i0") and 0 in lags(world, "i1")
    assert not world.nodes["i0"].one_sided and not world.nodes["i1"].one_sided


def test_a_commit_lost_with_its_sender_is_logged_as_one_sided():
    faults = [Fault("Commit", 0, "drop"), Fault("Apply", 0, "vanish", "after it is sent")]
    world = World(2, faults, downtime=FOREVER).run(65.0).finish()
    (alive,) = [node for node in world.nodes.values() if node.machine is not None]
    assert alive.one_sided == {0} and alive.weights == {}


def test_a_restarted_partner_forgets_the_open_exchange_and_exchanges_again():
    world = World(2, [Fault("Received", 0, "kill", "before it arrives")], downtime=3.0).run(65.0).finish()
    attempts = [{action.xid for action in node.applied if action.xid.round == 0} for node in world.nodes.values()]
    assert attempts[0] == attempts[1] and attempts[0] != {ExchangeId(0, "i1", 1, 1)}
    assert rounds_of(world)[0] >= {2, 3, 4}
    assert not any(node.one_sided for node in world.nodes.values())


@pytest.mark.parametrize("name", ["i0", "i1"])
def test_a_partner_that_is_behind_finds_the_message_in_the_mailbox(name):
    """Each island is delayed in turn: the earlier one dials in vain, the later one is answered."""
    world = World(2)
    world.at(2.0, setattr, world.nodes[name], "stopped_until", 16.0)
    world.run(65.0).finish()
    assert world.participation(0, 5) == 1


def test_the_earlier_island_of_a_pair_applies_its_correction_a_round_late():
    world = World(2)
    world.at(12.0, setattr, world.nodes["i1"], "stopped_until", 33.0)
    world.run(65.0).finish()
    assert lags(world, "i0")[1] == 1 and lags(world, "i1")[1] == 0
    assert not any(node.one_sided for node in world.nodes.values())


def test_an_island_too_far_behind_takes_the_state_of_a_donor():
    world = World(3)
    world.at(12.0, setattr, world.nodes["i2"], "stopped_until", 62.0)
    world.run(150.0).finish()
    assert world.nodes["i2"].heals and not world.nodes["i0"].heals and not world.nodes["i1"].heals
    assert world.participation(10, 13) == 1


def test_a_duplicate_is_applied_once():
    kinds = ("Hello", "Accept", "Message", "Received", "Commit", "StatusRequest", "Status", "AtRound")
    faults = [Fault(kind, nth, "duplicate") for kind in kinds for nth in range(40)]
    world = World(2, faults).run(65.0).finish()
    assert world.participation(0, 5) == 1  # the world asserts at each application that it is the first


@pytest.mark.parametrize("action", ["flip", "truncate", "nan", "wild"])
def test_one_broken_message_is_refused_by_both_and_sent_again(action):
    world = World(2, [Fault("Message", 4, action)]).run(65.0).finish()
    assert world.participation(0, 5) == 1
    assert world.sent["Message"] > 10


def test_a_nan_behind_a_good_message_of_the_same_exchange_is_never_applied():
    """`World.check` compares what both sides have applied."""
    world = World(2, [Fault("Message", nth, "nan behind") for nth in range(4, 8)]).run(65.0).finish()
    assert any("not due" in line for node in world.nodes.values() for line in node.lines)
    assert world.participation(0, 5) == 1


@pytest.mark.parametrize("action", ["flip", "nan", "wild"])
def test_three_broken_messages_in_a_row_lead_to_quarantine(action):
    world = World(2, [Fault("Message", nth, action) for nth in range(4, 40)]).run(105.0).finish()
    assert any("broken messages in a row" in line for node in world.nodes.values() for line in node.lines)
    assert world.participation(5, 9) == 0
    assert "the partner is in quarantine" in drops(world, "i0") + drops(world, "i1")


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Identity)])
def test_a_differing_identity_is_refused_before_any_data_and_only_that_island_ends(field):
    odd = differing(IDENTITY, field)
    world = World(3, identities=[IDENTITY, IDENTITY, odd]).run(35.0).finish()
    refused = [node.refused for node in world.nodes.values()]
    assert refused[:2] == [None, None]
    named = "seed" if field == "config" else field
    assert refused[2] is not None and re.search(f"says: {named}: .* here, .* at i[01][^:]*: give all", refused[2])
    for node in list(world.nodes.values())[:2]:
        assert any(re.fullmatch(f"i2 was refused: {named}: .* here, .* at i2.*", line) for line in node.lines)
    assert all({action.peer for action in world.nodes[name].applied} <= {"i0", "i1"} for name in ("i0", "i1"))


def test_a_caller_name_that_differs_from_its_certificate_is_refused():
    island = trained("a", ["b", "c"])
    hello = Hello(Caller(IDENTITY, "b", "a", 1, 0), ExchangeId(0, "b", 1, 1), 1)
    answer = island.handle(Opened("x", "c", hello), 20.0)[1]
    assert isinstance(answer, Send) and "name" in getattr(answer.header, "what", "")


def test_a_stopped_partner_is_given_up_at_the_deadline_learnt_from_past_transfers():
    world = World(2, [Fault("Message", 11, "stop", "before it is sent")]).run(65.0)
    (hit,) = [node for node in world.nodes.values() if node.disturbed]
    (other,) = [node for node in world.nodes.values() if not node.disturbed]
    assert other.machine is not None
    assert other.machine.peers[hit.name].transfers.allowance(1.0) < 0.5 * ROUND
    world.finish()


def test_actions_do_not_depend_on_the_offset_of_the_clock():
    def actions(offset: float):
        island = make("a", ["b"])
        events = [Start(), Tick(), Ready(), Tick(), RoundEnded(0, 5, 1.0), Tick(), RoundEnded(1, 5, 1.0), Tick()]
        return [island.handle(event, offset + 10.0 * time) for time, event in enumerate(events)]

    assert actions(0.0) == actions(1e7) == actions(-1e7)


def test_halves_of_a_partition_keep_training_and_exchange_after_it():
    world = World(4, durations=[ROUND] * 4)
    world.cuts.append((15.0, 75.0, frozenset({"i0", "i1"})))
    world.run(165.0).finish()
    for name, mate in (("i0", "i1"), ("i2", "i3")):
        together = {round for round in range(1, 5) if world.partner(name)(round) == mate}
        assert together and set(lags(world, name)) & set(range(1, 5)) == together
    assert world.participation(9, 14) == 1


def test_all_islands_resume_from_their_checkpoints_after_all_crashed():
    world = World(4)
    for node in world.nodes.values():
        world.at(55.0, world.crash, node, "kill")
    world.run(150.0).finish()
    assert all(node.round > 9 and not node.heals for node in world.nodes.values())
    assert world.participation(6, 9) == 1


def make(name: str, others: list[str], **arguments) -> Island:
    partners = [others[0], *others]
    return Island(name, others, IDENTITY, lambda round: partners[round % len(partners)], 1, **arguments)


def begin(island: Island) -> None:
    """Start an island that nobody answers, up to the time of 20 seconds."""
    for time, event in ((0.0, Start()), (10.0, Tick()), (10.0, Ready()), (20.0, Tick())):
        island.handle(event, time)


def trained(name: str, others: list[str], **arguments) -> Island:
    """Return an island after round 0, at the time of 20 seconds; nobody has answered its dial yet."""
    island = make(name, others, **arguments)
    begin(island)
    island.handle(RoundEnded(0, 3, 1.0), 20.0)
    return island


def hello(island: str, peer: str, round: int = 0, **arguments) -> Hello:
    xid = ExchangeId(round, peer, 1, 1)
    return Hello(Caller(IDENTITY, peer, island, 1, round), xid._replace(**arguments), 1)


def headers(actions) -> list:
    return [action.header for action in actions if isinstance(action, Send | Open)]


@pytest.mark.parametrize(("round", "answer"), [(0, Busy), (1, AtRound)])
def test_two_dials_that_cross_become_one(round, answer):
    """In even rounds the dial of the lower name counts: "a" refuses the dial of "b", and "b" accepts that of "a"."""
    assert isinstance(headers(trained("a", ["b"]).handle(Opened("x", "b", hello("a", "b", round)), 20.1))[0], answer)
    assert isinstance(headers(trained("b", ["a"]).handle(Opened("x", "a", hello("b", "a")), 20.1))[0], Accept)


def test_an_island_dials_again_at_once_when_its_partner_has_just_arrived():
    """The partner ended the round after it answered "not there yet", and its own dial crossed this one."""
    island, channel, _ = dialled(name="a", partner="b")
    assert isinstance(headers(island.handle(Opened("x", "b", hello("a", "b")), 20.1))[0], Busy)
    (again,) = headers(island.handle(Arrived(channel, AtRound(-1)), 20.2))
    assert isinstance(again, Hello) and again.xid.attempt == 2


def test_an_island_pauses_at_once_when_its_partner_is_behind():
    island = make("a", ["b"])
    begin(island)
    for second in range(20, 30):
        island.stride(float(second), 1)
    island.handle(RoundEnded(0, 3, 1.0), 30.0)
    for second in range(30, 40):
        island.stride(float(second), 1)
    call = island.handle(RoundEnded(1, 3, 1.0), 40.0)[-1]
    assert isinstance(call, Open)
    ended = Timing(4.0, Speed("b", 1.0, 0), None)  # "b" ended round 0 four of its steps ago; "a" has taken ten since
    island.handle(Arrived(call.channel, AtRound(0, ended)), 40.5)  # and half a second of latency
    assert island.pause() + island.pause() + island.pause() == 5.5


def test_an_island_told_twice_that_its_partner_is_behind_waits_for_its_dial():
    island, channel, _ = dialled(name="a", partner="b")
    island.handle(Opened("x", "b", hello("a", "b")), 20.1)
    (call,) = [a for a in island.handle(Arrived(channel, AtRound(-1)), 20.2) if isinstance(a, Open)]
    assert headers(island.handle(Arrived(call.channel, AtRound(-1)), 20.3)) == []


def test_a_dial_of_an_island_that_is_not_the_rounds_partner_is_refused():
    answer = headers(trained("a", ["b", "c"]).handle(Opened("x", "c", hello("a", "c")), 20.1))[0]
    assert answer == NotPartner("not in this round, of 3 members there")


def test_a_correction_is_applied_only_with_the_commit():
    island = trained("b", ["a"])
    call = hello("b", "a")
    island.handle(Opened("x", "a", call), 20.1)
    held = island.handle(Arrived("x", Message(call.xid), Content(1.0)), 21.0)
    assert held == [Keep(call.xid)]
    done: list[Any] = island.handle(Arrived("x", Received(call.xid, True)), 21.1)
    assert [type(action).__name__ for action in done] == ["Send", "Close", "Apply"]
    assert done[0] == Send("x", Commit(call.xid))
    assert done[2].weight == 1 / (3 + 1)  # w_j of w_i + w_j


def test_an_island_whose_name_is_taken_over_reports_it_once():
    island = make("a", ["b"])
    begin(island)
    island._context.commits = 1  # else it would ask which incarnation they know, and continue as a later one
    told: list[str] = []
    for round in range(3):
        (call,) = [a for a in island.handle(RoundEnded(round, 3, 1.0), 20.0 + round) if isinstance(a, Open)]
        actions = island.handle(Arrived(call.channel, NotPartner(PAST_INCARNATION)), 20.5 + round)
        told += [action.line for action in actions if isinstance(action, Tell)]
    assert [line.split(",")[0] for line in told] == ["another a has started since"]


def test_status_counts_due_and_committed_exchanges():
    island = trained("b", ["a"])
    status = island.status()
    assert isinstance(status, Status)
    assert (status.due, status.committed, status.round, status.partner) == (1, 0, 0, "a")


def test_no_island_dials_a_peer_after_its_goodbye():
    world = World(2)
    world.at(35.0, world.stop, world.nodes["i1"])
    world.at(36.0, world.crash, world.nodes["i1"], "kill")
    world.downtime = FOREVER
    dialled = world.run(38.0).sent["Hello"]
    assert world.run(95.0).finish().sent["Hello"] == dialled
    assert world.nodes["i0"].round >= 8


def dialled(name: str = "b", partner: str = "a") -> tuple[Island, Any, Hello]:
    """Return an island after its dial of round 0, the channel of the dial and its `Hello`."""
    island = make(name, [partner])
    begin(island)
    (call,) = [a for a in island.handle(RoundEnded(0, 3, 1.0), 20.0) if isinstance(a, Open)]
    assert isinstance(call.header, Hello)
    return island, call.channel, call.header


def test_an_exchange_committed_with_a_past_incarnation_is_logged_and_never_resumed():
    island, channel, _ = dialled()
    drop = island.handle(Arrived(channel, Done(Outcome.COMMITTED)), 20.1)[-1]
    assert isinstance(drop, Drop) and (drop.round, drop.one_sided) == (0, True)
    assert headers(island.handle(Opened("x", "a", hello("b", "a")), 20.2)) == [
        NotPartner("no message of that round is left")
    ]


def test_an_unresolved_exchange_blocks_a_second_one_of_its_round_until_settled():
    island, channel, call = dialled()
    island.handle(Arrived(channel, Accept(1, 0, 5)), 20.1)
    island.handle(Arrived(channel, Message(call.xid), Content(1.0)), 21.0)
    (query,) = [a for a in island.handle(Broken(channel), 21.1) if isinstance(a, Open)]
    assert query.header == StatusRequest(IDENTITY, call.xid)
    assert island.journal().unresolved == ((call.xid, "a"),)
    assert isinstance(headers(island.handle(Opened("x", "a", hello("b", "a")), 21.2))[0], Busy)
    answer = Status(1, 0, True, True, 1, 1, 0.0, "b", Outcome.ABORTED)
    island.handle(Arrived(query.channel, answer), 21.3)
    assert not island.journal().unresolved


@pytest.mark.parametrize("outcome", [Outcome.COMMITTED, None])
def test_a_leaving_peer_is_asked_about_unresolved_exchanges_before_it_goes(outcome):
    """Its last commit may still be in flight: if nobody asked, the exchange would be one-sided."""
    island, channel, call = dialled()
    island.handle(Arrived(channel, Accept(1, 0, 5)), 20.1)
    island.handle(Arrived(channel, Message(call.xid), Content(1.0)), 21.0)
    (query,) = [a for a in island.handle(Broken(channel), 21.1) if isinstance(a, Open)]
    island.handle(Broken(query.channel), 21.2)  # a retry would follow after a second
    actions = island.handle(Opened("bye", "a", Leave(Caller(IDENTITY, "a", "b", 1, 0))), 21.3)
    (again,) = [a for a in actions if isinstance(a, Open)]
    assert again.header == query.header and Close("bye") not in actions
    answer = Status(1, 0, True, True, 1, 1, 0.0, "b", outcome)
    actions = island.handle(Arrived(again.channel, answer), 21.4)
    assert Close("bye") in actions  # even if the outcome is unknown
    assert any(isinstance(a, Apply) for a in actions) is (outcome is not None)


@pytest.mark.parametrize("late", [False, True])
def test_an_unresolved_exchange_is_applied_once_known_to_be_committed_even_if_late(late):
    island, channel, call = dialled()
    island.handle(Arrived(channel, Accept(1, 0, 5)), 20.1)
    island.handle(Arrived(channel, Message(call.xid), Content(1.0)), 21.0)
    actions = island.handle(Broken(channel), 21.1)
    (query,) = [a for a in actions if isinstance(a, Open)]
    if late:
        for round in (1, 2):
            dropped = [a for a in island.handle(RoundEnded(round, 3, 1.0), 21.1) if isinstance(a, Drop)]
            assert dropped == []
    answer = Status(1, 0, True, True, 1, 1, 0.0, "b", Outcome.COMMITTED)
    (correction,) = [a for a in island.handle(Arrived(query.channel, answer), 22.0) if isinstance(a, Apply)]
    assert (correction.xid, correction.weight, correction.lag) == (call.xid, 5 / 8, 2 * late)


@pytest.mark.parametrize(("held", "outcome"), [(True, Outcome.COMMITTED), (False, Outcome.ABORTED)])
def test_a_status_request_makes_the_deciding_side_commit_or_abort(held, outcome):
    """The asking side holds a message. If this side does too, both apply; else it aborts and ignores later headers."""
    island, call = trained("b", ["a"]), hello("b", "a")
    island.handle(Opened("x", "a", call), 20.1)
    if held:
        island.handle(Arrived("x", Message(call.xid), Content(1.0)), 21.0)
    actions = island.handle(Opened("y", "a", StatusRequest(IDENTITY, call.xid)), 21.1)
    assert [a.header.outcome for a in actions if isinstance(a, Send) and isinstance(a.header, Status)] == [outcome]
    assert any(isinstance(a, Apply) for a in actions) is held
    for header, content in ((Message(call.xid), Content(1.0)), (Received(call.xid, True), None)):
        assert island.handle(Arrived("x", header, content), 21.2) == []
