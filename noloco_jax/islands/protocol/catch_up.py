"""Starting and catching up: from the own checkpoint, or from the state of a live island (design §12).

An island asks around twice when it starts. First whether it belongs to the others, before it compiles. Then, as minutes
may have passed, from which weights it trains. Islands that start at the same time begin together: who is ready waits a
while for those who are about to be, or the first would be rounds ahead of the last from the beginning on.

A donor is ahead of who asks, and has a lineage: a committed exchange in the past of its weights, through checkpoints
and healings. An island that has lost its weights takes no others: one that began anew could wipe out a model otherwise;
it has happened elsewhere. Without such a donor, one that is ahead is better than none for a newcomer, and for an island
that has weights but is too late to meet anybody: it would train alone for ever.
"""

import math
import statistics
import zlib
from dataclasses import dataclass, field

from noloco_jax.islands.protocol.context import Backoff, Context
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
    """What has been asked and answered.

    Attributes:
      deadline: for answers.
      asked: the calls that are open, and to whom.
      waits: whether a second answer is awaited where the first was "not ready yet".
      found: the last answer of each.
      lags: rounds behind each that trains, when it answered.
    """

    deadline: float
    asked: dict[Channel, str]
    waits: bool = False
    found: dict[str, Status] = field(default_factory=dict)
    lags: list[int] = field(default_factory=list)

    def heard(self, channel: Channel, status: Status, round: int) -> None:
        """An answer, to who has ended `round`."""
        name = self.asked[channel]
        self.found[name] = status
        if not (self.waits and status.starting):
            del self.asked[channel]
        if status.training and status.round >= 0:
            self.lags.append(status.round - round)

    def is_over(self, now: float) -> bool:
        """Whether all have answered that are going to; where somebody trains, nobody waits for who is not ready."""
        unheard = any(name not in self.found for name in self.asked.values())
        return now >= self.deadline or not (unheard or self.not_ready())

    def not_ready(self) -> list[str]:
        """Those of whom the second answer has not come, where nobody trains."""
        if any(status.training for status in self.found.values()):
            return []
        return sorted(name for name in self.asked.values() if name in self.found)


ASKED_AT_ONCE = 16  # a sample's median is good enough, also among a thousand islands


@dataclass
class _Download:
    """A state on its way from a donor, and the donors that are asked next."""

    deadline: float
    channel: Channel
    donor: str
    others: list[str]


class CatchUp:
    """Whether an island trains, from which weights, and to whom it gives its own.

    Args:
      context: of the island.
      has_state: whether it has weights to begin with.
      began_before: without them: whether it has been part of the run, whose weights it then waits for.

    Attributes:
      is_ready: whether it can train.
      training: whether it has weights and goes on with them.
    """

    def __init__(self, context: Context, has_state: bool, began_before: bool):
        self._context = context
        self._retry = Backoff(context)
        self._sweep: Sweep | None = None
        self._download: _Download | None = None
        self._client: tuple[Channel, float] | None = None
        self._rounds_late = 0  # in a row, by so much that most partners had given up
        self._sweeps = 0
        self._has_state = has_state
        self._needs_lineage = began_before and not has_state
        self._start_deadline = 0.0
        self.is_ready = self.training = False

    def start(self) -> None:
        self._begin_sweep()

    def ready(self) -> None:
        self.is_ready = True
        self._start_deadline = self._context.now + self._context.settings.start_seconds
        self._begin_sweep()

    def stop(self) -> None:
        """Ends what it does for itself, and whom it serves."""
        self.training = False
        self._retry.at = None
        channels = [*(self._sweep.asked if self._sweep else ())]
        channels += [part.channel for part in (self._download,) if part is not None]
        channels += [self._client[0]] if self._client else []
        for channel in channels:
            self._context.close(channel)
        self._sweep = self._download = self._client = None

    def round_ended(self) -> None:
        """Looks around where somebody may be so far ahead that the message of this round has come too late for it.

        That is when it knows best how late it is: whoever is level has just ended this round or has yet to.
        """
        context = self._context
        self._has_state, self._needs_lineage = True, False
        suspicion = context.came_too_late or any(
            peer.round - context.round >= context.reach for peer in context.peers.values()
        )
        context.came_too_late = False
        if self._sweep is not None or self._download is not None:
            return
        if suspicion:
            self._begin_sweep()
        else:
            self._rounds_late = 0

    # Asking.

    def _begin_sweep(self) -> None:
        context = self._context
        self._sweeps += 1
        names = sorted(context.peers, key=lambda name: _mixed(f"{context.name} {name} {self._sweeps}"))
        waits = self.is_ready and not self.training and context.now < self._start_deadline
        request = StatusRequest(context.identity, until_ready=waits)
        asked = {context.open(name, request): name for name in names[:ASKED_AT_ONCE]}
        self._sweep = Sweep(context.now + context.settings.answer_seconds, asked, waits)
        self._decide_when_all_are_heard()

    def _decide_when_all_are_heard(self) -> None:
        sweep = self._sweep
        if sweep is None or not sweep.is_over(self._context.now):
            return
        for channel in sweep.asked:
            self._context.close(channel)
        self._sweep = None
        self._decide(sweep)

    def _decide(self, sweep: Sweep) -> None:
        """Goes on from the own weights, from another's, or from the beginning."""
        context = self._context
        if context.refused:
            return
        if not self.is_ready:
            context.actions.append(Admitted())
            return
        if not_ready := sweep.not_ready():
            context.tell(f"{context.name} is ready and waits a little for {', '.join(not_ready)}, to begin together")
            self._begin_sweep()
            return
        if len(sweep.found) == len(context.peers) and not any(status.lineage for status in sweep.found.values()):
            self._needs_lineage = False  # there is none to wait for
        alive = {name: status for name, status in sweep.found.items() if status.training and status.round >= 0}
        if not (self._is_late(sweep.lags) if self._has_state else self._has_begun(sweep)):
            self._begin()
            return
        donors = [
            name
            for name, status in alive.items()
            if status.round > context.round and (status.lineage or not self._needs_lineage)
        ]
        newest = max((alive[name].round for name in donors), default=0)

        def worth(name: str) -> tuple[bool, bool, int]:
            """Islands that start together choose different donors among those that are as good."""
            status = alive[name]
            late = newest - status.round > context.reach
            return not status.lineage, late, _mixed(f"{context.name} {name}")

        self._ask_for_state(sorted(donors, key=worth))

    def _is_late(self, lags: list[int]) -> bool:
        """Whether the own weights are too late to meet most others: by far, or time and again at a round's end."""
        lag, reach = statistics.median_low(lags) if lags else 0, self._context.reach
        self._rounds_late = self._rounds_late + 1 if self.training and lag >= reach else 0
        return lag > reach or self._rounds_late > 1

    def _has_begun(self, sweep: Sweep) -> bool:
        """Whether there are weights of this run somewhere, as far as is known without own ones."""
        others = any(status.lineage or status.round >= 0 for status in sweep.found.values())
        return others or self._needs_lineage

    def _begin(self) -> None:
        """Trains on from what it has."""
        if not self.training:
            self._context.actions.append(Begin(fresh=not self._has_state))
        self.training = True

    def _ask_for_state(self, donors: list[str]) -> None:
        context = self._context
        if donors:
            deadline = context.now + context.settings.state_seconds
            request = StateRequest(context.caller(donors[0]), self._needs_lineage)
            self._download = _Download(deadline, context.open(donors[0], request), donors[0], donors[1:])
            return
        self._download = None
        if self._has_state:
            self._begin()  # and looks again after a round
            return
        context.tell(f"{context.name} waits for an island with weights of this run; in an empty workdir it begins anew")
        self._retry.start()

    def _next_donor(self) -> None:
        assert self._download is not None
        self._context.close(self._download.channel)
        self._ask_for_state(self._download.others)

    def arrived(self, channel: Channel, header: Header, content: Content | None) -> Heal | None:
        """What came through a channel of this part's: a whole state, to go on from, or nothing yet."""
        sweep, download, context = self._sweep, self._download, self._context
        if sweep is not None and channel in sweep.asked:
            name = sweep.asked[channel]
            if isinstance(header, Status):
                context.peers[name].told(header.incarnation, header.round, context.now)
                sweep.heard(channel, header, context.round)
            else:
                del sweep.asked[channel]
                if isinstance(header, Wrong):
                    context.is_wrong(name, header)
            if channel not in sweep.asked:
                context.close(channel)
            self._decide_when_all_are_heard()
        elif download is not None and channel == download.channel:
            finite = content is not None and math.isfinite(content.norm)
            if isinstance(header, State) and finite and header.round > context.round:
                context.close(channel)
                self._download = None
                self._has_state = self.training = True
                self._needs_lineage = False
                self._rounds_late = 0
                return Heal(download.donor, header.round, header.lineage)
            self._next_donor()
        return None

    def broken(self, channel: Channel) -> None:
        if self._sweep is not None and channel in self._sweep.asked:
            del self._sweep.asked[channel]
            self._decide_when_all_are_heard()
        elif self._download is not None and channel == self._download.channel:
            self._next_donor()
        elif self._client is not None and channel == self._client[0]:
            self._client = None

    def tick(self) -> None:
        now = self._context.now
        self._decide_when_all_are_heard()
        if self._download is not None and self._download.deadline <= now:
            self._next_donor()
        if self._client is not None and self._client[1] <= now:
            self._context.close(self._client[0])
            self._client = None
        if self._retry.due():
            self._begin_sweep()

    def deadlines(self) -> list[float]:
        times = [
            self._retry.at,
            self._client[1] if self._client else None,
            self._download.deadline if self._download else None,
            self._sweep.deadline if self._sweep else None,
        ]
        return [time for time in times if time is not None]

    # Giving.

    def opened(self, channel: Channel, request: StateRequest) -> None:
        """Another island, whose identity is right, asks for the state. One at a time, as each takes the whole link."""
        context = self._context
        if not self.training or context.round < 0:
            context.answer(channel, NotPartner("no state yet"))
        elif request.lineage and not context.lineage:
            context.answer(channel, NotPartner("no exchange was ever committed here"))
        elif self._client is not None:
            context.answer(channel, Busy(context.settings.retry_seconds))
        else:
            self._client = channel, context.now + context.settings.state_seconds
            context.send(channel, State(context.round, context.lineage))


def _mixed(text: str) -> int:
    return zlib.crc32(text.encode())
