"""Watcher of all islands of a run: each tells its status again and again, on a connection that stays. Needs no jax."""

import asyncio
import contextlib
import math
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from noloco_jax.errors import UserError
from noloco_jax.islands import messages_pb2 as pb
from noloco_jax.islands.ask import RosterAndKeys, ask_about, take_newest
from noloco_jax.islands.exchange import ConnectionLost, ProtocolError
from noloco_jax.islands.peers import check_status
from noloco_jax.islands.roster import Roster
from noloco_jax.islands.standing import AWAY, REMOVED, Watched, is_complete, present, states_of, summary
from noloco_jax.islands.transport import Dialler

_AT_ONCE = 32  # islands that are dialled
_RETRY_SECONDS = 30.0  # the longest wait before an island that does not answer is dialled again
_ABOUT_SECONDS = 10.0  # between two questions about islands that do not answer
_ENDED = "it ended the call"
_MAX, _MIN, _ALL = 600, 60, 60_000  # samples of an island in a history, and of all islands

Values = Sequence[float | None]


class Watcher:
    """Watcher of all islands of a run, in a thread, from `start` until `close`.

    Args:
      every, seconds: between two statuses of an island, and for an island to answer.
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


class History:
    """Samples of islands, from the first one on: as they become too many, every second one is dropped.

    Args:
      names: of the figures of a sample.
    """

    def __init__(self, *names: str):
        self._names = names
        self._times: list[float] = []
        self._islands: dict[str, list[Values]] = {}
        self._gap = 1  # calls of `add` from one sample to the next
        self._calls = 0

    def add(self, now: float, samples: Mapping[str, Values]) -> None:
        """Add a sample of each island; those that are missing, or None in it, are unknown."""
        self._calls += 1
        if (self._calls - 1) % self._gap:
            return
        unknown = (None,) * len(self._names)
        for name in samples.keys() - self._islands.keys():
            self._islands[name] = [unknown] * len(self._times)
        self._times.append(now)
        for name, kept in self._islands.items():
            kept.append(samples.get(name, unknown))
        if len(self._times) >= min(_MAX, max(_MIN, _ALL // max(len(self._islands), 1))):
            self._times = self._times[::2]
            self._islands = {name: kept[::2] for name, kept in self._islands.items()}
            self._gap *= 2

    def to_json(self) -> dict[str, Any]:
        """Return the times, and of each island a list for each figure."""
        islands = {
            name: dict(zip(self._names, zip(*kept, strict=True), strict=False)) for name, kept in self._islands.items()
        }
        return {"times": self._times, "islands": islands}
