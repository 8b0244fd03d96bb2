"""Members that come, go and move while the others train: by commands over real sockets, and many on a virtual clock."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from noloco_jax.errors import UserError
from noloco_jax.islands import messages_pb2 as pb
from noloco_jax.islands.ask import RosterAndKeys, discover, open_run
from noloco_jax.islands.command import main as island
from noloco_jax.islands.exchange import ConnectionLost
from noloco_jax.islands.members import lead
from noloco_jax.islands.roster import MEMBERS_FILE, Address, Member, Roster, read_members
from noloco_jax.islands.transport import Dialler
from support.island_world import Sea
from support.live_island import LiveIsland, training, wait_for
from support.ports import free_port
from support.rosters import on_loopback, with_keys

NAMES = ("paris", "berlin")


@pytest.fixture
def run(tmp_path) -> tuple[Path, Path]:
    """Return the roster's file and the folder of keys of a run of two."""
    return with_keys(on_loopback("paris", "berlin", run="members"), tmp_path)


def test_a_member_joins_and_another_leaves_while_the_others_train(run, tmp_path, capsys):
    path, keys = run
    paris, berlin = (LiveIsland(name, path, tmp_path, keys / name) for name in NAMES)
    with training(paris, berlin):
        wait_for(lambda: berlin.step > 20)
        assert island(["invite", "--name=oslo", f"--address=127.0.0.1:{free_port()}", f"--keys={keys}"]) == 0
        said = capsys.readouterr().out
        assert "oslo, at 127.0.0.1:" in said and "is told to berlin, paris" in said
        oslo = LiveIsland("oslo", keys / "oslo" / MEMBERS_FILE, tmp_path, keys / "oslo")
        with training(oslo):
            wait_for(lambda: any(outcome.outcome == "met" for outcome in oslo.outcomes))
            assert oslo.outcomes[0].outcome == "caught up"
            assert island(["remove", "berlin", f"--keys={keys}"]) == 0
            wait_for(lambda: berlin.link.is_removed)
            wait_for(lambda: sum(outcome.partner == "oslo" for outcome in paris.outcomes[-6:]) >= 5)
            found = discover(open_run(path, keys), 60.0)
            assert found.run.roster.version == 3
            assert {status.roster_version for status in found.statuses.values()} == {3}
        assert any("berlin is removed: no member from round" in line for line in paris.lines)
    for one in (paris, berlin, oslo):
        assert one.error is None and np.isfinite(one.weights).all()
        kept = read_members(tmp_path / f"work-{one.name}" / MEMBERS_FILE, "members", (keys / "ca.pem").read_bytes())
        assert kept.version == 3


def test_a_removed_member_s_keys_fetch_nothing_and_it_is_told_why(run, tmp_path):
    path, keys = run
    paris, berlin = (LiveIsland(name, path, tmp_path, keys / name) for name in NAMES)
    with training(paris):
        with training(berlin):
            wait_for(lambda: berlin.step > 20)
            assert island(["remove", "berlin", f"--keys={keys}"]) == 0
            until = read_members(keys / MEMBERS_FILE, None, (keys / "ca.pem").read_bytes()).member("berlin").until_round
            wait_for(lambda: berlin.link.is_removed and paris.round >= (until or 0))
        former = open_run(path, keys / "berlin")
        said = f"berlin is removed: no member from round {(until or 0) + 1} on"
        assert discover(former, 60.0).islands["paris"].fault == said
        with pytest.raises(ConnectionLost, match=said):
            asyncio.run(_weights(former))
        assert discover(open_run(path, keys), 60.0).statuses.keys() == {"paris"}
        (tmp_path / "lost").mkdir()
        again = LiveIsland("berlin", path, tmp_path / "lost", keys / "berlin")  # it has never heard of its end
        with training(again):
            wait_for(lambda: again.error is not None)
        assert isinstance(again.error, UserError) and said in str(again.error)


async def _weights(run: RosterAndKeys) -> list[pb.WeightsFrame]:
    dialler = Dialler(run.name, run.credentials, run.roster)
    try:
        return [frame async for frame in dialler.weights("paris", pb.WeightsRequest())]
    finally:
        await dialler.close()


def test_a_member_moves_to_an_address_that_is_signed(run, tmp_path):
    path, keys = run
    paris, berlin = (LiveIsland(name, path, tmp_path, keys / name) for name in NAMES)
    with training(paris):
        with training(berlin):
            wait_for(lambda: berlin.step > 20)
        assert island(["invite", "--name=berlin", f"--address=127.0.0.1:{free_port()}", f"--keys={keys}"]) == 0
        moved = LiveIsland("berlin", keys / MEMBERS_FILE, tmp_path, keys / "berlin")
        with training(moved):
            wait_for(lambda: sum(outcome.outcome == "met" for outcome in moved.outcomes) >= 6)
        assert any("berlin is at 127.0.0.1:" in line for line in paris.lines)


def test_a_member_that_moved_while_nobody_answered_tells_the_others_itself(run, tmp_path, capsys):
    path, keys = run
    move = ["invite", "--name=berlin", f"--address=127.0.0.1:{free_port()}", f"--keys={keys}"]
    for _ in range(2):
        with pytest.raises(UserError, match=r"none of the islands answers .* has version 2; give the same command"):
            island(move)
    paris = LiveIsland("paris", path, tmp_path, keys / "paris")  # of the old roster
    with training(paris, LiveIsland("berlin", keys / MEMBERS_FILE, tmp_path, keys / "berlin")):
        wait_for(lambda: sum(outcome.outcome == "met" for outcome in paris.outcomes) >= 6)
    assert paris.link.node.table.roster.version == 2
    assert "berlin is a member already, at 127.0.0.1:" in capsys.readouterr().out


def test_a_move_is_told_again_to_one_that_answers_and_the_former_process_says_that_it_is_to_end(run, tmp_path, capsys):
    path, keys = run
    move = ["invite", "--name=berlin", f"--address=127.0.0.1:{free_port()}", f"--keys={keys}"]
    with pytest.raises(UserError, match="none of the islands answers"):
        island(move)
    paris, berlin = (LiveIsland(name, path, tmp_path, keys / name) for name in NAMES)
    try:
        paris.link.open().result()
        assert island(move) == 0
        assert "roster version 2 is told to paris" in capsys.readouterr().out
        berlin.link.open().result()  # at its former address
        wait_for(lambda: any("berlin was at 127.0.0.1:" in line for line in berlin.lines), 60)
        assert not any("was at" in line for line in paris.lines)
    finally:
        paris.link.close()
        berlin.link.close()


@pytest.mark.parametrize("first", ["old", "new"])
async def test_an_island_with_a_newer_roster_tells_one_that_cannot_ask_it(first):
    """Nobody reaches b, as at the address in a's roster; b reaches a, once both have started."""
    sea, now = Sea("ab", step_seconds=1.0), asyncio.get_running_loop().time
    sea.cut = lambda me, peer: now() < 200 or (me == "a" and sea.islands["a"].node.table.roster.version == 0)
    content = pb.Roster(run="simulation", version=1).SerializeToString()
    document = pb.SignedRoster(roster=content, signature=b"x").SerializeToString()
    newer = Roster("simulation", sea.roster.members, 2, 1, document)
    a = sea.add("a", parse={document: newer}.__getitem__)
    b = sea.add("b", parse={}.__getitem__, roster=newer)
    delays = (0.0, 200.0) if first == "old" else (200.0, 0.0)
    training = [asyncio.ensure_future(sim.train(10**6, after=delay)) for sim, delay in zip((a, b), delays, strict=True)]
    await asyncio.sleep(400)
    for task in training:
        task.cancel()
    assert a.node.table.roster is newer


def test_keys_made_anew_serve_at_the_next_start_and_the_old_ones_are_refused(run, tmp_path):
    path, keys = run
    paris, berlin = (LiveIsland(name, path, tmp_path, keys / name) for name in NAMES)
    with training(paris):
        with training(berlin):
            wait_for(lambda: berlin.step > 20)
            assert island(["keys", f"--roster={path}", f"--out={keys}", "--replace=berlin"]) == 0
            wait_for(lambda: paris.link.node.table.roster.version == 2)
            known = len(paris.outcomes)
            wait_for(lambda: [outcome.outcome for outcome in paris.outcomes[known:][-6:]] == ["alone"] * 6)
        again = LiveIsland("berlin", path, tmp_path, keys / "berlin")
        with training(again):
            wait_for(lambda: sum(outcome.outcome in ("met", "late") for outcome in again.outcomes) >= 6)


def test_rounds_beyond_the_run_s_end_are_refused_before_anything_is_signed(run, tmp_path):
    path, keys = run
    paris = LiveIsland("paris", path, tmp_path, keys / "paris", num_rounds=50)
    paris.link.open().result()
    try:
        for arguments, said in (
            (["remove", "berlin", "--from_round=51"], "--from_round=51: the run ends after round 50"),
            (
                ["invite", "--name=oslo", "--address=h:1", "--from_round=51"],
                "--from_round=51: the run ends after round 50",
            ),
        ):
            with pytest.raises(UserError, match=said):
                island([*arguments, f"--keys={keys}"])
        paris.link.node.table.round = 47
        with pytest.raises(UserError, match="until round 57 to reach all: give an earlier --from_round=N"):
            island(["remove", "berlin", f"--keys={keys}"])
        assert read_members(keys / MEMBERS_FILE, None, (keys / "ca.pem").read_bytes()).version == 1
        assert island(["remove", "berlin", "--from_round=50", f"--keys={keys}"]) == 0
    finally:
        paris.link.close()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["invite", "--name=Oslo", "--address=h:1"], "give a DNS label"),
        (["invite", "--name=oslo", "--address=h:0"], "others cannot dial port 0"),
        (["invite", "--name=oslo", "--address=h:1"], "none of the islands answers"),
        (["invite", "--name=oslo", "--address=h:1", "--from_round=0"], "rounds are counted from 1"),
        (["remove", "oslo"], "has no island 'oslo'"),
        (["remove", "paris"], "none of the islands answers"),
    ],
)
def test_mistakes_with_members_are_refused_before_anything_is_signed(run, arguments, said):
    _, keys = run
    with pytest.raises(UserError, match=said):
        island([*arguments, f"--keys={keys}"])
    assert read_members(keys / MEMBERS_FILE, None, (keys / "ca.pem").read_bytes()).version == 1
    assert not (keys / "oslo").exists()


@pytest.mark.parametrize(("count", "hours"), [(100, 0.4), pytest.param(1000, 0.2, marks=pytest.mark.slow)])
async def test_members_under_churn_of_ten_percent_an_hour_keep_meeting(count, hours):
    """The authority makes a version every few minutes, told to one island; Hellos carry it to all others."""
    sea, now = Sea([f"i{n}" for n in range(count)], step_seconds=60.0, steps_a_round=1), asyncio.get_running_loop().time
    rosters, tasks, minutes = dict[bytes, Roster](), list[asyncio.Task](), list[float]()

    def begin(name: str, roster: Roster, round: int = -1) -> None:
        sim = sea.add(name, parse=rosters.__getitem__, roster=roster)
        sim.node.table.phase, sim.node.table.round = pb.Status.TRAINING, round
        sim.round, sim.step = round, round + 1
        tasks.append(asyncio.ensure_future(sim.go_on(10**6)))

    async def spread(roster: Roster, soon: int) -> None:
        present, began = [sea.islands[name] for name in roster.active(soon)], now()
        while sum(sim.node.table.roster.version >= roster.version for sim in present) < 0.99 * len(present):
            await asyncio.sleep(10)
        minutes.append((now() - began) / 60)

    roster = sea.roster
    for name in roster.names:
        begin(name, roster)
    for minute in range(1, int(60 * hours) + 1):
        await asyncio.sleep(60)
        rows, latest = list(roster.members), max(sim.node.table.round for sim in sea.islands.values())
        soon = latest + lead(count)
        while len(rows) < count + int(0.1 * count * minute / 60):
            leaver = sea.random.choice([row for row in rows if row.until_round is None])
            rows[leaver.id] = leaver._replace(until_round=soon)
            rows.append(Member(len(rows), f"n{len(rows)}", Address("127.0.0.1", 1), from_round=soon))
        if len(rows) == len(roster.members):
            continue
        content = pb.Roster(run="simulation", version=roster.version + 1).SerializeToString()
        document = pb.SignedRoster(roster=content, signature=b"x").SerializeToString()
        former, roster = roster, Roster("simulation", tuple(rows), count, roster.version + 1, document)
        rosters[document] = roster
        for row in rows[len(former.members) :]:
            begin(row.name, roster, latest)
        told = sea.random.choice([sim for name, sim in sea.islands.items() if roster.get(name) is not None])
        told.node.table.take_roster(document, "authority")
        tasks.append(asyncio.ensure_future(spread(roster, soon)))
    await asyncio.sleep(900)
    meetings = [sim.node.meetings for sim in sea.islands.values()]
    assert sum(one.committed for one in meetings) >= 0.95 * sum(one.due for one in meetings)
    assert minutes and max(minutes) <= lead(count)
