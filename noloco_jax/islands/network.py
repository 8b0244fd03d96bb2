"""The training's side of an island's network: one thread runs the protocol and all calls on an asyncio loop.

A second thread decodes messages and computes corrections. The training never waits for either: it leaves messages here
and takes what has arrived between two inner steps.
"""

import asyncio
import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from noloco_jax.errors import UserError
from noloco_jax.islands import messages_pb2 as pb
from noloco_jax.islands.catch_up import CatchUp, CaughtUp, give
from noloco_jax.islands.copies import Copies
from noloco_jax.islands.exchange import ConnectionLost
from noloco_jax.islands.fetch import fetch
from noloco_jax.islands.interfaces import Plan, RoundOutcome
from noloco_jax.islands.keys import Credentials, expiry_warning
from noloco_jax.islands.node import Node
from noloco_jax.islands.pace import Pace
from noloco_jax.islands.payload import Message, StateCodec
from noloco_jax.islands.roster import MEMBERS_FILE, Address, Roster, parse_document, write_members
from noloco_jax.islands.start import admit, begin
from noloco_jax.islands.transport import Dialler, Listener

T = TypeVar("T")


class Correction(NamedTuple):
    """Correction of an exchange, to apply between two inner steps, once it is computed."""

    round: int
    arrays: Future[Sequence[np.ndarray]]


@dataclass(frozen=True, kw_only=True)
class NetworkPlan(Plan):
    """Facts of an island that the network needs as well.

    Attributes:
      credentials: its keys; None without TLS.
      state_codec: the forms in which the state travels.
      workdir: keeps the newest roster.
      by_time: True for `--pace=time`.
      began_before: True if an earlier start of this island has trained.
      listen: the address to listen at; None: the port of the roster's address, on all of the machine's addresses.
    """

    credentials: Credentials | None
    state_codec: StateCodec
    workdir: Path
    by_time: bool = False
    began_before: bool = False
    listen: Address | None = None


class NetworkThread:
    """An island's network thread. Methods are those of the training's thread, unless they say otherwise.

    `report` is called with lines for people, from any thread. `is_listening` is True once others can call.
    """

    def __init__(self, plan: NetworkPlan, report: Callable[[str], None]):
        self._plan, self._report = plan, report
        self._arriving: deque[Correction | CaughtUp] = deque()  # from the network's thread to the training's
        self._inbox: list[Correction | CaughtUp] = []  # of the training's thread alone
        self._outcomes: deque[RoundOutcome] = deque()  # from the network's thread to the training's
        self._giving = 0  # calls that fetch weights now
        self._steps = 0  # inner steps begun
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="island-decode")
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(self._log_fault)
        self._thread = threading.Thread(target=self._loop.run_forever, name="island-network", daemon=True)
        self._is_closed = self.is_listening = False
        self.pace = Pace(plan.sync_every / plan.num_fragments, plan.by_time)
        self.dialler = Dialler(plan.name, plan.credentials, plan.roster)
        authority = None if plan.credentials is None else plan.credentials.authority
        parse = None if authority is None else partial(parse_document, run=plan.roster.run, authority=authority)
        self.node = Node(plan, self.dialler, self, self.pace, parse)
        self.copies = Copies(self.node.table, plan.state_codec, self.run, self._arriving.append)
        self._listener = Listener(self.node, self._give, plan.credentials)

    # Start and end.

    def open(self) -> "Future[None]":
        """Begin to listen, and to introduce the island to the others.

        The result raises `UserError` if the name or address is in use, or most of the others refuse the island.
        """
        self._thread.start()
        return self.submit(self._open())

    def begin(self) -> "Future[None]":
        """Begin to wait until the island may train; the result raises `UserError` as `start.begin`."""
        plan, catch_up = self._plan, CatchUp(self.node, self.copies)
        return self.submit(begin(self.node.table, catch_up, plan.saved is not None, plan.began_before))

    def leave(self, phase: Any = pb.Status.LEAVING) -> None:
        """Begin no further exchange, and tell the peers one of `peers.ENDED`."""
        if self._thread.is_alive() and not self._is_closed and self.is_listening:
            self._call(lambda: self.node.leave(phase))

    def close(self) -> None:
        """End all calls and both threads."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(30)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)
            self._loop.close()
        self._worker.shutdown(cancel_futures=True)

    # Rounds.

    def round_ended(self, round: int, step: int, message: Message, norm: float, tokens: int) -> None:
        """Leave a round's message to be exchanged; see `Node.round_ended`."""
        self._loop.call_soon_threadsafe(self.node.round_ended, round, step, message, norm, tokens)

    def stride(self, largest: int) -> int:
        """Begin an inner step: return the steps of the schedule that it stands for."""
        self._steps += 1
        return self.pace.stride(time.monotonic(), largest)

    def take(self) -> list[Correction | CaughtUp]:
        """Return corrections ready to apply, in order; a received state has taken the place of earlier ones."""
        self._drain()
        ready = itertools.takewhile(lambda item: isinstance(item, CaughtUp) or item.arrays.done(), self._inbox)
        return self._taken(len(list(ready)))

    def take_all(self, is_last: bool = False) -> tuple[list[Correction | CaughtUp], dict[str, Any] | None]:
        """Return all corrections delivered, and the protocol's state to save with weights that have applied them.

        Nothing, and None, where a received state is to replace the weights; `is_last` weights are replaced no more.
        """

        def drain() -> dict[str, Any]:
            self._drain()
            return self.node.to_json()

        saved = self._call(drain)
        corrections: list[Correction | CaughtUp] = [x for x in self._inbox if isinstance(x, Correction)]
        if len(corrections) < len(self._inbox) and not is_last:
            return [], None
        self._inbox = corrections
        return self._taken(len(self._inbox)), saved

    def take_outcomes(self) -> list[RoundOutcome]:
        """Return the outcomes since the last call."""
        return [self._outcomes.popleft() for _ in range(len(self._outcomes))]

    def settle(self, round: int, seconds: float) -> None:
        """Wait until every exchange of this round and earlier ones has ended, up to so many seconds."""

        async def settled() -> None:
            await asyncio.wait_for(self.node.table.until(lambda: not self.node.meetings.is_open(round)), seconds)

        with contextlib.suppress(TimeoutError):
            self.submit(settled()).result()

    # Figures.

    def status(self) -> pb.Status:
        return self._call(self.node.status)

    def record(self, figures: Mapping[str, float]) -> None:
        """Show figures of the training to those who watch."""
        self._loop.call_soon_threadsafe(self.node.figures.update, dict(figures))

    @property
    def is_exchanging(self) -> bool:
        """True while messages may arrive."""
        return self.node.meetings.is_open(self.node.table.round)

    @property
    def is_removed(self) -> bool:
        """True once the island has ended its last round as a member."""
        return self.node.table.is_removed

    # Weights for others.

    @property
    def is_giving(self) -> bool:
        """True while somebody fetches weights."""
        return self._giving > 0

    async def fetch(self, peer: str, seconds: float, more: float) -> list[np.ndarray]:
        """Return a peer's exact last weights, on the network's thread; see `fetch.fetch`."""
        specs = self._plan.state_codec.weights
        return (await fetch(self.dialler, peer, specs, self._plan.workdir, seconds, more=more, last=True))[0]

    def ask(self, names: Sequence[str], seconds: float) -> None:
        """Begin to ask peers where they are."""
        table = self.node.table
        self._loop.call_soon_threadsafe(lambda: table.start(table.ask(names, seconds)))  # which reports its errors

    # As `TrainerCallbacks`, on the network's thread.

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        return await self._loop.run_in_executor(self._worker, function, *arguments)

    def deliver(self, round: int, correct: Callable[[], Any]) -> None:
        self._arriving.append(Correction(round, self._worker.submit(correct)))

    def outcome(self, outcome: RoundOutcome) -> None:
        self._outcomes.append(outcome)

    def log(self, line: str) -> None:
        self._report(line)

    def keep(self, roster: Roster) -> None:
        self.node.table.start(self.run(write_members, self._plan.workdir / MEMBERS_FILE, roster))

    @property
    def num_steps(self) -> int:
        return self._steps

    # Inside.

    def _drain(self) -> None:
        """Move what has arrived to the inbox, where a state takes the place of everything before it."""
        while self._arriving:
            item = self._arriving.popleft()
            self._inbox = [item] if isinstance(item, CaughtUp) else [*self._inbox, item]

    def _taken(self, count: int) -> list[Correction | CaughtUp]:
        taken, self._inbox = self._inbox[:count], self._inbox[count:]
        for item in taken:  # in order with `round_ended`, so that the protocol knows what each message has
            self._loop.call_soon_threadsafe(self.node.applied, item.round)
        return taken

    async def _open(self) -> None:
        plan, credentials = self._plan, self._plan.credentials
        address = plan.roster.member(plan.name).address
        if address.can_be_dialled:
            await self._check_alone()
        if address.can_be_dialled or plan.listen:
            host = "127.0.0.1" if address.is_loopback else "[::]"
            await self._listener.open(plan.listen or Address(host.strip("[]"), address.port))
        self.is_listening = True
        if credentials is not None and (line := expiry_warning(credentials, plan.name)):
            self.log(line)
        await admit(self.node.table)

    async def _check_alone(self) -> None:
        """Raise `UserError` where an island of this name answers at its address."""
        name = self._plan.name
        try:
            await self.dialler.greet(name, pb.Greeting(), 3.0)
        except ConnectionLost:
            return
        raise UserError(f"{name} runs already, at its address in the roster: end it, or start another island")

    async def _give(self, request: pb.WeightsRequest) -> AsyncGenerator[pb.WeightsFrame, None]:
        self._giving += 1
        try:
            async for frame in give(self.node.table, self.copies, request):
                yield frame
        finally:
            self._giving -= 1

    async def _close(self) -> None:
        await self.node.table.close()
        await self._listener.close()
        await self.dialler.close()
        left = asyncio.all_tasks() - {asyncio.current_task()}  # such as `begin`, of an island that is told to stop
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def _log_fault(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not is_fault(context):
            return
        fault = context.get("exception") or context["message"]
        self.node.table.log(f"a fault of this program, please report it: {fault!r}")
        loop.default_exception_handler(context)  # logs the stack

    def submit(self, coroutine: Any) -> "Future[Any]":
        """Run a coroutine on the network's thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _call(self, function: Callable[[], T]) -> T:
        """Return the result of a short function, called on the network's thread."""

        async def call() -> T:
            return function()

        return self.submit(call()).result()


def is_fault(context: dict[str, Any]) -> bool:
    """Return False for an error of gRPC's poller: all loops of a process share it, also those that are closed."""
    return "PollerCompletionQueue" not in context["message"]


def is_done(future: "Future[None]", seconds: float) -> bool:
    """Return whether a future is done within so many seconds; raise its error."""
    if done := bool(wait([future], seconds).done):
        future.result()
    return done
