"""Exact weights of other islands, for a merge: fetched into files without a name, so that memory holds no second model.

A fetch has a deadline. Weights that are on their way by then get as long again, if their speed so far suffices.
"""

import asyncio
import mmap
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from noloco_jax.formatting import format_bytes
from noloco_jax.islands import messages_pb2 as pb
from noloco_jax.islands.catch_up import receive_into
from noloco_jax.islands.exchange import ConnectionLost
from noloco_jax.islands.interfaces import Network
from noloco_jax.islands.payload import EXACT, ArraySpec, unpack


class Spool:
    """Bytes of arrays in a file without a name, which lasts as long as its arrays; a context, to write to it.

    Args:
      folder: on the disk that is to hold it.
    """

    def __init__(self, folder: Path):
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self.num_bytes = 0

    def __enter__(self) -> "Spool":
        return self

    def __exit__(self, *_: Any) -> None:
        self._file.close()

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self.num_bytes += len(data)

    def arrays(self, specs: Sequence[ArraySpec]) -> list[np.ndarray]:
        """Return what was written, as arrays that are read from the file when they are used."""
        self._file.flush()
        return unpack(memoryview(mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)), specs)


async def fetch(
    network: Network,
    peer: str,
    specs: Sequence[ArraySpec],
    folder: Path,
    seconds: float,
    *,
    more: float | None = None,
    last: bool = False,
) -> tuple[list[np.ndarray], int]:
    """Return a peer's exact weights, and its last round.

    Args:
      network, peer, specs: the calls, its name, and the specs of its weights.
      folder: for the file that holds them.
      seconds: until the deadline.
      more: seconds beyond the deadline, for weights that will have come by then at their speed so far; None: as many.
      last: True for weights after the last step alone.

    Raises:
      ConnectionLost: if the peer refuses, is silent, or too slow.
      ProtocolError: if what comes is not of this size.
      OSError: if the disk is full.
    """
    now, size = asyncio.get_running_loop().time, sum(spec.nbytes for spec in specs)
    more = seconds if more is None else more
    started, request = now(), pb.WeightsRequest(kind=EXACT, last=last)
    with Spool(folder) as spool:
        receiving = asyncio.ensure_future(receive_into(network, peer, request, size, spool.write))
        try:
            await asyncio.wait([receiving], timeout=seconds)
            if not receiving.done() and (size - spool.num_bytes) * (now() - started) <= more * spool.num_bytes:
                await asyncio.wait([receiving], timeout=more)
            if not receiving.done():
                came = f"{format_bytes(spool.num_bytes)} of {format_bytes(size)}" if spool.num_bytes else "nothing"
                raise ConnectionLost(f"of its weights {came} came in {now() - started:.3g} s")
            round = receiving.result()
        finally:
            receiving.cancel()
            await asyncio.wait([receiving])
        return spool.arrays(specs), round
