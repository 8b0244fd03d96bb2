"""Agent of an island: carries out its protocol's actions over Flight, beside the training.

Every call has a thread (`calls.py`). All of them, and the training, hand events to the protocol under one lock,
which is held for as long as it takes to decide, never while anything is sent, copied or computed.
"""

import itertools
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from noloco_jax.errors import UserError
from noloco_jax.islands import peer_errors
from noloco_jax.islands.calls import Calls, Listener
from noloco_jax.islands.donor import Donor
from noloco_jax.islands.entries import describe, known_roster, write_members
from noloco_jax.islands.keys import Credentials
from noloco_jax.islands.network import Network
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
    Keep,
    KeepShare,
    Learned,
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
    Told,
)
from noloco_jax.islands.protocol.island import Island, Journal
from noloco_jax.islands.protocol.members import Entry
from noloco_jax.islands.protocol.messages import (
    ExchangeId,
    Header,
    HeaderError,
    Message,
    State,
    Status,
    StatusRequest,
    Windows,
    from_json,
)
from noloco_jax.islands.query import ask_all, ask_status
from noloco_jax.islands.recent import LONGEST_LINE, WATCH, Recent, event_time
from noloco_jax.islands.roster import Address, Roster
from noloco_jax.islands.server import Handlers
from noloco_jax.islands.snapshots import ABOUT, Snapshots
from noloco_jax.islands.state_shares import Assembly, StateLayouts


@dataclass(frozen=True)
class Correction:
    """Correction of an exchange, to apply between two inner steps.

    Attributes:
      round: the round whose message it corrects.
      arrays: c = w_j/(w_i + w_j) (m_j − m_i), once computed.
    """

    round: int
    arrays: Future[Arrays]


_SHOWN = ("incarnation", "round", "training", "starting", "finished", "committed", "due", "lag", "partner", "members")
_GOODBYE_SECONDS = 5.0  # for peers to ask about exchanges that only this island can resolve


@dataclass(frozen=True)
class Healed:
    """State of peers, from which training continues.

    Attributes:
      round: the last round that the donor of the position has ended.
      step: its inner steps.
      leaves: arrays of a state by their numbers.
      whole: True if these are all of them; otherwise weights, and what travels with them.
    """

    round: int
    step: int
    leaves: Mapping[int, np.ndarray]
    whole: bool


@dataclass(frozen=True)
class Met:
    """Outcome of a round's message.

    Attributes:
      round: the round of the message.
      partner: the island to exchange it with; empty: nobody.
      outcome: "met" in its round, "late" in a later one, or "alone"; "healed": no message; training continues from the
        partner's state after this round.
      lag: rounds by which it was late.
      reason: the reason for "alone", in a few words.
      one_sided: True if the partner may have applied its half.
      factor: the smallest of the correction's arrays, below 1 where bounds clipped it; 0: the messages were exchanged,
        and nothing of the partner's is taken.
      steps_late: inner steps begun from the end of its round until its exchange committed; None where it did not.
    """

    round: int
    partner: str
    outcome: str
    lag: int = 0
    reason: str = ""
    one_sided: bool = False
    factor: float = 1.0
    steps_late: int | None = None


class Agent:
    """Network side of an island. `open` starts its threads and `close` ends them.

    Args:
      roster: the founders, at their addresses as this machine knows them.
      name: this island.
      credentials: its keys, None without TLS.
      protocol: the state machine that decides.
      settings: the protocol's settings.
      codec: the codec of messages.
      states: layouts of a state.
      report: called with lines for people.
      snapshots: copies of the weights for merging.
      about: description of the island's weights.
      listen: the address to listen at; None: see `Server`.
      members_file: where membership entries are kept; None: nowhere.

    Attributes:
      snapshots: see above.
      network: the ways to the peers.
      recent: recent events, for those who watch.
    """

    def __init__(
        self,
        roster: Roster,
        name: str,
        credentials: Credentials | None,
        protocol: Island,
        settings: Settings,
        codec: Codec,
        states: StateLayouts,
        report: Callable[[str], None],
        snapshots: Snapshots,
        about: Mapping[str, Any],
        members_file: Path | None = None,
        listen: Address | None = None,
    ):
        self._founders, self._name = roster, name
        self._protocol, self._to_people = protocol, report
        self.recent, self._began = Recent(), event_time()
        self._members_file = members_file
        self._codec = codec
        self.snapshots, self._about = snapshots, dict(about)
        self._changed = threading.Condition(threading.RLock())
        known = known_roster(roster, protocol.members, protocol.round)
        self.network = Network(known, name, credentials, self._report, listen)
        self._calls = Calls(
            self.network.clients,
            codec.specs,
            lambda share: states.of(share.whole).specs(share.number),
            settings.answer_seconds,
            self._changed,
            Listener(self._happened, self._ended, self._read, self._report),
        )
        self._fits = settings.fits
        self._whole_state, self._layout = settings.whole_state, states.of(settings.whole_state)
        self._assembly: Assembly | None = None  # shares of a state that this island catches up from
        self._donor = Donor(states, self._calls.send, self._calls.end)
        self._former = ThreadPoolExecutor(1, thread_name_prefix="corrections")
        self._own: dict[int, Arrays] = {}
        self._steps = 0  # inner steps that were begun
        self._begun: dict[int, int] = {}  # round of a message in `_own` -> inner steps begun until its end
        self._others: dict[ExchangeId, Arrays] = {}  # decoded messages of peers that the protocol has accepted
        self._arriving: Any = None  # arrays of the event at hand
        self._windows: dict[ExchangeId, Arrays] = {}  # windows of the pair
        self._proposed: dict[Any, Message] = {}  # channel on which windows were sent -> the message to follow
        self._inbox: list[Correction | Healed] = []
        self._met: list[Met] = []
        self._admitted = self._decided = False
        self._refused: Refused | None = None
        self._left = False
        self._opened = self._closed = False
        self._over = False  # nothing is carried out any more, as a last call may still end or bring something
        self._follow_members()

    # The training's side.

    def open(self) -> None:
        """Listen, and ask the peers for their status. Raises `UserError` where it cannot listen."""
        actions = {ABOUT: self._tell_about, WATCH: self._show}
        serves = (
            self._calls.called,
            self.snapshots.state,
            actions,
            self._report,
            self.network.relay.call,
            self._introduced,
        )
        self.network.open(Handlers(*serves))
        self._opened = True
        self._follow_members()
        threading.Thread(target=self._tick, daemon=True, name="ticks").start()
        self._handle(Start())

    def admitted(self, seconds: float) -> bool:
        """Wait up to `seconds` for admission by the peers; return True once admitted.

        Raises `UserError` if most of the others say that it does not belong to them.
        """
        return self._wait(lambda: self._admitted, seconds)

    def ready(self) -> None:
        """Report that the island can train: its programs are compiled, and its own weights loaded if it has any."""
        self._handle(Ready())

    def decided(self, seconds: float) -> bool:
        """Wait up to `seconds` for the decision to train; return True once decided. A peer's weights come with `take`.

        Raises `UserError` as `admitted` does.
        """
        return self._wait(lambda: self._decided, seconds)

    @property
    def incarnation(self) -> int:
        """Incarnation of the weights: larger after a peer's state is taken."""
        return self._protocol.incarnation

    def _wait(self, is_known: Callable[[], bool], seconds: float) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: is_known() or self._refused is not None, seconds)
            if self._refused is not None:
                raise UserError(self._refused.line)
            return is_known()

    def end_round(self, round: int, tokens: int, message: Arrays, norm: float) -> None:
        """Start the exchange of a round's message, after the round's solo step.

        Args:
          round: the round after the last one.
          tokens: tokens trained on in it, the message's weight.
          message: the encoded message.
          norm: the message's Euclidean norm.
        """
        with self._changed:
            if any(isinstance(item, Healed) for item in self._inbox):
                return  # these weights are about to be replaced
            self._own[round], self._begun[round] = message, self._steps
            self._handle(RoundEnded(round, tokens, norm))
            if len(self._protocol.members.present(round)) != len(self.network.roster.names):
                self._follow_members()
            for old in [old for old in self._own if not self._protocol.is_meeting(old)]:
                del self._own[old], self._begun[old]
            for arrays in (self._others, self._windows):
                for xid in [xid for xid in arrays if xid.round not in self._own]:
                    del arrays[xid]
            if not self._protocol.status().partner:
                is_member = self._name in self._protocol.members.active(round)
                reason = "an odd number of islands" if is_member else f"{self._name} is no member in this round"
                self._met.append(Met(round, "", "alone", reason=reason))

    def stride(self, most: int) -> int:
        """Return the steps of the run's schedule, up to `most`, that the next inner step is to stand for."""
        with self._changed:
            self._steps += 1
            return self._protocol.stride(time.monotonic(), most)

    def pause(self) -> float:
        """Return the seconds to pause before the next inner step, for partners that end their rounds a little later."""
        with self._changed:
            return self._protocol.pause()

    @property
    def is_exchanging(self) -> bool:
        """True while an exchange is under way or a correction is pending."""
        with self._changed:
            return bool(self._inbox) or self._protocol.is_exchanging

    def take(self) -> list[Correction | Healed]:
        """Return corrections ready to apply, in order; a received state discards everything queued before it."""
        with self._changed:
            ready = list(itertools.takewhile(lambda item: isinstance(item, Healed) or item.arrays.done(), self._inbox))
            return self._taken(len(ready))

    def take_all(self) -> tuple[list[Correction | Healed], Journal]:
        """Return everything queued, and the journal to save with weights that have applied it."""
        with self._changed:
            return self._taken(len(self._inbox)), self._protocol.journal()

    def put_back(self, healed: Healed) -> None:
        """Put `healed` back at the head of the queue."""
        with self._changed:
            self._inbox.insert(0, healed)

    def take_met(self) -> list[Met]:
        """Return the outcomes since the last call."""
        with self._changed:
            met, self._met = self._met, []
            return met

    def status(self) -> Status:
        """Return this island's status."""
        with self._changed:
            return self._protocol.status()

    @property
    def wants_state(self) -> bool:
        """True while a peer waits for a copy of the state: call `give` then."""
        with self._changed:
            return self._donor.is_waited_for

    @property
    def wanted(self) -> list[int]:
        """Numbers of the state's arrays to `give`."""
        with self._changed:
            return self._donor.wanted

    def give(self, round: int, step: int, leaves: Mapping[int, np.ndarray]) -> None:
        """Serve the peers that wait for a copy of the state: see `Donor.give`."""
        with self._changed:
            self._donor.give(round, step, leaves)

    def settle(self, round: int, seconds: float) -> None:
        """Wait up to `seconds` until every exchange of `round` and earlier ones has ended."""
        with self._changed:
            self._changed.wait_for(lambda: not self._protocol.is_meeting(round), seconds)

    def leave(self, finished: bool = False) -> None:
        """Say goodbye to the peers: nothing is committed any more, so that the next checkpoint is complete.

        `finished`: all steps of the run are taken; the weights are then served until `close`.
        """
        with self._changed:
            if self._opened and not self._left:
                self._left = True
                self._handle(Stop(finished))

    def unfinished(self, ask_seconds: float = 0.0) -> list[str]:
        """Return the islands not known to have taken all steps; ask them first where `ask_seconds` is positive."""
        with self._changed:
            names = self._unfinished()
        if not ask_seconds:
            return names
        clients = {name: self.network.clients[name] for name in names}
        answers = ask_all(clients, lambda client: ask_status(client, StatusRequest(), ask_seconds))
        with self._changed:
            for name, answer in answers.items():
                if isinstance(answer, Status) and answer.finished and name in self._protocol.peers:
                    self._protocol.peers[name].finished = True
            return self._unfinished()

    @property
    def is_relaying(self) -> bool:
        """True while an island that only dials out is reached through this one."""
        return self.network.relay.is_in_use

    @property
    def is_removed(self) -> bool:
        """True once this island has ended its last round as a member: the others go on without it."""
        with self._changed:
            return self._protocol.members.is_over(self._name, self._protocol.round + 1)

    def active(self) -> tuple[str, ...]:
        """Return the members of the last round, by their ids."""
        with self._changed:
            return self._protocol.members.active(max(self._protocol.round, 0))

    def _unfinished(self) -> list[str]:
        active, peers = self.active(), self._protocol.peers
        return [name for name in active if name in peers and not peers[name].finished]

    def close(self) -> None:
        """Leave, and end all calls."""
        self.leave()
        with self._changed:
            is_first, self._closed = not self._closed, True
            self.snapshots.close()
            self._changed.notify_all()
        if not is_first:
            return
        if self._opened:
            self._calls.hang_up(_GOODBYE_SECONDS)
        self.network.close()
        with self._changed:
            self._over = True
        self._former.shutdown()

    def _taken(self, count: int) -> list[Correction | Healed]:
        taken, self._inbox = self._inbox[:count], self._inbox[count:]
        last = max((i for i, item in enumerate(taken) if isinstance(item, Healed)), default=0)
        return taken[last:]

    # The protocol's side.

    def _handle(self, event: Event) -> None:
        with self._changed:
            if self._over:
                return
            for action in self._protocol.handle(event, time.monotonic()):
                self._carry_out(action)
            self._changed.notify_all()

    def _carry_out(self, action: Action) -> None:
        match action:
            case Open():
                self._calls.dial(action)
            case Send(channel, State() as header):
                self._donor.ask(channel, header)
            case Send(channel, Message() as header):
                self._send_message(channel, header)
            case Send(channel, header):
                self._calls.send(channel, header, None)
            case Close(channel):
                self._donor.forget(channel)
                self._calls.end(channel)
            case Keep(xid):
                assert self._arriving is not None
                for kept in (self._others, self._windows):  # a round has one exchange: earlier attempts have failed
                    for other in [other for other in kept if other.round == xid.round and other != xid]:
                        del kept[other]
                self._others[xid] = self._arriving
            case KeepShare(number):
                assert self._arriving is not None
                self._assembly = self._assembly or Assembly(self._layout)
                self._assembly.put(number, self._arriving[0])
            case Apply(xid, peer, weight, lag, factors):
                messages = self._own[xid.round], self._others.pop(xid)
                formed = self._former.submit(self._codec.correction, *messages, weight, factors)
                self._inbox.append(Correction(xid.round, formed))
                factor = min(factors, default=1.0)
                steps = self._steps - self._begun[xid.round]
                self._met.append(Met(xid.round, peer, "late" if lag else "met", lag, factor=factor, steps_late=steps))
            case Drop(round, peer, reason, one_sided, exchanged):
                factor = 0.0 if exchanged else 1.0
                self._met.append(Met(round, peer, "alone", reason=reason, one_sided=one_sided, factor=factor))
            case Admitted():
                self._admitted = True
            case Begin():
                self._decided = True
            case Heal(peer, round):
                assert self._arriving is not None
                self._decided = True
                self._own, self._begun, self._others, self._windows = {}, {}, {}, {}
                (step, *_), leaves = self._arriving
                self._inbox = [Healed(round, int(step), leaves, self._whole_state)]
                self._assembly = None
                self._met.append(Met(round, peer, "healed"))
            case Refused():
                self._refused = action
            case Learned(entries):
                self._learn(entries)
            case Tell(line):
                self._report(line)

    def _learn(self, entries: Sequence[Entry]) -> None:
        """Keep new entries, in a thread, and follow them."""
        members = self._protocol.members
        for entry in entries:
            self._report(describe(entry))
        if self._members_file is not None:
            self._former.submit(write_members, self._members_file, self._founders, members.entries)
        self._follow_members()

    def _follow_members(self) -> None:
        """Call and admit the present members, at their newest addresses."""
        members = self._protocol.members
        issued = {entry.name: entry.issued for entry in members.entries if entry.issued > 0}
        self.network.follow(known_roster(self._founders, members, self._protocol.round), issued)

    def _introduced(self, name: str, body: Mapping[str, Any]) -> bool:
        """Return whether an unknown caller has brought an entry that makes it a member."""
        try:
            header = from_json(dict(body))
        except HeaderError:
            return False
        if not isinstance(header, StatusRequest) or header.news is None:
            return False
        with self._changed:
            self._handle(Told(header.news))
            return name in self.network.roster.names

    def _tick(self) -> None:
        """Send the protocol a tick whenever its deadline has come."""
        with self._changed:
            while not self._closed:
                deadline = self._protocol.next_deadline()
                wait = None if deadline is None else deadline - time.monotonic()
                if wait is not None and wait <= 0:
                    self._handle(Tick())
                else:
                    self._changed.wait(None if wait is None else min(wait, threading.TIMEOUT_MAX))

    def _send_message(self, channel: Any, header: Message) -> None:
        """Send a message, or the windows that its wire format needs first."""
        own = self._own[header.xid.round]
        windows = self._codec.windows(own)
        if windows is None:
            self._calls.send(channel, header, self._codec.payload(own, ()))
        else:
            self._proposed[channel] = header
            self._calls.send(channel, Windows(header.xid), windows)

    def _take_windows(self, channel: Any, xid: ExchangeId, windows: Arrays) -> None:
        """Send the message in the windows of both, once the peer's have come; the call's thread encodes it."""
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
            self._arriving = arrays
            self._handle(event)
            self._arriving = None

    def _ended(self, channel: Any) -> None:
        with self._changed:
            self._proposed.pop(channel, None)
            self._donor.forget(channel)

    def _read(self, header: Header, arrays: Arrays) -> tuple[Content, Arrays]:
        """Decode the arrays behind a header, in the thread of the call: what the protocol learns, and what is kept."""
        if isinstance(header, Windows):
            return Content(0.0), arrays
        if isinstance(header, State) and header.share is not None:
            return self._read_share(header.round, header.share.number, arrays)
        if not isinstance(header, Message):
            return Content(norm_of(arrays)), arrays
        with self._changed:
            own, windows = self._own.get(header.xid.round), self._windows.get(header.xid)
        if own is None:
            return Content(math.nan), arrays  # the round is over and its call has ended
        if windows is None and Windows.__name__ in self._codec.specs(header.xid.round):
            raise peer_errors.RefusedError("a message came ahead of its windows")
        read = self._codec.read(own, windows or (), arrays)
        return Content(read.norm, read.differences), read.arrays

    def _read_share(self, round: int, number: int, arrays: Arrays) -> tuple[Content, Any]:
        """Check a share; with the position, which comes last, decode all arrays."""
        if number:
            return Content(0.0 if self._layout.is_finite(number, arrays[0]) else math.nan), arrays
        if not self._fits(round, int(arrays[0])):
            return Content(math.nan), arrays
        assembly = self._assembly or Assembly(self._layout)
        leaves = assembly.leaves(arrays[1:])
        return Content(norm_of([x for x in leaves.values() if x.dtype.kind != "c"])), (arrays[:1], leaves)

    def _report(self, line: str) -> None:
        """Tell people, and those who watch."""
        self.recent.add({"time": event_time(), "event": "notice", "line": line[:LONGEST_LINE]})
        self._to_people(line)

    def _show(self, caller: str, argument: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of this island, its view of the peers, and events after the number `after`."""
        after = argument.get("after", 0)
        if type(after) is not int:
            raise peer_errors.RefusedError("watch asks for the events after a number")
        events, last = self.recent.after(after)
        now = time.monotonic()
        with self._changed:
            status, ended = self._protocol.status(), self._protocol.round
            peers = [
                {
                    "name": peer.name,
                    "round": peer.round,
                    "seen": None if peer.seen is None else round(max(now - peer.seen, 0.0), 1),
                    "away": peer.away,
                    "finished": peer.finished,
                    "refuses": peer.wrong or "",
                    "left_out": peer.left_out,
                    "quarantined_until": peer.quarantined_until if peer.quarantined_until > ended else 0,
                    "fault": peer.fault,
                }
                for peer in self._protocol.peers.values()
            ]
        shown = {name: getattr(status, name) for name in _SHOWN}
        return {
            **shown,
            "name": self._name,
            "run": self._founders.run,
            "began": self._began,
            "num_steps": self._about.get("config", {}).get("num_steps"),
            "totals": self.recent.totals,
            "peers": peers,
            "events": events,
            "last": last,
        }

    def _tell_about(self, caller: str, argument: Mapping[str, Any]) -> dict[str, Any]:
        with self._changed:
            status = self._protocol.status()
        return {**self._about, "round": status.round, "training": status.training or status.finished}
