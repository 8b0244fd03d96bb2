"""Lowering of replica permutations to device permutations, when a device holds several replicas."""

import functools
from typing import NamedTuple

import numpy as np

# Destination of a device that sends nothing.
NOWHERE = -1
# One exchange between devices: a sequence of (destination of every device, number of replicas that each sends).
Pattern = tuple[tuple[tuple[int, ...], int], ...]


class Routes(NamedTuple):
    """Movement of blocks of replicas for each entry of a pool of permutations.

    Attributes:
      num_devices: D.
      num_slots: L replicas a device.
      patterns: the distinct exchanges between devices.
      pattern_of: (pool,) the pattern of each entry.
      send: (pool, D, L) the slots in the order in which a device sends them; in their own order when D is 1.
      receive: (pool, D, L) the position of each slot's data in the block that its device received.
    """

    num_devices: int
    num_slots: int
    patterns: tuple[Pattern, ...]
    pattern_of: np.ndarray
    send: np.ndarray
    receive: np.ndarray


def lower(sources: np.ndarray, num_devices: int, num_slots: int) -> Routes:
    """Compute the routes of permutations of N = D·L replicas, replica i in slot i mod L of device i // L.

    The numbers of replicas that go from one device to another form a D×D matrix whose rows and columns all sum to L, so
    it is a sum of permutation matrices (Birkhoff, König), each of which is one `ppermute`. Permutations that move whole
    blocks of devices take a single one.

    Args:
      sources: int (pool, N), the replica that each replica receives from; each row a permutation.
      num_devices: D.
      num_slots: L.
    """
    return _lower(tuple(map(tuple, np.asarray(sources).tolist())), num_devices, num_slots)


@functools.cache
def _lower(sources: tuple[tuple[int, ...], ...], num_devices: int, num_slots: int) -> Routes:
    patterns: dict[Pattern, int] = {}
    pattern_of, send, receive = [], [], []
    for row in sources:
        pattern, row_send, row_receive = _lower_one(row, num_devices, num_slots)
        pattern_of.append(patterns.setdefault(pattern, len(patterns)))
        send.append(row_send)
        receive.append(row_receive)
    return Routes(
        num_devices,
        num_slots,
        tuple(patterns),
        np.array(pattern_of, np.int32),
        np.array(send, np.int32),
        np.array(receive, np.int32),
    )


def _lower_one(sources: tuple[int, ...], num_devices: int, num_slots: int) -> tuple[Pattern, np.ndarray, np.ndarray]:
    waiting: dict[tuple[int, int], list[tuple[int, int]]] = {}  # (device, device) -> [(slot, slot)] not yet sent
    counts = np.zeros((num_devices, num_devices), int)
    for replica, source in enumerate(sources):
        (there, slot_there), (here, slot_here) = divmod(source, num_slots), divmod(replica, num_slots)
        waiting.setdefault((there, here), []).append((slot_there, slot_here))
        counts[there, here] += 1
    for slots in waiting.values():
        slots.sort(
            reverse=True
        )  # popped in the order of the sending slots, so that one device keeps its block as it is
    pattern = []
    send = np.zeros((num_devices, num_slots), np.int32)
    receive = np.zeros((num_devices, num_slots), np.int32)
    start = 0
    while start < num_slots:
        if counts.diagonal().all():  # replicas that stay on their device need no message
            destinations = np.arange(num_devices)
        elif num_slots == 1 or num_devices == 2:  # the counts are a multiple of a permutation matrix already
            destinations = counts.argmax(axis=1)
        else:
            from scipy.optimize import linear_sum_assignment  # imported only here: it takes as long as importing jax

            _, destinations = linear_sum_assignment(np.where(counts > 0, -counts, num_devices * num_slots))
        count = int(counts[np.arange(num_devices), destinations].min())
        for device, destination in enumerate(destinations.tolist()):
            counts[device, destination] -= count
            for position in range(start, start + count):
                slot, slot_there = waiting[device, destination].pop()
                send[device, position] = slot
                receive[destination, slot_there] = position
        pattern.append((tuple(destinations.tolist()), count))
        start += count
    return tuple(pattern), send, receive
