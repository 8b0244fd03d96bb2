"""Islands of a few numbers in one process, over real sockets: what commands meet."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from noloco_jax.islands.catch_up import CaughtUp
from noloco_jax.islands.interfaces import Read
from noloco_jax.islands.keys import credentials_for
from noloco_jax.islands.network import Correction, Link, LinkPlan, is_done
from noloco_jax.islands.partners import partner_by
from noloco_jax.islands.payload import ArraySpec, Message, StateForms
from noloco_jax.islands.roster import MEMBERS_FILE, Roster, newest
from noloco_jax.outer.pairing import RandomPairing

SPECS = [ArraySpec((3, 5), np.dtype(np.float32)), ArraySpec((), np.dtype(np.int32))]


class Floats:
    """Codec of messages of one array."""

    sizes = (SPECS[0].nbytes,)

    def part(self, own: Message, number: int, theirs: Any) -> bytes:
        return own.arrays[0].tobytes()

    def read(self, own: Message, theirs: Any) -> Read:
        other = np.frombuffer(theirs[0], np.float32).reshape(3, 5)
        return Read(other, float(np.linalg.norm(other)), float(np.linalg.norm(other - own.arrays[0])))

    def correction(self, own: Message, read: Read, weight: float) -> list[np.ndarray]:
        return [np.float32(weight) * (read.arrays - own.arrays[0])]


class LiveIsland:
    """An island with a training thread that adds noise to an array, a round every few steps."""

    def __init__(self, name: str, roster: Roster, folder: Path, keys: Path | None = None, **fields: Any):
        self.name, self.lines, self.met = name, list[str](), list[Any]()
        credentials = credentials_for(roster, name, keys)
        workdir = folder / f"work-{name}"
        workdir.mkdir(exist_ok=True)
        authority = None if credentials is None else credentials.authority
        self.plan = LinkPlan(
            name=name,
            roster=newest(workdir / MEMBERS_FILE, roster, authority),
            credentials=credentials,
            identity=fields.pop("identity", {"run": roster.run}),
            partner=partner_by(RandomPairing(len(roster.names)), 1),
            codec=Floats(),
            forms=StateForms(SPECS, 1, [1]),
            workdir=workdir,
            incarnation=time.time_ns() // 1_000_000,
            steps_per_round=5,
            **fields,
        )
        self.link = Link(self.plan, self.lines.append)
        self.weights = np.ones((3, 5), np.float32)
        self.step = 0
        self.stopping = threading.Event()
        self.step_seconds = 0.02
        self.error: BaseException | None = None
        self.round = -1
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> "LiveIsland":
        self._thread.start()
        return self

    def _run(self) -> None:
        try:
            opened = self.link.open()
            while not is_done(opened, 0.1):
                if self.stopping.is_set():
                    return
            begun = self.link.begin()
            while not is_done(begun, 0.1):
                if self.stopping.is_set():
                    return
            self._train()
        except BaseException as error:
            self.error = error
        finally:
            self.link.close()

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
            time.sleep(self.step_seconds + self.link.pace.pause())
            self.step += 1
            self.weights = self.weights + np.float32(0.01) * rng.normal(size=(3, 5)).astype(np.float32)
            if self.step % 5 == 0:
                self.round += 1
                norm = float(np.linalg.norm(self.weights))
                self.link.round_ended(self.round, self.step, Message(self.round, [self.weights.copy()]), norm, 10)
            self.met += self.link.take_met()

    def stop(self) -> None:
        self.stopping.set()
        self._thread.join(300)


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
            island.stop()


def wait_for(holds: Callable[[], Any], seconds: float = 300.0) -> None:
    """Wait until a condition holds; fail after so many seconds."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.05)
