"""Download of a state, in shares from several donors, into the current round.

Donors are replicas: their weights differ, as do the rounds of their copies. A share is part of one replica's weights as
they were between two of its inner steps, and replicas that average are close, so that weights put together from several
of them are as good as those of one (bench/MEASURED.md). No donor has to hold a copy for another's sake.

At last one donor is asked for its position, where training continues, however long the shares took: weights that are
some rounds old come nearer to the others in the next exchanges; a round that is over by then would meet nobody.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from noloco_jax.islands.protocol.context import Context
from noloco_jax.islands.protocol.events import Channel, Content, Heal, KeepShare
from noloco_jax.islands.protocol.messages import Busy, Header, Share, State, StateRequest

MOST_DONORS = 4  # at once
MOST_BUSY = 8  # consecutive answers of a donor that it is busy
MOST_AT_ONCE = 4  # shares of one donor
_QUICK_SECONDS = 1.0  # for a share, below which a donor is asked for another at the same time: its link has room


@dataclass(eq=False)
class _Donor:
    """Donor, and how it answers.

    Attributes:
      name: its name.
      rank: donors of the first's rank are asked at once; others instead of those that fail.
      at_once: calls to it at once.
      busy: consecutive answers that it is busy.
      free_at: time before which it is not asked again.
      has_given: True if a share came since it last failed.
    """

    name: str
    rank: tuple
    at_once: int = 1
    busy: int = 0
    free_at: float = -math.inf
    has_given: bool = False


@dataclass
class _Request:
    """Request under way for a share."""

    donor: _Donor
    number: int
    began: float
    deadline: float


class Download:
    """Shares of a state that have come and are still missing.

    Shares stay when all donors have failed, for those that are found next.

    Args:
      context: the island's shared state.
    """

    def __init__(self, context: Context):
        self._context = context
        self._donors: list[_Donor] = []
        self._requests: dict[Channel, _Request] = {}
        self._needs_lineage = False
        self._most = MOST_DONORS
        self._allowance = context.settings.share_seconds
        self._start_over()

    def ask(self, donors: Sequence[tuple[tuple, str]], needs_lineage: bool) -> None:
        """Ask donors for what is missing.

        Args:
          donors: rank and name of each, the best first.
          needs_lineage: True if only states with a lineage are accepted.
        """
        if needs_lineage > self._lineage or self._context.now - self._heard > self._context.settings.state_seconds:
            self._start_over()
        self._needs_lineage = needs_lineage
        self._donors = [_Donor(name, rank) for rank, name in donors]
        self._fill()

    @property
    def is_under_way(self) -> bool:
        """True while there is a donor to wait for."""
        return bool(self._donors)

    def is_of(self, channel: Channel) -> bool:
        """Return whether a channel belongs to a request."""
        return channel in self._requests

    def arrived(self, channel: Channel, header: Header, content: Content | None) -> Heal | None:
        """Handle an answer; return the state once it is complete."""
        context, request = self._context, self._requests.pop(channel)
        donor = request.donor
        context.close(channel)
        if isinstance(header, Busy) and donor.busy < MOST_BUSY:
            donor.busy += 1
            donor.free_at = context.now + min(header.seconds, context.settings.share_seconds)
            self._miss(request)
        elif not (isinstance(header, State) and self._is_answer(header, request.number)):
            self._failed(request)
        elif content is None or not math.isfinite(content.norm):
            if not request.number:  # in a share it would have been seen
                self._start_over()
            self._failed(request)
        else:
            self._heard = context.now
            donor.busy, donor.has_given = 0, True
            is_quick = context.now - request.began < _QUICK_SECONDS
            donor.at_once = min(donor.at_once + 1, MOST_AT_ONCE) if is_quick else 1
            self._lineage &= header.lineage
            if request.number:
                context.actions.append(KeepShare(request.number))
            elif header.round > context.round:
                self.stop()
                return Heal(donor.name, header.round, self._lineage)
            else:
                self._donors.remove(donor)  # fell behind meanwhile
        self._fill()
        return None

    def broken(self, channel: Channel) -> None:
        self._failed(self._requests.pop(channel))
        self._fill()

    def tick(self) -> None:
        late = [channel for channel, request in self._requests.items() if request.deadline <= self._context.now]
        silent: list[_Donor] = []
        for channel in late:
            request = self._requests.pop(channel, None)
            if request is None:  # its donor was left
                continue
            self._context.close(channel)
            if request.donor not in silent:
                silent.append(request.donor)
                self._allowance = min(2 * self._allowance, self._context.settings.state_seconds)
                self._most = max(self._most - 1, 1)
            self._failed(request)
        self._fill()

    def stop(self) -> None:
        """End all requests."""
        for channel in self._requests:
            self._context.close(channel)
        self._requests.clear()
        self._donors.clear()

    def deadlines(self) -> list[float]:
        waits = [donor.free_at for donor in self._active() if donor.free_at > self._context.now]
        return waits + [request.deadline for request in self._requests.values()]

    def _start_over(self) -> None:
        self._missing = list(range(self._context.settings.shares, 0, -1))
        self._lineage = True
        self._heard = self._context.now

    def _active(self) -> list[_Donor]:
        """Return the donors to ask now."""
        return [donor for donor in self._donors if donor.rank == self._donors[0].rank][: self._most]

    def _fill(self) -> None:
        """Ask the donors for what is missing, as many at once as their links take."""
        for donor in self._active():
            while donor.free_at <= self._context.now and self._count(donor) < donor.at_once:
                if self._missing:
                    self._request(donor, self._missing.pop())
                elif not self._requests:
                    self._request(donor, 0)
                else:
                    break

    def _request(self, donor: _Donor, number: int) -> None:
        context = self._context
        request = StateRequest(context.caller(donor.name), self._needs_lineage, self._share(number))
        deadline = context.now + self._allowance
        self._requests[context.open(donor.name, request)] = _Request(donor, number, context.now, deadline)

    def _failed(self, request: _Request) -> None:
        """Ask others in place of a donor that fails; one that gave something since it last failed is tried again."""
        donor = request.donor
        if donor.has_given:
            donor.has_given, donor.at_once = False, 1
        elif donor in self._donors:
            self._donors.remove(donor)
            for channel in [channel for channel, one in self._requests.items() if one.donor is donor]:
                self._context.close(channel)
                self._miss(self._requests.pop(channel))
        self._miss(request)

    def _miss(self, request: _Request) -> None:
        if request.number:
            self._missing.append(request.number)

    def _is_answer(self, header: State, number: int) -> bool:
        return header.share == self._share(number) and (header.lineage or not self._needs_lineage)

    def _count(self, donor: _Donor) -> int:
        return sum(request.donor is donor for request in self._requests.values())

    def _share(self, number: int) -> Share:
        return Share(number, self._context.settings.whole_state)
