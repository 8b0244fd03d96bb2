"""An island on the network: its protocol's actions carried out, over Flight, beside the training and never before it.

Every call has a thread. All of them, and the training, hand events to the protocol under one lock, which is held for as
long as it takes to decide, never while anything is sent, copied or computed.
"""

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from noloco_jax.errors import UserError
from noloco_jax.islands.channel import Channel
from noloco_jax.islands.client import Client
from noloco_jax.islands.conversation import Conversation
from noloco_jax.islands.frames import ArraySpec, Expects, Frame
from noloco_jax.islands.keys import Credentials
from noloco_jax.islands.peer_errors import Busy, Ended, PeerError
from noloco_jax.islands.peer_errors import Refused as RefusedCall
from noloco_jax.islands.protocol.events import (
    Action,
    Apply,
    Arrived,
    Begin,
    Broken,
    Close,
    Content,
    Drop,
    Event,
    Heal,
    Open,
    Opened,
    Refused,
    RoundEnded,
    Send,
    Start,
    Stop,
    Tell,
    Tick,
)
from noloco_jax.islands.protocol.headers import (
    ExchangeId,
    HeaderError,
    Hello,
    Leave,
    Message,
    Opener,
    State,
    StateRequest,
    Status,
    StatusRequest,
    from_json,
    to_json,
)
from noloco_jax.islands.protocol.island import Island, Journal
from noloco_jax.islands.protocol.settings import Settings
from noloco_jax.islands.roster import Roster
from noloco_jax.islands.server import Handlers, Server
from noloco_jax.islands.snapshots import ABOUT, Snapshots

_CALL_SECONDS = 3600.0  # the protocol ends calls long before
_GOODBYE_SECONDS = 2.0
Arrays = Sequence[np.ndarray]


@dataclass(frozen=True)
class Correction:
    """What an exchange came to: to be entered between two inner steps.

    Attributes:
      round: whose message it corrects.
      arrays: c = w_j/(w_i + w_j) (m_j − m_i), once they are computed.
    """

    round: int
    arrays: Future[Arrays]


@dataclass(frozen=True)
class Healed:
    """Another island's state, to go on from.

    Attributes:
      peer: whose.
      round: the last one that it has ended.
      arrays: as the other's `Station.give` was given them.
    """

    peer: str
    round: int
    arrays: Arrays


@dataclass(frozen=True)
class Met:
    """What became of a round's message.

    Attributes:
      round: which.
      partner: whom it was to be exchanged with; empty: nobody.
      outcome: "met" in its round, "late" in a later one, or "alone"; "healed": of no message, the partner's state, that
        of after this round, is gone on from.
      lag: rounds by which it was late.
      reason: why alone, in a few words.
      one_sided: whether the partner may have applied its half.
    """

    round: int
    partner: str
    outcome: str
    lag: int = 0
    reason: str = ""
    one_sided: bool = False


class Station:
    """The network's side of an island. Threads are started by `open` and ended by `close`.

    Args:
      roster: the islands.
      name: of this one.
      credentials: its keys, None without TLS.
      protocol: what decides.
      settings: of the protocol.
      message: what each array of a message must be.
      state: the same of a state.
      report: is given lines for people.
      snapshots: of the weights, for who asks for them.
      about: what the island says of its weights.
    """

    def __init__(
        self,
        roster: Roster,
        name: str,
        credentials: Credentials | None,
        protocol: Island,
        settings: Settings,
        message: Sequence[ArraySpec],
        state: Sequence[ArraySpec],
        report: Callable[[str], None],
        snapshots: Snapshots,
        about: Mapping[str, Any],
    ):
        self._roster, self._name, self._credentials = roster, name, credentials
        self._protocol, self._settings, self._report = protocol, settings, report
        self.snapshots, self._about = snapshots, dict(about)
        self._specs: Mapping[str, Sequence[ArraySpec]] = {Message.__name__: message, State.__name__: state}
        self._clients = {other: Client(roster, name, credentials, other) for other in roster.names if other != name}
        self._changed = threading.Condition(threading.RLock())
        self._conversations: dict[Any, Conversation] = {}
        self._numbers = itertools.count()
        self._former = ThreadPoolExecutor(1, thread_name_prefix="corrections")
        self._own: dict[int, Arrays] = {}
        self._others: dict[ExchangeId, Arrays] = {}
        self._states: dict[Any, Arrays] = {}
        self._inbox: list[Correction | Healed] = []
        self._met: list[Met] = []
        self._waiting: list[tuple[Any, State]] = []  # for a copy of the state
        self._decision: Begin | Heal | Refused | None = None
        self._closed = False
        self._server: Server | None = None

    # The training's side.

    def open(self) -> None:
        """Listens, and asks the others where they are. Raises `UserError` where it cannot listen."""
        handlers = Handlers(self._called, self.snapshots.state, {ABOUT: self._tell_about}, self._report)
        self._server = Server(self._roster, self._name, self._credentials, handlers)
        threading.Thread(target=self._tick, daemon=True, name="ticks").start()
        self._handle(Start())

    def decided(self, seconds: float) -> bool:
        """Waits that long for what the island is to train from; whether that is known.

        Raises `UserError` if most of the others say that it does not belong to them.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._decision is not None, seconds)
            if isinstance(self._decision, Refused):
                raise UserError(self._decision.line)
            return self._decision is not None

    def end_round(self, round: int, tokens: int, message: Arrays) -> None:
        """The solo step of a round is done; its message is exchanged from now on."""
        norms = (_norm(message),)
        with self._changed:
            if any(isinstance(item, Healed) for item in self._inbox):
                return  # these weights are about to be replaced
            self._own[round] = message
            for old in [old for old in self._own if old < round - self._settings.patience - 1]:
                del self._own[old]
            for xid in [xid for xid in self._others if xid.round not in self._own]:
                del self._others[xid]
            self._handle(RoundEnded(round, tokens, norms))
            if not self._protocol.status().partner:
                self._met.append(Met(round, "", "alone", reason="an odd number of islands"))

    def take(self) -> list[Correction | Healed]:
        """What is to be entered now, in this order; after a state, nothing of before it."""
        with self._changed:
            ready = list(itertools.takewhile(lambda item: isinstance(item, Healed) or item.arrays.done(), self._inbox))
            return self._taken(len(ready))

    def take_all(self) -> tuple[list[Correction | Healed], Journal]:
        """All that is to be entered, and what is to be saved together with weights that have seen it."""
        with self._changed:
            return self._taken(len(self._inbox)), self._protocol.journal()

    def put_back(self, healed: Healed) -> None:
        """What was taken too early comes first again."""
        with self._changed:
            self._inbox.insert(0, healed)

    def take_met(self) -> tuple[list[Met], Status]:
        """What became of messages since the last time, and how the island is."""
        with self._changed:
            met, self._met = self._met, []
            return met, self._protocol.status()

    @property
    def wants_state(self) -> bool:
        """Whether another island waits for a copy of the state: for `give`."""
        return bool(self._waiting)

    def give(self, round: int, arrays: Arrays) -> None:
        """A copy of the state after `round`, which nobody will change, for those who wait for it."""
        with self._changed:
            waiting, self._waiting = self._waiting, []
        for key, header in waiting:
            conversation = self._conversations.get(key)
            if conversation is not None:
                conversation.send(replace(header, round=round), arrays)

    def settle(self, round: int, seconds: float) -> None:
        """Waits until nothing more will come of the message of `round` and earlier ones, at most that long."""
        with self._changed:
            self._changed.wait_for(lambda: not self._protocol.is_meeting(round), seconds)

    def close(self) -> None:
        """Says goodbye, and ends all calls."""
        with self._changed:
            opened, self._closed = self._server is not None and not self._closed, True
            self.snapshots.close()
            if opened:
                self._handle(Stop())
            self._changed.notify_all()
        if not opened:
            return
        deadline = time.monotonic() + _GOODBYE_SECONDS
        while self._conversations and time.monotonic() < deadline:
            time.sleep(0.02)
        for conversation in list(self._conversations.values()):
            conversation.cancel()
        assert self._server is not None
        self._server.close(1.0)
        self._former.shutdown()

    def _taken(self, count: int) -> list[Correction | Healed]:
        taken, self._inbox = self._inbox[:count], self._inbox[count:]
        last = max((i for i, item in enumerate(taken) if isinstance(item, Healed)), default=0)
        return taken[last:]

    # The protocol's side.

    def _handle(self, event: Event) -> None:
        with self._changed:
            for action in self._protocol.handle(event, time.monotonic()):
                self._carry_out(action)
            self._changed.notify_all()

    def _carry_out(self, action: Action) -> None:
        match action:
            case Open():
                self._dial(action)
            case Send(channel, State() as header):
                self._waiting.append((channel, header))
            case Send(channel, header):
                arrays = self._own[header.xid.round] if isinstance(header, Message) else None
                if channel in self._conversations:
                    self._conversations[channel].send(header, arrays)
            case Close(channel):
                self._waiting = [(key, header) for key, header in self._waiting if key != channel]
                if channel in self._conversations:
                    self._conversations[channel].end()
            case Apply(xid, peer, weight, lag):
                formed = self._former.submit(_correction, self._own[xid.round], self._others.pop(xid), weight)
                self._inbox.append(Correction(xid.round, formed))
                self._met.append(Met(xid.round, peer, "late" if lag else "met", lag))
            case Drop(round, _, peer, reason, one_sided):
                self._met.append(Met(round, peer, "alone", reason=reason, one_sided=one_sided))
            case Begin():
                self._decision = action
            case Heal(peer, round):
                self._decision = action
                self._own, self._others = {}, {}
                self._inbox = [Healed(peer, round, self._states.popitem()[1])]
                self._met.append(Met(round, peer, "healed"))
            case Refused():
                self._decision = action
            case Tell(line):
                self._report(line)

    def _tick(self) -> None:
        """Tells the protocol that time has passed, when it asks for that."""
        with self._changed:
            while not self._closed:
                deadline = self._protocol.next_deadline()
                wait = None if deadline is None else deadline - time.monotonic()
                if wait is not None and wait <= 0:
                    self._handle(Tick())
                else:
                    self._changed.wait(None if wait is None else min(wait, threading.TIMEOUT_MAX))

    # Calls.

    def _dial(self, action: Open) -> None:
        conversation = self._conversations[action.channel] = Conversation(action.channel, self._arrived)
        arguments = (conversation, action.peer, action.header)
        threading.Thread(target=self._run, args=arguments, daemon=True, name=f"to-{action.peer}").start()

    def _run(self, conversation: Conversation, peer: str, header: Opener) -> None:
        seconds = _CALL_SECONDS if isinstance(header, Hello | StateRequest) else self._settings.answer_seconds
        try:
            with self._clients[peer].exchange(to_json(header), self._expects, seconds) as channel:
                conversation.run(channel)
        except PeerError as error:
            if isinstance(error, RefusedCall):
                self._report(str(error))
        finally:
            self._over(conversation)

    def _called(self, caller: str, hello: Mapping[str, Any], connect: Callable[[Expects], Channel]) -> None:
        try:
            header = from_json(dict(hello))
        except HeaderError as error:
            raise RefusedCall(str(error)) from None
        if not isinstance(header, Hello | StatusRequest | StateRequest | Leave):
            raise RefusedCall(f"a call does not begin with {type(header).__name__}")
        if self._closed:
            raise Busy(f"{self._name} is about to stop")
        key = ("in", next(self._numbers))
        conversation = Conversation(key, self._arrived)
        channel = connect(self._expects)
        with self._changed:
            self._conversations[key] = conversation
            self._handle(Opened(key, caller, header))
        try:
            conversation.run(channel)
        except Ended:
            pass  # the caller has what it called for
        except PeerError:
            if not conversation.ended_here:
                raise
        finally:
            self._over(conversation)

    def _tell_about(self, caller: str, argument: Mapping[str, Any]) -> dict[str, Any]:
        with self._changed:
            status = self._protocol.status()
        return {**self._about, "round": status.round, "training": status.training}

    def _over(self, conversation: Conversation) -> None:
        with self._changed:
            self._conversations.pop(conversation.key, None)
            self._states.pop(conversation.key, None)
            self._waiting = [(key, header) for key, header in self._waiting if key != conversation.key]
            if not conversation.ended_here:
                self._handle(Broken(conversation.key))

    def _expects(self, header: Mapping[str, Any]) -> Sequence[ArraySpec] | None:
        return self._specs.get(str(header.get("kind")))

    def _arrived(self, conversation: Conversation, frame: Frame) -> None:
        try:
            header = from_json(frame.header)
        except HeaderError as error:
            raise RefusedCall(str(error)) from None
        content = None if frame.arrays is None else Content(_norm(frame.arrays))
        with self._changed:
            if conversation.ended_here:
                return
            if isinstance(header, Message) and frame.arrays is not None:
                self._others[header.xid] = frame.arrays
            if isinstance(header, State) and frame.arrays is not None:
                self._states = {conversation.key: frame.arrays}
            self._handle(Arrived(conversation.key, header, content))


def _correction(own: Arrays, others: Arrays, weight: float) -> Arrays:
    return [np.float32(weight) * (theirs - mine) for mine, theirs in zip(own, others, strict=True)]


def _norm(arrays: Arrays) -> float:
    """Euclidean, over all arrays; not finite where a value is not."""
    squares = (float(np.linalg.norm(x.reshape(-1).astype(np.float32, copy=False))) ** 2 for x in arrays)
    return float(np.sqrt(sum(x for x in squares)))
