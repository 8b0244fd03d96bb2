"""Start of an island among its peers: admission, a common beginning, or weights of those that train already."""

import asyncio
import math
from collections.abc import Collection

from noloco_jax.errors import UserError
from noloco_jax.islands import messages_pb2 as pb
from noloco_jax.islands.catch_up import RETRY_SECONDS, CatchUp, sample, with_weights
from noloco_jax.islands.peer_table import PeerTable
from noloco_jax.islands.peers import FINISHED

TOGETHER_SECONDS = 120.0  # for islands that compile or are not started yet
LOST_SECONDS = 120.0  # for weights of the run somewhere, of an island that has lost its own
ADMIT_SECONDS = 5.0  # for answers before anything is compiled


async def admit(table: PeerTable) -> None:
    """Introduce the island to its peers; raise `UserError` if most of the members refuse it."""
    await table.ask(sample(table), ADMIT_SECONDS)
    _check_refusals(table)


async def begin(table: PeerTable, catch_up: CatchUp, has_weights: bool, began_before: bool) -> None:
    """Wait until the island may train: from its own weights, with the others, or from weights of a peer.

    Where the others have finished, an island that is behind takes their weights, with which it has finished as well.

    Args:
      table: the island, which has compiled.
      catch_up: of it.
      has_weights: True if it resumes from a checkpoint.
      began_before: True if it was part of the run: without a checkpoint it has lost its weights.

    Raises `UserError` if most refuse it, or if there are no weights for it, as the others have finished and gone.
    """
    now, heard = asyncio.get_running_loop().time, dict[str, pb.Status]()
    start = now()
    table.phase = pb.Status.READY
    table.notify()
    while True:
        waits = now() < start + TOGETHER_SECONDS
        names = sample(table, last=[name for name, one in heard.items() if one.phase != pb.Status.STARTING])
        found = await table.ask(names, hold_seconds=8.0 if waits else 0.0)
        _check_refusals(table)
        heard = {name: status for name, status in (heard | found).items() if name in table.peers}
        heard = {name: status for name, status in heard.items() if name in found or name not in names}
        under_way = with_weights(heard.values())
        if under_way and (has_weights or _is_late(table, heard)):
            if has_weights and not catch_up.is_behind(heard.values(), has_trained=False):
                break
            first = next((one.from_round for one in table.roster.members if one.name == table.name), 0)
            if 1 + max(status.round for status in under_way) < first:
                _log(table, f"waits for round {first + 1}, its first as a member")
            elif await catch_up.from_one_of(heard):
                break
            elif has_weights:
                break  # it asks again after a round
            else:
                _log(table, "waits for an island that gives it weights of this run")
        elif has_weights:
            if not _waits_for(table, heard, ()) or not waits:
                break
        elif not under_way and (over := _over(table, heard, waits, began_before)):
            raise UserError(over)
        elif table.name not in table.roster.active(0):
            _log(table, "waits for an island that trains, to take its weights")
        elif began_before and not _is_lost(heard, len(table.peers), now() - start):
            _log(
                table,
                f"waits for an island with weights of this run; it begins anew in an empty workdir, or after "
                f"{LOST_SECONDS:g} s where half of all islands answer and none has any",
            )
        else:
            may_come = [name for name, one in table.peers.items() if not one.wrong and one.phase != pb.Status.GONE]
            missing = _waits_for(table, heard, may_come)
            if not missing or not waits:
                break
            left = math.ceil(start + TOGETHER_SECONDS - now())
            _log(table, f"is ready and waits for {_few(missing)} to begin together", f", {left} s at most")
        await asyncio.sleep(min(RETRY_SECONDS, 0.25 if waits else RETRY_SECONDS))
    table.phase = pb.Status.TRAINING
    table.notify()
    table.start(catch_up.watch())


def _is_late(table: PeerTable, heard: dict[str, pb.Status]) -> bool:
    """Return whether an island without weights is too late to begin with the others."""
    found = with_weights(heard.values())
    if all(status.phase in FINISHED for status in found):
        return True
    rounds = sorted(status.round for status in found)
    return rounds[(len(rounds) - 1) // 2] >= table.patience or table.name not in table.roster.active(0)


def _waits_for(table: PeerTable, heard: dict[str, pb.Status], absent: Collection[str]) -> list[str]:
    """Return the islands that compile, and those of `absent` that have not answered."""
    if any(status.phase == pb.Status.TRAINING for status in heard.values()):
        return []
    active = table.roster.active(0)
    return sorted(
        name
        for name in table.peers
        if (name in heard and heard[name].phase == pb.Status.STARTING)
        or (name in absent and name not in heard and name in active)
    )


def _over(table: PeerTable, heard: dict[str, pb.Status], waits: bool, began_before: bool) -> str:
    """Return the reason for which there will be no weights any more, or an empty text."""
    needs_weights = began_before or table.name not in table.roster.active(0)
    if needs_weights and table.peers and all(peer.phase == pb.Status.GONE for peer in table.peers.values()):
        return (
            f"all other islands have ended for good, and none is left to give {table.name} weights of this run: for a "
            "new run give all islands empty workdirs"
        )
    # A round is known of those alone that have answered with possible values.
    ended = {name: peer.round for name, peer in table.peers.items() if peer.phase in FINISHED and peer.round >= 0}
    # One that says so does not end the others: most must have finished.
    if 2 * len(ended) <= len(table.peers) or (waits and not table.peers.keys() <= heard.keys() | ended.keys()):
        return ""
    if any(status.phase == pb.Status.TRAINING for status in heard.values()):
        return ""
    return (
        f"{_few(sorted(ended))} finished in round {max(ended.values()) + 1} and no island gives weights any more: none "
        f"are left for {table.name} to continue from; for a new run give all islands empty workdirs"
    )


def _is_lost(heard: dict[str, pb.Status], num_peers: int, seconds: float) -> bool:
    """Return whether the weights that were lost are nowhere else, as far as islands answer."""
    if any(status.has_averaged for status in heard.values()):
        return False
    return len(heard) == num_peers or (seconds >= LOST_SECONDS and 2 * len(heard) + 2 > num_peers)


def _check_refusals(table: PeerTable) -> None:
    """Raise `UserError` if more than half of the others refuse this island."""
    wrong = [peer.wrong for peer in table.peers.values() if peer.wrong]
    if wrong and 2 * len(wrong) > len(table.peers):
        raise UserError(f"most islands refuse {table.name}: {wrong[0]}")


def _log(table: PeerTable, line: str, more: str = "") -> None:
    table.log_once(line, f"{table.name} {line}{more}")


def _few(names: Collection[str]) -> str:
    """Return names for a line, of many the first ones and the number of the others."""
    names = list(names)
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
