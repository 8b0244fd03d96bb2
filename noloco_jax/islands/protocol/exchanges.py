"""Exchanges: who dials, what is accepted, when both commit (design §12).

Both sides stream their messages. The dialler sends `Received` once it holds a good one; the answering side commits once
it has read that and holds a good one itself, and sends `Commit`. So nobody applies half of an exchange, unless the
commit and every later answer about it are lost.
"""

import dataclasses
import math
from collections.abc import Callable

from noloco_jax.islands.protocol.bounds import Factors, agreed, takes_nothing
from noloco_jax.islands.protocol.context import Backoff, Context
from noloco_jax.islands.protocol.events import Apply, Channel, Content, Drop, Keep, RoundEnded
from noloco_jax.islands.protocol.link_limit import LinkLimit
from noloco_jax.islands.protocol.meeting import Exchange, Meeting, Stage
from noloco_jax.islands.protocol.messages import (
    PAST_INCARNATION,
    Accept,
    Answer,
    AtRound,
    Busy,
    Commit,
    Done,
    ExchangeId,
    Header,
    Hello,
    Message,
    NotPartner,
    Outcome,
    Received,
    Timing,
    Wrong,
)
from noloco_jax.islands.protocol.peers import Peer
from noloco_jax.islands.protocol.recovery import Recovery

PROPORTION = 10.0  # largest norm of a message, in multiples of the own one's: beyond it is no message of this model
FAR_IN_A_ROW = 2  # exchanges, with one peer that came no closer
LATELY = 64  # rounds in which an island meets those that count when others are left out
FAR_AWAY = "its weights are far away, and nothing is taken from it"


class Exchanges:
    """Meetings of the last `patience` rounds, and the exchanges in them.

    Args:
      context: the island's shared state.
      partner: round -> name of the partner, or None; a pure function that all islands share.
    """

    def __init__(self, context: Context, partner: Callable[[int], str | None]):
        self._context = context
        self._partner = partner
        self._leaving = False
        self._link_limit = LinkLimit(context)
        self.recovery = Recovery(context)
        self.meetings: dict[int, Meeting] = {}
        self.due = 0
        self.lags: list[int] = []  # lag of each correction
        self._unequal: dict[str, tuple[float, float]] = {}  # peer -> seconds of an inner step here and there
        self._told_unequal: set[str] = set()

    # Rounds.

    def round_ended(self, event: RoundEnded) -> None:
        """Add the round's meeting, and drop those older than `patience` rounds."""
        context = self._context
        oldest = event.round - context.settings.patience
        # Kept a round longer, as only a status request is open.
        self._give_up(oldest - 1, "its outcome was never heard")
        for round in [round for round in self.meetings if round <= oldest]:
            self._link_limit.took(self.meetings[round].running, context.now)
            self._end(self.meetings[round], "not committed in time")
        name = self._partner(event.round)
        if name is None:
            return
        peer = context.peers[name]
        meeting = Meeting(event.round, peer, event.tokens, event.norm, Backoff(context))
        self.meetings[event.round] = meeting
        self.due += 1
        if not math.isfinite(event.norm):
            self._end(meeting, "the own message is not finite")
        elif peer.quarantined_until > event.round:
            self._end(meeting, "the partner is in quarantine")
        else:
            self._dial(meeting)

    def leave(self) -> None:
        """Stop exchanging: begin nothing, and commit nothing but unresolved exchanges."""
        self._leaving = True
        for meeting in list(self.meetings.values()):
            self._end(meeting, "leaving")

    def abandon(self, reason: str) -> None:
        """Drop all meetings and unresolved exchanges, as their weights are replaced."""
        for meeting in list(self.meetings.values()):
            self._end(meeting, reason)
        self._give_up(self._context.round, reason)

    def uncertain(self) -> list[tuple[ExchangeId, str]]:
        """Return exchanges whose partner may have applied its half, and the partners."""
        running = [meeting.running for meeting in self.meetings.values() if meeting.running is not None]
        held = [exchange for exchange in running if exchange.dials and exchange.stage is Stage.HELD]
        return [(exchange.xid, exchange.peer.name) for exchange in (*self.recovery.exchanges, *held)]

    def tick(self) -> None:
        now = self._context.now
        for meeting in list(self.meetings.values()):
            exchange = meeting.running
            if exchange is not None and exchange.deadline <= now:
                self._link_limit.took(exchange, now)
                self._failed(meeting)
            if meeting.retry.due():
                self._dial(meeting)
        self.recovery.tick()

    def deadlines(self) -> list[float]:
        running = (meeting.running for meeting in self.meetings.values())
        times = [exchange.deadline for exchange in running if exchange is not None]
        times += [meeting.retry.at for meeting in self.meetings.values() if meeting.retry.at is not None]
        return times + self.recovery.deadlines()

    # The dialling side.

    def _dial(self, meeting: Meeting) -> None:
        context, peer = self._context, meeting.peer
        if not context.dials(context.name, peer.name):
            return  # it calls
        if self.recovery.about(meeting.round) or meeting.running is not None:
            return
        if peer.away and (meeting.attempts or peer.finished or context.dials(peer.name, context.name)):
            return  # one that never calls is tried once a round: it may be back and could not tell
        if self._link_limit.must_wait(meeting, self.meetings.values()):
            return
        meeting.attempts += 1
        xid = ExchangeId(meeting.round, context.name, context.incarnation, meeting.attempts)
        hello = Hello(context.caller(meeting.peer.name), xid, meeting.tokens, self._timing(meeting), context.news)
        channel = context.open(meeting.peer.name, hello)
        deadline = context.now + context.settings.answer_seconds
        known = meeting.peer.round
        meeting.running = Exchange(xid, meeting.peer, channel, True, Stage.OFFERED, known, context.now, deadline)

    def _answered(self, meeting: Meeting, exchange: Exchange, header: Header) -> None:
        if isinstance(header, Accept | Busy | AtRound):
            exchange.peer.away = False
        match header:
            case Accept():
                exchange.peer.told(header.incarnation, header.round, self._context.now)
                self._keep_pace(exchange.peer, meeting.round, header.timing)
                self._stream(meeting, exchange, header.tokens)
            case Busy():
                self._failed(meeting, least=header.seconds)
            case AtRound() if exchange.known < meeting.round <= exchange.peer.round:
                self._end_exchange(meeting)  # the answer was sent before the partner's own dial, which crossed this one
                self._dial(meeting)
            case AtRound():
                self._keep_pace(exchange.peer, header.round, header.timing)
                exchange.peer.round = max(exchange.peer.round, header.round)
                if header.round >= meeting.round + self._context.settings.patience:
                    self._context.came_too_late = True
                    self._end(meeting, f"the partner is at round {header.round}")
                else:  # it dials at its round's end; this side retries now and then, in case it cannot
                    self._failed(meeting)
            case NotPartner():
                self._end(meeting, header.reason)
                if header.reason == PAST_INCARNATION:
                    self._context.is_past(exchange.xid)
            case Wrong():
                self._end(meeting, header.what)
                self._context.is_wrong(exchange.peer.name, header)
            case Done(Outcome.COMMITTED):  # committed by a past incarnation of this island, whose weights are lost
                self._end_exchange(meeting)
                del self.meetings[meeting.round]
                self._drop(meeting.round, meeting.peer, "committed before", one_sided=True)
            case _:
                self._failed(meeting)

    # The answering side.

    def opened(self, channel: Channel, hello: Hello) -> None:
        """Answer a peer that dials for an exchange; its identity has been checked."""
        context, caller, xid = self._context, hello.caller, hello.xid
        peer = context.peers[caller.sender]
        if caller.incarnation < peer.incarnation or (xid.dialler, xid.incarnation) != (peer.name, caller.incarnation):
            context.answer(channel, NotPartner(PAST_INCARNATION))
            return
        peer.told(caller.incarnation, caller.round, context.now)
        if self._partner(xid.round) == peer.name:
            # Also where this side's message is not here yet, or no longer.
            self._keep_pace(peer, xid.round, hello.timing)
        refusal = self._refusal(peer, xid)
        if isinstance(refusal, NotPartner):
            refusal = dataclasses.replace(refusal, news=context.news)
        if refusal is not None:
            context.answer(channel, refusal)
            return
        meeting = self.meetings[xid.round]
        if meeting.running is not None:
            self._end_exchange(meeting)  # a dial that crossed this one, or an attempt that its dialler gave up
        now = context.now
        meeting.running = Exchange(xid, peer, channel, False, Stage.STREAMING, peer.round, now, math.inf)
        timing = self._timing(meeting)
        context.send(channel, Accept(context.incarnation, context.round, meeting.tokens, timing, context.news))
        self._stream(meeting, meeting.running, hello.tokens)

    def _refusal(self, peer: Peer, xid: ExchangeId) -> Answer | None:
        """Return the refusal of an exchange that cannot be accepted now, or None."""
        context, meeting = self._context, self.meetings.get(xid.round)
        # The partner of a round that has ended stays the one that it was paired with, whoever has joined since.
        partner = meeting.peer.name if meeting is not None else self._partner(xid.round)
        if self._leaving:
            return NotPartner("leaving")
        if peer.quarantined_until > xid.round:
            return NotPartner("in quarantine")
        if partner != peer.name:
            return NotPartner(f"not in this round, of {len(context.members.active(xid.round))} members there")
        if context.ledger.has_committed(xid.round):
            return Done(Outcome.COMMITTED)
        if xid in context.ledger.outcomes:
            return Done(Outcome.ABORTED)
        if meeting is None:
            if context.round - context.settings.patience < xid.round <= context.round:
                return NotPartner("no message of that round is left")
            return AtRound(context.round, context.pace.timing(context.round, context.now))
        if (
            self.recovery.about(xid.round)
            or _prefers_its_own(context, meeting, xid)
            or self._link_limit.must_wait(meeting, self.meetings.values(), by_offers=False)
        ):
            return Busy(context.settings.retry_seconds)
        return None

    def settle(self, peer: str, xid: ExchangeId, factors: Factors) -> tuple[Outcome | None, Factors]:
        """Return outcome and factors to a dialler that asks how its exchange ended; it holds this side's message."""
        if xid.dialler != peer:
            return None, ()
        meeting = self.meetings.get(xid.round)
        if meeting is not None and meeting.running is not None and meeting.running.xid == xid:
            if meeting.running.stage is Stage.HELD:
                self._commit(meeting, meeting.running, factors)
            else:
                self._failed(meeting)
        ledger = self._context.ledger
        return ledger.settle(xid), ledger.factors.get(xid, ())

    # Both sides.

    def go_on(self) -> None:
        """Dial for meetings that wait for the link, the newest first: the oldest would hardly end in time."""
        for meeting in sorted(self.meetings.values(), key=lambda meeting: -meeting.round):
            if meeting.waits:
                self._dial(meeting)

    def arrived(self, channel: Channel, header: Header, content: Content | None) -> None:
        """Handle a header that came through a channel of an exchange or a status request; ignore others."""
        meeting = self._meeting_of(channel)
        if meeting is None:
            settled = self.recovery.arrived(channel, header)
            if settled is not None:
                self._resolve(*settled)
            return
        exchange = meeting.running
        assert exchange is not None
        if isinstance(header, Message) and (header.xid != exchange.xid or exchange.stage is not Stage.STREAMING):
            self._context.tell(f"{exchange.peer.name} sent a message that is not due, and it is refused: {header.xid}")
            self._failed(meeting)
            self._is_broken(exchange.peer)
            return
        if exchange.stage is Stage.OFFERED:
            exchange.peer.delay = self._context.now - exchange.began
            self._answered(meeting, exchange, header)
            return
        match header:
            case Message() if content is not None:
                self._judge(meeting, exchange, content)
            case Received() if header.xid == exchange.xid and not header.good:
                self._end_exchange(meeting, known_aborted=True)
                meeting.retry.start()
            case Received() if header.xid == exchange.xid and not exchange.dials:
                exchange.approved = True
                exchange.factors = header.factors
                if exchange.stage is Stage.HELD:
                    self._commit(meeting, exchange, header.factors)
            case Commit() if header.xid == exchange.xid and exchange.dials and exchange.stage is Stage.HELD:
                self._commit(meeting, exchange, header.factors)
            case Accept():
                pass  # twice
            case _:
                self._failed(meeting)

    def broken(self, channel: Channel, corrupt: bool) -> None:
        meeting = self._meeting_of(channel)
        if meeting is None:
            self.recovery.broken(channel)
            return
        self._failed(meeting, closed=True)
        if corrupt:
            self._is_broken(meeting.peer)

    def _meeting_of(self, channel: Channel) -> Meeting | None:
        meetings = self.meetings.values()
        return next((m for m in meetings if m.running is not None and m.running.channel == channel), None)

    def _timing(self, meeting: Meeting) -> Timing | None:
        return self._context.pace.timing(meeting.round, self._context.now)

    def _keep_pace(self, peer: Peer, round: int, timing: Timing | None) -> None:
        context = self._context
        seconds = context.pace.unequal(timing)
        if seconds is not None:
            self._unequal[peer.name] = seconds
        elif timing is not None:
            self._unequal.pop(peer.name, None)
        context.pace.hear(peer.name, round, timing, context.now)
        context.pace.meet(round, timing, context.now, peer.delay)

    def _stream(self, meeting: Meeting, exchange: Exchange, tokens: int) -> None:
        exchange.stage = Stage.STREAMING
        exchange.weight = meeting.weight(tokens)
        exchange.began = self._context.now
        least = self._context.settings.retry_seconds  # another attempt would not begin earlier
        exchange.deadline = exchange.began + exchange.peer.transfers.allowance(least)
        self._context.send(exchange.channel, Message(exchange.xid))

    def _judge(self, meeting: Meeting, exchange: Exchange, content: Content) -> None:
        """Check the partner's message, which came whole, and find the factors that bound its correction."""
        context = self._context
        if not content.norm <= PROPORTION * meeting.norm:  # NaN neither
            context.send(exchange.channel, Received(exchange.xid, False))
            self._failed(meeting)
            self._is_broken(exchange.peer)
            return
        exchange.sizes = tuple(exchange.weight * difference for difference in content.differences)
        exchange.own_factors = context.bounds.factors(exchange.sizes, meeting.norm)
        if self._stays_far(exchange):
            exchange.own_factors = (0.0,) * len(exchange.sizes)
        else:
            context.actions.append(Keep(exchange.xid))
        exchange.stage = Stage.HELD
        if exchange.dials:
            context.send(exchange.channel, Received(exchange.xid, True, exchange.own_factors))
        elif exchange.approved:
            self._commit(meeting, exchange, exchange.factors)

    def _commit(self, meeting: Meeting, exchange: Exchange, factors: Factors) -> None:
        context = self._context
        self._note_if_left_out(exchange.peer, takes_nothing(factors))
        exchange.factors = agreed(exchange.own_factors, factors)
        if not exchange.dials:
            context.send(exchange.channel, Commit(exchange.xid, exchange.factors))
        context.close(exchange.channel)
        self._link_limit.took(exchange, context.now)
        meeting.running = None
        self._apply(exchange)

    def _apply(self, exchange: Exchange) -> None:
        context, xid, peer = self._context, exchange.xid, exchange.peer
        context.ledger.close(xid, Outcome.COMMITTED, exchange.factors)
        self.meetings.pop(xid.round, None)
        peer.broken, peer.met = 0, xid.round
        peer.distance = peer.distance.after(exchange.sizes, exchange.own_factors)
        self._leave_out(peer, takes_nothing(exchange.own_factors))
        if peer.left_out:
            context.actions.append(Drop(xid.round, peer.name, FAR_AWAY, one_sided=True, exchanged=True))
            return
        context.bounds.accept(exchange.sizes, exchange.own_factors, exchange.factors)
        context.commits += 1
        context.lineage = True
        self.lags.append(context.round - xid.round)
        context.actions.append(Apply(xid, peer.name, exchange.weight, self.lags[-1], exchange.factors))

    def _stays_far(self, exchange: Exchange) -> bool:
        """Return whether the peer is far away, came no closer, and most of the others are not far away.

        Where most are, the run drifts apart or this island is the one that was alone or is damaged: taking nothing from
        the others would make either worse.
        """
        peer, context = exchange.peer, self._context
        if peer.distance.after(exchange.sizes, exchange.own_factors).count < FAR_IN_A_ROW:
            return False
        since = max(context.round - LATELY, 0)
        are_far = [one.distance.count > 0 for one in context.peers.values() if one is not peer and one.met >= since]
        return 1 + sum(are_far) <= len(are_far) - sum(are_far)

    def _leave_out(self, peer: Peer, leaves_out: bool) -> None:
        """Record and tell whether nothing is taken from a peer."""
        name = self._context.name
        if leaves_out and not peer.left_out:
            peer.fault = (
                f"is far from {name}'s weights and came no closer since their last exchange: it was alone for long; or "
                "its weights are damaged, if most say so and go on to"
            )
            self._context.tell(f"{peer.name} {peer.fault}; {name} takes nothing from it until it is close")
        elif peer.left_out and not leaves_out:
            self._context.tell(f"{peer.name} came closer, and {name} takes corrections from it again")
        peer.left_out = leaves_out

    def _note_if_left_out(self, peer: Peer, leaves_out: bool) -> None:
        """Record and tell whether a peer takes nothing from this island."""
        if leaves_out and not peer.leaves_out:
            name = self._context.name
            self._context.tell(
                f"{peer.name} takes nothing from {name}, which is far from its weights; {name} may still take from it, "
                "to come closer"
            )
        peer.leaves_out = leaves_out

    def _resolve(self, exchange: Exchange, outcome: Outcome) -> None:
        """Apply or drop an exchange whose outcome has become known."""
        round = exchange.xid.round
        if outcome is Outcome.COMMITTED:
            self._apply(exchange)
            return
        if outcome is Outcome.ABORTED:
            self._context.ledger.close(exchange.xid, outcome)
        if round in self.meetings and outcome is Outcome.ABORTED:
            self._dial(self.meetings[round])
            return
        self.meetings.pop(round, None)
        self._drop(round, exchange.peer, f"{outcome} by the partner", outcome is Outcome.FORGOTTEN)

    def _failed(self, meeting: Meeting, *, closed: bool = False, least: float = 0.0) -> None:
        """End the exchange under way and schedule another attempt."""
        self._end_exchange(meeting, closed=closed)
        meeting.retry.start(least)

    def _end_exchange(self, meeting: Meeting, *, closed: bool = False, known_aborted: bool = False) -> None:
        """End the exchange under way. From `Received` on, only the answering side may call it aborted."""
        exchange = meeting.running
        assert exchange is not None
        meeting.running = None
        if not closed:
            self._context.close(exchange.channel)
        if exchange.dials and exchange.stage is Stage.HELD and not known_aborted:
            self.recovery.add(exchange)
        else:
            self._context.ledger.close(exchange.xid, Outcome.ABORTED)

    def _end(self, meeting: Meeting, reason: str) -> None:
        """Drop a meeting; an unresolved exchange of it stays."""
        if meeting.running is not None:
            self._end_exchange(meeting)
        del self.meetings[meeting.round]
        if not self.recovery.about(meeting.round):
            self._drop(meeting.round, meeting.peer, reason)

    def _drop(self, round: int, peer: Peer, reason: str, one_sided: bool = False) -> None:
        self._context.actions.append(Drop(round, peer.name, reason, one_sided))
        if peer.name not in self._told_unequal and (seconds := self._unequal.get(peer.name)) is not None:
            self._told_unequal.add(peer.name)
            self._context.tell(
                f"an inner step takes {seconds[0]:.3g} s here and {seconds[1]:.3g} s on {peer.name}: islands of "
                "unequal speed hardly meet in equal steps; start all of them with --pace=time (nj.Island has no pace)"
            )

    def _give_up(self, round: int, reason: str) -> None:
        for exchange in self.recovery.give_up(round):
            self._drop(exchange.xid.round, exchange.peer, reason, one_sided=True)

    def _is_broken(self, peer: Peer) -> None:
        """Count a broken message; quarantine the peer after several in a row."""
        context = self._context
        peer.broken += 1
        if peer.broken < context.settings.broken_in_a_row:
            return
        peer.broken = 0
        peer.quarantined_until = context.round + 1 + context.settings.quarantine_rounds
        peer.fault = f"sent {context.settings.broken_in_a_row} broken messages in a row"
        context.tell(f"{peer.name} {peer.fault}; nothing is exchanged with it before round {peer.quarantined_until}")
        for meeting in [meeting for meeting in self.meetings.values() if meeting.peer is peer]:
            self._end(meeting, "the partner is in quarantine")


def _prefers_its_own(context: Context, meeting: Meeting, xid: ExchangeId) -> bool:
    """Return whether the exchange under way has precedence over the partner's dial.

    Of two dials that cross, both sides keep the lower name's in even rounds and the higher name's in odd ones.
    """
    running = meeting.running
    if running is None:
        return False
    if running.dials:
        lower_name_leads = meeting.round % 2 == 0
        leads = (context.name < meeting.peer.name) is lower_name_leads
        return leads or running.stage is not Stage.OFFERED
    return (xid.incarnation, xid.attempt) <= (running.xid.incarnation, running.xid.attempt)
