"""Start and catching up: from the own checkpoint, or from the state of live islands (design §12).

An island asks its peers twice when it starts: before it compiles, if it belongs to them; afterwards, as minutes may
have passed, from which weights it trains. Islands begin a run together: one that is ready waits for those that will
soon be or do not answer yet, or the first would be rounds ahead of the last from the beginning.

A donor is ahead of the island that asks, and has a lineage: a committed exchange in the past of its weights, through
checkpoints and donors. An island that has lost its weights takes no others: otherwise one that began anew could wipe
out a model, as has happened elsewhere. It begins anew once all islands have said that they have no such weights either,
or half of all for `lost_seconds`: where the rest have weights, theirs are ahead of those. Without such a donor, one
that is ahead is better than none for a newcomer, and for an island whose weights are too late to meet anybody: it would
train alone for ever.
"""

import math
import statistics
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from noloco_jax.islands.protocol.context import Backoff, Context
from noloco_jax.islands.protocol.download import MOST_AT_ONCE, Download
from noloco_jax.islands.protocol.events import Admitted, Begin, Channel, Content, Heal
from noloco_jax.islands.protocol.messages import (
    Busy,
    Header,
    NotPartner,
    State,
    StateRequest,
    Status,
    StatusRequest,
    Wrong,
)


@dataclass
class Sweep:
    """Requests and answers of one round.

    Attributes:
      deadline: time limit of answers.
      names: the islands that were asked.
      asked: open calls -> island.
      waits: True if a second answer is awaited where the first was "not ready yet".
      found: island -> its last answer.
      lags: rounds behind each island that trains.
    """

    deadline: float
    names: frozenset[str]
    asked: dict[Channel, str]
    waits: bool = False
    found: dict[str, Status] = field(default_factory=dict)
    lags: list[int] = field(default_factory=list)

    def heard(self, channel: Channel, status: Status, round: int) -> None:
        """Record an answer; `round` is the last one ended here."""
        name = self.asked[channel]
        self.found[name] = status
        if not (self.waits and status.starting):
            del self.asked[channel]
        if status.training and status.round >= 0:
            self.lags.append(status.round - round)

    def is_over(self, now: float) -> bool:
        """Return True once all have answered; where somebody trains, nobody waits for islands not ready."""
        return now >= self.deadline or not (self.unheard() or self.not_ready())

    def unheard(self) -> set[str]:
        """Return the islands that were asked and have not answered yet."""
        return set(self.asked.values()) - self.found.keys()

    def has_found_the_run(self) -> bool:
        """Return whether an island that trains from weights of this run has answered."""
        return any(status.training and status.lineage for status in self.found.values())

    def not_ready(self) -> list[str]:
        """Return the islands whose second answer is missing, where nobody trains."""
        return [] if self.has_found_training() else sorted(name for name in self.asked.values() if name in self.found)

    def has_found_training(self) -> bool:
        """Return whether an island that trains has answered."""
        return any(status.training for status in self.found.values())


# The median of a sample is good enough, even among a thousand islands. Before it trains, an island asks all in turn.
ASKED_AT_ONCE = 16
ABSENT_SECONDS = 0.5  # between requests to islands that do not answer yet when a run begins
MOST_CLIENTS = 4 * MOST_AT_ONCE  # calls for shares that a donor serves at once


class CatchUp:
    """Decision whether an island trains, and from which weights; also gives its own state to others.

    Args:
      context: the island's shared state.
      has_state: True if it has weights to begin with.
      began_before: without weights: True if it was part of the run, whose weights it then waits for.

    Attributes:
      is_ready: True once it can train.
      training: True while it has weights and trains.
    """

    def __init__(self, context: Context, has_state: bool, began_before: bool):
        self._context = context
        self._retry = Backoff(context)
        self._sweep: Sweep | None = None
        self._download = Download(context)
        self._clients: dict[Channel, tuple[str, float]] = {}  # calls for shares -> island, deadline
        self._rounds_late = 0  # consecutive rounds that ended later than the reach
        self._late_since = math.inf  # when it was first too late for most partners, and has been since
        self._sweeps = 0
        self._has_state = has_state
        self._needs_lineage = began_before and not has_state
        self._asked: set[str] = set()  # peers asked since it is ready
        self._heard: dict[str, Status] = {}  # last answers since then; of those that said nothing the last time, none
        self._silent: set[str] = set()  # peers that did not answer the last requests in time
        self._start_deadline = self._lost_deadline = 0.0
        self._awaits_membership = False
        self._told_absent: list[str] = []
        self.is_ready = self.training = False

    def start(self) -> None:
        self._begin_sweep()

    def ready(self) -> None:
        self.is_ready = True
        self._asked.clear()
        now, settings = self._context.now, self._context.settings
        self._start_deadline, self._lost_deadline = now + settings.start_seconds, now + settings.lost_seconds
        self._begin_sweep()

    def stop(self) -> None:
        """End its own downloads and requests, and those that it serves."""
        self.training = False
        self._retry.at = None
        for channel in (*(self._sweep.asked if self._sweep else ()), *self._clients):
            self._context.close(channel)
        self._download.stop()
        self._sweep = None
        self._clients.clear()

    def round_ended(self) -> None:
        """Ask around if a peer may be so far ahead that this round's message came too late for it.

        A round's end is when lateness is known best: peers that are level have just ended this round or soon will.
        """
        context, patience = self._context, self._context.settings.patience
        self._has_state, self._needs_lineage = True, False
        suspicion = (
            context.came_too_late
            or context.taken_for_past
            or any(peer.round - context.round >= patience for peer in context.peers.values())
            or self._late_since < math.inf  # no news is not a sign of being level
        )
        context.came_too_late = context.taken_for_past = False
        if self._sweep is not None or self._download.is_under_way:
            return
        if suspicion:
            self._begin_sweep()

    def _forget_lateness(self) -> None:
        self._rounds_late, self._late_since = 0, math.inf

    # Requests to peers.

    def _begin_sweep(self) -> None:
        context = self._context
        self._sweeps += 1
        waits = self.is_ready and not self.training and context.now < self._start_deadline
        request = StatusRequest(context.identity, until_ready=waits, news=context.news)
        asked = {context.open(name, request): name for name in self._sample()}
        self._asked |= set(asked.values())
        deadline = context.now + context.settings.answer_seconds
        self._sweep = Sweep(deadline, frozenset(asked.values()), asked, waits)
        self._decide_when_all_are_heard()

    def _sample(self) -> list[str]:
        """Return peers to ask: those not asked yet first, then those whose weights an island that lost its own seeks.

        Beyond these at random: all islands together would overload one that compiles or is not started.
        """
        mixed = {name: _mixed(f"{self._context.name} {name} {self._sweeps}") for name in self._context.peers}

        def order(name: str) -> tuple[bool, bool, int]:
            return name in self._asked, self._needs_lineage and name in self._heard, mixed[name]

        return sorted(mixed, key=order)[:ASKED_AT_ONCE]

    def _decide_when_all_are_heard(self) -> None:
        sweep = self._sweep
        if sweep is None:
            return
        # Peers that are stopped or behind a partition say nothing: an island that restarts does not wait for them all.
        are_silent_again = self._has_state and sweep.unheard() <= self._silent and not sweep.not_ready()
        if sweep.has_found_the_run() or are_silent_again:
            sweep.deadline = min(sweep.deadline, self._context.now + self._context.settings.rest_seconds)
        if not sweep.is_over(self._context.now):
            return
        for channel in sweep.asked:
            self._context.close(channel)
        self._sweep, self._silent = None, sweep.unheard()
        self._decide(sweep)

    def _decide(self, sweep: Sweep) -> None:
        """Continue from the own weights, from a peer's, or from the beginning."""
        context = self._context
        if context.refused:
            return
        if not self.is_ready:
            context.actions.append(Admitted())
            return
        self._record(sweep)
        if self._must_ask_others(sweep):
            self._begin_sweep()
            return
        if not_ready := self._not_ready(sweep):
            context.tell(f"{context.name} is ready and waits for {_few(not_ready)}, to begin together")
            self._begin_sweep()
            return
        if self._needs_lineage:
            self._needs_lineage = not self._is_lost()
        alive = {name: status for name, status in sweep.found.items() if status.training and status.round >= 0}
        if not self._has_state and not alive and self._is_too_late(sweep):
            return
        under_way = 1 + max((status.round for status in sweep.found.values()), default=-1)
        if not self._has_state and under_way < context.members.first_round(context.name):
            self._wait_for_membership(under_way)
            return
        if not (self._is_late(sweep.lags) if self._has_state else self._has_begun(sweep)):
            if self._has_state or not self._waits_for_absent(sweep):
                self._begin()
            return
        donors = [
            name
            for name, status in alive.items()
            if status.round > context.round and (status.lineage or not self._needs_lineage)
        ]
        newest = max((alive[name].round for name in donors), default=0)

        def rank(name: str) -> tuple[bool, bool]:
            return not alive[name].lineage, newest - alive[name].round > context.reach

        def order(name: str) -> tuple:
            """Rank a donor; islands that start together choose different donors among equals."""
            return rank(name), _mixed(f"{context.name} {name}")

        self._download.ask([(rank(name), name) for name in sorted(donors, key=order)], self._needs_lineage)
        self._go_on_without_donors()

    def _record(self, sweep: Sweep) -> None:
        """Keep the answers of a sweep; those of islands that answered earlier and not this time count no longer."""
        still = set(sweep.asked.values())
        for name in self._heard.keys() - self._context.peers.keys():
            del self._heard[name]  # removed meanwhile
        for name in sweep.names & self._context.peers.keys():
            status = sweep.found.get(name)
            if status is None or (sweep.waits and status.starting and name not in still):
                self._heard.pop(name, None)
            else:
                self._heard[name] = status

    def _must_ask_others(self, sweep: Sweep) -> bool:
        """Return whether peers that were not asked yet may compile, train, or be not started.

        An island with weights does not ask for them all where some are silent, each of which costs a timeout.
        """
        context = self._context
        if self.training or sweep.has_found_training() or context.now >= self._start_deadline:
            return False
        return bool(context.peers.keys() - self._asked) and not (self._has_state and sweep.unheard())

    def _not_ready(self, sweep: Sweep) -> list[str]:
        """Return the islands to wait for that compile, where nobody trains."""
        if not sweep.waits or sweep.has_found_training():
            return []
        return sorted(name for name, status in self._heard.items() if status.starting)

    def _is_late(self, lags: list[int]) -> bool:
        """Return whether the own weights are too late to meet most others, and stay so.

        They are by more than the reach, by as much in two rounds in a row, or by less for longer than peers that pause
        take to give way.
        """
        context, settings = self._context, self._context.settings
        lag, reach = statistics.median_low(lags) if lags else 0, context.reach
        if not self.training or lag < settings.patience:
            self._forget_lateness()
            return lag > reach
        self._rounds_late = self._rounds_late + 1 if lag >= reach else 0
        self._late_since = min(self._late_since, context.now)
        return lag > reach or self._rounds_late > 1 or context.now - self._late_since > 2 * settings.reach_seconds

    def _has_begun(self, sweep: Sweep) -> bool:
        """Return whether weights of this run exist somewhere, as far as an island without weights knows."""
        known = (*sweep.found.values(), *self._heard.values())
        others = any(status.lineage or status.round >= 0 for status in known)
        return others or self._needs_lineage

    def _is_lost(self) -> bool:
        """Return whether the weights that were lost are nowhere else, as far as islands answer; see `lost_seconds`."""
        context, heard = self._context, self._heard
        if any(status.lineage for status in heard.values()):
            return False
        silent = sorted(context.peers.keys() - heard.keys())
        if silent and (context.now < self._lost_deadline or 2 * len(silent) > len(context.peers) + 1):
            return False
        without = f", and {', '.join(silent[:8])} did not answer" if silent else ""
        context.tell(f"no island has weights of this run any more{without}: {context.name} begins anew")
        return True

    def _is_too_late(self, sweep: Sweep) -> bool:
        """Return whether some islands have taken their last step, and none trains; end this one then.

        For a while an island that does not answer may be one that trains.
        """
        context, rounds = self._context, {name: one.round for name, one in sweep.found.items() if one.finished}
        silent = (sweep.names | context.peers.keys() - self._heard.keys()) - sweep.found.keys()
        if not rounds or (silent and context.now < self._start_deadline):
            return False
        if any(status.training for status in self._heard.values()):
            return False  # one that this sweep did not ask
        context.refuse(
            f"{', '.join(sorted(rounds))} finished in round {max(rounds.values()) + 1} and no island trains any more: "
            f"there are no weights for {context.name} to continue from; for a new run give all islands empty workdirs"
        )
        return True

    def _waits_for_absent(self, sweep: Sweep) -> bool:
        """Return whether a run that is about to begin waits for islands that do not answer yet."""
        context = self._context
        silent = sorted(context.peers.keys() - sweep.found.keys() - self._heard.keys())
        absent = [name for name in silent if context.peers[name].wrong is None]
        if not (absent and context.settings.awaits_absent) or context.now >= self._start_deadline:
            return False
        if absent != self._told_absent:
            self._told_absent, left = absent, math.ceil(self._start_deadline - context.now)
            context.tell(f"{context.name} is ready and waits for {_few(absent)} to begin together, {left} s at most")
        self._retry.at = context.now + ABSENT_SECONDS
        return True

    def _wait_for_membership(self, round: int) -> None:
        """Ask again later for a state: a member to come would train away from the others, alone."""
        context = self._context
        if not self._awaits_membership:
            self._awaits_membership = True
            first = context.members.first_round(context.name)
            context.tell(f"{context.name} waits for round {first + 1}, its first as a member; now it is {round + 1}")
        self._retry.at = context.now + context.settings.answer_seconds

    def _begin(self) -> None:
        """Train from the weights at hand."""
        if not self.training:
            self._context.actions.append(Begin(fresh=not self._has_state))
        self.training = True

    def _go_on_without_donors(self) -> None:
        """Train from the own weights if there are any, or ask around later, once no donor is left."""
        if self._download.is_under_way:
            return
        context = self._context
        if self._has_state:
            self._begin()  # and asks again after a round
            return
        context.tell(
            f"{context.name} waits for an island with weights of this run; it begins anew in an empty workdir, or "
            f"after {context.settings.lost_seconds:g} s where half of all islands answer and none has any"
        )
        self._retry.start()

    def arrived(self, channel: Channel, header: Header, content: Content | None) -> Heal | None:
        """Handle a header of this part's channels; return the complete state of a donor, or None."""
        sweep, download, context = self._sweep, self._download, self._context
        if sweep is not None and channel in sweep.asked:
            name = sweep.asked[channel]
            if isinstance(header, Status):
                if name in context.peers:  # not removed meanwhile
                    context.peers[name].told(header.incarnation, header.round, context.now)
                context.is_known_as(header.yours)
                sweep.heard(channel, header, context.round)
            else:
                del sweep.asked[channel]
                if isinstance(header, Wrong):
                    context.is_wrong(name, header)
            if channel not in sweep.asked:
                context.close(channel)
            self._decide_when_all_are_heard()
        elif download.is_of(channel):
            healed = download.arrived(channel, header, content)
            if healed is None:
                self._go_on_without_donors()
                return None
            self._download = Download(context)
            self._has_state = self.training = True
            self._needs_lineage = False
            self._forget_lateness()
            return healed
        return None

    def broken(self, channel: Channel) -> None:
        if self._sweep is not None and channel in self._sweep.asked:
            del self._sweep.asked[channel]
            self._decide_when_all_are_heard()
        elif self._download.is_of(channel):
            self._download.broken(channel)
            self._go_on_without_donors()
        else:
            self._clients.pop(channel, None)

    def tick(self) -> None:
        now = self._context.now
        self._decide_when_all_are_heard()
        if self._download.is_under_way:
            self._download.tick()
            self._go_on_without_donors()
        for channel in [channel for channel, (_, deadline) in self._clients.items() if deadline <= now]:
            self._context.close(channel)
            del self._clients[channel]
        if self._retry.due():
            self._begin_sweep()

    def deadlines(self) -> list[float]:
        times = [self._retry.at, self._sweep.deadline if self._sweep else None]
        times += [deadline for _, deadline in self._clients.values()]
        return [time for time in times if time is not None] + self._download.deadlines()

    # State for others.

    def opened(self, channel: Channel, peer: str, request: StateRequest) -> None:
        """Answer a peer's request for a share of the state; a limited number at a time, as all share the link."""
        context, served = self._context, [name for name, _ in self._clients.values()]
        if request.share is None:
            context.answer(channel, NotPartner("a state is given in shares: install the same version"))
        elif not self.training or context.round < 0:
            context.answer(channel, NotPartner("no state yet"))
        elif request.lineage and not context.lineage:
            context.answer(channel, NotPartner("no exchange was ever committed here"))
        elif len(served) >= MOST_CLIENTS or served.count(peer) >= MOST_AT_ONCE:
            context.answer(channel, Busy(context.settings.retry_seconds))
        else:
            self._clients[channel] = peer, context.now + context.settings.state_seconds
            context.send(channel, State(context.round, context.lineage, request.share))


def _few(names: Sequence[str]) -> str:
    """Return names for a line, of many the first ones and the number of the others."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _mixed(text: str) -> int:
    return zlib.crc32(text.encode())
