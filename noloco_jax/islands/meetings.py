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

from noloco_jax.islands import exchange
from noloco_jax.islands import messages_pb2 as pb
from noloco_jax.islands.bounds import Bounds, agreed, damping, is_ignored
from noloco_jax.islands.exchange import SILENT_SECONDS, Attempt, ConnectionLost, ProtocolError, Refused
from noloco_jax.islands.interfaces import RoundOutcome, Stream
from noloco_jax.islands.peer_table import PeerTable
from noloco_jax.islands.peers import ENDED, FINISHED, Peer, check_hello, check_round, check_timing

MAX_DELAY = 2.0  # seconds that a frame may be on its way, as far as pace is concerned
RETRY_SECONDS, MAX_RETRY_SECONDS = 0.2, 2.0  # before a broken exchange is dialled again
LATELY = 64  # rounds in which an island has exchanged with those that count when others are left out
HELD_AHEAD = 64  # rounds that a dialler may be ahead for its call to be held
BACKLOG = 1.0  # messages still to flow with which a link stays busy for a round
OPEN = 3  # patiences of messages that are kept at most
CARRIED = 0.97  # share of the exchanges below which a link is called too slow
LATEST = 8  # patiences after which an exchange that still flows is given up


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
        assert state in _NEXT.get(self.state, ()), f"round {self.round}: {state} after {self.state}"
        self.state = state

    def carry(self, task: asyncio.Task | None) -> None:
        """Make a task the call under way, and cancel the former one unless it is the caller itself."""
        if self.task is not None and self.task is not asyncio.current_task():
            self.task.cancel()
        self.task = task  # a cancelled one's traceback holds the meeting


class Meetings:
    """Exchanges of one island; `saved` is the result of `to_json` before its restart.

    Attributes:
      due: messages with a partner, since the start.
      committed: of them those exchanged.
      steps_late: inner steps from the ends of their rounds until they were committed, summed.
      one_sided: exchanges that only the partner may have applied, also before the start.
      unapplied: rounds whose corrections are delivered, and not yet in the messages that the training makes.
    """

    def __init__(self, table: PeerTable, saved: Mapping[str, Any] | None):
        self.table = table
        self.due = self.committed = self.steps_late = 0
        self.one_sided: int = saved["one_sided"] + saved["unresolved"] if saved else 0
        self.unapplied: set[int] = set()
        self._bounds = Bounds(saved and saved["bounds"])
        self._open: dict[int, Meeting] = {}
        self._finished: dict[tuple[str, int, int], float] = {}  # (dialler, incarnation, round) -> own factor
        self._carried: deque[bool] = deque(maxlen=LATELY)  # False for a round left out, True for one exchanged

    def to_json(self) -> dict[str, Any]:
        return {
            "bounds": self._bounds.to_json(),
            "one_sided": self.one_sided,
            "unresolved": sum(meeting.state is State.UNSURE for meeting in self._open.values()),
        }

    def is_open(self, round: int) -> bool:
        """Return whether the message of this round, or of an earlier one, may still be exchanged; for any thread."""
        return any(one <= round for one in tuple(self._open))  # a copy, as meetings end meanwhile

    def begin(self, round: int, own: Any, norm: float, tokens: int) -> None:
        """Begin the meeting of a round that has ended, and end those that have waited too long."""
        table, oldest = self.table, round - LATEST * self.table.patience  # a lost Commit is asked for until then
        for meeting in [one for one in self._open.values() if one.round <= round - self._patience(one)]:
            self._end(meeting, "not committed in time")
        self._finished = {key: factor for key, factor in self._finished.items() if key[2] > oldest - LATELY}
        if (name := table.partner(round)) is None:
            return
        self.due += 1
        factor = partial(self._factor, round)  # not of the meeting: a cycle would keep all arrays
        attempt = Attempt(table.plan.codec, table.trainer.run, own, norm, tokens, factor)
        meeting = self._open[round] = Meeting(round, name, attempt, table.trainer.num_steps)
        for other in self.unapplied:
            meeting.lacks += self._share_of(other, table.partner(other) or "", meeting)
        if not math.isfinite(norm):
            self._end(meeting, "the own message is not finite")
        elif fault := table.peers[name].absence(round):
            self._end(meeting, fault)
        elif (dials := table.dials(name, round)) is None:
            self._end(meeting, "neither of the two can be dialled")
        elif self._backlog() >= BACKLOG or len(self._open) > OPEN * table.patience:
            self._leave_out_round(meeting)
        elif dials:
            meeting.carry(table.start(self._dial(meeting)))

    def _leave_out_round(self, meeting: Meeting) -> None:
        """End a meeting for which the link has no time; log once if it is too slow for the run, and what would fit."""
        self._carried.append(False)
        self._end(meeting, "the link is busy with earlier rounds")
        share = sum(self._carried) / len(self._carried)
        if len(self._carried) >= LATELY // 2 and 0 < share < CARRIED:
            fitting = f"a narrower wire, if there is one, or sync_every={math.ceil(self.table.plan.sync_every / share)}"
            self.table.log_once("link", f"{self.table.name}'s link carries {share:.2g} of what is sent: give {fitting}")

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

    def end(self, reason: str) -> None:
        """End all meetings, without corrections."""
        for meeting in [*self._open.values()]:
            self._end(meeting, reason)

    def end_absent(self) -> None:
        """End the meetings with peers that exchange no more, unless a peer that has ended may have committed one."""
        for meeting in [*self._open.values()]:
            peer = self.table.peers.get(meeting.partner)
            fault = "the partner is no member any more" if peer is None else peer.absence(self.table.round)
            may_be_committed = meeting.state is State.UNSURE and peer is not None and peer.phase in ENDED
            if fault and not may_be_committed:
                self._end(meeting, fault)

    # The dialling side.

    async def _dial(self, meeting: Meeting) -> None:
        """Dial until the messages are exchanged, or there is no hope."""
        delay, table = RETRY_SECONDS, self.table
        peer = table.peers[meeting.partner]

        def hear(frame: pb.Frame) -> None:
            nonlocal dialled
            if dialled is not None:
                dialled, peer.delay = None, min((_now() - dialled) / 2, MAX_DELAY)
            if frame.HasField("no"):
                check_round(frame.no.round)
                table.hear(peer.name, frame.no.round, roster_version=frame.no.roster_version)
            elif frame.HasField("accept"):
                accept, now = frame.accept, _now()
                check_timing(accept.timing)
                table.hear(peer.name, meeting.round, accept.incarnation, accept.roster_version)
                table.pace.adapt(peer.name, meeting.round, accept.timing, now - peer.delay, now, has_called=False)
                meeting.become(State.ACCEPTED)  # it has committed nothing before
            else:
                table.hear(peer.name)

        while True:
            dialled: float | None = _now()
            attempt, common = meeting.attempt, self._common(meeting)
            held = {"num_held": attempt.num_held, "held_of": attempt.incarnation}
            hello = pb.Hello(round=meeting.round, identity=table.digest, **held, **common)
            try:
                async with table.network.exchange(meeting.partner) as stream:
                    hold = partial(meeting.become, State.UNSURE)
                    theirs = await exchange.offer(stream, hello, attempt, hear, hold)
            except Refused as refused:
                reason, text = refused.answer.reason, refused.answer.text
                if reason == pb.No.WRONG:
                    peer.wrong = text[:300]
                if reason != pb.No.NOT_TRAINING:
                    self._end(meeting, text[:100], reason == pb.No.OVER_BEFORE)
            except ProtocolError as error:
                self._broken(peer, error)
            except ConnectionLost as error:
                table.log_of(peer.name, "silence", f"{peer.name}: {error}")
            else:
                if meeting.state is State.UNSURE:
                    self._commit(meeting, theirs)
                else:  # a Done for what was never received
                    self._broken(peer, ProtocolError("a commit that was not due"))
            if meeting.state is not State.OVER and (fault := peer.absence(meeting.round)):
                self._end(meeting, fault)
            if meeting.state is State.OVER:  # a broken message ends all meetings with its sender
                return
            await asyncio.sleep(delay)
            delay = min(2 * delay, MAX_RETRY_SECONDS)

    # The answering side.

    async def called(self, name: str, stream: Stream) -> None:
        """Answer a call for an exchange; `name` is that of the caller's certificate."""
        hello = await exchange.receive_hello(stream)
        try:
            check_hello(hello)
            await self._answer(name, hello, stream)
        except ProtocolError as error:
            if name in self.table.peers:
                self._broken(self.table.peers[name], error)

    async def _answer(self, name: str, hello: pb.Hello, stream: Stream) -> None:
        table, came, is_news = self.table, _now(), False
        peer = table.peers.get(name)
        if peer is not None and hello.identity == table.digest:
            is_partner = table.partner(hello.round) == name
            table.hear(name, hello.round if is_partner else -1, hello.incarnation, hello.roster_version)
            is_news = is_partner and hello.round == peer.round  # not of a round that it has long left behind
        if (done := self._finished.get((name, hello.incarnation, hello.round))) is not None:
            await exchange.send(stream, pb.Frame(done=pb.Done(factor=done)))
            return
        try:
            if (refusal := self._refusal(name, hello)) is None and hello.round > table.round:
                ended = table.until(lambda: table.round >= hello.round or table.phase != pb.Status.TRAINING)
                await exchange.hold_until(ended, stream)
                refusal = self._refusal(name, hello)
        finally:
            if peer is not None and is_news:
                table.pace.adapt(name, hello.round, hello.timing, came - peer.delay, _now())
        if refusal is not None:
            await exchange.send(stream, pb.Frame(no=refusal))
            return
        meeting = self._open[hello.round]
        attempt, this = meeting.attempt, asyncio.current_task()
        meeting.carry(this)  # in the place of one that its dialler gave up
        meeting.become(State.ACCEPTED)

        def commit(theirs: float) -> float:
            if meeting.task is not this:
                raise ConnectionLost("the round is over here")
            self._finished[name, hello.incarnation, hello.round] = attempt.factor
            self._commit(meeting, theirs)
            return attempt.factor

        try:
            await exchange.answer(stream, pb.Accept(**self._common(meeting)), hello, attempt, commit)
        finally:
            if meeting.task is this:
                meeting.carry(None)

    def _refusal(self, name: str, hello: pb.Hello) -> pb.No | None:
        """Return a refusal, or None where a call is accepted, or held until the round ends."""
        table, round = self.table, hello.round
        peer, meeting = table.peers.get(name), self._open.get(round)

        def no(text: str, reason: Any = pb.No.OTHER) -> pb.No:
            return pb.No(reason=reason, text=text, round=table.round, roster_version=table.roster.version)

        if peer is None:
            return no(f"{name} is no member here")
        if hello.identity != table.digest:
            return no("another configuration: the start of either says which value", pb.No.WRONG)
        if table.phase in ENDED:
            return no("it has finished" if table.phase in FINISHED else "it leaves")
        if table.phase != pb.Status.TRAINING:
            return no("it starts", pb.No.NOT_TRAINING)
        if peer.quarantined_until > round:
            return no("in quarantine there, after broken messages")
        if (meeting.partner if meeting else table.partner(round)) != name:
            return no(f"not in this round, of {len(table.roster.active(round))} members there")
        if any(key[0] == name and key[2] == round for key in self._finished):
            return no("it was exchanged before a restart", pb.No.OVER_BEFORE)
        if round > table.round + HELD_AHEAD:
            return no(f"it is {round - table.round} rounds behind")
        if round <= table.round and meeting is None:
            return no(f"its message is gone, or was left out on a busy link; it has ended round {table.round + 1}")
        if meeting is not None and table.dials(name, round) is True:
            return no("it dials itself")
        return None

    # Both sides.

    def _common(self, meeting: Meeting) -> dict[str, Any]:
        """Return the fields that a Hello and an Accept share."""
        table = self.table
        return {
            "incarnation": table.incarnation,
            "tokens": meeting.attempt.tokens,
            "timing": table.pace.timing(meeting.round, _now()),
            "roster_version": table.roster.version,
        }

    def _commit(self, meeting: Meeting, theirs: float) -> None:
        """Apply an exchange; `theirs` is the partner's factor."""
        table, attempt, read = self.table, meeting.attempt, meeting.attempt.read
        assert read is not None
        peer, factor = table.peers[meeting.partner], agreed(attempt.factor, theirs)
        self._close(meeting)
        peer.broken, peer.last_exchanged = 0, meeting.round
        peer.distance = peer.distance.after(attempt.size, meeting.bound)
        peer.left_out = meeting.bound == 0.0
        late, lag = table.trainer.num_steps - meeting.steps, table.round - meeting.round
        outcome = RoundOutcome(meeting.round, peer.name, "late" if lag else "met", lag, factor=factor, steps_late=late)
        if peer.left_out:
            reason = "its weights are far away and come no closer: nothing is taken from it"
            table.log_of(peer.name, "far", f"{peer.name}: {reason}")
            table.trainer.outcome(outcome._replace(outcome="alone", reason=reason, factor=0.0, one_sided=True))
            return
        self._bounds.accept(attempt.size, meeting.bound, min(factor / meeting.damping, 1.0))
        for other in self._open.values():
            other.lacks += self._share_of(meeting.round, meeting.partner, other)
        self.committed += 1
        self._carried.append(True)
        table.has_averaged = True
        self.steps_late += late
        self.unapplied.add(meeting.round)
        own, weight, codec = attempt.own, factor * attempt.weight, table.plan.codec
        table.trainer.deliver(meeting.round, lambda: codec.correction(own, read, weight))
        table.trainer.outcome(outcome)

    def _end(self, meeting: Meeting, reason: str, one_sided: bool = False) -> None:
        """End a meeting without a correction."""
        one_sided = one_sided or meeting.state is State.UNSURE
        self.one_sided += one_sided
        self._close(meeting)
        table, partner = self.table, meeting.partner
        table.trainer.outcome(RoundOutcome(meeting.round, partner, "alone", reason=reason, one_sided=one_sided))
        if table.pace.has_paused_in_vain:
            table.log_once(
                "unequal",
                f"{partner} is later, although {table.name} pauses for a third of its time: islands of unequal speed "
                "rarely exchange in equal steps; start all of them with --pace=time (nj.Island has no pace)",
            )

    def _close(self, meeting: Meeting) -> None:
        meeting.become(State.OVER)
        del self._open[meeting.round]
        meeting.carry(None)
        self.table.notify()

    def _factor(self, round: int, size: float) -> float:
        """Return the factor of a correction of a size, for its bounds and its delay; 0: nothing is taken."""
        if (meeting := self._open.get(round)) is None:
            raise ConnectionLost("the round is over here")
        peers, since = self.table.peers, max(self.table.round - LATELY, 0)
        meeting.damping = damping(meeting.lacks)
        meeting.bound = self._bounds.factor(size, meeting.attempt.norm)
        distance = peers[meeting.partner].distance.after(size, meeting.bound)
        others = (one for name, one in peers.items() if name != meeting.partner and one.last_exchanged >= since)
        if is_ignored(distance, [one.distance for one in others]):
            meeting.bound = 0.0
        return meeting.bound * meeting.damping

    def _share_of(self, round: int, partner: str, meeting: Meeting) -> float:
        """Return how much a meeting's message lacks for want of the correction of another round."""
        if (meeting.round - round) % self.table.plan.num_fragments:
            return 0.0
        return 1.0 if meeting.partner == partner else 0.5

    def _broken(self, peer: Peer, error: ProtocolError) -> None:
        """Count a broken message; leave the peer out for a while after several in a row."""
        self.table.log_of(peer.name, "broken", f"{peer.name} sent {error}: it is refused")
        if peer.count_broken(self.table.round):
            line = f"{peer.name}: nothing is exchanged with it before round {peer.quarantined_until + 1}"
            self.table.log_of(peer.name, "quarantine", line)
            self.end_absent()


def _now() -> float:
    return asyncio.get_running_loop().time()
