"""Watcher of all islands of a run: each tells its status again and again, on a connection that stays. Needs no jax."""

import asyncio
import contextlib
import itertools
import math
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from noloco_jax.errors import UserError
from noloco_jax.islands import messages_pb2 as pb
from noloco_jax.islands.ask import RosterAndKeys, ask_about, present, take_newest
from noloco_jax.islands.exchange import ConnectionLost, ProtocolError
from noloco_jax.islands.history import History
from noloco_jax.islands.peers import FAULTS, LINES, check_status
from noloco_jax.islands.roster import Roster
from noloco_jax.islands.standing import AWAY, REMOVED, STARTED, is_complete, standing, summary
from noloco_jax.islands.transport import Dialler

_AT_ONCE = 32  # islands that are dialled
_RETRY_SECONDS = 30.0  # the longest wait before an island that does not answer is dialled again
_ABOUT_SECONDS = 10.0  # between two questions about islands that do not answer
_LONGEST, _FIGURES = 300, 16  # characters of a line, and figures of an island: more are not honest
_NOT_ASKED, _ENDED = "not asked yet", "it ended the call"


@dataclass
class Watched:
    """Last known state of one island.

    Attributes:
      status: its last status.
      fault: the reason for which it does not answer now; empty: it does.
      answered: time of the last status, by the monotonic clock.
      told: the phase that others have last heard of it, since it does not answer; None: unknown.
    """

    status: pb.Status | None = None
    fault: str = _NOT_ASKED
    answered: float = -math.inf
    told: Any = None

    def take(self, status: pb.Status, now: float) -> None:
        self.status, self.fault, self.answered, self.told = status, "", now, None

    @property
    def answer(self) -> pb.Status | None:
        """Its status, while it answers."""
        return None if self.fault else self.status

    @property
    def last(self) -> Any:
        """The phase that is known last; None: none is."""
        return self.told if self.told is not None else self.status and self.status.phase

    def sample(self) -> tuple[float | None, float | None]:
        """Return round and loss for a chart; None for each that it does not tell.

        An island that has restarted has no round until it trains: it may yet catch up.
        """
        if (status := self.answer) is None or status.phase not in STARTED:
            return None, None
        return status.round + 1, _finite(status.figures).get("loss")

    def to_json(self, state: str, version: int, now: float) -> dict[str, Any]:
        """Return what a page shows; `state` is the island's, `version` that of the newest roster."""
        one = self.status
        shown: dict[str, Any] = {"state": state, "answers": not self.fault}
        if state == AWAY:
            shown["away"] = self.fault
        if one is None:
            return shown
        known = {
            "seconds": now - self.answered,
            "due": one.due,
            "committed": one.committed,
            "one_sided": one.one_sided,
            "steps_late": one.steps_late if math.isfinite(one.steps_late) else None,
            "participation": one.committed / one.due if one.due else None,
            "partner": one.partner[:_LONGEST],
            "members": one.num_members,
            "roster": one.roster_version,
            "is_behind": is_behind(one.roster_version, version),
            "figures": _finite(one.figures),
            "peers": [{"name": peer.name, "fault": peer.fault[:_LONGEST]} for peer in one.peers[:FAULTS]],
            "notices": [line[:_LONGEST] for line in one.notices[-LINES:]],
        }
        if one.phase in STARTED:
            known |= {"round": one.round + 1, "step": one.step, "rounds": one.num_rounds or None}
        return shown | known


def _finite(figures: Mapping[str, float]) -> dict[str, float]:
    """Return the figures that JSON can hold."""
    few = itertools.islice(figures.items(), _FIGURES)
    return {name[:_LONGEST]: value for name, value in few if math.isfinite(value)}


def is_behind(version: int, newest: int) -> bool:
    """Return whether an island's roster is older than the newest; version 1 is the file, version 0, signed."""
    return max(version, 1) < newest


def states_of(roster: Roster, islands: Mapping[str, Watched]) -> dict[str, str]:
    """Return the state of every member, in the roster's order: see `standing`."""
    statuses = [one.status for one in islands.values() if one.status is not None]
    there = {member.name for member in present(roster, statuses)}
    states = {}
    for member in roster.members:
        one = islands.get(member.name) or Watched()
        state = standing(member, one.answer, one.last, member.name not in there)
        states[member.name] = one.fault if state == AWAY and one.fault == _NOT_ASKED else state
    return states


class Watcher:
    """Hears all islands of a run, in a thread, from `start` until `close`.

    Args:
      run: the run.
      every: seconds between two statuses of an island.
      seconds: for an island to answer.
      dialler: calls the islands; None: one by gRPC.
      reopen: returns the run anew where the member in whose name it calls is one no more.
    """

    def __init__(
        self,
        run: RosterAndKeys,
        every: float,
        seconds: float = 10.0,
        dialler: Any = None,
        reopen: Callable[[], RosterAndKeys] | None = None,
    ):
        self._reopen = reopen
        self._run, self._every, self._seconds, self._dialler = run, every, seconds, dialler
        self._lock = threading.Lock()
        self._islands: dict[str, Watched] = {}
        self._history = History("round", "loss")
        self._asked_about = -math.inf
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._watch()), daemon=True, name="island-watcher")

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join(10)

    def known(self) -> tuple[Roster, dict[str, str], dict[str, Watched]]:
        """Return the newest roster, the state of every member, and what is known of those that were heard."""
        with self._lock:
            roster, islands = self._run.roster, {name: replace(one) for name, one in self._islands.items()}
        return roster, states_of(roster, islands), islands

    def to_json(self) -> dict[str, Any]:
        """Return the run and its islands, for a page and for metrics."""
        (roster, states, islands), now, new = self.known(), time.monotonic(), Watched()
        return {
            "run": roster.run,
            "version": roster.version,
            "now": time.time(),
            "summary": summary(states.values()),
            "is_complete": is_complete(states.values()),
            "islands": {
                name: islands.get(name, new).to_json(state, roster.version, now) for name, state in states.items()
            },
        }

    def history(self) -> dict[str, Any]:
        """Return the islands' rounds and losses since the start, and the seconds until they are worth asking again."""
        with self._lock:
            return self._history.to_json() | {"seconds": max(self._every, len(self._islands) / 50)}

    async def _watch(self) -> None:
        while not self._over.is_set():
            await self._watch_as(self._run)

    async def _watch_as(self, run: RosterAndKeys) -> None:
        """Watch in the name of one member, until another one's keys are there in its place."""
        dialler = self._dialler or Dialler(run.name, run.credentials, run.roster)
        limit, tasks = asyncio.Semaphore(_AT_ONCE), dict[str, asyncio.Task[None]]()
        try:
            while not self._over.is_set() and self._run.name == run.name:
                self._follow(dialler, limit, tasks)
                await asyncio.to_thread(self._over.wait, self._every)
                self._look(time.monotonic())
                await self._learn(dialler)
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
            await dialler.close()

    def _follow(self, dialler: Any, limit: asyncio.Semaphore, tasks: dict[str, asyncio.Task[None]]) -> None:
        """Hear the members there are, and those no more whose membership has ended."""
        statuses = [one.status for one in self._islands.values() if one.status is not None]
        names = {one.name for one in present(self._run.roster, statuses)}
        for name in names - tasks.keys():
            with self._lock:
                self._islands.setdefault(name, Watched())
            tasks[name] = asyncio.ensure_future(self._hear(name, dialler, limit))
        for name in tasks.keys() - names:
            if self._islands[name].fault:  # while it still answers, its last words are wanted
                tasks.pop(name).cancel()

    async def _hear(self, name: str, dialler: Any, limit: asyncio.Semaphore) -> None:
        """Take an island's statuses, for good."""
        one, wait = self._islands[name], self._every
        while True:
            fault, statuses = _ENDED, dialler.watch(name, self._every)
            try:
                async with limit, asyncio.timeout(self._seconds):
                    self._take(one, await anext(statuses))
                async for status in statuses:
                    self._take(one, status)
            except (ConnectionLost, ProtocolError) as error:
                fault = str(error)
            except TimeoutError:
                fault = f"no answer in {self._seconds:g} s"
            except StopAsyncIteration:
                pass
            finally:
                await statuses.aclose()
            if fault == _ENDED:  # by which the island checks the caller anew
                wait = self._every
            else:
                wait = self._every if not one.fault else min(1.5 * wait, max(_RETRY_SECONDS, self._every))
                with self._lock:
                    one.fault = fault
            if wait > self._seconds:  # no other call to it is under way
                await dialler.forget(name)
            await asyncio.sleep(random.uniform(0.5, 1.0) * wait)

    def _take(self, one: Watched, status: pb.Status) -> None:
        check_status(status)
        with self._lock:
            one.take(status, time.monotonic())

    def _look(self, now: float) -> None:
        """Note who has fallen silent, and add to the history."""
        silence = self._every + self._seconds
        with self._lock:
            for one in self._islands.values():
                if not one.fault and now - one.answered > silence:
                    one.fault = f"no answer in {silence:g} s"
            self._history.add(time.time(), {name: one.sample() for name, one in self._islands.items()})

    async def _learn(self, dialler: Any) -> None:
        """Take a newer roster, and ask others about islands that do not answer."""
        statuses = {name: one.status for name, one in self._islands.items() if one.status is not None and not one.fault}
        if any(status.roster_version > self._run.roster.version for status in statuses.values()):
            run = await take_newest(self._run, dialler, statuses, self._seconds)
            with self._lock:
                self._run = run
        if self._reopen is not None and self.known()[1].get(self._run.name) == REMOVED:
            with contextlib.suppress(UserError):
                run = self._reopen()
                with self._lock:
                    self._run = replace(self._run, name=run.name, credentials=run.credentials)
        silent = [name for name, state in self.known()[1].items() if state == AWAY]
        if not silent or not statuses or time.monotonic() - self._asked_about < _ABOUT_SECONDS:
            return
        self._asked_about = time.monotonic()
        told = await ask_about(silent, list(statuses), dialler, self._seconds)
        with self._lock:
            for name, phase in told.items():
                if self._islands[name].fault:
                    self._islands[name].told = phase
