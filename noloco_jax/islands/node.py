"""Protocol of one island: what the training tells it, and what it answers."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Any

from noloco_jax.islands import messages_pb2 as pb
from noloco_jax.islands.interfaces import Met, Network, Plan, World
from noloco_jax.islands.meetings import Meetings
from noloco_jax.islands.pace import Pace
from noloco_jax.islands.peers import FAULTS, FINISHED, LINES, Peer, check_greeting, check_watch, difference
from noloco_jax.islands.roster import Roster
from noloco_jax.islands.view import GREET_SECONDS, View

SILENT = 3  # questions in a row without an answer, after which a peer that has finished is taken to have gone


class Node(View):
    """One island among its peers.

    Args:
      plan: what the island brings.
      network: calls to the others.
      world: the training.
      pace: of this island.
      parse: (document) -> roster; raises `BadRosterError`. None: a newer roster is never taken, without TLS.
    """

    def __init__(
        self, plan: Plan, network: Network, world: World, pace: Pace, parse: Callable[[bytes], Roster] | None = None
    ):
        self.step = 0
        self.figures: dict[str, float] = {}
        self.meetings = Meetings(self, plan.saved)
        super().__init__(plan, network, world, pace, parse)

    def peer_ended(self, peer: Peer) -> None:
        self.meetings.peer_left(peer)

    def members_changed(self) -> None:
        self.meetings.end("the partner is no member any more", lambda meeting: meeting.partner not in self.peers)

    # The training's side.

    def round_ended(
        self, round: int, step: int, own: Any, norm: float, tokens: int, lacking: Sequence[int] = ()
    ) -> None:
        """End a round: its message waits for the partner's.

        Args:
          round: one more than the last one.
          step: inner steps behind it.
          own: the message, for the codec.
          norm: Euclidean, of the message.
          tokens: that were trained on in it.
          lacking: rounds whose corrections are delivered, and not applied in the message.
        """
        assert round == self.round + 1, f"round {round} follows round {self.round}"
        self.round, self.step = round, step
        self.pace.round_ended(round, self._now())
        self.meetings.begin(round, own, norm, tokens, lacking)
        self.notify()

    def to_json(self) -> dict[str, Any]:
        """Return the protocol's state, to save with weights in which everything delivered is applied."""
        known = {one.name: [*one.distance, one.quarantined_until] for one in self.peers.values()}
        peers = {name: values for name, values in known.items() if any(values)}
        return {"round": self.round, "has_averaged": self.has_averaged, "peers": peers, **self.meetings.to_json()}

    def leave(self, phase: Any) -> None:
        """End all meetings, and tell the peers: the phase is one of `ENDED`."""
        self.phase = phase
        self.meetings.end("leaving")
        names = [peer.name for peer in self.peers.values() if peer.phase != pb.Status.LEAVING and not peer.wrong]
        self.start(self.ask(names, GREET_SECONDS / 2))
        self.notify()

    def adopt(self, donor: str, round: int, has_averaged: bool) -> None:
        """Continue from a donor's weights: forget the exchanges of the old ones."""
        self.meetings.end("weights of a peer took this island's place")
        self.round, self.has_averaged = round, self.has_averaged or has_averaged
        self.incarnation += 1
        self.pace.restart()
        self.world.outcome(Met(round, donor, "caught up"))
        self.notify()

    def unfinished(self) -> list[str]:
        """Return the members not known to have taken their last step."""
        active = self.roster.active(max(self.round, 0))
        return [name for name in active if name in self.peers and self.peers[name].phase not in FINISHED]

    def unmerged(self, names: Iterable[str]) -> list[str]:
        """Return those of these peers that may still want this island's last weights: they have not gone."""
        over = (pb.Status.MERGED, pb.Status.LEAVING)
        peers = [self.peers[name] for name in names if name in self.peers]
        return [peer.name for peer in peers if peer.phase not in over and peer.silent < SILENT]

    async def greeted(self, name: str, greeting: pb.Greeting) -> pb.Status:
        """Answer a greeting of an island or a command; `name` is that of the caller's certificate."""
        check_greeting(greeting)
        if greeting.HasField("roster"):
            self.take_roster(greeting.roster.SerializeToString(), name)
        wrong, peer = "", self.peers.get(name)
        if peer is not None and greeting.identity:
            peer.wrong = wrong = difference(self.identity, greeting.identity, name)
            self.hear(name, pb.Timing(), greeting.incarnation, greeting.address)
            if greeting.incarnation == peer.incarnation:  # not one of an earlier start
                self.hear_phase(name, greeting.phase)
            self.take_news(name, greeting.roster_version)
        if greeting.until_ready:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(greeting.hold_seconds):
                    await self.until(lambda: self.phase != pb.Status.STARTING)
        status = self.status(for_people=not greeting.identity)
        if wrong:
            status.wrong = difference(greeting.identity, self.identity, self.name)
        for about in (self.peers[other] for other in greeting.about if other in self.peers):
            status.peers.add(name=about.name, phase=about.phase)
        if greeting.wants_roster and self.roster.version > greeting.roster_version:
            status.roster.ParseFromString(self.roster.document)
        if greeting.wants_details:
            status.details = self._plan.details
        return status

    async def watched(self, request: pb.WatchRequest) -> AsyncGenerator[pb.Status, None]:
        """Yield this island's status at once, every so many seconds, and whenever its phase changes."""
        check_watch(request)
        while True:
            phase = self.phase
            yield self.status(for_people=True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(request.every_seconds):
                    await self.until(lambda: self.phase != phase)  # noqa: B023 - awaited before the next one

    def status(self, for_people: bool = False) -> pb.Status:
        """Return this island's status; for people with figures, its latest lines, and the peers that have a fault.

        Its size does not depend on the number of members.
        """
        meetings = self.meetings
        status = pb.Status(
            phase=self.phase,
            incarnation=self.incarnation,
            round=self.round,
            step=self.step,
            has_averaged=self.has_averaged,
            due=meetings.due,
            committed=meetings.committed,
            one_sided=meetings.one_sided,
            steps_late=meetings.steps_late,
            partner=(self.partner(self.round) or "") if self.round >= 0 else "",
            roster_version=self.roster.version,
            num_members=len(self.roster.active(max(self.round, 0))),
            timing=self.timing(),
            num_rounds=self._plan.num_rounds,
        )
        if not for_people:
            return status
        status.figures.update(self.figures)
        status.notices.extend(self.notices[-LINES:])
        faults = ((peer.name, peer.fault(self.round)) for peer in self.peers.values())
        for name, fault in itertools.islice((found for found in faults if found[1]), FAULTS):
            status.peers.add(name=name, fault=fault)
        return status
