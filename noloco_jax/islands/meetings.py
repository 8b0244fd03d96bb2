"""Exchanges of one island, round by round: who dials, what is accepted, what is committed, and what is left out.

A meeting is a round's message that waits for its partner's. Its dialler calls until the messages are exchanged or the
patience ends. An exchange whose messages flow has more time: on a slow link it is finished late rather than begun in
vain. While two of them flow the link is busy, and a round that ends is left out, before a byte of it is sent. So the
link always has an exchange to carry, and never more than it can end.
"""

import asyncio
import enum
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from noloco_jax.islands import messages_pb2 as pb
from noloco_jax.islands.bounds import FAR_IN_A_ROW, Bounds, agreed
from noloco_jax.islands.exchange import (
    SILENT_SECONDS,
    Attempt,
    ConnectionLost,
    ProtocolError,
    Refused,
    answer,
    hold_until,
    offer,
    receive_hello,
    send,
)
from noloco_jax.islands.interfaces import PATIENCE, RoundOutcome, Stream
from noloco_jax.islands.peer_table import PeerTable
from noloco_jax.islands.peers import ENDED, FINISHED, Peer, check_hello, check_round, check_timing

MAX_DELAY = 2.0  # seconds that a frame may be on its way, as far as pace is concerned
RETRY_SECONDS, MAX_RETRY_SECONDS = 0.2, 2.0  # before a broken exchange is dialled again
BROKEN_IN_A_ROW, QUARANTINE_ROUNDS = 3, 16
LATELY = 64  # rounds in which an island has exchanged with those that count when others are left out
HELD_AHEAD = 64  # rounds that a dialler may be ahead for its call to be held
BACKLOG = 1.0  # messages still to flow with which a link stays busy for a round
OPEN = 3  # patiences of messages that are kept at most
CARRIED = 0.97  # share of the exchanges below which a link is called too slow
LATEST = 8  # patiences after which an exchange that still flows is given up
TRAINING = pb.Status.TRAINING


class State(enum.Enum):
    """State of a meeting. README.md has a picture."""

    WAITING = enum.auto()  # for the partner's Accept or Hello
    ACCEPTED = enum.auto()  # the messages flow, or did until a call broke: what came is kept
    UNSURE = enum.auto()  # the partner may have committed: `Received` was sent
    OVER = enum.auto()  # committed, or ended without a correction: it has left `Meetings._open`


_NEXT = {
    State.WAITING: (State.ACCEPTED, State.OVER),
    State.ACCEPTED: (State.ACCEPTED, State.UNSURE, State.OVER),
    State.UNSURE: (State.ACCEPTED, State.OVER),  # accepted once more, so it was not committed
    State.OVER: (),
}


@dataclass(eq=False)
class Meeting:
    """Message of a round that waits for its partner's.

    Attributes:
      round, partner: of the message.
      attempt: the message, and what has come of the partner's.
      steps: inner steps begun when it was made.
      lacks: exchanges of the same fragment whose corrections the message lacks; half of those with other partners.
      bound, damping: the factors that bring its correction into the bounds, and that scale it for what it lacks.
      state: changed by `become` alone.
      task: the call under way, changed by `carry` alone.
    """

    round: int
    partner: str
    attempt: Attempt
    steps: int
    lacks: float = 0.0
    bound: float = 1.0
    damping: float = 1.0
    state: State = State.WAITING
    task: asyncio.Task | None = None

    def become(self, state: State) -> None:
        assert state in _NEXT[self.state], f"round {self.round}: {state} after {self.state}"
        self.state = state

    def carry(self, task: asyncio.Task | None) -> None:
        """Make a task the call under way, and cancel the former one unless it is the caller itself."""
        if self.task is not None and self.task is not asyncio.current_task():
            self.task.cancel()
        self.task = task  # a cancelled one's traceback holds the meeting


class Meetings:
    """Exchanges of one island.

    Args:
      table: the island.
      saved: see `to_json`.

    Attributes:
      due: messages with a partner, since the start.
      committed: of them those exchanged.
      one_sided: exchanges that only the partner may have applied, also before the start.
      unapplied: rounds whose corrections are delivered, and not yet in the messages that the training makes.
    """

    def __init__(self, table: PeerTable, saved: Mapping[str, Any] | None):
        self.table = table
        self.due = self.committed = 0
        self.one_sided: int = saved["one_sided"] + saved["unresolved"] if saved else 0
        self.unapplied: set[int] = set()
        self._bounds = Bounds(saved and saved["bounds"])
        self._open: dict[int, Meeting] = {}
        self._finished: dict[tuple[str, int, int], float] = {}  # (dialler, incarnation, round) -> own factor
        self._steps_late = 0  # of corrections, summed
        self._left_out: deque[int] = deque(maxlen=LATELY)  # rounds, as the link was busy
        self._carried: deque[bool] = deque(maxlen=LATELY)  # False for a round left out, True for one exchanged
        self._logged_slow = False
        self._logged_unequal = False

    def to_json(self) -> dict[str, Any]:
        return {
            "bounds": self._bounds.to_json(),
            "one_sided": self.one_sided,
            "unresolved": sum(meeting.state is State.UNSURE for meeting in self._open.values()),
        }

    @property
    def steps_late(self) -> float:
        """Mean inner steps from the end of a round until its exchange was committed."""
        return self._steps_late / self.committed if self.committed else 0.0

    def is_open(self, round: int) -> bool:
        """Return whether the message of this round, or of an earlier one, may still be exchanged; for any thread."""
        return any(one <= round for one in tuple(self._open))  # a copy, as meetings end meanwhile

    def begin(self, round: int, own: Any, norm: float, tokens: int) -> None:
        """Begin the meeting of a round that has ended, and end those that have waited too long."""
        table, oldest = self.table, round - LATEST * self.table.patience  # a lost Commit is asked for until then
        self.end("not committed in time", lambda meeting: meeting.round <= round - self._patience(meeting))
        self._finished = {key: factor for key, factor in self._finished.items() if key[2] > oldest - LATELY}
        name = table.partner(round)
        if name is None:
            return
        self.due += 1
        factor = partial(self._factor, round)  # not of the meeting: a cycle would keep all arrays
        attempt = Attempt(table.codec, table.trainer.run, own, norm, tokens, factor)
        meeting = self._open[round] = Meeting(round, name, attempt, table.trainer.num_steps)
        for other in self.unapplied:
            meeting.lacks += self._share_of(other, table.partner(other) or "", meeting)
        if not math.isfinite(norm):
            self._end(meeting, "the own message is not finite")
        elif fault := self._absence(table.peers[name], round):
            self._end(meeting, fault)
        elif (dials := self._dials(name, round)) is None:
            self._end(meeting, "neither of the two can be dialled")
        elif self._backlog() >= BACKLOG or len(self._open) > OPEN * table.patience:
            self._left_out.append(round)
            self._end(meeting, "the link is busy with earlier rounds")
            self._log_slow()
        elif dials:
            meeting.carry(table.start(self._dial(meeting)))

    def _backlog(self) -> float:
        """Return the messages still to flow; a partner that is slow itself counts as half of them at most."""
        backlogs: dict[str, float] = {}
        for meeting in self._open.values():
            backlogs[meeting.partner] = backlogs.get(meeting.partner, 0.0) + meeting.attempt.backlog
        largest = BACKLOG / 2 if len(self.table.peers) > 1 else math.inf
        return sum(min(backlog, largest) for backlog in backlogs.values())

    def _patience(self, meeting: Meeting) -> int:
        """Return the rounds after which a meeting ends: more of them while its messages flow, or did just now."""
        attempt = meeting.attempt
        flows = attempt.num_calls or _now() - attempt.flowed < SILENT_SECONDS
        return self.table.patience * (LATEST if flows else 1)

    def end(self, reason: str, which: Any = lambda meeting: True) -> None:
        """End meetings without a correction: all, or those for which `which` returns True."""
        for meeting in [one for one in self._open.values() if which(one)]:
            self._end(meeting, reason)

    def peer_left(self, peer: Peer) -> None:
        """End the meetings with a peer that begins no further exchange, but for those that it may have committed."""
        reason = self._absence(peer, self.table.round)
        self.end(reason, lambda meeting: meeting.partner == peer.name and meeting.state is not State.UNSURE)

    # The dialling side.

    async def _dial(self, meeting: Meeting) -> None:
        """Dial until the messages are exchanged, or there is no hope."""
        delay, table = RETRY_SECONDS, self.table
        peer = table.peers[meeting.partner]

        def hold() -> None:
            meeting.become(State.UNSURE)

        def hear(frame: pb.Frame) -> None:
            nonlocal dialled
            if dialled is not None:
                dialled, peer.delay = None, min((_now() - dialled) / 2, MAX_DELAY)
            if frame.HasField("no"):
                check_round(frame.no.round)
                table.hear(peer.name, frame.no.round)
                table.take_news(peer.name, frame.no.roster_version)
            elif frame.HasField("accept"):
                check_timing(frame.accept.timing)
                table.hear(peer.name, meeting.round, frame.accept.incarnation)
                table.take_news(peer.name, frame.accept.roster_version)
                now, timing = _now(), frame.accept.timing
                table.pace.adapt(peer.name, meeting.round, timing, now - peer.delay, now, has_called=False)
                meeting.become(State.ACCEPTED)  # it has committed nothing before
            else:
                table.hear(peer.name)

        while True:
            dialled: float | None = _now()
            try:
                async with table.network.exchange(meeting.partner) as stream:
                    theirs = await offer(stream, self._hello(meeting), meeting.attempt, hear, hold)
            except Refused as refused:
                if refused.answer.reason != pb.No.NOT_TRAINING:
                    if refused.answer.reason == pb.No.WRONG:
                        peer.wrong = refused.answer.text[:300]
                    self._end(meeting, refused.answer.text[:100], refused.answer.reason == pb.No.OVER_BEFORE)
                    return
            except ProtocolError as error:
                self._broken(peer, error)
            except ConnectionLost as error:
                table.log_of(peer.name, "silence", f"{peer.name}: {error}")
            else:
                if meeting.state is not State.UNSURE:  # a Done for what was never received
                    self._broken(peer, ProtocolError("a commit that was not due"))
                else:
                    self._commit(meeting, theirs)
                    return
            if meeting.state is State.OVER:  # a broken message ends all meetings with its sender
                return
            if fault := self._absence(peer, meeting.round):
                self._end(meeting, fault)
                return
            await asyncio.sleep(delay)
            delay = min(2 * delay, MAX_RETRY_SECONDS)

    def _hello(self, meeting: Meeting) -> pb.Hello:
        table = self.table
        return pb.Hello(
            round=meeting.round,
            incarnation=table.incarnation,
            identity=table.digest,
            tokens=meeting.attempt.tokens,
            timing=table.pace.timing(meeting.round, _now()),
            roster_version=table.roster.version,
            num_held=meeting.attempt.num_held,
            held_of=meeting.attempt.incarnation,
        )

    def _dials(self, name: str, round: int) -> bool | None:
        """Return whether this island dials, rather than its partner; None: neither can."""
        table = self.table
        members = [table.roster.member(one) for one in (table.name, name)]
        mine, theirs = (one.address.can_be_dialled for one in members)
        if not (mine and theirs):
            return theirs if mine or theirs else None
        return (members[0].id < members[1].id) is (round % 2 == 0)

    # The answering side.

    async def called(self, name: str, stream: Stream) -> None:
        """Answer a call for an exchange; `name` is that of the caller's certificate."""
        table, hello, came = self.table, await receive_hello(stream), _now()
        peer = table.peers.get(name)
        try:
            check_hello(hello)
        except ProtocolError as error:
            if peer is not None:
                self._broken(peer, error)
            return
        is_news = False
        if peer is not None and hello.identity == table.digest:
            is_partner = table.partner(hello.round) == name
            table.hear(name, hello.round if is_partner else -1, hello.incarnation)
            table.take_news(name, hello.roster_version)
            is_news = is_partner and hello.round == peer.round  # not of a round that it has long left behind
        if (done := self._finished.get((name, hello.incarnation, hello.round))) is not None:
            await send(stream, pb.Frame(done=pb.Done(factor=done)))
            return
        try:
            if (refusal := self._refusal(name, hello)) is None and hello.round > table.round:
                ended = table.until(lambda: table.round >= hello.round or table.phase != TRAINING)
                await hold_until(ended, stream)
                refusal = self._refusal(name, hello)
        finally:
            if peer is not None and is_news:
                table.pace.adapt(name, hello.round, hello.timing, came - peer.delay, _now())
        if refusal is not None:
            reason, text = refusal
            no = pb.No(reason=reason, text=text, round=table.round, roster_version=table.roster.version)
            await send(stream, pb.Frame(no=no))
            return
        meeting = self._open[hello.round]
        attempt, this = meeting.attempt, asyncio.current_task()
        meeting.carry(this)  # in the place of one that its dialler gave up
        meeting.become(State.ACCEPTED)
        accept = pb.Accept(
            incarnation=table.incarnation,
            tokens=attempt.tokens,
            timing=table.pace.timing(hello.round, _now()),
            roster_version=table.roster.version,
        )

        def commit(theirs: float) -> float:
            if meeting.task is not this:
                raise ConnectionLost("the round is over here")
            self._finished[name, hello.incarnation, hello.round] = attempt.factor
            self._commit(meeting, theirs)
            return attempt.factor

        try:
            await answer(stream, accept, hello, attempt, commit)
        except ProtocolError as error:
            self._broken(table.peers[name], error)
        finally:
            if meeting.task is this:
                meeting.carry(None)

    def _refusal(self, name: str, hello: pb.Hello) -> tuple[Any, str] | None:
        """Return reason and text of a refusal, or None where a call is accepted, or held until the round ends."""
        table, round, no = self.table, hello.round, pb.No
        peer, meeting = table.peers.get(name), self._open.get(round)
        if peer is None:
            return no.NOT_PARTNER, f"{name} is no member here"
        if hello.identity != table.digest:
            return no.WRONG, "another configuration: the start of either says which value"
        if table.phase in ENDED:
            return no.LEAVING, "it has finished" if table.phase in FINISHED else "it leaves"
        if table.phase != TRAINING:
            return no.NOT_TRAINING, "it starts"
        if peer.quarantined_until > round:
            return no.QUARANTINED, "in quarantine there, after broken messages"
        if (meeting.partner if meeting else table.partner(round)) != name:
            return no.NOT_PARTNER, f"not in this round, of {len(table.roster.active(round))} members there"
        if any(key[0] == name and key[2] == round for key in self._finished):
            return no.OVER_BEFORE, "it was exchanged before a restart"
        if round > table.round + HELD_AHEAD:
            return no.OVER, f"it is {round - table.round} rounds behind"
        if round in self._left_out:
            return no.BUSY, "its link is busy with earlier rounds"
        if round <= table.round and meeting is None:
            return no.OVER, f"its message is gone, it has ended round {table.round + 1}"
        if meeting is not None and self._dials(name, round) is True:
            return no.NOT_PARTNER, "it dials itself"
        return None

    # Both sides.

    def _commit(self, meeting: Meeting, theirs: float) -> None:
        """Apply an exchange; `theirs` is the partner's factor."""
        table, attempt, read = self.table, meeting.attempt, meeting.attempt.read
        assert read is not None
        peer, factor = table.peers[meeting.partner], agreed(attempt.factor, theirs)
        self._close(meeting)
        peer.broken, peer.last_exchanged = 0, meeting.round
        peer.distance = peer.distance.after(attempt.size, meeting.bound)
        self._leave_out(peer, meeting.bound == 0.0)
        late = table.trainer.num_steps - meeting.steps
        lag = table.round - meeting.round
        outcome = RoundOutcome(meeting.round, peer.name, "late" if lag else "met", lag, factor=factor, steps_late=late)
        if peer.left_out:
            reason = "its weights are far away, and nothing is taken from it"
            table.trainer.outcome(outcome._replace(outcome="alone", reason=reason, factor=0.0, one_sided=True))
            return
        self._bounds.accept(attempt.size, meeting.bound, min(factor / meeting.damping, 1.0))
        for other in self._open.values():
            other.lacks += self._share_of(meeting.round, meeting.partner, other)
        self.committed += 1
        self._carried.append(True)
        table.has_averaged = True
        self._steps_late += late
        self.unapplied.add(meeting.round)
        own, weight, codec = attempt.own, factor * attempt.weight, table.codec
        table.trainer.deliver(meeting.round, lambda: codec.correction(own, read, weight))
        table.trainer.outcome(outcome)

    def _end(self, meeting: Meeting, reason: str, one_sided: bool = False) -> None:
        """End a meeting without a correction."""
        table, one_sided = self.table, one_sided or meeting.state is State.UNSURE
        self.one_sided += one_sided
        self._close(meeting)
        table.trainer.outcome(RoundOutcome(meeting.round, meeting.partner, "alone", reason=reason, one_sided=one_sided))
        if table.pace.has_paused_in_vain and not self._logged_unequal:
            self._logged_unequal = True
            table.log(
                f"{meeting.partner} is later, although {table.name} pauses for a third of its time: islands of unequal "
                "speed rarely exchange in equal steps; start all of them with --pace=time (nj.Island has no pace)"
            )

    def _close(self, meeting: Meeting) -> None:
        meeting.become(State.OVER)
        del self._open[meeting.round]
        meeting.carry(None)
        self.table.notify()

    def _factor(self, round: int, size: float) -> float:
        """Return the factor of a correction of a size, for its bounds and its delay; 0: nothing is taken.

        Nothing is taken from a peer that is far away and came no closer, unless most of the others are far away: then
        the run drifts apart or this island was alone, and taking nothing from the others would make either worse.
        """
        if (meeting := self._open.get(round)) is None:
            raise ConnectionLost("the round is over here")
        meeting.damping = _damping(meeting.lacks)
        meeting.bound = factor = self._bounds.factor(size, meeting.attempt.norm)
        peer = self.table.peers[meeting.partner]
        if peer.distance.after(size, factor).count >= FAR_IN_A_ROW:
            since = max(self.table.round - LATELY, 0)
            others = [one for one in self.table.peers.values() if one is not peer and one.last_exchanged >= since]
            num_far = sum(one.distance.count > 0 for one in others)
            if 1 + num_far <= len(others) - num_far:
                meeting.bound = 0.0
        return meeting.bound * meeting.damping

    def _share_of(self, round: int, partner: str, meeting: Meeting) -> float:
        """Return how much a meeting's message lacks for want of the correction of another round."""
        if (meeting.round - round) % (self.table.patience // PATIENCE):
            return 0.0
        return 1.0 if meeting.partner == partner else 0.5

    def _leave_out(self, peer: Peer, leaves_out: bool) -> None:
        name = self.table.name
        if leaves_out and not peer.left_out:
            self.table.log_of(
                peer.name,
                "far",
                f"{peer.name} is far from {name}'s weights and came no closer since their last exchange: it was "
                f"alone for long, or its weights are damaged; {name} takes nothing from it until it is close",
            )
        elif peer.left_out and not leaves_out:
            self.table.log_of(
                peer.name, "close", f"{peer.name} came closer, and {name} takes corrections from it again"
            )
        peer.left_out = leaves_out

    def _broken(self, peer: Peer, error: ProtocolError) -> None:
        """Count a broken message; leave the peer out for a while after several in a row."""
        peer.broken += 1
        self.table.log_of(peer.name, "broken", f"{peer.name} sent {error}: it is refused")
        if peer.broken < BROKEN_IN_A_ROW:
            return
        peer.broken = 0
        peer.quarantined_until = self.table.round + 1 + QUARANTINE_ROUNDS
        until = f"nothing is exchanged with it before round {peer.quarantined_until + 1}"
        self.table.log_of(peer.name, "quarantine", f"{peer.name}: {until}")
        self.end("the partner is in quarantine", lambda meeting: meeting.partner == peer.name)

    def _absence(self, peer: Peer, round: int) -> str:
        """Return the reason for which nothing is exchanged with a partner, or an empty text."""
        if peer.quarantined_until > round:
            return "the partner is in quarantine"
        if peer.phase in ENDED:
            return "the partner has finished" if peer.phase in FINISHED else "the partner has left"
        return "the two refuse each other" if peer.wrong else ""

    def _log_slow(self) -> None:
        """Count a round that was left out; log once that the link is too slow for the run, and what would fit."""
        table = self.table
        self._carried.append(False)
        share = sum(self._carried) / len(self._carried)
        if not self._logged_slow and len(self._carried) >= LATELY // 2 and 0 < share < CARRIED:
            self._logged_slow = True
            to = f" to {min(table.peers)}" if len(table.peers) == 1 else f" of {table.name}"
            table.log(f"the link{to} carries {share:.2g} of what is sent: {table.advice(share)}")


def _now() -> float:
    return asyncio.get_running_loop().time()


def _damping(lacks: float) -> float:
    """Return the share of a correction that is applied where its message lacks so many others.

    Exchanges that overlap correct one difference several times. In full that diverges: with a momentum of 0.5 the
    difference of two islands grows by a tenth in every round. Scaled like this it is stable up to a momentum of 0.7.
    """
    return (1 + lacks) ** -1.5
