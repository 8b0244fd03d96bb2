"""Exchanges header by header: actions of one island in answer to each header of its partner."""

import math
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
    Refused,
    RoundEnded,
    Send,
    Start,
    Tell,
)
from noloco_jax.islands.protocol.island import Island
from noloco_jax.islands.protocol.messages import (
    Accept,
    Caller,
    Commit,
    ExchangeId,
    Hello,
    Leave,
    Message,
    NotPartner,
    Outcome,
    Received,
    StatusRequest,
    Wrong,
)
from support.island_world import IDENTITY

GOOD, BROKEN = 1.0, math.nan  # norms


class Exchanging:
    """Island "a", whose partner is "b" in every round, after the end of round 0."""

    def __init__(self, others: str = "bcd"):
        self.island = Island("a", list(others), IDENTITY, lambda round: "b", 7)
        for event in (Start(), Ready()):
            for action in self.island.handle(event, 0.0):
                if isinstance(action, Open):
                    self.island.handle(Broken(action.channel), 0.0)
        self.end_round(0)

    def end_round(self, round: int) -> list[Any]:
        """End a round and return the actions; the island dials "b"."""
        actions = self.island.handle(RoundEnded(round, 1, 1.0), float(round))
        calls = [each for each in actions if isinstance(each, Open)]
        self.dials = [(call.channel, call.header) for call in calls if isinstance(call.header, Hello)]
        return actions

    def arrive(self, channel: Any, header: Any, norm: float | None = None) -> list[Any]:
        return self.island.handle(Arrived(channel, header, None if norm is None else Content(norm)), 1.0)

    def hold(self) -> tuple[Any, ExchangeId]:
        """Run the dialled exchange until the island holds the partner's message; return its channel and id."""
        ((channel, hello),) = self.dials
        self.arrive(channel, Accept(1, 0, 1))
        actions = self.arrive(channel, Message(hello.xid), GOOD)
        assert actions == [Keep(hello.xid), Send(channel, Received(hello.xid, True))]
        return channel, hello.xid

    def answer(self, round: int, norm: float, attempt: int = 1) -> list[Any]:
        """Fail the island's own dials, then let "b" dial and exchange; return all actions."""
        for channel, _ in self.dials:
            self.island.handle(Broken(channel), 1.0)
        xid, channel = ExchangeId(round, "b", 1, attempt), ("in", round, attempt)
        actions = self.island.handle(Opened(channel, "b", Hello(Caller(IDENTITY, "b", "a", 1, round), xid, 1)), 1.0)
        actions += self.arrive(channel, Message(xid), norm)
        return actions + self.arrive(channel, Received(xid, True))


def test_an_exchange_with_a_held_message_is_saved_as_unresolved():
    """The partner may commit at any time after `Received`, even if this process is killed before it hears of it."""
    a = Exchanging()
    assert a.island.journal().unresolved == ()
    channel, xid = a.hold()
    assert a.island.journal().unresolved == ((xid, "b"),)
    a.arrive(channel, Commit(xid))
    assert a.island.journal().unresolved == () and a.island.journal().outcomes[xid] is Outcome.COMMITTED


def test_an_unresolved_exchange_is_dropped_a_round_later_than_an_unanswered_one():
    a = Exchanging()
    channel, xid = a.hold()
    a.island.handle(Broken(channel), 1.0)
    lost = [[action for action in a.end_round(round) if isinstance(action, Drop)] for round in (1, 2, 3)]
    assert [[(drop.round, drop.one_sided) for drop in drops] for drops in lost] == [
        [],
        [],
        [(xid.round, True), (1, False)],
    ]


def test_only_the_dialling_island_may_query_the_outcome_of_an_exchange():
    a = Exchanging()
    xid = ExchangeId(0, "b", 1, 1)
    answer: Any = a.island.handle(Opened("x", "c", StatusRequest(IDENTITY, xid)), 1.0)[0]
    assert answer.header.outcome is None
    assert any(isinstance(action, Apply) for action in a.answer(0, GOOD))  # the exchange is still open


def test_only_consecutive_broken_messages_lead_to_quarantine():
    a = Exchanging()
    for round, norm in enumerate((BROKEN, BROKEN, GOOD, BROKEN)):
        if round:
            a.end_round(round)
        actions = a.answer(round, norm)
        assert any(isinstance(action, Apply) for action in actions) is (norm == GOOD)
    assert a.island.peers["b"].quarantined_until == 0
    a.end_round(4)
    for attempt in (1, 2):
        a.answer(4, BROKEN, attempt)
    assert a.island.peers["b"].quarantined_until == 4 + 1 + 16


@pytest.mark.parametrize("undue", ["a second one", "another exchange's", "ahead of the answer"])
def test_a_message_that_is_not_due_is_never_kept_and_ends_its_exchange(undue):
    a = Exchanging()
    ((channel, hello),) = a.dials
    actions, xid = [], hello.xid
    if undue != "ahead of the answer":
        actions += a.arrive(channel, Accept(1, 0, 1))
    if undue == "a second one":
        actions += a.arrive(channel, Message(xid), GOOD)
    other = xid._replace(attempt=2) if undue == "another exchange's" else xid
    refusal = a.arrive(channel, Message(other), GOOD)
    actions += refusal
    assert [action for action in actions if isinstance(action, Keep)] == [Keep(xid)] * (undue == "a second one")
    assert Close(channel) in refusal
    (line,) = [action.line for action in refusal if isinstance(action, Tell)]
    assert line.startswith("b sent a message that is not due, and it is refused: ExchangeId(round=0")
    assert a.island.peers["b"].broken == 1


@pytest.mark.parametrize("until", [1, 2])
def test_quarantine_ends_in_the_announced_round(until):
    a = Exchanging()
    a.island.peers["b"].quarantined_until = until
    a.end_round(1)
    assert len(a.dials) == (until == 1)
    answer: Any = a.answer(1, GOOD)[0]
    assert isinstance(answer.header, Accept) if until == 1 else answer.header == NotPartner("in quarantine")


def test_a_refusal_stops_an_island_only_before_its_first_exchange():
    for has_exchanged in (False, True):
        a = Exchanging(others="b")
        channel, xid = a.hold()
        if has_exchanged:
            a.arrive(channel, Commit(xid))
        a.island.handle(Broken(channel), 1.0)
        a.end_round(1)
        actions = a.arrive(a.dials[0][0], Wrong("model"))
        assert any(isinstance(action, Tell) for action in actions)
        assert any(isinstance(action, Refused) for action in actions) is not has_exchanged


def test_a_late_goodbye_of_a_former_process_is_ignored():
    a = Exchanging()
    a.island.peers["b"].told(2, 0, 0.0)
    for incarnation, away in ((1, False), (2, True)):
        a.island.handle(Opened("x", "b", Leave(Caller(IDENTITY, "b", "a", incarnation, 0))), 1.0)
        assert a.island.peers["b"].away is away
