"""Islands of a few numbers in one process, over real sockets: what commands meet."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from noloco_jax.islands.catch_up import CaughtUp
from noloco_jax.islands.keys import open_membership
from noloco_jax.islands.network import Correction, NetworkPlan, NetworkThread, is_done
from noloco_jax.islands.payload import Message, StateCodec, codec_of, specs_of
from noloco_jax.islands.roster import Roster
from noloco_jax.optim.exchange.wire import wire_of
from noloco_jax.optim.pairing import RandomPairing

WEIGHTS, STEP = np.ones((3, 5), np.float32), np.zeros((), np.int32)


class LiveIsland(threading.Thread):
    """An island whose thread adds noise to an array, with a round every few steps.

    Args:
      name: the island's.
      roster: path of its file, or the `Roster`.
      folder: of the islands' workdirs.
      keys: folder of the island's keys; None: without TLS.
      weights: the array.
      step_seconds: of an inner step.
      **fields: further ones of the `NetworkPlan`.
    """

    def __init__(
        self,
        name: str,
        roster: Path | Roster,
        folder: Path,
        keys: Path | None = None,
        *,
        weights: np.ndarray = WEIGHTS,
        step_seconds: float = 0.02,
        **fields: Any,
    ):
        super().__init__(daemon=True)
        self.lines, self.outcomes, workdir = list[str](), list[Any](), folder / f"work-{name}"
        workdir.mkdir(exist_ok=True)
        newest, credentials = open_membership(roster, name, keys, workdir)
        facts: dict[str, Any] = {"identity": {"run": newest.run}, "details": json.dumps({"config": None})} | fields
        plan = NetworkPlan(
            name=name,
            roster=newest,
            credentials=credentials,
            pairing=RandomPairing(len(newest.names)),
            codec=codec_of(wire_of("float32"), [weights], [weights], [1]),
            state_codec=StateCodec(specs_of([weights, STEP]), 1, [1]),
            workdir=workdir,
            incarnation=time.time_ns() // 1_000_000,
            sync_every=5,
            **facts,
        )
        self.name, self.link = name, NetworkThread(plan, self.lines.append)
        self.weights, self.step, self.round = weights, 0, -1
        self._step_seconds = step_seconds
        self.stopping, self.error = threading.Event(), None

    def run(self) -> None:
        try:
            if self._has_ended(self.link.open()) and self._has_ended(self.link.begin()):
                self._train()
        except BaseException as error:
            self.error = error
        finally:
            self.link.close()

    def _has_ended(self, started: "Future[None]") -> bool:
        """Wait for the end of what was started; return False where the island has to stop before."""
        while not (is_ended := is_done(started, 0.1)) and not self.stopping.is_set():
            pass
        return is_ended

    def _train(self) -> None:
        rng = np.random.default_rng(0)
        while not self.stopping.is_set() and not self.link.is_removed:
            for item in self.link.take():
                if isinstance(item, CaughtUp):
                    self.weights, self.step, self.round = np.array(item.leaves[0]), item.step, item.round
                elif isinstance(item, Correction):
                    self.weights = self.weights + item.arrays.result()[0]
            if wanted := self.link.copies.wanted:
                state = {0: self.weights.copy(), 1: np.int32(self.step) * np.ones((), np.int32)}
                self.link.copies.give({number: state[number] for number in wanted}, self.round, self.step)
            self.link.stride(1)
            time.sleep(self._step_seconds + self.link.pace.pause())
            self.step += 1
            self.weights = self.weights + np.float32(0.01) * rng.normal(size=self.weights.shape).astype(np.float32)
            if self.step % 5 == 0:
                self.round += 1
                norm = float(np.linalg.norm(self.weights))
                self.link.round_ended(self.round, self.step, Message(self.round, [self.weights.copy()]), norm, 10)
            self.outcomes += self.link.take_outcomes()


@contextlib.contextmanager
def training(*islands: LiveIsland) -> Iterator[None]:
    """Train these islands beside the body."""
    for island in islands:
        island.start()
    try:
        yield
    finally:
        for island in islands:
            island.stopping.set()
        for island in islands:
            island.join(300)


def wait_for(holds: Callable[[], Any], seconds: float = 300.0) -> None:
    """Wait until a condition holds; fail after so many seconds."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.05)
