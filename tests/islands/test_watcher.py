"""Watcher of a run's islands: the words for their states, and the cost of a poll. Islands are in memory."""

import asyncio
import itertools
import json
import math
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from noloco_jax.islands import ask as asking
from noloco_jax.islands import messages_pb2 as pb
from noloco_jax.islands.ask import Found, RosterAndKeys, ask_all
from noloco_jax.islands.dashboard import exposition, values_of
from noloco_jax.islands.exchange import ConnectionLost, ProtocolError
from noloco_jax.islands.keys import Credentials
from noloco_jax.islands.peers import MAX_ABOUT, Peer, check_watch
from noloco_jax.islands.roster import Address, Member, Roster
from noloco_jax.islands.standing import Watched, is_complete, standing, states_of, summary
from noloco_jax.islands.status import status_table
from noloco_jax.islands.watcher import History, Watcher
from support.island_world import Sea
from support.live_island import wait_for

ROW = Member(0, "paris", Address("127.0.0.1", 1))
REMOVED = ROW._replace(until_round=10)
PHASE: Any = pb.Status.Phase.Value


def answer(phase: str, round: int = 3, **fields: Any) -> pb.Status:
    return pb.Status(phase=PHASE(phase), round=round, **fields)


@pytest.mark.parametrize(
    ("member", "status", "last", "is_over", "word"),
    [
        (ROW, answer("STARTING"), None, False, "starting"),
        (ROW, answer("TRAINING"), None, False, "training"),
        (ROW, answer("FINISHED"), None, False, "finished"),
        (ROW, answer("MERGED"), None, False, "finished"),
        (ROW, answer("LEAVING"), None, False, "leaving"),
        (ROW, None, "FINISHED", False, "finished"),
        (ROW, None, "MERGED", False, "finished"),
        (ROW, None, "LEAVING", False, "left"),
        (ROW, None, "TRAINING", False, "away"),
        (ROW, None, None, False, "away"),
        (REMOVED, answer("TRAINING", 8), None, False, "training"),
        (REMOVED, answer("LEAVING", 9), None, False, "removed"),  # round 9 was its last one
        (REMOVED, None, "LEAVING", True, "removed"),
        (REMOVED, None, "TRAINING", False, "away"),
    ],
)
def test_finished_left_removed_and_away_are_four_words(member, status, last, is_over, word):
    assert standing(member, status, last and PHASE(last), is_over) == word


@pytest.mark.parametrize(
    ("states", "line"),
    [
        (["training", "training", "away"], "2 of 3 islands train, 1 away"),
        (["training", "removed"], "1 of 1 islands train, 1 removed"),
        (["finished", "training"], "1 of 2 islands train, 1 finished"),
        (["finished", "finished", "removed"], "complete: 2 of 2 islands have finished, 1 removed"),
        (["finished", "away", "left"], "over: 1 of 3 islands have finished, 1 away, 1 left"),
        (["away", "away"], "none of 2 islands answers: the run is over, or cannot be reached"),
    ],
)
def test_a_run_is_complete_once_all_that_are_no_exception_have_finished(states, line):
    assert summary(states) == line
    assert is_complete(states) == line.startswith("complete")


class Islands:
    """Stands for a `Dialler` to islands in memory, whose statuses are set by hand. Counts what travels."""

    def __init__(self, statuses: Mapping[str, pb.Status | str]):
        self.statuses = dict(statuses)
        self.told: dict[str, str] = {}  # phases that islands tell of others
        self.unknown: set[str] = set()  # islands that have restarted, and were told nothing yet
        self.document = b""
        self.bytes = self.rosters = 0

    async def watch(self, name: str, every: float) -> AsyncGenerator[pb.Status, None]:
        while not isinstance(status := self.statuses[name], str):
            self.bytes += status.ByteSize()
            yield status
            await asyncio.sleep(every)
        raise ConnectionLost(status)

    async def greet(self, name: str, greeting: pb.Greeting, seconds: float) -> pb.Status:
        if isinstance(status := self.statuses[name], str):
            raise ConnectionLost(status)
        found = pb.Status()
        found.CopyFrom(status)
        told = {} if name in self.unknown else self.told
        found.peers.extend(pb.Peer(name=one, phase=PHASE(told.get(one, "STARTING"))) for one in greeting.about)
        if greeting.wants_roster and self.document:
            found.roster.ParseFromString(self.document)
            self.rosters += 1
        self.bytes += found.ByteSize()
        return found

    def follow(self, roster: Roster) -> None:
        pass

    async def forget(self, peer: str) -> None:
        pass

    async def close(self) -> None:
        pass


def run_of(*names: str) -> RosterAndKeys:
    rows = (Member(i, name, Address("127.0.0.1", i + 1)) for i, name in enumerate(names))
    return RosterAndKeys(Roster("test", tuple(rows), len(names)), names[0], None)


def ask(run: RosterAndKeys, islands: Any) -> Found:
    return asyncio.run(ask_all(run, islands, 1.0))


def test_an_island_keeps_its_last_word_after_its_process_has_ended():
    islands = Islands({name: answer("TRAINING") for name in ("paris", "berlin", "rome", "oslo")})
    watcher = Watcher(run_of(*islands.statuses), 0.02, dialler=islands)

    def states() -> dict[str, str]:
        return {name: one["state"] for name, one in watcher.to_json()["islands"].items()}

    watcher.start()
    wait_for(lambda: set(states().values()) == {"training"})
    islands.statuses |= {"paris": answer("MERGED"), "berlin": answer("LEAVING")}
    wait_for(lambda: states() == {"paris": "finished", "berlin": "leaving", "rome": "training", "oslo": "training"})
    islands.statuses |= dict.fromkeys(islands.statuses, "nobody listens there")
    wait_for(lambda: states() == {"paris": "finished", "berlin": "left", "rome": "away", "oslo": "away"})
    shown = watcher.to_json()
    assert shown["summary"] == "over: 1 of 4 islands have finished, 2 away, 1 left"
    up = {name: values_of(one).get("up") for name, one in shown["islands"].items()}
    assert up == {"paris": None, "berlin": None, "rome": 0.0, "oslo": 0.0}
    islands.statuses["rome"] = answer("TRAINING")  # it has been started again
    wait_for(lambda: states()["rome"] == "training")
    watcher.close()


def test_others_tell_of_an_island_that_ended_before_the_watcher_came():
    gone = "nobody listens there"
    restarted = dict.fromkeys(("oslo", "bonn"), answer("STARTING"))
    islands = Islands({"paris": gone, "berlin": answer("FINISHED"), **restarted, "rome": gone})
    islands.told = {"paris": "FINISHED", "rome": "TRAINING"}
    islands.unknown = {*restarted}
    found = ask(run_of(*islands.statuses), islands)
    states = states_of(found.run.roster, found.islands)
    assert (states["paris"], states["rome"]) == ("finished", "away")
    watcher = Watcher(run_of(*islands.statuses), 0.02, dialler=islands)
    watcher.start()

    def state(name: str) -> str:
        return watcher.to_json()["islands"][name]["state"]

    wait_for(lambda: state("paris") == "finished", 60)
    assert state("rome") == "away"
    islands.statuses["paris"], islands.told = answer("TRAINING"), {}  # it has been started again
    wait_for(lambda: state("paris") == "training")
    islands.statuses["paris"] = gone
    wait_for(lambda: state("paris") == "away", 60)
    watcher.close()


def test_a_removed_member_is_watched_until_its_end():
    islands = Islands({"paris": answer("TRAINING", 4), "berlin": answer("TRAINING", 4)})
    run = run_of("paris", "berlin")
    run = RosterAndKeys(run.roster.changed(run.roster.member("berlin")._replace(until_round=9)), run.name, None)
    watcher = Watcher(run, 0.02, dialler=islands)

    def berlin() -> str:
        return watcher.to_json()["islands"]["berlin"]["state"]

    watcher.start()
    wait_for(lambda: berlin() == "training")
    islands.statuses["berlin"] = answer("LEAVING", 8)
    wait_for(lambda: berlin() == "removed")
    islands.statuses |= {"berlin": "nobody listens there", "paris": answer("TRAINING", 12)}
    wait_for(lambda: not watcher.to_json()["islands"]["berlin"]["answers"])
    assert berlin() == "removed" and "up" not in values_of(watcher.to_json()["islands"]["berlin"])
    assert watcher.to_json()["summary"] == "1 of 1 islands train, 1 removed"
    watcher.close()


def test_a_watcher_goes_on_in_the_name_of_another_member_once_its_own_is_removed():
    islands = Islands({"paris": answer("TRAINING", 4), "berlin": answer("TRAINING", 4)})
    run = run_of("paris", "berlin")
    roster = run.roster.changed(run.roster.member("paris")._replace(until_round=9))
    watcher = Watcher(
        RosterAndKeys(roster, "paris", None),
        0.02,
        dialler=islands,
        reopen=lambda: RosterAndKeys(roster, "berlin", None),
    )
    watcher.start()
    wait_for(lambda: watcher.known()[1] == {"paris": "training", "berlin": "training"})
    assert watcher._run.name == "paris"
    islands.statuses |= {"paris": answer("LEAVING", 8), "berlin": answer("TRAINING", 12)}
    wait_for(lambda: watcher._run.name == "berlin")
    islands.statuses["berlin"] = answer("TRAINING", 13)
    wait_for(lambda: watcher.to_json()["islands"]["berlin"]["round"] == 14)
    watcher.close()


def test_an_island_that_restarts_has_no_round_until_it_trains():
    watched, seen = Watched(), []
    for status in (answer("TRAINING", 30), answer("STARTING", -1), answer("READY", -1), answer("TRAINING", 33)):
        watched.take(status, 0.0)
        seen.append((watched.sample()[0], watched.to_json("x", 1, 0.0).get("round")))
    assert seen == [(31, 31), (None, None), (None, None), (34, 34)]


def test_no_round_is_kept_of_an_island_that_does_not_answer():
    watched = Watched()
    watched.take(answer("TRAINING", 3, figures={"loss": 1.0}), 1.0)
    assert watched.sample() == (4, 1.0)
    watched.fault = "no answer in 5 s"
    assert watched.sample() == (None, None)
    assert values_of(watched.to_json("away", 1, 9.0)) == {"up": 0.0, "due": 0, "committed": 0, "one_sided": 0}


def test_a_silent_island_is_away(monkeypatch):
    islands = Islands({"paris": answer("TRAINING"), "berlin": answer("TRAINING")})

    async def stopped(name: str, every: float) -> AsyncGenerator[pb.Status, None]:
        yield answer("TRAINING")
        await asyncio.sleep(3600)

    monkeypatch.setattr(islands, "watch", stopped)
    watcher = Watcher(run_of("paris", "berlin"), 0.02, 0.2, islands)
    watcher.start()
    wait_for(lambda: watcher.to_json()["islands"]["paris"].get("away") == "no answer in 0.22 s")
    watcher.close()


def test_what_a_hostile_member_tells_is_still_json_and_short():
    watched = Watched()
    peers = [pb.Peer(name="x", fault="<script>" * 1000)] * 1000
    figures = {str(i): math.inf if i % 2 else 1.0 for i in range(1000)}
    watched.take(answer("TRAINING", steps_late=math.nan, figures=figures, peers=peers, notices=["y" * 9999] * 99), 0.0)
    text = json.dumps(watched.to_json("training", 1, 1.0), allow_nan=False)
    assert len(text) < 6000
    exposition({"run": "r", "islands": {"x": watched.to_json("training", 1, 1.0)}})
    with pytest.raises(ProtocolError):
        check_watch(pb.WatchRequest(every_seconds=math.nan))


def test_the_table_has_each_island_s_own_version_of_the_roster():
    run = run_of("paris", "berlin", "rome", "oslo")
    run = RosterAndKeys(run.roster.changed(Member(4, "bonn", Address("127.0.0.1", 9))), run.name, None)  # version 1
    run = RosterAndKeys(run.roster.changed(Member(5, "bern", Address("127.0.0.1", 8))), run.name, None)  # version 2
    versions = [("paris", 2), ("berlin", 1), ("rome", 0)]
    islands = {name: Watched(answer("TRAINING", roster_version=version), "") for name, version in versions}
    table = status_table(
        run.roster, states_of(run.roster, islands), islands | {"oslo": Watched(None, "does not answer")}
    )
    assert str(table.title).startswith("run test, roster version 2")
    assert [*table.columns[6].cells] == ["2", "1, behind", "0, behind", "", "", ""]


def test_a_long_table_on_a_terminal_has_those_first_that_do_not_train():
    run = run_of(*(f"i{n}" for n in range(300)))
    islands = {name: Watched(answer("TRAINING"), "") for name in run.roster.names} | {"i200": Watched(None, "gone")}
    table = status_table(run.roster, states_of(run.roster, islands), islands, 20)
    assert [*table.columns[0].cells][:2] == ["i200", "i0"] and table.row_count == 20
    assert table.caption == "280 more are not shown"


async def test_a_status_does_not_grow_with_the_members():
    sizes = []
    for count in (10, 400):
        node = Sea([f"i{n}" for n in range(count)]).add("i0").node
        for name, peer in node.table.peers.items():
            peer.wrong = f"another model than {name}'s" if count > 100 else ""
        sizes.append(node.status(for_people=True).ByteSize())
        node.table.roster = replace(
            node.table.roster, version=3, document=pb.SignedRoster(roster=b"x").SerializeToString()
        )
        carries = [
            (await node.greeted("i1", pb.Greeting(wants_roster=True, roster_version=version))).HasField("roster")
            for version in (2, 3, 4)
        ]
        assert carries == [True, False, False]
    assert sizes[1] <= sizes[0] + 8 * 50  # of eight faults
    with pytest.raises(ProtocolError):
        await node.greeted("i1", pb.Greeting(about=["x"] * (MAX_ABOUT + 1)))


async def test_a_watched_island_tells_the_end_of_its_phase_at_once():
    node = Sea("ab").add("a").node
    told = []

    async def watch() -> None:
        async for status in node.watched(pb.WatchRequest(every_seconds=100)):
            told.append((asyncio.get_running_loop().time() // 1, status.phase))

    watching = asyncio.ensure_future(watch())
    await asyncio.sleep(130)
    node.leave(pb.Status.FINISHED)
    await asyncio.sleep(1)
    watching.cancel()
    assert told == [(0, pb.Status.STARTING), (100, pb.Status.STARTING), (130, pb.Status.FINISHED)]


def test_a_newer_roster_is_fetched_from_a_few_and_checked_once(monkeypatch):
    count = 300
    run = run_of(*(f"i{n}" for n in range(count)))
    run = RosterAndKeys(run.roster, run.name, Credentials(b"", b"", b""))
    newer = Roster("test", run.roster.members, count, version=5)
    checked = []
    monkeypatch.setattr(asking, "parse_document", lambda *_: checked.append(1) or newer)
    islands = Islands({name: answer("TRAINING", roster_version=5) for name in run.roster.names})
    islands.document = pb.SignedRoster(roster=b"x" * 50_000).SerializeToString()
    found = ask(run, islands)
    assert found.run.roster is newer and len(checked) == islands.rosters == 1
    islands.statuses["i7"] = answer("TRAINING", roster_version=2**60)  # a lie, told to each poll, costs one question
    assert ask(found.run, islands).run.roster is newer
    assert islands.rosters <= 4


def test_a_peer_that_has_sent_nothing_has_no_fault_before_the_first_round():
    assert Peer("paris").fault(-1) == ""
    assert "nothing is exchanged with it before round 9" in Peer("paris", quarantined_until=8).fault(-1)


def test_a_history_spans_the_whole_run_and_is_bounded():
    history = History("round", "loss")
    for second in range(5000):
        history.add(second, {"paris": (second, None)} | ({"berlin": (second, 1.0)} if second > 2500 else {}))
    kept = history.to_json()
    times = kept["times"]
    assert 300 <= len(times) <= 600 and times[0] < 20 and times[-1] > 4980
    assert len({b - a for a, b in itertools.pairwise(times)}) == 1
    assert list(kept["islands"]["paris"]["round"]) == times
    berlin = kept["islands"]["berlin"]["loss"]
    assert [one is None for one in berlin] == [time <= 2500 for time in times]
