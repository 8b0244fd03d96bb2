"""Numeric parts of the protocol, each by itself, and the modules that the protocol may import."""

import ast
import math

import numpy as np
import pytest

from noloco_jax.islands.protocol.bounds import Bounds
from noloco_jax.islands.protocol.context import LONGEST_PAUSE, Backoff, Context, Settings
from noloco_jax.islands.protocol.ledger import ROUNDS_KEPT, Ledger
from noloco_jax.islands.protocol.meeting import Meeting
from noloco_jax.islands.protocol.members import Members
from noloco_jax.islands.protocol.messages import ExchangeId, Outcome
from noloco_jax.islands.protocol.peers import Peer, Transfers
from support.island_world import IDENTITY
from support.paths import ROOT

XID = ExchangeId(3, "a", 1, 1)


def test_the_protocol_imports_only_its_own_modules_and_arithmetic():
    imported = set()
    for path in (ROOT / "noloco_jax/islands/protocol").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(str(node.module))
    outside = {name for name in imported if not name.startswith("noloco_jax.islands.protocol")}
    arithmetic = {"enum", "hashlib", "itertools", "json", "math", "statistics", "zlib"}
    assert outside <= {"collections", "collections.abc", "dataclasses", "types", "typing", *arithmetic}


def test_the_allowance_of_a_transfer_is_the_median_plus_four_median_deviations():
    transfers, seconds = Transfers(), [3.0, 1.0, 9.0, 8.0, 2.0]
    for second in seconds:
        transfers.add(second)
    deviation = np.median(np.abs(np.array(seconds) - np.median(seconds)))
    assert transfers.allowance(0.0) == np.median(seconds) + 4 * deviation


def test_the_allowance_of_fast_transfers_is_never_below_the_least():
    transfers = Transfers()
    for _ in range(16):
        transfers.add(0.006)
    assert transfers.allowance(1.0) == 1.0


def test_the_allowance_leaves_slack_and_grows_when_the_link_slows_down():
    transfers = Transfers()
    assert transfers.allowance(0.0) == math.inf
    for _ in range(16):
        transfers.add(1.0)
    assert transfers.allowance(0.0) == 2.0
    for _ in range(60):  # each transfer takes 5 s now, and is cut off until the allowance has grown
        transfers.add(min(5.0, transfers.allowance(0.0)))
    assert transfers.allowance(0.0) >= 5.0


@pytest.mark.parametrize(("mine", "theirs"), [(1, 3), (5, 5), (0, 2), (2, 0), (0, 0), (10**12, 7)])
def test_weighted_corrections_cancel(mine, theirs):
    """w_i c_i + w_j c_j = 0 with c_i = w_j/(w_i + w_j) (m_j − m_i)."""

    def weight(own: int, other: int) -> float:
        return Meeting(0, None, own, 1.0, None).weight(other)  # pyright: ignore[reportArgumentType]

    m_i, m_j = 2.5, -1.25
    c_i, c_j = weight(mine, theirs) * (m_j - m_i), weight(theirs, mine) * (m_i - m_j)
    assert mine * c_i + theirs * c_j == pytest.approx(0, abs=1e-9)
    assert m_i + c_i == pytest.approx(m_j + c_j)


def test_settling_an_unknown_exchange_aborts_it_for_good():
    ledger = Ledger()
    assert ledger.settle(XID) is Outcome.ABORTED
    with pytest.raises(ValueError, match="ended as aborted"):
        ledger.close(XID, Outcome.COMMITTED)


def test_a_second_correction_in_one_round_is_refused():
    ledger = Ledger()
    ledger.close(XID, Outcome.COMMITTED)
    assert ledger.settle(XID) is Outcome.COMMITTED and ledger.has_committed(3)
    with pytest.raises(ValueError, match="second correction"):
        ledger.close(XID._replace(attempt=2), Outcome.COMMITTED)


def test_a_committed_exchange_is_forgotten_and_never_reported_as_aborted():
    ledger = Ledger()
    ledger.close(XID, Outcome.COMMITTED)
    ledger.forget(3 + ROUNDS_KEPT)
    assert ledger.settle(XID) is Outcome.COMMITTED
    ledger.forget(4 + ROUNDS_KEPT)
    assert ledger.settle(XID) is Outcome.FORGOTTEN


def test_pauses_between_retries_double_up_to_the_longest():
    arguments = (
        Members(("a", "b")),
        IDENTITY,
        Settings(retry_seconds=0.5),
        1,
        Ledger(),
        Bounds(),
        lambda name, peer: True,
    )
    context = Context("a", *arguments)
    backoff, pauses = Backoff(context), []
    for _ in range(9):
        backoff.start()
        assert backoff.at is not None
        pauses.append(backoff.at - context.now)
        context.now = backoff.at
        assert backoff.due() and not backoff.due()
    assert pauses[:3] == [0.5, 1.0, 2.0] and pauses[-3:] == [0.5 * LONGEST_PAUSE] * 3


def test_an_overtaken_message_does_not_move_a_peer_back_to_an_earlier_round():
    peer = Peer("b")
    for incarnation, round in ((1, 7), (1, 6)):
        peer.told(incarnation, round, 0.0)
    assert peer.round == 7
    peer.told(2, 4, 0.0)  # from an earlier checkpoint
    peer.told(1, 9, 0.0)
    assert (peer.incarnation, peer.round) == (2, 4)
