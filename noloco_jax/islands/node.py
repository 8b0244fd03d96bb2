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

    `parse` maps a document to a roster or raises `BadRosterError`; None: a newer roster is never taken, without TLS.
    """

    def __init__(
        self,
        plan: Plan,
        network: Network,
        trainer: TrainerCallbacks,
        pace: Pace,
        parse: Callable[[bytes], Roster] | None = None,
    ):
        self.step = 0
        self.figures: dict[str, float] = {}
        self._donated: int | None = None  # round of a donor's weights, until the training continues from them
        self.table = PeerTable(plan, network, trainer, pace, parse, lambda: self.meetings.end_absent())
        self.meetings = Meetings(self.table, plan.saved)

    # The training's side.

    def round_ended(self, round: int, step: int, own: Any, norm: float, tokens: int) -> None:
        """End a round: its message waits for the partner's.

        Rounds of weights whose place a donor's take are left out, until the training continues from the donor's. The
        round is one more than the last one, `own` the message for the codec, and `norm` its Euclidean one.
        """
        if self._donated is not None:
            return
        table = self.table
        assert round == table.round + 1, f"round {round} follows round {table.round}"
        table.round, self.step = round, step
        table.pace.round_ended(round, asyncio.get_running_loop().time())
        self.meetings.begin(round, own, norm, tokens)
        table.notify()

    def applied(self, round: int) -> None:
        """Learn that messages from now on have the correction of a round, or a donor's weights of that round."""
        self.meetings.unapplied.discard(round)
        if round == self._donated:
            self._donated = None

    def to_json(self) -> dict[str, Any]:
        """Return the protocol's state, to save with weights in which everything delivered is applied."""
        table = self.table
        known = {one.name: [*one.distance, one.quarantined_until] for one in table.peers.values()}
        peers = {name: values for name, values in known.items() if any(values)}
        return {"round": table.round, "has_averaged": table.has_averaged, "peers": peers, **self.meetings.to_json()}

    def leave(self, phase: Any) -> None:
        """End all meetings, and tell the peers: the phase is one of `ENDED`."""
        table = self.table
        table.phase = phase
        self.meetings.end("leaving")
        names = [peer.name for peer in table.peers.values() if peer.phase != pb.Status.LEAVING and not peer.wrong]
        table.start(table.ask(names, GREET_SECONDS / 2))
        table.notify()

    def adopt(self, donor: str, round: int, step: int, has_averaged: bool) -> None:
        """Continue from a donor's weights: forget the exchanges of the old ones."""
        table = self.table
        self.meetings.end("weights of a peer took this island's place")
        self.meetings.unapplied.clear()
        table.round = self._donated = round
        self.step = step
        table.has_averaged = table.has_averaged or has_averaged
        table.incarnation += 1
        table.pace.restart()
        table.trainer.outcome(RoundOutcome(round, donor, "caught up"))
        table.notify()

    # From any thread, without waiting: what peers have told so far.

    def active(self) -> tuple[str, ...]:
        """Return the members of the last round, by their ids."""
        return self.table.roster.active(max(self.table.round, 0))

    def finished(self) -> list[str]:
        """Return the other members that have taken their last step."""
        return [peer.name for peer in self._peers(self.active()) if peer.phase in FINISHED]

    def unfinished(self) -> list[str]:
        """Return the other members that are not known to have taken their last step, and may still take it."""
        return [peer.name for peer in self._peers(self.active()) if peer.phase not in (*FINISHED, pb.Status.GONE)]

    def unmerged(self, names: Iterable[str]) -> list[str]:
        """Return those of these peers that may still want this island's last weights: they have not gone."""
        over = (pb.Status.MERGED, pb.Status.LEAVING, pb.Status.GONE)
        return [peer.name for peer in self._peers(names) if peer.phase not in over and peer.silent < SILENT]

    def _peers(self, names: Iterable[str]) -> list[Peer]:
        known = self.table.peers  # once: the network's thread may replace it
        return [known[name] for name in names if name in known]

    # The peers' side.

    async def greeted(self, name: str, greeting: pb.Greeting) -> pb.Status:
        """Answer a greeting of an island or a command; `name` is that of the caller's certificate."""
        check_greeting(greeting)
        table = self.table
        if greeting.HasField("roster"):
            table.take_roster(greeting.roster.SerializeToString(), name)
        wrong, peer = "", table.peers.get(name)
        if peer is not None and greeting.identity:
            peer.wrong = wrong = difference(table.plan.identity, greeting.identity, name)
            table.hear(name, incarnation=greeting.incarnation, roster_version=greeting.roster_version)
            if greeting.incarnation == peer.incarnation:  # not one of an earlier start
                table.hear_phase(name, greeting.phase)
        elif peer is not None and greeting.phase in (pb.Status.GONE, pb.Status.MERGED):  # its launcher tells it
            table.hear(name, 0)
            table.hear_phase(name, greeting.phase)
        if greeting.hold_seconds:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(greeting.hold_seconds):
                    await table.until(lambda: table.phase != pb.Status.STARTING)
        if ended := table.end_of(name):
            status = pb.Status(wrong=ended, roster_version=table.roster.version)
        else:
            status = self.status(for_people=not greeting.identity)
            for about in (table.peers[other] for other in greeting.about if other in table.peers):
                status.peers.add(name=about.name, phase=about.phase)
        if wrong:
            status.wrong = difference(greeting.identity, table.plan.identity, table.name)
        if (greeting.wants_roster or ended) and table.roster.version > greeting.roster_version:
            status.roster.ParseFromString(table.roster.document)
        if greeting.wants_details and not ended:
            status.details = table.plan.details
        return status

    async def watched(self, request: pb.WatchRequest) -> AsyncGenerator[pb.Status, None]:
        """Yield this island's status at once, every so many seconds, and whenever its phase changes."""
        check_watch(request)
        table = self.table
        while True:
            phase = table.phase
            yield self.status(for_people=True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(request.every_seconds):
                    await table.until(lambda: table.phase != phase)  # noqa: B023 - awaited before the next one

    def status(self, for_people: bool = False) -> pb.Status:
        """Return this island's status; for people with figures, its latest lines, and the peers that have a fault.

        Its size does not depend on the number of members.
        """
        table, meetings = self.table, self.meetings
        status = pb.Status(
            phase=table.phase,
            incarnation=table.incarnation,
            round=table.round,
            step=self.step,
            has_averaged=table.has_averaged,
            due=meetings.due,
            committed=meetings.committed,
            one_sided=meetings.one_sided,
            steps_late=meetings.steps_late / max(meetings.committed, 1),
            partner=(table.partner(table.round) or "") if table.round >= 0 else "",
            roster_version=table.roster.version,
            num_members=len(self.active()),
            round_seconds=table.pace.round_seconds(),
            num_rounds=table.plan.num_rounds,
        )
        if not for_people:
            return status
        status.figures.update(self.figures)
        status.notices.extend(table.notices[-LINES:])
        faults = ((peer.name, peer.fault(table.round)) for peer in table.peers.values())
        for name, fault in itertools.islice((found for found in faults if found[1]), FAULTS):
            status.peers.add(name=name, fault=fault)
        return status
