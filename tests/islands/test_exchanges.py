"""Exchanges word by word: what one island makes of each of its partner's."""

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
    """Island "a", which meets "b" in every round, and has ended round 0."""

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
        """The channel and the id of the exchange that it has dialled for, up to the message that it now holds."""
        ((channel, hello),) = self.dials
        self.arrive(channel, Accept(1, 0, 1))
        said = self.arrive(channel, Message(hello.xid), GOOD)
        assert said == [Keep(hello.xid), Send(channel, Received(hello.xid, True))]
        return channel, hello.xid

    def answer(self, round: int, norm: float, attempt: int = 1) -> list[Any]:
        """Return the answer to a dial of "b", whom the island's own dial does not reach, and what follows."""
        for channel, _ in self.dials:
            self.island.handle(Broken(channel), 1.0)
        xid, channel = ExchangeId(round, "b", 1, attempt), ("in", round, attempt)
        actions = self.island.handle(Opened(channel, "b", Hello(Caller(IDENTITY, "b", "a", 1, round), xid, 1)), 1.0)
        actions += self.arrive(channel, Message(xid), norm)
        return actions + self.arrive(channel, Received(xid, True))


def test_a_message_that_was_held_is_saved_as_in_doubt():
    """The partner may commit at any time from `Received` on, also where the process that is to hear of it is killed."""
    a = Exchanging()
    assert a.island.journal().unresolved == ()
    channel, xid = a.hold()
    assert a.island.journal().unresolved == ((xid, "b"),)
    a.arrive(channel, Commit(xid))
    assert a.island.journal().unresolved == () and a.island.journal().outcomes[xid] is Outcome.COMMITTED


def test_a_doubt_is_given_up_a_round_after_its_message():
    a = Exchanging()
    channel, xid = a.hold()
    a.island.handle(Broken(channel), 1.0)
    lost = [[action for action in a.end_round(round) if isinstance(action, Drop)] for round in (1, 2, 3)]
    assert [[(drop.round, drop.one_sided) for drop in drops] for drops in lost] == [
        [],
        [],
        [(xid.round, True), (1, False)],
    ]


def test_only_who_dialled_may_ask_how_an_exchange_ended():
    a = Exchanging()
    xid = ExchangeId(0, "b", 1, 1)
    answer: Any = a.island.handle(Opened("x", "c", StatusRequest(IDENTITY, xid)), 1.0)[0]
    assert answer.header.outcome is None
    assert any(isinstance(action, Apply) for action in a.answer(0, GOOD))  # it is as open as before


def test_broken_messages_with_a_good_one_between_are_no_reason_for_quarantine():
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
    said, xid = [], hello.xid
    if undue != "ahead of the answer":
        said += a.arrive(channel, Accept(1, 0, 1))
    if undue == "a second one":
        said += a.arrive(channel, Message(xid), GOOD)
    other = xid._replace(attempt=2) if undue == "another exchange's" else xid
    refusal = a.arrive(channel, Message(other), GOOD)
    said += refusal
    assert [action for action in said if isinstance(action, Keep)] == [Keep(xid)] * (undue == "a second one")
    assert Close(channel) in refusal
    (line,) = [action.line for action in refusal if isinstance(action, Tell)]
    assert line.startswith("b sent a message that is not due, and it is refused: ExchangeId(round=0")
    assert a.island.peers["b"].broken == 1


@pytest.mark.parametrize("until", [1, 2])
def test_quarantine_is_over_in_the_round_that_is_told(until):
    a = Exchanging()
    a.island.peers["b"].quarantined_until = until
    a.end_round(1)
    assert len(a.dials) == (until == 1)
    answer: Any = a.answer(1, GOOD)[0]
    assert isinstance(answer.header, Accept) if until == 1 else answer.header == NotPartner("in quarantine")


def test_newcomers_that_refuse_an_island_stop_it_before_its_first_exchange_alone():
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


def test_a_late_goodbye_of_a_former_process_is_not_the_present_ones():
    a = Exchanging()
    a.island.peers["b"].told(2, 0, 0.0)
    for incarnation, away in ((1, False), (2, True)):
        a.island.handle(Opened("x", "b", Leave(Caller(IDENTITY, "b", "a", incarnation, 0))), 1.0)
        assert a.island.peers["b"].away is away
