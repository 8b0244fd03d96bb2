"""Members that come, go and move while the others train: by commands over real sockets, and many on a virtual clock."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from noloco_jax.errors import UserError
from noloco_jax.island.command import main as island
from noloco_jax.islands import messages_pb2 as pb
from noloco_jax.islands.commands import discover, open_run
from noloco_jax.islands.members import lead
from noloco_jax.islands.roster import MEMBERS_FILE, Address, Member, Roster, read_members, read_roster
from support.island_world import Sea, roster_of
from support.live_island import LiveIsland, training, wait_for
from support.ports import free_ports
from support.virtual_time import run_virtual


@pytest.fixture
def run(tmp_path) -> tuple[Path, Path]:
    """Return the roster's file and the folder of keys of a run of two."""
    rows = zip(("paris", "berlin"), free_ports(2), strict=True)
    text = "".join(f'[[island]]\nname = "{name}"\naddress = "127.0.0.1:{port}"\n' for name, port in rows)
    (tmp_path / "roster.toml").write_text('run = "members"\n' + text)
    assert island(["keys", f"--roster={tmp_path / 'roster.toml'}", f"--out={tmp_path / 'keys'}"]) == 0
    return tmp_path / "roster.toml", tmp_path / "keys"


def test_a_member_joins_and_another_leaves_while_the_others_train(run, tmp_path, capsys):
    path, keys = run
    roster = read_roster(path)
    paris, berlin = (LiveIsland(name, roster, tmp_path, keys / name) for name in roster.names)
    with training(paris, berlin):
        wait_for(lambda: berlin.step > 20)
        (port,) = free_ports(1)
        assert island(["invite", "--name=oslo", f"--address=127.0.0.1:{port}", f"--keys={keys}"]) == 0
        said = capsys.readouterr().out
        assert "oslo, at 127.0.0.1:" in said and "is told to berlin, paris" in said
        invited = read_members(keys / "oslo" / MEMBERS_FILE, None, (keys / "ca.pem").read_bytes())
        oslo = LiveIsland("oslo", invited, tmp_path, keys / "oslo")
        first = invited.member("oslo").from_round
        with training(oslo):
            wait_for(lambda: oslo.round >= first and any(met.outcome == "met" for met in oslo.met))
            assert oslo.met[0].outcome == "caught up"
            assert island(["remove", "berlin", f"--keys={keys}"]) == 0
            wait_for(lambda: berlin.link.is_removed)
            wait_for(lambda: sum(met.partner == "oslo" for met in paris.met[-6:]) >= 5)
            found = discover(open_run(path, keys), 60.0)
            assert found.run.roster.version == 3
            assert {status.roster_version for status in found.statuses.values()} == {3}
        assert any("berlin is removed: no member from round" in line for line in paris.lines)
    for one in (paris, berlin, oslo):
        assert one.error is None and np.isfinite(one.weights).all()
        kept = read_members(tmp_path / f"work-{one.name}" / MEMBERS_FILE, "members", (keys / "ca.pem").read_bytes())
        assert kept.version == 3


def test_a_member_that_moves_tells_the_others_itself(run, tmp_path):
    path, keys = run
    roster = read_roster(path)
    paris, berlin = (LiveIsland(name, roster, tmp_path, keys / name) for name in roster.names)
    with training(paris):
        with training(berlin):
            wait_for(lambda: berlin.step > 20)
        moved = LiveIsland("berlin", roster, tmp_path, keys / "berlin", address=Address("127.0.0.1", *free_ports(1)))
        with training(moved):
            wait_for(lambda: sum(met.outcome == "met" for met in moved.met) >= 6)
        assert any("berlin is at 127.0.0.1:" in line for line in paris.lines)


def test_a_member_s_new_address_holds_until_it_tells_another_one():
    async def main() -> list[Address | None]:
        sea = Sea(["a", "b"])
        a, b = sea.add("a"), sea.add("b")
        found = []
        for told in ("127.0.0.1:9000", None, "no address", ""):  # None: it was dialled, and tells none
            b.node.hear("a", a.node.timing(), 1, told)
            found.append(b.node.peers["a"].address)
        await sea.close()
        return found

    moved = Address("127.0.0.1", 9000)
    assert run_virtual(main()) == [moved, moved, moved, None]


def test_keys_made_anew_serve_at_the_next_start_and_the_old_ones_are_refused(run, tmp_path):
    path, keys = run
    roster = read_roster(path)
    paris, berlin = (LiveIsland(name, roster, tmp_path, keys / name) for name in roster.names)
    with training(paris):
        with training(berlin):
            wait_for(lambda: berlin.step > 20)
            assert island(["keys", f"--roster={path}", f"--out={keys}", "--replace=berlin"]) == 0
            wait_for(lambda: paris.link.node.roster.version == 2)
            known = len(paris.met)
            wait_for(lambda: [met.outcome for met in paris.met[known:][-6:]] == ["alone"] * 6)
        again = LiveIsland("berlin", roster, tmp_path, keys / "berlin")
        with training(again):
            wait_for(lambda: sum(met.outcome in ("met", "late") for met in again.met) >= 6)


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
def test_members_under_churn_of_ten_percent_an_hour_keep_meeting(count, hours):
    """The authority makes a version every few minutes, told to one island; Hellos carry it to all others."""
    names = [f"i{n}" for n in range(count)]
    reached: list[float] = []

    async def main() -> tuple[int, int, float]:
        rosters: dict[bytes, Roster] = {}
        sea = Sea(names, step_seconds=60.0, steps_a_round=1)
        sea.roster = roster_of(names)

        def parse(document: bytes) -> Roster:
            return rosters[document]

        sims = {name: sea.add(name, parse=parse) for name in names}
        for sim in sims.values():
            sim.node.phase = pb.Status.TRAINING  # they begin at once
        training = {name: asyncio.ensure_future(sim.go_on(10**6)) for name, sim in sims.items()}
        roster, changed, random = sea.roster, 0, sea.random
        for minute in range(int(60 * hours)):
            await asyncio.sleep(60)
            due = 0.1 * count * (minute + 1) / 60
            rows = list(roster.members)
            soon = max(sim.node.round for sim in sims.values()) + lead(count)
            while changed < int(due):
                changed += 1
                present = [row for row in rows if row.until_round is None]
                leaver = random.choice(present)
                rows[leaver.id] = leaver._replace(until_round=soon)
                name = f"n{changed}"
                rows.append(Member(len(rows), name, Address("127.0.0.1", 1), from_round=soon))
            if tuple(rows) == roster.members:
                continue
            version = roster.version + 1
            content = pb.Roster(run="simulation", version=version).SerializeToString()
            document = pb.SignedRoster(roster=content, signature=b"x").SerializeToString()
            roster = rosters[document] = Roster("simulation", tuple(rows), count, version, document)
            for row in rows:
                if row.name not in sims and not roster.is_over(row.name, soon):
                    new = sims[row.name] = sea.add(row.name, parse=parse, roster=roster)
                    donor = max(sims.values(), key=lambda one: one.step)
                    new.node.phase, new.node.round = pb.Status.TRAINING, donor.node.round
                    new.step, new.slow = donor.step, donor.slow.copy()
                    training[row.name] = asyncio.ensure_future(new.go_on(10**6))
            told = random.choice([one for name, one in sims.items() if roster.get(name) is not None])
            told.node.take_roster(document, "authority")
            began, known = asyncio.get_running_loop().time(), version
            present = [sims[row.name] for row in rows if not roster.is_over(row.name, soon)]

            async def spread(present=present, known=known, began=began) -> None:
                while sum(sim.node.roster.version >= known for sim in present) < 0.99 * len(present):
                    await asyncio.sleep(10)
                reached.append(asyncio.get_running_loop().time() - began)

            spreading = asyncio.ensure_future(spread())
            training[f"spread {version}"] = spreading
        await asyncio.sleep(900)
        due = sum(sim.node.meetings.due for sim in sims.values())
        met = sum(sim.node.meetings.committed for sim in sims.values())
        weights = np.array([sim.slow for sim in sims.values()])
        for task in training.values():
            task.cancel()
        await sea.close()
        return due, met, float(np.sqrt(np.mean(np.var(weights, axis=0))))

    due, met, spread = run_virtual(main())
    rounds = sorted(seconds / 60 for seconds in reached)
    print(f"participation {met / due:.4f}, spread {spread:.3f}, rounds until 99 % know: {rounds}")
    assert met >= 0.95 * due
    assert max(rounds) <= lead(count)
