"""The points at which all processes of a run wait for one another, with a form for a process that is alone."""

import itertools
import json
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import jax
import numpy as np
from jax._src import distributed  # whose barriers have no public name
from jax.experimental import multihost_utils

PyTree = Any
T = TypeVar("T")
_BROADCASTS = "noloco_jax/broadcasts"
_KEPT = 10_000  # broadcasts in the store: no process is as far behind as that for the minutes until JAX misses it
_FIRST_SECONDS = 24 * 3600  # for the first process to decide; JAX ends those that wait for one that is gone
_numbers = itertools.count()  # of this process's broadcasts
# Named by the error of an exchange that failed; of NCCL's errors, those of a peer or a network that is lost.
_EXCHANGES = (
    *("Gloo ", "coordination service", "CoordinationService"),
    *("remote process exited", "ncclRemoteError", "unhandled system error", "ncclSystemError"),
)


class Processes(Protocol):
    """The processes of a run, as one of them sees them. Every one has to make the same calls in the same order.

    The bodies are those of a process that is alone, and waits for nobody.

    Attributes:
      alone: whether there is only this process.
      is_first: whether this is the first one, which decides and speaks for all.
    """

    alone: bool = True
    is_first: bool = True

    def broadcast(self, decide: Callable[[], T]) -> T:
        """Return what `decide` returns in the first process, which alone calls it: a value that JSON can hold.

        The others wait for the first process, and it waits for nobody. No device takes part in it, so the programs that
        are under way run on.
        """
        return decide()

    def gather(self, value: PyTree) -> list[PyTree]:
        """Return every process's value, by process number; `value` is small and made of what JSON can hold."""
        return [value]

    def barrier(self, name: str) -> None:
        """Return once every process has come here; all give the same `name`."""

    def wait_at(self, name: str, seconds: float) -> None:
        """Return once every process has come here, of which one may take so many seconds longer than the others.

        Unlike `barrier`, this exchanges nothing between devices, whose libraries wait for half a minute. All give the
        same `name`, and each name is given once.
        """

    def agree_to_stop(self, received: bool) -> bool:
        """Return True if all processes stop here. None waits for another: they agree on a number of calls.

        Args:
          received: this process was told to stop. Of several processes, JAX itself sees a SIGTERM to any.
        """
        return received


class OneProcess(Processes):
    """A process that is alone."""


class DistributedProcesses:
    """Several processes that `jax.distributed` connects."""

    alone = False
    _asked, _stops = 0, False  # of the process: whichever of its objects asks JAX

    def __init__(self) -> None:
        self.is_first = jax.process_index() == 0

    def broadcast(self, decide: Callable[[], T]) -> T:
        client: Any = distributed.global_state.client
        number = next(_numbers)
        folder, rest = divmod(number, _KEPT)
        key = f"{_BROADCASTS}/{folder}/{rest}"
        if not self.is_first:
            return json.loads(client.blocking_key_value_get(key, 1000 * _FIRST_SECONDS))
        if rest == 0 and folder > 1:
            client.key_value_delete(f"{_BROADCASTS}/{folder - 2}/")
        value = decide()
        client.key_value_set(key, json.dumps(value))
        return value

    def gather(self, value: PyTree) -> list[PyTree]:
        text = np.frombuffer(json.dumps(value).encode(), np.uint8)
        sizes = multihost_utils.process_allgather(np.int32(len(text)))
        # Rounded up, so that texts of almost the same length do not each compile a program.
        padded = np.zeros(-(-int(sizes.max()) // 4096) * 4096, np.uint8)
        padded[: len(text)] = text
        texts = multihost_utils.process_allgather(padded)
        return [json.loads(bytes(row[:size])) for row, size in zip(np.asarray(texts), sizes, strict=True)]

    def barrier(self, name: str) -> None:
        multihost_utils.sync_global_devices(name)

    def wait_at(self, name: str, seconds: float) -> None:
        client: Any = distributed.global_state.client
        client.wait_at_barrier(f"noloco_jax/{name}", int(seconds * 1000))

    def agree_to_stop(self, received: bool) -> bool:
        # JAX answers True for one number alone: steps may pass over theirs, and who asks later has to hear of it too.
        of_all = DistributedProcesses
        of_all._asked += 1
        of_all._stops = of_all._stops or multihost_utils.reached_preemption_sync_point(of_all._asked)
        return of_all._stops


def is_of_exchange(error: BaseException) -> bool:
    """Return True for an error by which an exchange between processes failed, as when one of them is lost.

    It may come from any call that all processes make together, of whatever library, and as a `ValueError`.
    """
    return any(name in str(error) for name in _EXCHANGES)


def run_processes() -> Processes:
    """Return the processes that JAX knows of: those of `jax.distributed`, or this one alone."""
    return OneProcess() if jax.process_count() == 1 else DistributedProcesses()
