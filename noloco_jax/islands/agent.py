"""An island on the network: its protocol's actions carried out, over Flight, beside the training and never before it.

Every call has a thread (`calls.py`). All of them, and the training, hand events to the protocol under one lock,
which is held for as long as it takes to decide, never while anything is sent, copied or computed.
"""

import itertools
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from noloco_jax.errors import UserError
from noloco_jax.islands import peer_errors
from noloco_jax.islands.calls import Calls, Listener
from noloco_jax.islands.channel import Channel
from noloco_jax.islands.client import Client
from noloco_jax.islands.frames import ArraySpec, Expects
from noloco_jax.islands.keys import Credentials
from noloco_jax.islands.payload import Arrays, Codec, norm_of, pair_windows
from noloco_jax.islands.protocol.context import Settings
from noloco_jax.islands.protocol.events import (
    Action,
    Admitted,
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
    Ready,
    Refused,
    RoundEnded,
    Send,
    Start,
    Stop,
    Tell,
    Tick,
)
from noloco_jax.islands.protocol.island import Island, Journal
from noloco_jax.islands.protocol.messages import (
    ExchangeId,
    Header,
    Message,
    State,
    Status,
    Windows,
)
from noloco_jax.islands.query import ask_all
from noloco_jax.islands.roster import Roster
from noloco_jax.islands.server import Handlers, Server
from noloco_jax.islands.snapshots import ABOUT, Snapshots


@dataclass(frozen=True)
class Correction:
    """What an exchange came to: to be entered between two inner steps.

    Attributes:
      round: whose message it corrects.
      arrays: c = w_j/(w_i + w_j) (m_j − m_i), once they are computed.
    """

    round: int
    arrays: Future[Arrays]


_GOODBYE_SECONDS = 5.0  # in which the others ask what only this island knows


@dataclass(frozen=True)
class Healed:
    """Another island's state, to go on from.

    Attributes:
      peer: whose.
      round: the last one that it has ended.
      arrays: as the other's `Agent.give` was given them.
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


class Agent:
    """The network's side of an island. Threads are started by `open` and ended by `close`.

    Args:
      roster: the islands.
      name: of this one.
      credentials: its keys, None without TLS.
      protocol: what decides.
      settings: of the protocol.
      codec: the form in which messages travel.
      state: what each array of a state must be.
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
        codec: Codec,
        state: Sequence[ArraySpec],
        report: Callable[[str], None],
        snapshots: Snapshots,
        about: Mapping[str, Any],
    ):
        self._roster, self._name, self._credentials = roster, name, credentials
        self._protocol, self._report = protocol, report
        self._codec = codec
        self.snapshots, self._about = snapshots, dict(about)
        self._changed = threading.Condition(threading.RLock())
        self.clients = {other: Client(roster, name, credentials, other) for other in roster.names if other != name}
        self._calls = Calls(
            self.clients,
            {**codec.specs, State.__name__: state},
            settings.answer_seconds,
            self._changed,
            Listener(self._happened, self._ended, self._read, report),
        )
        self._former = ThreadPoolExecutor(1, thread_name_prefix="corrections")
        self._own: dict[int, Arrays] = {}
        self._others: dict[ExchangeId, Arrays] = {}  # as far as read
        self._windows: dict[ExchangeId, Arrays] = {}  # of both
        self._proposed: dict[Any, Message] = {}  # calls through which windows were sent, and what is to follow
        self._states: dict[Any, Arrays] = {}
        self._inbox: list[Correction | Healed] = []
        self._met: list[Met] = []
        self._waiting: list[tuple[Any, State]] = []  # for a copy of the state
        self._admitted = self._decided = False
        self._refused: Refused | None = None
        self._left = False
        self._closed = False
        self._server: Server | None = None

    # The training's side.

    def open(self) -> None:
        """Listens, and asks the others where they are. Raises `UserError` where it cannot listen."""
        handlers = Handlers(self._called, self.snapshots.state, {ABOUT: self._tell_about}, self._report)
        self._server = Server(self._roster, self._name, self._credentials, handlers)
        threading.Thread(target=self._tick, daemon=True, name="ticks").start()
        self._handle(Start())

    def admitted(self, seconds: float) -> bool:
        """Waits that long for the others' first word; whether it has come, and the island may make itself ready.

        Raises `UserError` if most of the others say that it does not belong to them.
        """
        return self._wait(lambda: self._admitted, seconds)

    def ready(self) -> None:
        """The island can train: its programs are compiled, and its own weights are there if it has any."""
        self._handle(Ready())

    def decided(self, seconds: float) -> bool:
        """Waits that long until the island is to train; whether it is. Another's weights come with `take`.

        Raises `UserError` as `admitted` does.
        """
        return self._wait(lambda: self._decided, seconds)

    @property
    def incarnation(self) -> int:
        """Of the weights: larger after a healing."""
        return self._protocol.incarnation

    def _wait(self, is_known: Callable[[], bool], seconds: float) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: is_known() or self._refused is not None, seconds)
            if self._refused is not None:
                raise UserError(self._refused.line)
            return is_known()

    def end_round(self, round: int, tokens: int, message: Arrays, norm: float) -> None:
        """The solo step of a round is done; its message, as it travels, is exchanged from now on.

        Args:
          round: the one after the last.
          tokens: trained on in it: the message's weight.
          message: encoded.
          norm: Euclidean, of the message.
        """
        with self._changed:
            if any(isinstance(item, Healed) for item in self._inbox):
                return  # these weights are about to be replaced
            self._own[round] = message
            self._handle(RoundEnded(round, tokens, norm))
            for old in [old for old in self._own if not self._protocol.is_meeting(old)]:
                del self._own[old]
            for arrays in (self._others, self._windows):
                for xid in [xid for xid in arrays if xid.round not in self._own]:
                    del arrays[xid]
            if not self._protocol.status().partner:
                self._met.append(Met(round, "", "alone", reason="an odd number of islands"))

    def stride(self, most: int) -> int:
        """Steps of the run's schedule, up to `most`, that the inner step which begins now is to stand for."""
        with self._changed:
            return self._protocol.stride(time.monotonic(), most)

    def pause(self) -> float:
        """Seconds to let pass before the next inner step, for partners that end their rounds a little later."""
        with self._changed:
            return self._protocol.pause()

    @property
    def is_exchanging(self) -> bool:
        """Whether an exchange is under way, or a correction about to come of one."""
        with self._changed:
            return bool(self._inbox) or self._protocol.is_exchanging

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
            self._calls.send(key, replace(header, round=round), arrays)

    def settle(self, round: int, seconds: float) -> None:
        """Waits until nothing more will come of the message of `round` and earlier ones, at most that long."""
        with self._changed:
            self._changed.wait_for(lambda: not self._protocol.is_meeting(round), seconds)

    def leave(self, finished: bool = False) -> None:
        """Says goodbye: nothing is committed any more, so that what is saved next has seen all that there is.

        `finished`: whether all steps of the run are taken; the weights are served on then, until `close`.
        """
        with self._changed:
            if self._server is not None and not self._left:
                self._left = True
                self._handle(Stop(finished))

    def unfinished(self, ask_seconds: float = 0.0) -> list[str]:
        """The islands that are not known to have taken all steps of the run; they are asked where seconds are given."""
        with self._changed:
            names = [name for name, peer in self._protocol.peers.items() if not peer.finished]
        answers = ask_all({name: self.clients[name] for name in names}, ask_seconds) if ask_seconds else {}
        with self._changed:
            for name, answer in answers.items():
                if isinstance(answer, Status) and answer.finished:
                    self._protocol.peers[name].finished = True
            return [name for name, peer in self._protocol.peers.items() if not peer.finished]

    def close(self) -> None:
        """Leaves, and ends all calls."""
        self.leave()
        with self._changed:
            opened, self._closed = self._server is not None and not self._closed, True
            self.snapshots.close()
            self._changed.notify_all()
        if not opened:
            return
        self._calls.hang_up(_GOODBYE_SECONDS)
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
                self._calls.dial(action)
            case Send(channel, State() as header):
                self._waiting.append((channel, header))
            case Send(channel, Message() as header):
                self._send_message(channel, header)
            case Send(channel, header):
                self._calls.send(channel, header, None)
            case Close(channel):
                self._waiting = [(key, header) for key, header in self._waiting if key != channel]
                self._calls.end(channel)
            case Apply(xid, peer, weight, lag):
                formed = self._former.submit(
                    self._codec.correction, self._own[xid.round], self._others.pop(xid), weight
                )
                self._inbox.append(Correction(xid.round, formed))
                self._met.append(Met(xid.round, peer, "late" if lag else "met", lag))
            case Drop(round, peer, reason, one_sided):
                self._met.append(Met(round, peer, "alone", reason=reason, one_sided=one_sided))
            case Admitted():
                self._admitted = True
            case Begin():
                self._decided = True
            case Heal(peer, round):
                self._decided = True
                self._own, self._others, self._windows = {}, {}, {}
                self._inbox = [Healed(peer, round, self._states.popitem()[1])]
                self._met.append(Met(round, peer, "healed"))
            case Refused():
                self._refused = action
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

    def _send_message(self, channel: Any, header: Message) -> None:
        """Sends a message, or what its code needs ahead of it."""
        own = self._own[header.xid.round]
        windows = self._codec.windows(own)
        if windows is None:
            self._calls.send(channel, header, self._codec.payload(own, ()))
        else:
            self._proposed[channel] = header
            self._calls.send(channel, Windows(header.xid), windows)

    def _take_windows(self, channel: Any, xid: ExchangeId, windows: Arrays) -> None:
        """Sends the message in the windows of both, once the other island's have come; its call's thread encodes it."""
        header, own = self._proposed.pop(channel, None), self._own.get(xid.round)
        if header is None or header.xid != xid or own is None:
            raise peer_errors.RefusedError("windows came that were not asked for")
        both = self._windows[xid] = pair_windows(self._codec.windows(own) or (), windows)
        self._calls.send(channel, header, partial(self._codec.payload, own, both))

    # What the calls bring.

    def _happened(self, event: Opened | Arrived | Broken, arrays: Arrays | None) -> None:
        with self._changed:
            if isinstance(event, Arrived) and isinstance(event.header, Windows) and arrays is not None:
                self._take_windows(event.channel, event.header.xid, arrays)
                return
            if isinstance(event, Arrived) and arrays is not None:
                if isinstance(event.header, Message):
                    self._others[event.header.xid] = arrays
                else:
                    self._states = {event.channel: arrays}
            self._handle(event)

    def _ended(self, channel: Any) -> None:
        with self._changed:
            self._states.pop(channel, None)
            self._proposed.pop(channel, None)
            self._waiting = [(key, header) for key, header in self._waiting if key != channel]

    def _read(self, header: Header, arrays: Arrays) -> tuple[Content, Arrays]:
        """What came behind a header, for the protocol and to be kept; in the thread of the call."""
        if isinstance(header, Windows):
            return Content(0.0), arrays
        if not isinstance(header, Message):
            return Content(norm_of(arrays)), arrays
        with self._changed:
            own, windows = self._own.get(header.xid.round), self._windows.get(header.xid)
        if own is None:
            return Content(math.nan), arrays  # the round is over, and the call has been ended
        if windows is None and Windows.__name__ in self._codec.specs:
            raise peer_errors.RefusedError("a message came ahead of its windows")
        read = self._codec.read(own, windows or (), arrays)
        return Content(read.norm), read.arrays

    def _called(self, caller: str, hello: Mapping[str, Any], connect: Callable[[Expects], Channel]) -> None:
        self._calls.called(caller, hello, connect)

    def _tell_about(self, caller: str, argument: Mapping[str, Any]) -> dict[str, Any]:
        with self._changed:
            status = self._protocol.status()
        return {**self._about, "round": status.round, "training": status.training or status.finished}
