"""Table of an island's peers: what they have told, the roster that it follows, and its tasks and lines.

Everything here runs on one asyncio loop, so that no step between two awaits is interrupted. The network and the
training are behind `Network` and `TrainerCallbacks`; tests have both in memory, on a virtual clock.
"""

import asyncio
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

from noloco_jax.islands import messages_pb2 as pb
from noloco_jax.islands.bounds import Distance
from noloco_jax.islands.exchange import ConnectionLost, ProtocolError
from noloco_jax.islands.interfaces import Network, Plan, TrainerCallbacks
from noloco_jax.islands.pace import Pace
from noloco_jax.islands.peers import ENDED, FINISHED, Peer, check_status, digest
from noloco_jax.islands.roster import BadRosterError, Roster, changes, describe, version_of
from noloco_jax.optim.pairing import Pairing, RandomPairing

LOG_AGAIN_SECONDS = 3600.0  # after a line of one kind on a peer
ROSTER_SECONDS = 5.0  # between two questions to one peer for a newer roster, and between sending it one's own twice
GREET_SECONDS = 10.0  # for an answer to a greeting


class PeerTable:
    """Table of an island's peers.

    Args:
      plan, network, trainer, pace, parse: as for `Node`.
      peers_changed: called when peers have come or gone, or begin no further exchange.
    """

    def __init__(
        self,
        plan: Plan,
        network: Network,
        trainer: TrainerCallbacks,
        pace: Pace,
        parse: Callable[[bytes], Roster] | None,
        peers_changed: Callable[[], None],
    ):
        saved = plan.saved
        self.plan, self.name, self.patience, self.fits = plan, plan.name, plan.patience, plan.fits
        self.roster, self.incarnation, self.digest = plan.roster, plan.incarnation, digest(plan.identity)
        self.network, self.trainer, self.pace = network, trainer, pace
        self.round: int = saved["round"] if saved else -1
        self.has_averaged: bool = bool(saved and saved["has_averaged"])
        self.phase: Any = pb.Status.STARTING
        self.peers: dict[str, Peer] = {}
        self.notices: list[str] = []
        self._parse, self._peers_changed = parse, peers_changed
        self._changed = asyncio.Event()  # set and replaced at every change that somebody may wait for
        self._tasks: set[asyncio.Task] = set()
        self._bad_senders: dict[str, float] = {}  # who sent a roster that nobody signed, and when
        self._logged: dict[tuple[str, str], tuple[int, float]] = {}  # (peer, kind) -> lines so far, time of the last
        self._logged_once: set[str] = set()
        self.follow(plan.roster)
        for other, (count, size, until) in (saved["peers"] if saved else {}).items():
            if other in self.peers:
                self.peers[other].distance, self.peers[other].quarantined_until = Distance(count, size), until

    def partner(self, round: int) -> str | None:
        """Return the partner of a round, or None."""
        active = self.roster.active(round)
        if self.name not in active or len(active) < 2:
            return None
        draw, fragment = divmod(round, self.plan.num_fragments)
        pairing, me = _resized(self.plan.pairing, len(active)), active.index(self.name)
        groups = pairing.pool[int(pairing.pool_index(draw, fragment))]
        return next((active[i] for group in groups if me in group for i in group if i != me), None)

    def dials(self, peer: str, round: int) -> bool | None:
        """Return whether this island dials a partner, rather than being dialled; None: neither can."""
        members = [self.roster.member(name) for name in (self.name, peer)]
        own, other = (member.address.can_be_dialled for member in members)
        if not (own and other):
            return other if own or other else None
        return (members[0].id < members[1].id) is (round % 2 == 0)

    def end_of(self, name: str) -> str:
        """Return that an island is a member no more, once this one has ended a round without it; else an empty text."""
        member = self.roster.get(name)
        return describe(None, member) if member is not None and self.roster.is_over(name, self.round) else ""

    @property
    def is_removed(self) -> bool:
        """True once this island has ended its last round as a member."""
        return self.roster.is_over(self.name, self.round + 1)

    # Peers.

    def hear(self, name: str, round: int = -1, incarnation: int = 0, roster_version: int = -1) -> None:
        """Learn what a peer tells of itself; -1, and incarnation 0, stand for what it does not tell.

        If its roster is a newer one, it is asked for that, and sent this island's if it is an older one, which may have
        an address at which nobody is any more. Neither is done too often.
        """
        peer = self.peers[name]
        peer.silent = 0
        if incarnation > peer.incarnation:
            peer.incarnation, peer.round, peer.phase = incarnation, -1, pb.Status.STARTING
        peer.round = max(peer.round, round)
        is_due = self._now() - peer.asked_for_roster >= ROSTER_SECONDS
        is_other = roster_version not in (-1, self.roster.version)
        if is_other and self._parse is not None and is_due:
            peer.asked_for_roster = self._now()
            self.start(self.ask([name], wants_roster=True))

    def hear_phase(self, name: str, phase: Any) -> None:
        """Learn a peer's phase: it ends once, and for good until a later start, so that what comes late is ignored."""
        peer = self.peers[name]
        if peer.phase in ENDED and phase not in ENDED:
            return
        has_ended = phase in ENDED and peer.phase not in ENDED
        peer.phase = phase
        if has_ended:
            self._peers_changed()
        self.notify()

    async def ask(self, names: Iterable[str], seconds: float = GREET_SECONDS, **fields: Any) -> dict[str, pb.Status]:
        """Greet peers at once; return the answers of those that answer and do not refuse.

        `fields` are those of the greeting, which tells this island's phase as well.
        """
        found: dict[str, pb.Status] = {}

        async def one(name: str) -> None:
            try:
                status = await self.network.greet(name, self.greeting(**fields), seconds)
                check_status(status)
                if self._is_to_be_told(name, status.roster_version):
                    roster = pb.SignedRoster.FromString(self.roster.document)
                    status = await self.network.greet(name, self.greeting(roster=roster, **fields), seconds)
                    check_status(status)
            except (ConnectionLost, ProtocolError):
                if name in self.peers:
                    self.peers[name].silent += 1
                return
            if name not in self.peers:
                return
            self.peers[name].wrong = status.wrong[:300]
            if not status.wrong:
                found[name] = status
                is_known = status.round_seconds or status.phase in FINISHED
                self.hear(name, status.round if is_known else -1, status.incarnation, status.roster_version)
                self.hear_phase(name, status.phase)
            if status.HasField("roster"):
                self.take_roster(status.roster.SerializeToString(), name)

        await asyncio.gather(*map(one, names))
        return found

    def _is_to_be_told(self, name: str, version: int) -> bool:
        """Return whether to send a peer with this version the own roster now, and note that it is sent."""
        peer, now = self.peers.get(name), self._now()
        if peer is None or version >= self.roster.version or not self.roster.document:
            return False
        if now - peer.told_roster < ROSTER_SECONDS:
            return False
        peer.told_roster = now
        return True

    def greeting(self, **fields: Any) -> pb.Greeting:
        """Return a greeting of this island."""
        return pb.Greeting(
            identity=self.plan.identity,
            incarnation=self.incarnation,
            roster_version=self.roster.version,
            phase=self.phase,
            **fields,
        )

    # The roster.

    def follow(self, roster: Roster) -> None:
        """Take a roster's members for one's peers."""
        self.roster = roster
        names = [name for name in roster.names if name != self.name and not roster.is_over(name, self.round)]
        self.peers = {name: self.peers.get(name) or Peer(name) for name in names}
        self.network.follow(roster)

    def take_roster(self, document: bytes, sender: str) -> None:
        """Take a newer roster that the run's authority has signed; ignore others."""
        now = self._now()
        if self._parse is None or version_of(document) <= self.roster.version:
            return
        if now - self._bad_senders.get(sender, -ROSTER_SECONDS) < ROSTER_SECONDS:
            return  # a signature takes time to check
        try:
            roster = self._parse(document)
        except BadRosterError as error:
            self._bad_senders = {**dict([*self._bad_senders.items()][-99:]), sender: now}
            self.log_of(sender, "roster", f"{sender} sent a roster that is refused: {error}")
            return
        if roster.founders != self.roster.founders:
            return
        for line in changes(self.roster, roster):
            self.log(line)
        own, moved = self.roster.get(self.name), roster.get(self.name)
        if own is not None and moved is not None and own.address != moved.address:
            self.log(f"{self.name} was at {own.address}: if it starts on another machine, end this process first")
        self.trainer.keep(roster)
        self.follow(roster)
        self._peers_changed()
        self.notify()

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
            task.get_loop().call_exception_handler({"message": "a task failed", "exception": error})

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

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    def log_of(self, name: str, kind: str, line: str) -> None:
        """Log a line on a peer, unless one of its kind was logged within an hour and they are not ten times as many."""
        count, last = self._logged.get((name, kind), (0, -math.inf))
        count, now = count + 1, self._now()
        is_told = now - last >= LOG_AGAIN_SECONDS or count == 10 ** (len(str(count)) - 1)
        self._logged[name, kind] = count, now if is_told else last
        if is_told:
            self.log(line if count == 1 else f"{line}; number {count} of such lines on {name}")

    def log_once(self, kind: str, line: str) -> None:
        """Log the first line of a kind."""
        if kind not in self._logged_once:
            self._logged_once.add(kind)
            self.log(line)

    def log(self, line: str) -> None:
        """Log a line for people, and for those who watch."""
        self.notices = [*self.notices[-19:], line[:300]]
        self.trainer.log(line)


@functools.lru_cache(maxsize=8)
def _resized(pairing: Pairing, count: int) -> Pairing:
    """Return the pairing of another number of islands, as members come and go: random pairs of the same seed.

    Pairs of a hypercube need a power of two.
    """
    if pairing.num_replicas == count:
        return pairing
    if not isinstance(pairing, RandomPairing):
        return RandomPairing(count)
    order = "passes" if pairing.order == "hypercube" and count & (count - 1) else pairing.order
    return RandomPairing(count, seed=pairing.seed, order=order)
