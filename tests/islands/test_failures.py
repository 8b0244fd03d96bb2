"""Every failure of the design's table (§12): a row is a test."""

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
def test_a_partner_that_is_dead_costs_nothing_but_its_exchanges(action):
    world = World(2, downtime=FOREVER)
    world.at(5.0, world.crash, world.nodes["i1"], action)
    world.run(65.0).finish()
    assert world.nodes["i0"].round == 5
    assert rounds_of(world)[0] == set()
    assert drops(world, "i0") == ["not committed in time"] * 4  # of rounds 0 to 3; two are waited for


@pytest.mark.parametrize(
    ("kind", "moment"),
    [("Message", "before it is sent"), ("Received", "before it is sent"), ("Received", "before it arrives")],
)
def test_who_dies_before_the_commit_leaves_nothing_behind(kind, moment):
    world = World(2, [Fault(kind, 0, "kill", moment)], downtime=FOREVER).run(45.0).finish()
    (alive,) = [node for node in world.nodes.values() if node.machine is not None]
    assert alive.weights == {}


def test_a_lost_commit_is_asked_for():
    world = World(2, [Fault("Commit", 0, "drop")]).run(35.0).finish()
    assert 0 in lags(world, "i0") and 0 in lags(world, "i1")
    assert not world.nodes["i0"].one_sided and not world.nodes["i1"].one_sided


def test_a_commit_that_is_lost_with_its_sender_is_logged_as_one_sided():
    faults = [Fault("Commit", 0, "drop"), Fault("Apply", 0, "vanish", "after it is sent")]
    world = World(2, faults, downtime=FOREVER).run(65.0).finish()
    (alive,) = [node for node in world.nodes.values() if node.machine is not None]
    assert alive.one_sided == {0} and alive.weights == {}


def test_a_partner_that_has_restarted_knows_nothing_of_the_exchange_and_meets_again():
    world = World(2, [Fault("Received", 0, "kill", "before it arrives")], downtime=3.0).run(65.0).finish()
    attempts = [{action.xid for action in node.applied if action.xid.round == 0} for node in world.nodes.values()]
    assert attempts[0] == attempts[1] and attempts[0] != {ExchangeId(0, "i1", 1, 1)}
    assert rounds_of(world)[0] >= {2, 3, 4}
    assert not any(node.one_sided for node in world.nodes.values())


@pytest.mark.parametrize("name", ["i0", "i1"])
def test_a_partner_that_is_behind_finds_the_message_in_the_mailbox(name):
    """Each is first in its turn: who comes first dials in vain, who comes later is answered."""
    world = World(2)
    world.at(2.0, setattr, world.nodes[name], "stopped_until", 16.0)
    world.run(65.0).finish()
    assert world.participation(0, 5) == 1


def test_the_first_of_two_applies_its_half_a_round_late():
    world = World(2)
    world.at(12.0, setattr, world.nodes["i1"], "stopped_until", 33.0)
    world.run(65.0).finish()
    assert lags(world, "i0")[1] == 1 and lags(world, "i1")[1] == 0
    assert not any(node.one_sided for node in world.nodes.values())


def test_who_is_too_far_behind_takes_the_state_of_another():
    world = World(3)
    world.at(12.0, setattr, world.nodes["i2"], "stopped_until", 62.0)
    world.run(150.0).finish()
    assert world.nodes["i2"].heals and not world.nodes["i0"].heals and not world.nodes["i1"].heals
    assert world.participation(10, 13) == 1


def test_a_duplicate_is_applied_once():
    kinds = ("Hello", "Accept", "Message", "Received", "Commit", "StatusRequest", "Status", "AtRound")
    faults = [Fault(kind, nth, "duplicate") for kind in kinds for nth in range(40)]
    world = World(2, faults).run(65.0).finish()
    assert world.participation(0, 5) == 1  # that nothing is applied twice is asserted at each application


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
def test_another_model_run_config_or_roster_is_refused_before_any_data_and_only_the_odd_one_ends(field):
    odd = differing(IDENTITY, field)
    world = World(3, identities=[IDENTITY, IDENTITY, odd]).run(35.0).finish()
    refused = [node.refused for node in world.nodes.values()]
    assert refused[:2] == [None, None]
    named = "seed" if field == "config" else field
    assert refused[2] is not None and re.search(f"says: {named}: .* here, .* at i[01][^:]*: give all", refused[2])
    for node in list(world.nodes.values())[:2]:
        assert any(re.fullmatch(f"i2 was refused: {named}: .* here, .* at i2.*", line) for line in node.lines)
    assert all({action.peer for action in world.nodes[name].applied} <= {"i0", "i1"} for name in ("i0", "i1"))


def test_a_name_that_the_certificate_does_not_say_is_refused():
    island = trained("a", ["b", "c"])
    hello = Hello(Caller(IDENTITY, "b", "a", 1, 0), ExchangeId(0, "b", 1, 1), 1)
    answer = island.handle(Opened("x", "c", hello), 20.0)[1]
    assert isinstance(answer, Send) and "name" in getattr(answer.header, "what", "")


def test_a_stopped_partner_is_given_up_at_the_deadline_of_past_transfers():
    world = World(2, [Fault("Message", 11, "stop", "before it is sent")]).run(65.0)
    (hit,) = [node for node in world.nodes.values() if node.disturbed]
    (other,) = [node for node in world.nodes.values() if not node.disturbed]
    assert other.machine is not None
    assert other.machine.peers[hit.name].transfers.allowance(1.0) < 0.5 * ROUND
    world.finish()


def test_clocks_are_only_compared_with_themselves():
    def actions(offset: float):
        island = make("a", ["b"])
        events = [Start(), Tick(), Ready(), Tick(), RoundEnded(0, 5, 1.0), Tick(), RoundEnded(1, 5, 1.0), Tick()]
        return [island.handle(event, offset + 10.0 * time) for time, event in enumerate(events)]

    assert actions(0.0) == actions(1e7) == actions(-1e7)


def test_halves_of_a_partition_go_on_and_meet_after_it():
    world = World(4, durations=[ROUND] * 4)
    world.cuts.append((15.0, 75.0, frozenset({"i0", "i1"})))
    world.run(165.0).finish()
    for name, mate in (("i0", "i1"), ("i2", "i3")):
        together = {round for round in range(1, 5) if world.partner(name)(round) == mate}
        assert together and set(lags(world, name)) & set(range(1, 5)) == together
    assert world.participation(9, 14) == 1


def test_all_dead_come_back_from_their_checkpoints():
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
    """An island that nobody answers, until the time 20."""
    for time, event in ((0.0, Start()), (10.0, Tick()), (10.0, Ready()), (20.0, Tick())):
        island.handle(event, time)


def trained(name: str, others: list[str], **arguments) -> Island:
    """An island after round 0, which nobody has answered yet."""
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
    """The dial of the lower name counts in even rounds, so that "a" refuses "b", and "b" takes what "a" sends."""
    assert isinstance(headers(trained("a", ["b"]).handle(Opened("x", "b", hello("a", "b", round)), 20.1))[0], answer)
    assert isinstance(headers(trained("b", ["a"]).handle(Opened("x", "a", hello("b", "a")), 20.1))[0], Accept)


def test_who_has_missed_the_partners_dial_by_a_moment_dials_again_at_once():
    """The partner's "not there yet" was on its way when it got there, and its own dial crossed this one's."""
    island, channel, _ = dialled(name="a", partner="b")
    assert isinstance(headers(island.handle(Opened("x", "b", hello("a", "b")), 20.1))[0], Busy)
    (again,) = headers(island.handle(Arrived(channel, AtRound(-1)), 20.2))
    assert isinstance(again, Hello) and again.xid.attempt == 2


def test_who_finds_its_partner_behind_gives_way_at_once():
    island = make("a", ["b"])
    begin(island)
    for second in range(20, 30):
        island.stride(float(second), 1)
    island.handle(RoundEnded(0, 3, 1.0), 30.0)
    for second in range(30, 40):
        island.stride(float(second), 1)
    call = island.handle(RoundEnded(1, 3, 1.0), 40.0)[-1]
    assert isinstance(call, Open)
    ended = Timing(4.0, Speed("b", 1.0, 0), None)  # four of its steps ago, and "a" has taken ten since
    island.handle(Arrived(call.channel, AtRound(0, ended)), 40.5)  # or five, by the time that it is read
    assert island.pause() + island.pause() + island.pause() == 5.5


def test_who_is_told_twice_that_the_partner_is_not_there_waits_for_it():
    island, channel, _ = dialled(name="a", partner="b")
    island.handle(Opened("x", "b", hello("a", "b")), 20.1)
    (call,) = [a for a in island.handle(Arrived(channel, AtRound(-1)), 20.2) if isinstance(a, Open)]
    assert headers(island.handle(Arrived(call.channel, AtRound(-1)), 20.3)) == []


def test_who_is_not_the_partner_of_a_round_is_told_so():
    answer = headers(trained("a", ["b", "c"]).handle(Opened("x", "c", hello("a", "c")), 20.1))[0]
    assert answer == NotPartner("not in this round, of 3 members there")


def test_nothing_is_applied_before_the_commit_and_a_question_settles_what_was_not():
    island = trained("b", ["a"])
    call = hello("b", "a")
    island.handle(Opened("x", "a", call), 20.1)
    held = island.handle(Arrived("x", Message(call.xid), Content(1.0)), 21.0)
    assert held == [Keep(call.xid)]
    done: list[Any] = island.handle(Arrived("x", Received(call.xid, True)), 21.1)
    assert [type(action).__name__ for action in done] == ["Send", "Close", "Apply"]
    assert done[0] == Send("x", Commit(call.xid))
    assert done[2].weight == 1 / (3 + 1)  # w_j of w_i + w_j


def test_an_island_whose_name_another_has_taken_says_so_once():
    island = make("a", ["b"])
    begin(island)
    island._context.commits = 1  # else it would ask which incarnation they know, and continue as a later one
    told: list[str] = []
    for round in range(3):
        (call,) = [a for a in island.handle(RoundEnded(round, 3, 1.0), 20.0 + round) if isinstance(a, Open)]
        actions = island.handle(Arrived(call.channel, NotPartner(PAST_INCARNATION)), 20.5 + round)
        told += [action.line for action in actions if isinstance(action, Tell)]
    assert [line.split(",")[0] for line in told] == ["another a has started since"]


def test_status_counts_what_was_due_and_committed():
    island = trained("b", ["a"])
    status = island.status()
    assert isinstance(status, Status)
    assert (status.due, status.committed, status.round, status.partner) == (1, 0, 0, "a")


def test_after_a_goodbye_nobody_dials_in_vain():
    world = World(2)
    world.at(35.0, world.stop, world.nodes["i1"])
    world.at(36.0, world.crash, world.nodes["i1"], "kill")
    world.downtime = FOREVER
    dialled = world.run(38.0).sent["Hello"]
    assert world.run(95.0).finish().sent["Hello"] == dialled
    assert world.nodes["i0"].round >= 8


def dialled(name: str = "b", partner: str = "a") -> tuple[Island, Any, Hello]:
    """An island after its dial of round 0, the channel and what went through it."""
    island = make(name, [partner])
    begin(island)
    (call,) = [a for a in island.handle(RoundEnded(0, 3, 1.0), 20.0) if isinstance(a, Open)]
    assert isinstance(call.header, Hello)
    return island, call.channel, call.header


def test_what_the_partner_committed_with_a_past_incarnation_is_logged_and_never_taken_up_again():
    island, channel, _ = dialled()
    drop = island.handle(Arrived(channel, Done(Outcome.COMMITTED)), 20.1)[-1]
    assert isinstance(drop, Drop) and (drop.round, drop.one_sided) == (0, True)
    assert headers(island.handle(Opened("x", "a", hello("b", "a")), 20.2)) == [
        NotPartner("no message of that round is left")
    ]


def test_a_message_in_doubt_is_not_exchanged_until_it_is_settled():
    island, channel, call = dialled()
    island.handle(Arrived(channel, Accept(1, 0, 5)), 20.1)
    island.handle(Arrived(channel, Message(call.xid), Content(1.0)), 21.0)
    (question,) = [a for a in island.handle(Broken(channel), 21.1) if isinstance(a, Open)]
    assert question.header == StatusRequest(IDENTITY, call.xid)
    assert island.journal().unresolved == ((call.xid, "a"),)
    assert isinstance(headers(island.handle(Opened("x", "a", hello("b", "a")), 21.2))[0], Busy)
    answer = Status(1, 0, True, True, 1, 1, 0.0, "b", Outcome.ABORTED)
    island.handle(Arrived(question.channel, answer), 21.3)
    assert not island.journal().unresolved


@pytest.mark.parametrize("outcome", [Outcome.COMMITTED, None])
def test_who_says_goodbye_is_asked_what_only_it_knows_before_it_may_go(outcome):
    """Its last commit may be on its way when it goes: one-sided, if nobody asked then."""
    island, channel, call = dialled()
    island.handle(Arrived(channel, Accept(1, 0, 5)), 20.1)
    island.handle(Arrived(channel, Message(call.xid), Content(1.0)), 21.0)
    (question,) = [a for a in island.handle(Broken(channel), 21.1) if isinstance(a, Open)]
    island.handle(Broken(question.channel), 21.2)  # which leads to another one in a second
    actions = island.handle(Opened("bye", "a", Leave(Caller(IDENTITY, "a", "b", 1, 0))), 21.3)
    (again,) = [a for a in actions if isinstance(a, Open)]
    assert again.header == question.header and Close("bye") not in actions
    answer = Status(1, 0, True, True, 1, 1, 0.0, "b", outcome)
    actions = island.handle(Arrived(again.channel, answer), 21.4)
    assert Close("bye") in actions  # also where there was no answer
    assert any(isinstance(a, Apply) for a in actions) is (outcome is not None)


@pytest.mark.parametrize("late", [False, True])
def test_what_was_in_doubt_is_applied_when_it_is_known_to_be_committed_even_a_round_after_its_message(late):
    island, channel, call = dialled()
    island.handle(Arrived(channel, Accept(1, 0, 5)), 20.1)
    island.handle(Arrived(channel, Message(call.xid), Content(1.0)), 21.0)
    actions = island.handle(Broken(channel), 21.1)
    (question,) = [a for a in actions if isinstance(a, Open)]
    if late:
        for round in (1, 2):
            dropped = [a for a in island.handle(RoundEnded(round, 3, 1.0), 21.1) if isinstance(a, Drop)]
            assert dropped == []
    answer = Status(1, 0, True, True, 1, 1, 0.0, "b", Outcome.COMMITTED)
    (correction,) = [a for a in island.handle(Arrived(question.channel, answer), 22.0) if isinstance(a, Apply)]
    assert (correction.xid, correction.weight, correction.lag) == (call.xid, 5 / 8, 2 * late)


@pytest.mark.parametrize(("held", "outcome"), [(True, Outcome.COMMITTED), (False, Outcome.ABORTED)])
def test_a_question_settles_what_it_asks_for_on_the_side_that_decides(held, outcome):
    """The asking side holds a good message: with one here too, both apply; else later headers change nothing."""
    island, call = trained("b", ["a"]), hello("b", "a")
    island.handle(Opened("x", "a", call), 20.1)
    if held:
        island.handle(Arrived("x", Message(call.xid), Content(1.0)), 21.0)
    actions = island.handle(Opened("y", "a", StatusRequest(IDENTITY, call.xid)), 21.1)
    assert [a.header.outcome for a in actions if isinstance(a, Send) and isinstance(a.header, Status)] == [outcome]
    assert any(isinstance(a, Apply) for a in actions) is held
    for header, content in ((Message(call.xid), Content(1.0)), (Received(call.xid, True), None)):
        assert island.handle(Arrived("x", header, content), 21.2) == []
