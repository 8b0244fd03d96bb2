"""End of a run: who has finished, as the others know it, where messages are lost or late and islands are killed."""

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from noloco_jax.errors import TransientError, UserError
from noloco_jax.islands import messages_pb2 as pb
from noloco_jax.islands.exchange import ConnectionLost
from noloco_jax.islands.final_merge import RunEnd
from noloco_jax.islands.node import SILENT
from noloco_jax.islands.run import can_be_at, closing
from noloco_jax.islands.steps import IslandSteps
from noloco_jax.islands.sync import IslandSync
from noloco_jax.optim.schedule import SyncSchedule
from noloco_jax.spmd.programs import TrainState
from support.island_world import Sea, Sim

FINISHED, MERGED, LEAVING = pb.Status.FINISHED, pb.Status.MERGED, pb.Status.LEAVING


def two() -> tuple[Sim, Sim]:
    sea = Sea("ab")
    a, b = sea.add("a"), sea.add("b")
    a.node.table.phase = b.node.table.phase = pb.Status.TRAINING
    return a, b


async def test_an_island_whose_goodbye_was_lost_is_known_to_have_finished_once_the_other_says_its_own():
    a, b = two()
    a.sea.cut = lambda one, other: True
    a.node.leave(FINISHED)
    await asyncio.sleep(20)
    assert b.node.unfinished() == ["a"]
    a.sea.cut = lambda one, other: False
    b.node.leave(FINISHED)
    await asyncio.sleep(1)
    assert b.node.unfinished() == a.node.unfinished() == []


async def test_every_question_of_a_finished_island_says_that_it_has_finished():
    a, b = two()
    a.node.table.phase = FINISHED
    await a.node.table.ask(["b"])
    assert b.node.unfinished() == []


async def test_what_an_island_told_before_its_goodbye_and_comes_after_it_is_ignored_until_it_starts_again():
    a, b = two()
    late = a.node.table.greeting()
    a.node.leave(FINISHED)
    await asyncio.sleep(1)
    await b.node.greeted("a", late)
    b.node.table.hear("a", 3, a.node.table.incarnation)
    assert b.node.unfinished() == []
    b.node.table.hear("a", incarnation=a.node.table.incarnation + 1)
    assert b.node.unfinished() == ["a"]
    await b.node.greeted("a", late)
    assert b.node.unfinished() == ["a"]


@pytest.mark.parametrize("how", ["merged", "leaves", "killed"])
async def test_last_weights_are_kept_for_a_peer_until_it_has_merged_or_is_gone(how):
    a, b = two()
    for sim in (a, b):
        sim.node.leave(FINISHED)
    await asyncio.sleep(1)
    assert a.node.unmerged(["b"]) == ["b"]
    if how == "killed":
        b.kill()
    else:
        b.node.leave(MERGED if how == "merged" else LEAVING)
    for asked in range(SILENT):
        assert how != "killed" or a.node.unmerged(["b"]) == ["b"], asked
        await a.node.table.ask(["b"], 2.0)
    assert a.node.unmerged(["b"]) == []


async def test_a_partner_that_leaves_ends_the_meeting_at_once():
    a, b = two()

    async def faults(sender: str, receiver: str, kind: str) -> None:
        raise ConnectionLost("a fault of the test")

    a.sea.faults = faults
    a.end_round()
    b.node.leave(LEAVING)
    await asyncio.sleep(1)
    assert [outcome.reason for outcome in a.outcomes] == ["the partner has left"]


@pytest.mark.parametrize(("unmerged", "seconds"), [([], 30.0), (["rome"], 600.0)], ids=["gone", "still there"])
async def test_a_peer_that_may_have_gone_is_asked_for_its_weights_for_half_a_minute_alone(unmerged, seconds):
    async def fetch(name: str, left: float, more: float) -> Any:
        assert left == pytest.approx(max(600 - now(), 0)) and more == 600
        raise ConnectionLost("nobody listens there")

    now = asyncio.get_running_loop().time
    link: Any = SimpleNamespace(fetch=fetch, node=SimpleNamespace(unmerged=lambda names: unmerged))
    steps: Any = SimpleNamespace(link=link)
    end = RunEnd(steps, "paris", 600.0, lambda: False, print)
    assert await end._fetch(link, "rome") == "nobody listens there"
    assert now() == pytest.approx(seconds, abs=0.5)


async def test_an_island_that_was_given_up_is_waited_for_no_longer_until_it_starts_again():
    a, b = two()
    await a.node.greeted("b", pb.Greeting(phase=pb.Status.GONE))  # from its launcher
    assert a.node.unfinished() == a.node.unmerged(["b"]) == a.node.finished() == []
    b.node.table.incarnation += 1
    await b.node.table.ask(["a"])
    assert a.node.unfinished() == ["b"]
    b.node.leave(pb.Status.GONE)
    await asyncio.sleep(1)
    assert a.node.unfinished() == []


@pytest.mark.parametrize(("error", "told"), [(UserError, [pb.Status.GONE]), (TransientError, []), (OSError, [])])
def test_an_island_that_ends_with_a_mistake_of_the_input_says_that_it_is_gone(error, told):
    """After any other error the same command may do better, and the others wait for it."""
    link: Any = Waiting()
    with pytest.raises(error), closing(link):
        raise error("an error of the test")
    assert link.told == [*told, "closed"]


@pytest.mark.parametrize(
    ("round", "step", "can"),
    [(79, 800, True), (78, 799, True), (0, 10, True), (79, 801, False), (78, 800, False), (-1, 0, False)],
)
def test_a_donor_may_be_at_any_step_up_to_the_last(round, step, can):
    assert can_be_at(SyncSchedule(10), 800, round, step) == can


def test_the_weights_of_a_donor_that_has_finished_are_trained_no_further():
    steps: Any = SimpleNamespace(apply_arrived=lambda state, step: (state, 800))  # and no inner step is prepared
    sync = IslandSync("paris", SyncSchedule(10), steps, 0, cast(Any, None))
    assert sync.before_step(TrainState((), (), None), 610, lambda step: 800 - step)[1:] == (800, 0)


class Waiting:
    """Link of an island whose peer rome has finished, and gives nothing.

    Args:
      is_giving: True while rome fetches this island's weights.
    """

    is_removed, copies = False, SimpleNamespace(wanted=())

    def __init__(self, is_giving: bool = False):
        self.is_giving = is_giving
        self.told: list[Any] = []
        self.node = self
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def submit(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def fetch(self, *_: Any) -> Any:
        await asyncio.sleep(600)

    def active(self) -> tuple[str, ...]:
        return "paris", "rome"

    def finished(self) -> list[str]:
        return ["rome"]

    def unfinished(self) -> list[str]:
        return []

    def unmerged(self, names: Any) -> list[str]:
        return ["rome"]

    def close(self) -> None:
        self.told.append("closed")

    def ask(self, names: Any, seconds: float) -> None:
        self.submit(asyncio.sleep(seconds))

    def leave(self, phase: Any) -> None:
        self.told.append(phase)


def test_a_merge_that_is_told_to_stop_while_it_fetches_stops_within_a_second():
    link: Any = Waiting()
    steps, lines, started = IslandSteps(link, *[None] * 3), list[str](), time.monotonic()  # type: ignore[arg-type]
    end = RunEnd(steps, "paris", 600.0, lambda: time.monotonic() > started + 0.5, lines.append)
    state = TrainState([np.ones(3)], (), None)
    assert end.merge(state, 800) is state
    assert time.monotonic() - started < 1.5
    assert "600 s for each, twice as long" in lines[0] and "not merged, as it is told to stop" in lines[1]
    assert link.told == [FINISHED, pb.Status.MERGED]  # nobody waits for its weights


@pytest.mark.parametrize(("is_giving", "seconds"), [(False, 0.5), (True, 1.0)], ids=["nobody fetches", "rome fetches"])
def test_weights_are_served_for_the_time_given_and_twice_as_long_while_they_are_fetched(is_giving, seconds):
    steps = IslandSteps(Waiting(is_giving), *[None] * 3)  # type: ignore[arg-type]
    started = time.monotonic()
    steps.serve_until(TrainState((), (), None), 800, 0.5, lambda: False, lambda node: node.unmerged(["rome"]))
    assert time.monotonic() - started == pytest.approx(seconds, abs=0.4)


def test_a_stop_is_heard_while_a_peer_does_not_answer():
    steps, started = IslandSteps(Waiting(), *[None] * 3), time.monotonic()  # type: ignore[arg-type]
    is_stopping = lambda: time.monotonic() > started + 0.3  # noqa: E731
    steps.serve_until(TrainState((), (), None), 800, 600.0, is_stopping, lambda node: node.unmerged(["rome"]))
    assert time.monotonic() - started < 1.3
