"""Protocol of one island: its meetings round by round, what it answers, and what it knows of its peers.

Everything here runs on one asyncio loop, so that no step between two awaits is interrupted. The network and the
training are behind `Network` and `World`; tests have both in memory, on a virtual clock.
"""

import asyncio
import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from noloco_jax.errors import UserError
from noloco_jax.islands import messages_pb2 as pb
from noloco_jax.islands.bounds import FAR_IN_A_ROW, LARGEST, Bounds, Distance, agreed
from noloco_jax.islands.exchange import (
    Broken,
    Refused,
    Stream,
    Unfit,
    answer,
    hold_until,
    offer,
    receive_hello,
    send_answer,
)
from noloco_jax.islands.pace import Pace
from noloco_jax.islands.peers import Peer, check_greeting, check_hello, check_timing, difference, digest
from noloco_jax.islands.roster import Address, BadRosterError, Roster, changes, parse_dialled, version_of

RETRY_SECONDS, MAX_RETRY_SECONDS = 0.2, 2.0  # before a broken exchange is dialled again
BROKEN_IN_A_ROW, QUARANTINE_ROUNDS = 3, 16
LATELY = 64  # rounds in which an island meets those that count when others are left out
HELD_AHEAD = 64  # rounds that a dialler may be ahead for its call to be held
ROSTER_SECONDS = 5.0  # between two questions to one peer for a newer roster
GREET_SECONDS = 10.0  # for an answer to a greeting
TRAINING = pb.Status.TRAINING


class Settings(NamedTuple):
    """Settings of the protocol.

    Attributes:
      patience: rounds for which a message waits for its partner's.
      whole_state: True to catch up from a whole state instead of weights.
      fits: (round, step) -> True where a run can be at both at once.
    """

    patience: int = 2
    whole_state: bool = False
    fits: Callable[[int, int], bool] = lambda round, step: True


class Met(NamedTuple):
    """Outcome of a round's message.

    Attributes:
      round: the round of the message.
      partner: the island to exchange it with; empty: nobody.
      outcome: "met" in its round, "late" in a later one, or "alone"; "caught up": no message; training continues
        from the partner's weights after this round.
      lag: rounds by which it was late.
      reason: the reason for "alone", in a few words.
      one_sided: True if the partner may have applied its half.
      factor: of the correction, below 1 where bounds clipped it; 0: nothing of the partner's is taken.
      steps_late: inner steps begun from the end of its round until its exchange was committed; None where it was not.
    """

    round: int
    partner: str
    outcome: str
    lag: int = 0
    reason: str = ""
    one_sided: bool = False
    factor: float = 1.0
    steps_late: int | None = None


class Read(NamedTuple):
    """A partner's message, decoded.

    Attributes:
      arrays: argument of `Codec.correction`.
      norm: Euclidean, of what the message stands for; not finite where a value is not.
      difference: |m_j − m_i|.
    """

    arrays: Any
    norm: float
    difference: float


class Codec(Protocol):
    """Form of messages. `own` is the message as the training gave it. These methods may take long: see `World.run`."""

    @property
    def sizes(self) -> Sequence[int]:
        """Return the bytes of each part of a message."""
        ...

    def part(self, own: Any, number: int, theirs: Sequence[bytes]) -> bytes: ...

    def read(self, own: Any, theirs: Sequence[bytes]) -> Read: ...

    def correction(self, own: Any, read: Read, weight: float) -> Any: ...


class Network(Protocol):
    """Calls to other islands. They raise `Broken`, with the reason in words."""

    def exchange(self, peer: str) -> AbstractAsyncContextManager[Stream]: ...

    async def greet(self, peer: str, greeting: pb.Greeting, seconds: float) -> pb.Status: ...

    def weights(self, peer: str, request: pb.WeightsRequest) -> Any:
        """Return an asynchronous iterator over the frames of a donor."""
        ...

    def follow(self, roster: Roster, addresses: Mapping[str, Address]) -> None:
        """Dial and admit the members of a roster; some have told newer addresses themselves."""
        ...


class World(Protocol):
    """The training, as the protocol sees it."""

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function that takes long beside the loop."""
        ...

    def deliver(self, round: int, correct: Callable[[], Any]) -> None:
        """Apply the correction that `correct` computes, between two later inner steps."""
        ...

    def outcome(self, met: Met) -> None: ...

    def tell(self, line: str) -> None: ...

    def keep(self, roster: Roster) -> None:
        """Keep a new roster on disk."""
        ...

    @property
    def num_steps(self) -> int:
        """Inner steps begun since the start."""
        ...


@dataclass(eq=False)
class Meeting:
    """Message of a round that waits for its partner's.

    Attributes:
      round, partner: of the message.
      own: the message as the training gave it.
      tokens: its weight.
      norm: Euclidean.
      steps: inner steps begun when it was made.
      held: the attempt in which the partner may have committed.
      task: the attempt under way.
    """

    round: int
    partner: str
    own: Any
    tokens: int
    norm: float
    steps: int
    held: "Attempt | None" = None
    task: asyncio.Task | None = None


class Attempt:
    """One island's part in one attempt of an exchange: see `exchange.Side`."""

    def __init__(self, node: "Node", meeting: Meeting):
        self._node, self._meeting = node, meeting
        self.weight = self.size = self.factor = 0.0
        self.read: Read | None = None

    def sizes(self) -> Sequence[int]:
        return self._node.codec.sizes

    async def part(self, number: int, theirs: Sequence[bytes]) -> bytes:
        return await self._node.world.run(self._node.codec.part, self._meeting.own, number, tuple(theirs))

    async def judge(self, theirs: Sequence[bytes], tokens: int) -> float:
        node, meeting = self._node, self._meeting
        try:
            read: Read = await node.world.run(node.codec.read, meeting.own, tuple(theirs))
        except (ValueError, TypeError, IndexError, ArithmeticError) as error:
            raise Unfit(f"a message that cannot be decoded: {error}") from None
        if not read.norm <= LARGEST * meeting.norm or not math.isfinite(read.difference):  # NaN neither
            raise Unfit(f"a message of norm {read.norm:.3g}, where the own one has {meeting.norm:.3g}")
        self.weight = tokens / (tokens + meeting.tokens)
        self.read, self.size = read, self.weight * read.difference
        self.factor = node.bounds.factor(self.size, meeting.norm)
        if node.stays_far(node.peers[meeting.partner], self.size, self.factor):
            self.factor = 0.0
        return self.factor


class Node:
    """One island among its peers.

    Args:
      name: its name in the roster.
      roster: the members as they are known at the start.
      identity: values that must equal those of the others.
      partner: (members of a round, round, name) -> name of the partner, or None; a pure function, the same everywhere.
      network: calls to the others.
      world: the training.
      codec: form of messages.
      incarnation: larger than in every earlier start.
      pace: of this island.
      settings: of the protocol.
      saved: the result of `to_json` at the checkpoint to resume from.
      parse: (document) -> roster; raises `BadRosterError`. None: a newer roster is never taken, without TLS.
      address: of this island, if it is another than in the roster.
    """

    def __init__(
        self,
        name: str,
        roster: Roster,
        identity: Mapping[str, str],
        partner: Callable[[Sequence[str], int, str], str | None],
        network: Network,
        world: World,
        codec: Codec,
        incarnation: int,
        pace: Pace,
        settings: Settings | None = None,
        saved: Mapping[str, Any] | None = None,
        parse: Callable[[bytes], Roster] | None = None,
        address: Address | None = None,
    ):
        self.name, self.roster, self.identity = name, roster, dict(identity)
        self.network, self.world, self.codec = network, world, codec
        self.incarnation, self.settings, self.pace = incarnation, settings or Settings(), pace
        self.address = address
        self.bounds = Bounds(saved and saved["bounds"])
        self.round: int = saved["round"] if saved else -1
        self.step = 0
        self.has_averaged: bool = bool(saved and saved["has_averaged"])
        self.one_sided: int = saved["one_sided"] + saved["unresolved"] if saved else 0
        self.due = self.committed = 0
        self.phase = pb.Status.STARTING
        self.peers: dict[str, Peer] = {}
        self.details = ""
        self.figures: dict[str, float] = {}
        self.notices: list[str] = []
        self.lag_since: float | None = None
        self._partner, self._parse = partner, parse
        self._digest = digest(identity)
        self._meetings: dict[int, Meeting] = {}
        self._finished: dict[tuple[str, int, int], float] = {}  # (dialler, incarnation, round) -> own factor
        self._steps_late = (0, 0)  # of corrections: sum, count
        self._changed = asyncio.Event()  # set and replaced at every change that somebody may wait for
        self._tasks: set[asyncio.Task] = set()
        self._asked_for_roster: dict[str, float] = {}
        self._told_badly: dict[str, float] = {}  # who told a roster that nobody signed, and when
        self._told_unequal: set[str] = set()
        self._silent: dict[str, tuple[str, float | None]] = {}
        self.follow(roster)
        for other, (count, size, until) in (saved["peers"] if saved else {}).items():
            if other in self.peers:
                self.peers[other].distance, self.peers[other].quarantined_until = Distance(count, size), until

    # The training's side.

    def round_ended(self, round: int, step: int, own: Any, norm: float, tokens: int) -> None:
        """End a round: its message waits for the partner's.

        Args:
          round: one more than the last one.
          step: inner steps behind it.
          own: the message, for the codec.
          norm: Euclidean, of the message.
          tokens: that were trained on in it.
        """
        assert round == self.round + 1, f"round {round} follows round {self.round}"
        self.round, self.step = round, step
        self.pace.round_ended(round, self._now())
        oldest = round - self.settings.patience
        for meeting in [meeting for meeting in self._meetings.values() if meeting.round <= oldest]:
            self._end(meeting, "not committed in time")
        self._finished = {key: factor for key, factor in self._finished.items() if key[2] > oldest - LATELY}
        name = self.partner(round)
        if name is not None:
            self.due += 1
            meeting = self._meetings[round] = Meeting(round, name, own, tokens, norm, self.world.num_steps)
            if not math.isfinite(norm):
                self._end(meeting, "the own message is not finite")
            elif fault := self._absence(self.peers[name], round):
                self._end(meeting, fault)
            elif (dials := self._dials(name, round)) is None:
                self._end(meeting, "neither of the two can be dialled")
            elif dials:
                meeting.task = self.start(self._meet(meeting))
        self.notify()

    def to_json(self) -> dict[str, Any]:
        """Return the protocol's state, to save with weights in which everything delivered is applied."""
        known = {one.name: [*one.distance, one.quarantined_until] for one in self.peers.values()}
        return {
            "round": self.round,
            "has_averaged": self.has_averaged,
            "bounds": self.bounds.to_json(),
            "peers": {name: values for name, values in known.items() if any(values)},
            "one_sided": self.one_sided,
            "unresolved": sum(meeting.held is not None for meeting in self._meetings.values()),
        }

    def is_meeting(self, round: int) -> bool:
        """Return whether the message of this round, or of an earlier one, may still be exchanged."""
        return any(one <= round for one in self._meetings)

    def leave(self, finished: bool) -> None:
        """End all meetings, and tell the peers that this island stops."""
        self.phase = pb.Status.FINISHED if finished else pb.Status.LEAVING
        for meeting in list(self._meetings.values()):
            self._end(meeting, "leaving")
        for peer in self.peers.values():
            if not peer.away and not peer.wrong:
                self.start(self._goodbye(peer.name))
        self.notify()

    def adopt(self, donor: str, round: int, has_averaged: bool) -> None:
        """Continue from a donor's weights: forget the exchanges of the old ones."""
        for meeting in list(self._meetings.values()):
            self._end(meeting, "weights of a peer took this island's place")
        self.round, self.has_averaged = round, self.has_averaged or has_averaged
        self.incarnation += 1
        self.lag_since = None
        self.pace.restart()
        self.world.outcome(Met(round, donor, "caught up"))
        self.notify()

    def partner(self, round: int) -> str | None:
        """Return the partner of a round, or None."""
        active = self.roster.active(round)
        return self._partner(active, round, self.name) if self.name in active and len(active) > 1 else None

    @property
    def is_removed(self) -> bool:
        """True once this island has ended its last round as a member."""
        return self.roster.is_over(self.name, self.round + 1)

    def unfinished(self) -> list[str]:
        """Return the members not known to have taken their last step."""
        active = self.roster.active(max(self.round, 0))
        return [name for name in active if name in self.peers and not self.peers[name].finished]

    # The dialling side.

    async def _meet(self, meeting: Meeting) -> None:
        """Dial until the messages are exchanged, or there is no hope."""
        delay, peer = RETRY_SECONDS, self.peers[meeting.partner]
        while True:
            attempt = Attempt(self, meeting)

            def hear(timing: pb.Timing, incarnation: int, version: int) -> None:
                self.hear(meeting.partner, timing, incarnation)
                self.take_news(meeting.partner, version)
                if incarnation:
                    meeting.held = None  # it accepts: what was held before was never committed

            def hold(attempt: Attempt = attempt) -> None:
                meeting.held = attempt

            try:
                async with self.network.exchange(meeting.partner) as stream:
                    theirs = await offer(stream, self._hello(meeting), attempt, hear, hold)
            except Refused as refused:
                if refused.answer.reason != pb.No.NOT_TRAINING:
                    if refused.answer.reason == pb.No.WRONG:
                        peer.wrong = refused.answer.text[:300]
                    self._end(meeting, refused.answer.text[:100], refused.answer.reason == pb.No.OVER_BEFORE)
                    return
            except Unfit as error:
                self._broken(peer, error)
            except Broken as error:
                self._log_silence(peer, error)
            else:
                if meeting.held is None:  # a Done for what was never received
                    self._broken(peer, Unfit("a commit that was not due"))
                else:
                    self._commit(meeting, meeting.held, theirs)
                    return
            if fault := self._absence(peer, meeting.round):
                self._end(meeting, fault)
                return
            await asyncio.sleep(delay)
            delay = min(2 * delay, MAX_RETRY_SECONDS)

    def _hello(self, meeting: Meeting) -> pb.Hello:
        return pb.Hello(
            round=meeting.round,
            incarnation=self.incarnation,
            identity=self._digest,
            tokens=meeting.tokens,
            timing=self.pace.timing(meeting.round, self._now()),
            roster_version=self.roster.version,
            address="" if self.address is None else str(self.address),
        )

    def _dials(self, name: str, round: int) -> bool | None:
        """Return whether this island dials, rather than its partner; None: neither can."""
        mine, theirs = self._can_be_dialled(self.name), self._can_be_dialled(name)
        if not (mine and theirs):
            return theirs if mine or theirs else None
        ids = [self.roster.member(one).id for one in (self.name, name)]
        return (ids[0] < ids[1]) is (round % 2 == 0)

    def _can_be_dialled(self, name: str) -> bool:
        told = self.address if name == self.name else self.peers[name].address
        return (told or self.roster.member(name).address).can_be_dialled

    # The answering side.

    async def exchange_called(self, name: str, stream: Stream) -> None:
        """Answer a call for an exchange; `name` is that of the caller's certificate."""
        hello = await receive_hello(stream)
        peer = self.peers.get(name)
        try:
            check_hello(hello)
        except Unfit as error:
            if peer is not None:
                self._broken(peer, error)
            return
        if peer is not None:
            self.hear(name, hello.timing, hello.incarnation, hello.address)
            self.take_news(name, hello.roster_version)
        if (done := self._finished.get((name, hello.incarnation, hello.round))) is not None:
            await send_answer(stream, pb.Frame(done=pb.Done(factor=done)))
            return
        if (refusal := self._refusal(name, hello)) is None and hello.round > self.round:
            ended = self.until(lambda: self.round >= hello.round or self.phase != TRAINING)
            await hold_until(ended, stream, self._timing)
            refusal = self._refusal(name, hello)
        if refusal is not None:
            refusal.timing.CopyFrom(self._timing())
            refusal.roster_version = self.roster.version
            await send_answer(stream, pb.Frame(no=refusal))
            return
        meeting = self._meetings[hello.round]
        if meeting.task is not None:  # an attempt that its dialler gave up
            meeting.task.cancel()
        attempt, this = Attempt(self, meeting), asyncio.current_task()
        meeting.task = this
        accept = pb.Accept(
            incarnation=self.incarnation,
            tokens=meeting.tokens,
            timing=self.pace.timing(hello.round, self._now()),
            roster_version=self.roster.version,
        )

        def commit(theirs: float) -> float:
            if self._meetings.get(hello.round) is not meeting or meeting.task is not this:
                raise Broken("the round is over here")
            self._finished[name, hello.incarnation, hello.round] = attempt.factor
            self._commit(meeting, attempt, theirs)
            return attempt.factor

        try:
            await answer(stream, accept, hello.tokens, attempt, commit)
        except Unfit as error:
            self._broken(self.peers[name], error)
        finally:
            if meeting.task is this:
                meeting.task = None

    def _refusal(self, name: str, hello: pb.Hello) -> pb.No | None:
        """Return the refusal of an exchange, or None where it is accepted, or held until the round ends."""
        peer, round = self.peers.get(name), hello.round
        if peer is None:
            return pb.No(reason=pb.No.NOT_PARTNER, text=f"{name} is no member here")
        if hello.identity != self._digest:
            return pb.No(reason=pb.No.WRONG, text="another configuration: the start of either says which value")
        if self.phase in (pb.Status.FINISHED, pb.Status.LEAVING):
            return pb.No(
                reason=pb.No.LEAVING, text="it leaves" if self.phase == pb.Status.LEAVING else "it has finished"
            )
        if self.phase != TRAINING:
            return pb.No(reason=pb.No.NOT_TRAINING, text="it starts")
        if peer.quarantined_until > round:
            return pb.No(reason=pb.No.QUARANTINED, text="in quarantine there, after broken messages")
        meeting = self._meetings.get(round)
        if (meeting.partner if meeting else self.partner(round)) != name:
            return pb.No(
                reason=pb.No.NOT_PARTNER, text=f"not in this round, of {len(self.roster.active(round))} members there"
            )
        if any(key[0] == name and key[2] == round for key in self._finished):
            return pb.No(reason=pb.No.OVER_BEFORE, text="it was exchanged before a restart")
        if round > self.round + HELD_AHEAD:
            return pb.No(reason=pb.No.OVER, text=f"it is {round - self.round} rounds behind")
        if round <= self.round and meeting is None:
            return pb.No(reason=pb.No.OVER, text=f"its message is gone, it has ended round {self.round + 1}")
        if meeting is not None and self._dials(name, round) is True:
            return pb.No(reason=pb.No.NOT_PARTNER, text="it dials itself")
        return None

    # Both sides.

    def hear(self, name: str, timing: pb.Timing, incarnation: int = 0, address: str = "") -> None:
        """Learn what a peer tells of itself; raise `Unfit` for what no honest island tells."""
        check_timing(timing)
        peer = self.peers[name]
        peer.heard, peer.away, peer.finished = self._now(), False, False
        if incarnation and incarnation != peer.incarnation:
            peer.incarnation, peer.round = incarnation, -1
        if timing.round_seconds or timing.ago:
            peer.round = max(peer.round, timing.round)
        self.pace.meet(name, timing, self._now())
        self.learn_address(name, address)

    def learn_address(self, name: str, text: str) -> None:
        """Dial a peer where it says to be reached; ignore a text that is no address."""
        peer = self.peers[name]
        with contextlib.suppress(UserError):
            address = parse_dialled(text) if text else None
            if address != peer.address and (address or peer.address):
                peer.address = address
                self.tell(f"{name} is at {address or self.roster.member(name).address} from now on")
                self._follow_addresses()

    def _commit(self, meeting: Meeting, attempt: Attempt, theirs: float) -> None:
        """Apply an exchange; `theirs` is the partner's factor."""
        assert attempt.read is not None
        peer, factor = self.peers[meeting.partner], agreed(attempt.factor, theirs)
        self._close(meeting)
        peer.broken, peer.met = 0, meeting.round
        peer.distance = peer.distance.after(attempt.size, attempt.factor)
        self._leave_out(peer, attempt.factor == 0.0)
        late = self.world.num_steps - meeting.steps
        lag = self.round - meeting.round
        met = Met(meeting.round, peer.name, "late" if lag else "met", lag, factor=factor, steps_late=late)
        if peer.left_out:
            reason = "its weights are far away, and nothing is taken from it"
            self.world.outcome(met._replace(outcome="alone", reason=reason, factor=0.0, one_sided=True))
            return
        self.bounds.accept(attempt.size, attempt.factor, factor)
        self.committed += 1
        self.has_averaged = True
        self._steps_late = self._steps_late[0] + late, self._steps_late[1] + 1
        own, read, weight, codec = meeting.own, attempt.read, factor * attempt.weight, self.codec
        self.world.deliver(meeting.round, lambda: codec.correction(own, read, weight))
        self.world.outcome(met)

    def _end(self, meeting: Meeting, reason: str, one_sided: bool = False) -> None:
        """End a meeting without a correction."""
        one_sided = one_sided or meeting.held is not None
        self.one_sided += one_sided
        self._close(meeting)
        self.world.outcome(Met(meeting.round, meeting.partner, "alone", reason=reason, one_sided=one_sided))
        if meeting.partner not in self._told_unequal and (ratio := self.pace.unequal) is not None:
            self._told_unequal.add(meeting.partner)
            slower = f"{max(ratio, 1 / ratio):.2g} times as long {'there' if ratio > 1 else 'here'}"
            self.tell(
                f"a round takes {slower} as of the last exchange: islands of unequal speed hardly meet in equal steps; "
                "start all of them with --pace=time (nj.Island has no pace)"
            )

    def _close(self, meeting: Meeting) -> None:
        self._meetings.pop(meeting.round, None)
        if meeting.task is not None and meeting.task is not asyncio.current_task():
            meeting.task.cancel()
        self.notify()

    def stays_far(self, peer: Peer, size: float, factor: float) -> bool:
        """Return whether a peer is far away, came no closer, and most of the others are not far away.

        Where most are, the run drifts apart or this island is the one that was alone: taking nothing from the others
        would make either worse.
        """
        if peer.distance.after(size, factor).count < FAR_IN_A_ROW:
            return False
        since = max(self.round - LATELY, 0)
        are_far = [one.distance.count > 0 for one in self.peers.values() if one is not peer and one.met >= since]
        return 1 + sum(are_far) <= len(are_far) - sum(are_far)

    def _leave_out(self, peer: Peer, leaves_out: bool) -> None:
        if leaves_out and not peer.left_out:
            self.tell(
                f"{peer.name} is far from {self.name}'s weights and came no closer since their last exchange: it was "
                f"alone for long, or its weights are damaged; {self.name} takes nothing from it until it is close"
            )
        elif peer.left_out and not leaves_out:
            self.tell(f"{peer.name} came closer, and {self.name} takes corrections from it again")
        peer.left_out = leaves_out

    def _broken(self, peer: Peer, error: Unfit) -> None:
        """Count a broken message; leave the peer out for a while after several in a row."""
        peer.broken += 1
        self.tell(f"{peer.name} sent {error}: it is refused")
        if peer.broken < BROKEN_IN_A_ROW:
            return
        peer.broken = 0
        peer.quarantined_until = self.round + 1 + QUARANTINE_ROUNDS
        self.tell(f"{peer.name}: nothing is exchanged with it before round {peer.quarantined_until + 1}")
        for meeting in [one for one in self._meetings.values() if one.partner == peer.name]:
            self._end(meeting, "the partner is in quarantine")

    def _absence(self, peer: Peer, round: int) -> str:
        """Return the reason for which a partner cannot be met, or an empty text."""
        if peer.quarantined_until > round:
            return "the partner is in quarantine"
        if peer.away:
            return "the partner has finished" if peer.finished else "the partner has left"
        return "the two refuse each other" if peer.wrong else ""

    def _log_silence(self, peer: Peer, error: Broken) -> None:
        """Tell once that a peer does not answer, until it is heard again."""
        silence = str(error)
        if self._silent.get(peer.name) != (silence, peer.heard):
            self._silent[peer.name] = silence, peer.heard
            self.tell(f"{peer.name}: {silence}")

    # Greetings.

    async def greeted(self, name: str, greeting: pb.Greeting) -> pb.Status:
        """Answer a greeting of an island or a command; `name` is that of the caller's certificate."""
        check_greeting(greeting)
        peer = self.peers.get(name)
        wrong = ""
        if greeting.HasField("roster"):
            self.take_roster(greeting.roster.SerializeToString(), name)
            peer = self.peers.get(name)
        if peer is not None and greeting.identity:
            wrong = difference(self.identity, greeting.identity, name)
            peer.wrong, peer.away, peer.heard = wrong, False, self._now()
            peer.incarnation = max(peer.incarnation, greeting.incarnation)
            self.learn_address(name, greeting.address)
            self.take_news(name, greeting.roster_version)
        if peer is not None and greeting.leaving and greeting.incarnation >= peer.incarnation:
            peer.away, peer.finished = True, greeting.finished
            for meeting in [one for one in self._meetings.values() if one.partner == name and one.held is None]:
                self._end(meeting, self._absence(peer, meeting.round))
            self.notify()
        if greeting.until_ready and self.phase == pb.Status.STARTING:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(greeting.hold_seconds):
                    await self.until(lambda: self.phase != pb.Status.STARTING)
        status = self.status(with_peers=not greeting.identity)
        if wrong:
            status.wrong = difference(greeting.identity, self.identity, self.name)
        if greeting.wants_roster and self.roster.document:
            status.roster.ParseFromString(self.roster.document)
        if greeting.wants_details:
            status.details = self.details
        return status

    def status(self, with_peers: bool = False) -> pb.Status:
        """Return this island's status, for commands with its view of the peers."""
        total, count = self._steps_late
        now = self._now()
        status = pb.Status(
            phase=self.phase,
            incarnation=self.incarnation,
            round=self.round,
            step=self.step,
            has_averaged=self.has_averaged,
            due=self.due,
            committed=self.committed,
            one_sided=self.one_sided,
            steps_late=total / count if count else 0.0,
            partner=(self.partner(self.round) or "") if self.round >= 0 else "",
            roster_version=self.roster.version,
            num_members=len(self.roster.active(max(self.round, 0))),
            timing=self._timing(),
        )
        if not with_peers:
            return status
        status.figures.update(self.figures)
        status.notices.extend(self.notices)
        for peer in self.peers.values():
            seen = -1.0 if peer.heard is None else max(now - peer.heard, 0.0)
            status.peers.add(name=peer.name, seen=seen, fault=peer.fault(self.round))
        return status

    def greeting(self, **fields: Any) -> pb.Greeting:
        """Return a greeting of this island."""
        return pb.Greeting(
            identity=self.identity,
            incarnation=self.incarnation,
            roster_version=self.roster.version,
            address="" if self.address is None else str(self.address),
            **fields,
        )

    async def _goodbye(self, name: str) -> None:
        greeting = self.greeting(leaving=True, finished=self.phase == pb.Status.FINISHED)
        with contextlib.suppress(Broken):
            await self.network.greet(name, greeting, GREET_SECONDS / 2)

    # The roster.

    def follow(self, roster: Roster) -> None:
        """Take a roster's members for one's peers."""
        self.roster = roster
        names = [name for name in roster.names if name != self.name and not roster.is_over(name, self.round)]
        self.peers = {name: self.peers.get(name) or Peer(name) for name in names}
        for meeting in [one for one in self._meetings.values() if one.partner not in self.peers]:
            self._end(meeting, "the partner is no member any more")
        self._follow_addresses()

    def _follow_addresses(self) -> None:
        told = {peer.name: peer.address for peer in self.peers.values() if peer.address is not None}
        self.network.follow(self.roster, told)

    def take_roster(self, document: bytes, teller: str) -> None:
        """Take a newer roster that the run's authority has signed; ignore others."""
        now, last = self._now(), self._told_badly.get(teller)
        if self._parse is None or version_of(document) <= self.roster.version:
            return
        if last is not None and now - last < ROSTER_SECONDS:
            return  # a signature takes time to check
        try:
            roster = self._parse(document)
        except BadRosterError as error:
            self._told_badly = {**dict([*self._told_badly.items()][-99:]), teller: now}
            self.tell(f"{teller} told a roster that is not taken: {error}")
            return
        if roster.version <= self.roster.version or roster.founders != self.roster.founders:
            return
        for line in changes(self.roster, roster):
            self.tell(line)
        self.world.keep(roster)
        self.follow(roster)
        self.notify()

    def take_news(self, name: str, version: int) -> None:
        """Ask a peer for its roster if it has a newer one, and not too often."""
        if version <= self.roster.version or self._parse is None or name not in self.peers:
            return
        last = self._asked_for_roster.get(name)
        if last is None or self._now() - last >= ROSTER_SECONDS:
            self._asked_for_roster[name] = self._now()
            self.start(self._ask_for_roster(name))

    async def _ask_for_roster(self, name: str) -> None:
        with contextlib.suppress(Broken):
            status = await self.network.greet(name, self.greeting(wants_roster=True), GREET_SECONDS)
            if status.HasField("roster"):
                self.take_roster(status.roster.SerializeToString(), name)

    # Tasks, time, lines.

    def start(self, coroutine: Any) -> asyncio.Task:
        """Run a coroutine beside the others; its end is awaited by `close`."""
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.tell(f"a fault of this program, please report it: {error!r}")

    async def close(self, seconds: float = 2.0) -> None:
        """Wait for goodbyes, and end everything else."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def notify(self) -> None:
        """Wake up those that wait for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until a condition holds, which changes as `notify` is called."""
        while not holds():
            await self._changed.wait()

    def _timing(self) -> pb.Timing:
        return self.pace.timing(self.round, self._now())

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    def tell(self, line: str) -> None:
        """Tell people, and those who watch."""
        self.notices = [*self.notices[-19:], line[:300]]
        self.world.tell(line)
