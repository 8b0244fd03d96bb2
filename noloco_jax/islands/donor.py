"""Donor's side of catching up: copies of the state, encoded once, and given share by share.

A copy is taken between two inner steps when the first share is asked for, serves every island that catches up for a
while, and is dropped soon after the last of them. It takes the memory of one encoded state; the arrays are dropped one
by one as they are encoded, in the thread of a call.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from noloco_jax.islands.payload import Arrays
from noloco_jax.islands.protocol.messages import Share, State
from noloco_jax.islands.state_shares import StateLayout, StateLayouts

_LONGEST_SECONDS = 60.0  # age of a copy from which new shares are given
_IDLE_SECONDS = 15.0  # until a copy of which nobody asks for shares is dropped


class _Copy:
    """Copy of the state after `round`, to which `leaves` belong from now on."""

    def __init__(self, layout: StateLayout, round: int, leaves: dict[int, np.ndarray]):
        self.round = round
        self.taken = self.used = time.monotonic()
        self._layout, self._leaves = layout, leaves
        self._content: np.ndarray | None = None
        self._lock = threading.Lock()

    def share(self, number: int) -> list[np.ndarray]:
        with self._lock:
            if self._content is None:
                self._content = self._layout.encode(self._leaves)
        return [self._layout.share(self._content, number)]


class _Waiting(NamedTuple):
    """Call that waits for a copy: its channel, the header to send with it, and the share asked for."""

    channel: Any
    header: State
    share: Share


class Donor:
    """State for islands that catch up. Not thread-safe, but for the functions that it sends.

    Args:
      layouts: layouts of the state.
      send: called with the channel of a call, the header to send, and the arrays behind it or a function that makes
        them in the thread of the call.
      end: called with the channel of a call to end.
    """

    def __init__(
        self,
        layouts: StateLayouts,
        send: Callable[[Any, State, Arrays | Callable[[], Arrays]], None],
        end: Callable[[Any], None],
    ):
        self._layouts, self._send, self._end = layouts, send, end
        self._copies: dict[bool, _Copy] = {}
        self._waiting: list[_Waiting] = []

    def ask(self, channel: Any, header: State) -> None:
        """Give a share now, or once there is a copy."""
        share = header.share
        assert share is not None
        if not 0 <= share.number <= self._layouts.of(share.whole).count:
            self._end(channel)
            return
        copy, one = self._usable(share.whole), _Waiting(channel, header, share)
        if share.number and copy is not None:
            self._give_share(copy, one)
        else:
            self._waiting.append(one)

    @property
    def is_waited_for(self) -> bool:
        """True while a call waits for `give`."""
        now = time.monotonic()
        self._copies = {kind: copy for kind, copy in self._copies.items() if now - copy.used < _IDLE_SECONDS}
        return bool(self._waiting)

    @property
    def wanted(self) -> list[int]:
        """Numbers of the arrays to give."""
        return sorted({leaf for one in self._waiting for leaf in self._leaves(one.share)})

    def give(self, round: int, step: int, leaves: Mapping[int, np.ndarray]) -> None:
        """Serve the calls that wait, from a copy of the `wanted` arrays, which nobody will change.

        Args:
          round: the last round that was ended.
          step: inner steps taken.
          leaves: the arrays by their numbers.
        """
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            share, layout = one.share, self._layouts.of(one.share.whole)
            if not leaves.keys() >= self._leaves(share):
                self._waiting.append(one)  # asked for since `wanted` was
            elif share.number == 0:
                position = [np.asarray(step, np.int64), *(leaves[leaf] for leaf in layout.small)]
                self._send(one.channel, replace(one.header, round=round), position)
            else:
                copy = self._usable(share.whole)
                if copy is None:
                    shared = {leaf: leaves[leaf] for leaf in layout.shared}
                    copy = self._copies[share.whole] = _Copy(layout, round, shared)
                self._give_share(copy, one)

    def _leaves(self, share: Share) -> set[int]:
        """Return the numbers of the arrays that a share is made of; the position's belong to every copy."""
        layout = self._layouts.of(share.whole)
        return {*layout.small, *(layout.shared if share.number else ())}

    def _usable(self, whole: bool) -> _Copy | None:
        copy = self._copies.get(whole)
        return copy if copy is not None and time.monotonic() - copy.taken < _LONGEST_SECONDS else None

    def forget(self, channel: Any) -> None:
        """Serve a call no more."""
        self._waiting = [one for one in self._waiting if one.channel != channel]

    def _give_share(self, copy: _Copy, one: _Waiting) -> None:
        copy.used = time.monotonic()
        number = one.share.number
        self._send(one.channel, replace(one.header, round=copy.round), lambda: copy.share(number))
