"""End of a run: who has finished, as the others know it, where messages are lost or late and islands are killed."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from noloco_jax.islands import final_merge
from noloco_jax.islands import messages_pb2 as pb
from noloco_jax.islands.exchange import Broken
from noloco_jax.islands.final_merge import FinalMerge
from noloco_jax.islands.node import SILENT
from support.island_world import Sea, Sim

FINISHED, MERGED, LEAVING = pb.Status.FINISHED, pb.Status.MERGED, pb.Status.LEAVING


def two() -> tuple[Sim, Sim]:
    sea = Sea("ab")
    a, b = sea.add("a"), sea.add("b")
    a.node.phase = b.node.phase = pb.Status.TRAINING
    return a, b


async def test_an_island_whose_goodbye_was_lost_is_known_to_have_finished_once_the_other_says_its_own():
    a, b = two()
    a.world.cut = lambda one, other: True
    a.node.leave(FINISHED)
    await asyncio.sleep(20)
    assert b.node.unfinished() == ["a"]
    a.world.cut = lambda one, other: False
    b.node.leave(FINISHED)
    await asyncio.sleep(1)
    assert b.node.unfinished() == a.node.unfinished() == []


async def test_every_question_of_a_finished_island_says_that_it_has_finished():
    a, b = two()
    a.node.phase = FINISHED
    await a.node.ask(["b"])
    assert b.node.unfinished() == []


async def test_what_an_island_told_before_its_goodbye_and_comes_after_it_is_ignored_until_it_starts_again():
    a, b = two()
    late = a.node.greeting()
    a.node.leave(FINISHED)
    await asyncio.sleep(1)
    await b.node.greeted("a", late)
    b.node.hear("a", 3, a.node.incarnation)
    assert b.node.unfinished() == []
    b.node.hear("a", incarnation=a.node.incarnation + 1)
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
        await a.node.ask(["b"], 2.0)
    assert a.node.unmerged(["b"]) == []


async def test_a_partner_that_leaves_ends_the_meeting_at_once():
    a, b = two()

    async def faults(sender: str, receiver: str, kind: str) -> None:
        raise Broken("a fault of the test")

    a.world.faults = faults
    a.end_round()
    b.node.leave(LEAVING)
    await asyncio.sleep(1)
    assert [met.reason for met in a.met] == ["the partner has left"]


@pytest.mark.parametrize(("unmerged", "seconds"), [([], 30.0), (["rome"], 600.0)], ids=["gone", "still there"])
def test_a_peer_that_may_have_gone_is_asked_for_its_weights_for_half_a_minute_alone(unmerged, seconds, monkeypatch):
    now = 100.0

    def sleep(duration: float) -> None:
        nonlocal now
        now += duration

    def fetch(name: str) -> Any:
        return SimpleNamespace(result=lambda: (_ for _ in ()).throw(Broken("nobody listens there")))

    monkeypatch.setattr(final_merge, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    link: Any = SimpleNamespace(fetch=fetch, unmerged=lambda names: unmerged)
    steps: Any = SimpleNamespace(link=link)
    merge = FinalMerge(steps, "paris", 600.0, lambda: False, print)
    assert merge._fetch(link, "rome", now + 600) == "nobody listens there"
    assert now == pytest.approx(100 + seconds, abs=0.5)
