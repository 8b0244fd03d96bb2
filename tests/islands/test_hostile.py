"""One member that breaks the protocol: nothing of it reaches the training, and what it costs is bounded."""

import asyncio
import math
from typing import Any

import numpy as np
import pytest

from noloco_jax.islands import messages_pb2 as pb
from noloco_jax.islands.exchange import SILENT_SECONDS, ConnectionLost, ProtocolError
from noloco_jax.islands.peer_table import ROSTER_SECONDS
from noloco_jax.islands.peers import BROKEN_IN_A_ROW, QUARANTINE_ROUNDS
from noloco_jax.islands.roster import BadRosterError
from support.island_world import MemoryStream, Sea, participation

NAN = math.nan
HELLOS = {
    "no tokens": {"tokens": 0},
    "too many tokens": {"tokens": 2**63},
    "an impossible round": {"round": 2**63},
    "a time that is none": {"timing": pb.Timing(ago=NAN, round_seconds=math.inf)},
    "a round long ago": {"round": 0},
    "a round far ahead": {"round": 10_000},
    "another configuration": {"identity": 1},
}
FRAMES = {
    "no frame": [pb.Frame()],
    "a hello twice": [pb.Frame(hello=pb.Hello())],
    "a commit at once": [pb.Frame(commit=pb.Commit(factor=1.0))],
    "received at once": [pb.Frame(received=pb.Received(good=True, factor=1.0))],
    "an empty piece": [pb.Frame(piece=pb.Piece())],
    "a small piece": [pb.Frame(piece=pb.Piece(data=bytes(8)))],
    "a long piece": [pb.Frame(piece=pb.Piece(data=bytes(1 << 20)))],
    "NaN": [pb.Frame(piece=pb.Piece(data=np.full(4, NAN).tobytes()))],
    "infinity": [pb.Frame(piece=pb.Piece(data=np.full(4, math.inf).tobytes()))],
    "huge values": [pb.Frame(piece=pb.Piece(data=np.full(4, 1e300).tobytes()))],
    "large values": [pb.Frame(piece=pb.Piece(data=np.full(4, 1e4).tobytes()))],
    "a negative factor": [
        pb.Frame(piece=pb.Piece(data=np.ones(4).tobytes())),
        pb.Frame(received=pb.Received(good=True, factor=-1.0)),
    ],
    "a factor that is none": [
        pb.Frame(piece=pb.Piece(data=np.ones(4).tobytes())),
        pb.Frame(received=pb.Received(good=True, factor=NAN)),
    ],
    "nothing more": [],
}


async def with_an_attacker(attack, seconds: float = 60.0):
    """Train three islands, one of which attacks the first, and return them."""
    sea = Sea(["a", "b", "evil"])
    a, b, evil = (sea.add(name) for name in ("a", "b", "evil"))

    async def attacking() -> None:
        await asyncio.sleep(10.5)
        await attack(sea, a, evil)

    await asyncio.gather(a.train(600), b.train(600), evil.train(600), attacking())
    for sim in (a, b):
        assert np.isfinite(sim.slow).all() and np.abs(sim.slow).max() < 10
        due = [outcome for outcome in sim.outcomes if outcome.partner in ("a", "b") and outcome.reason != "leaving"]
        assert sum(outcome.outcome in ("met", "late") for outcome in due) >= 0.95 * len(due)
    return a, b, evil


def hello_to(a, round: int | None = None, **fields) -> pb.Hello:
    made: dict[str, Any] = {"incarnation": 9, "tokens": 100, "identity": a.node.table.digest, **fields}
    return pb.Hello(round=a.node.table.round if round is None else round, **made)


async def say(sea: Sea, frames) -> list[pb.Frame]:
    """Call the first island as the attacker with these frames, and return its answers."""
    answers = []
    try:
        async with sea.islands["evil"].node.table.network.exchange("a") as stream:
            for frame in frames:
                await stream.send(frame)
            async with asyncio.timeout(SILENT_SECONDS + 1):
                while True:
                    answers.append(await stream.receive())
    except (ConnectionLost, TimeoutError):
        pass
    return answers


async def test_a_false_hello_changes_nothing():
    async def attack(sea, a, evil):
        for kind, fields in HELLOS.items():
            for _ in range(3):
                answers = await say(sea, [pb.Frame(hello=hello_to(a, **{"round": None, **fields}))])
                kinds = {answer.WhichOneof("kind") for answer in answers}
                assert kinds <= {"no", "not_yet", "accept", "piece"}, kind
        assert a.node.table.phase == pb.Status.TRAINING  # none came too late

    await with_an_attacker(attack)


@pytest.mark.parametrize("kind", FRAMES)
async def test_false_frames_of_an_exchange_change_nothing_and_are_refused(kind):
    async def attack(sea, a, evil):
        evil.node.meetings.begin = lambda *message: None  # its meetings with the first island stay open for this
        for _ in range(60):
            if a.node.table.partner(a.node.table.round) == "evil" and a.node.meetings.is_open(a.node.table.round):
                await say(sea, [pb.Frame(hello=hello_to(a)), *FRAMES[kind]])
            await asyncio.sleep(0.5)

    a, *_ = await with_an_attacker(attack)
    assert any("it is refused" in line for line in a.lines) is (kind != "nothing more")


async def test_three_broken_messages_in_a_row_leave_their_sender_out_for_some_rounds():
    sea = Sea("ab")
    a, b = sea.add("a"), sea.add("b")
    b.tamper = lambda message: message * 1e4 if 15 <= b.node.table.round < 25 else message
    await asyncio.gather(a.train(600), b.train(600))
    assert any("nothing is exchanged with it before round" in line for line in a.lines), a.lines
    assert participation(a, 25 + QUARANTINE_ROUNDS + BROKEN_IN_A_ROW) > 0.9
    assert np.isfinite(a.slow).all()
    assert len({outcome.round for outcome in a.outcomes}) == len(a.outcomes)  # each message has one outcome


async def test_a_flood_of_rosters_that_nobody_signed_costs_a_check_every_few_seconds():
    checked = []

    def parse(document: bytes):
        checked.append(document)
        raise BadRosterError("the run's authority has not signed it")

    sea = Sea("ab")
    a, b = sea.add("a", parse=parse), sea.add("b")
    training = asyncio.gather(a.train(300), b.train(300))
    await asyncio.sleep(1)
    false = pb.SignedRoster(roster=pb.Roster(run="x", version=10**9).SerializeToString(), signature=b"x")
    began = asyncio.get_running_loop().time()
    for _ in range(5000):
        await b.node.table.network.greet("a", pb.Greeting(roster=false), 5.0)
    seconds = asyncio.get_running_loop().time() - began
    await training
    assert 1 <= len(checked) <= seconds / ROSTER_SECONDS + 1


async def test_claims_of_a_newer_roster_are_followed_up_once_in_a_while():
    sea = Sea("ab")
    a, b = sea.add("a", parse=lambda document: sea.roster), sea.add("b")
    asked = []
    greeted = b.node.greeted

    async def counted(name, greeting):
        if greeting.wants_roster:
            asked.append(name)
        return await greeted(name, greeting)

    b.node.greeted = counted
    for _ in range(1000):
        a.node.table.hear("b", roster_version=10**6)
        await asyncio.sleep(0.01)
    assert len(asked) <= 3


@pytest.mark.parametrize(
    "greeting",
    [
        pb.Greeting(identity={str(i): "x" for i in range(10_000)}),
        pb.Greeting(identity={"x": "y" * 100_000}),
        pb.Greeting(hold_seconds=1e9),
        pb.Greeting(hold_seconds=NAN),
    ],
    ids=["many values", "long values", "a long hold", "no time"],
)
async def test_greetings_of_impossible_sizes_are_refused(greeting):
    a = Sea("ab").add("a")
    with pytest.raises(ProtocolError):
        await a.node.greeted("b", greeting)


async def test_a_goodbye_counts_for_the_caller_alone():
    sea = Sea("abc")
    a = sea.add("a")
    goodbye = pb.Greeting(phase=pb.Status.FINISHED, identity=a.node.table.plan.identity)
    await a.node.greeted("b", goodbye)
    assert a.node.unfinished() == ["c"]
    await a.node.greeted("stranger", goodbye)
    assert "stranger" not in a.node.table.peers


async def test_what_one_member_repeats_is_told_once_and_then_by_its_number():
    sea = Sea("ab")
    a, _ = sea.add("a"), sea.add("b")
    for _ in range(1000):
        stream = MemoryStream("a", "b", sea)
        stream.arrived.put_nowait(pb.Frame(hello=hello_to(a, 0, tokens=0)))
        await a.node.meetings.called("b", stream)
    for said in ("Hello of impossible values", "nothing is exchanged with it"):
        numbers = [line.partition("; number ")[2].partition(" ")[0] for line in a.lines if said in line]
        assert numbers in (["", "10", "100"], ["", "10", "100", "1000"]), said
    a.lines.clear()
    await asyncio.sleep(3600)
    a.node.table.log_of("b", "broken", "again")
    assert len(a.lines) == 1
