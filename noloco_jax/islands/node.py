"""Protocol of one island: what the training tells it, and what it answers."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any

from noloco_jax.islands import messages_pb2 as pb
from noloco_jax.islands.interfaces import Network, Plan, RoundOutcome, TrainerCallbacks
from noloco_jax.islands.meetings import Meetings
from noloco_jax.islands.pace import Pace
from noloco_jax.islands.peer_table import GREET_SECONDS, PeerTable
from noloco_jax.islands.peers import FAULTS, FINISHED, LINES, Peer, check_greeting, check_watch, difference
from noloco_jax.islands.roster import Roster

SILENT = 3  # questions in a row without an answer, after which a peer that has finished is taken to have gone


class Node:
    """One island among its peers.

    Args:
      plan: what the island brings.
      network: calls to the others.
      world: the training.
      pace: of this island.
      parse: (document) -> roster; raises `BadRosterError`. None: a newer roster is never taken, without TLS.
    """

    def __init__(
        self,
        plan: Plan,
        network: Network,
        world: TrainerCallbacks,
        pace: Pace,
        parse: Callable[[bytes], Roster] | None = None,
    ):
        self.step = 0
        self.figures: dict[str, float] = {}
        self._donated: int | None = None  # round of a donor's weights, until the training continues from them
        self._details, self._num_rounds = plan.details, plan.num_rounds
        self.view = PeerTable(plan, network, world, pace, parse, self._peer_ended, self._members_changed)
        self.meetings = Meetings(self.view, plan.saved)

    # The training's side.

    def round_ended(self, round: int, step: int, own: Any, norm: float, tokens: int) -> None:
        """End a round: its message waits for the partner's.

        Rounds of weights whose place a donor's take are left out, until the training continues from the donor's.

        Args:
          round: one more than the last one.
          step: inner steps behind it.
          own: the message, for the codec.
          norm: Euclidean, of the message.
          tokens: that were trained on in it.
        """
        if self._donated is not None:
            return
        view = self.view
        assert round == view.round + 1, f"round {round} follows round {view.round}"
        view.round, self.step = round, step
        view.pace.round_ended(round, asyncio.get_running_loop().time())
        self.meetings.begin(round, own, norm, tokens)
        view.notify()

    def applied(self, round: int) -> None:
        """Learn that messages from now on have the correction of a round, or a donor's weights of that round."""
        self.meetings.unapplied.discard(round)
        if round == self._donated:
            self._donated = None

    def to_json(self) -> dict[str, Any]:
        """Return the protocol's state, to save with weights in which everything delivered is applied."""
        view = self.view
        known = {one.name: [*one.distance, one.quarantined_until] for one in view.peers.values()}
        peers = {name: values for name, values in known.items() if any(values)}
        return {"round": view.round, "has_averaged": view.has_averaged, "peers": peers, **self.meetings.to_json()}

    def leave(self, phase: Any) -> None:
        """End all meetings, and tell the peers: the phase is one of `ENDED`."""
        view = self.view
        view.phase = phase
        self.meetings.end("leaving")
        names = [peer.name for peer in view.peers.values() if peer.phase != pb.Status.LEAVING and not peer.wrong]
        view.start(view.ask(names, GREET_SECONDS / 2))
        view.notify()

    def adopt(self, donor: str, round: int, step: int, has_averaged: bool) -> None:
        """Continue from a donor's weights: forget the exchanges of the old ones."""
        view = self.view
        self.meetings.end("weights of a peer took this island's place")
        self.meetings.unapplied.clear()
        view.round = self._donated = round
        self.step = step
        view.has_averaged = view.has_averaged or has_averaged
        view.incarnation += 1
        view.pace.restart()
        view.world.outcome(RoundOutcome(round, donor, "caught up"))
        view.notify()

    # From any thread, without waiting: what peers have told so far.

    def finished(self) -> list[str]:
        """Return the members that have taken their last step."""
        return [peer.name for peer in self._active() if peer.phase in FINISHED]

    def unfinished(self) -> list[str]:
        """Return the members that are not known to have taken their last step, and may still take it."""
        return [peer.name for peer in self._active() if peer.phase not in (*FINISHED, pb.Status.GONE)]

    def unmerged(self, names: Iterable[str]) -> list[str]:
        """Return those of these peers that may still want this island's last weights: they have not gone."""
        over = (pb.Status.MERGED, pb.Status.LEAVING, pb.Status.GONE)
        known = self.view.peers  # once: the network's thread may replace it
        peers = [known[name] for name in names if name in known]
        return [peer.name for peer in peers if peer.phase not in over and peer.silent < SILENT]

    # The peers' side.

    async def greeted(self, name: str, greeting: pb.Greeting) -> pb.Status:
        """Answer a greeting of an island or a command; `name` is that of the caller's certificate."""
        check_greeting(greeting)
        view = self.view
        if greeting.HasField("roster"):
            view.take_roster(greeting.roster.SerializeToString(), name)
        wrong, peer = "", view.peers.get(name)
        if peer is not None and greeting.identity:
            peer.wrong = wrong = difference(view.identity, greeting.identity, name)
            view.hear(name, incarnation=greeting.incarnation)
            if greeting.incarnation == peer.incarnation:  # not one of an earlier start
                view.hear_phase(name, greeting.phase)
            view.take_news(name, greeting.roster_version)
        elif peer is not None and greeting.phase in (pb.Status.GONE, pb.Status.MERGED):  # its launcher tells it
            view.hear(name, 0)
            view.hear_phase(name, greeting.phase)
        if greeting.hold_seconds:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(greeting.hold_seconds):
                    await view.until(lambda: view.phase != pb.Status.STARTING)
        if ended := view.end_of(name):
            status = pb.Status(wrong=ended, roster_version=view.roster.version)
        else:
            status = self.status(for_people=not greeting.identity)
            for about in (view.peers[other] for other in greeting.about if other in view.peers):
                status.peers.add(name=about.name, phase=about.phase)
        if wrong:
            status.wrong = difference(greeting.identity, view.identity, view.name)
        if (greeting.wants_roster or ended) and view.roster.version > greeting.roster_version:
            status.roster.ParseFromString(view.roster.document)
        if greeting.wants_details and not ended:
            status.details = self._details
        return status

    async def watched(self, request: pb.WatchRequest) -> AsyncGenerator[pb.Status, None]:
        """Yield this island's status at once, every so many seconds, and whenever its phase changes."""
        check_watch(request)
        view = self.view
        while True:
            phase = view.phase
            yield self.status(for_people=True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(request.every_seconds):
                    await view.until(lambda: view.phase != phase)  # noqa: B023 - awaited before the next one

    def _active(self) -> list[Peer]:
        """Return the other members of the last round, by their ids."""
        view, known = self.view, self.view.peers
        return [known[name] for name in view.roster.active(max(view.round, 0)) if name in known]

    def status(self, for_people: bool = False) -> pb.Status:
        """Return this island's status; for people with figures, its latest lines, and the peers that have a fault.

        Its size does not depend on the number of members.
        """
        view, meetings = self.view, self.meetings
        status = pb.Status(
            phase=view.phase,
            incarnation=view.incarnation,
            round=view.round,
            step=self.step,
            has_averaged=view.has_averaged,
            due=meetings.due,
            committed=meetings.committed,
            one_sided=meetings.one_sided,
            steps_late=meetings.steps_late,
            partner=(view.partner(view.round) or "") if view.round >= 0 else "",
            roster_version=view.roster.version,
            num_members=len(view.roster.active(max(view.round, 0))),
            round_seconds=view.pace.round_seconds(),
            num_rounds=self._num_rounds,
        )
        if not for_people:
            return status
        status.figures.update(self.figures)
        status.notices.extend(view.notices[-LINES:])
        faults = ((peer.name, peer.fault(view.round)) for peer in view.peers.values())
        for name, fault in itertools.islice((found for found in faults if found[1]), FAULTS):
            status.peers.add(name=name, fault=fault)
        return status

    def _peer_ended(self, peer: Peer) -> None:
        self.meetings.peer_left(peer)

    def _members_changed(self) -> None:
        self.meetings.end("the partner is no member any more", lambda meeting: meeting.partner not in self.view.peers)
