"""The end of an island's run with the mean of all islands' last weights: `outer.final_merge`.

Every island that has taken its last step says so, serves its weights, and fetches those of the others that have. All
add them up in the order of their ids, so those that merge the same islands get the same bits. One that is missing when
`--linger` is over is left out, and named. Of an island of several processes the first one fetches, and all
place the mean.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np

from noloco_jax.islands.agent import Agent
from noloco_jax.islands.client import Client
from noloco_jax.islands.frames import ArraySpec
from noloco_jax.islands.peer_errors import BusyError, PeerError
from noloco_jax.islands.query import fetch_weights
from noloco_jax.islands.steps import IslandSteps
from noloco_jax.spmd.first_process import from_first_process, to_first_process
from noloco_jax.spmd.programs import TrainState

_RETRY_SECONDS = 0.1  # before asking again an island that serves another
_LEAST_SECONDS = 1.0  # for the weights of one island, near the deadline


class FinalMerge:
    """The merge of an island's last weights with those of the others.

    Args:
      steps: the island's outer steps.
      own: its name.
      specs: of its weights: name -> spec, in the order of their leaves.
      seconds: to wait for islands that are later, and again for those that fetch its weights, at most.
      is_stopping: whether to stop waiting.
      report: is given lines for people; the first process's are shown.
    """

    def __init__(
        self,
        steps: IslandSteps,
        own: str,
        specs: Mapping[str, ArraySpec],
        seconds: float,
        is_stopping: Callable[[], bool],
        report: Callable[[str], None],
    ):
        self._steps = steps
        self._is_over = threading.Event()  # to end the waits of the thread that fetches
        self._names: Sequence[str] = ()  # of the members at the end, by their ids
        self._own, self._specs = own, specs
        self._seconds, self._is_stopping, self._report = seconds, is_stopping, report

    def __call__(self, state: TrainState, step: int) -> TrainState:
        """Return the state after the last inner step with the mean of the islands' weights, where there are others.

        An island that is no member, as it was removed, keeps its own weights: the others do not ask for them.
        """
        agent = self._steps.agent
        is_member = self._steps.processes.broadcast(lambda: agent is not None and self._is_member(agent))
        if agent is not None:
            agent.snapshots.served.clear()  # of copies taken while it trained
            agent.leave(finished=is_member)
        if not is_member:
            self._report(f"not merged, as {self._own} is no member of the run now: it keeps its own weights")
            return state
        self._steps.linger(state, step, self._seconds, self._is_stopping, self._report)
        if self._is_stopping():
            self._report("not merged, as it is told to stop: `island merge --workdirs` makes the mean of what is saved")
            return state
        likes, structure = jax.tree.flatten(state.params)
        own = [x.astype(np.float32, copy=False) for x in to_first_process(likes)]
        with ThreadPoolExecutor(1, thread_name_prefix="merge") as thread:
            deadline = time.monotonic() + self._seconds
            is_merged, mean = self._merging(thread, agent, own, deadline)
            while not self._steps.processes.broadcast(is_merged):
                if self._is_stopping():
                    break
                self._steps.serve(state, step)
                time.sleep(0.02)
            self._is_over.set()
            leaves = [x.astype(like.dtype) for x, like in zip(mean(), likes, strict=agent is not None)]
        if agent is not None:
            agent.take_all()  # what came meanwhile is in no mean, as the others may have had the weights before
        specs = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in likes]
        return state._replace(params=structure.unflatten(from_first_process(leaves, specs)))

    def _is_member(self, agent: Agent) -> bool:
        """Return whether the others count this island among those to merge."""
        return self._own in agent.active() and not agent.is_removed

    def _merging(
        self, thread: ThreadPoolExecutor, agent: Agent | None, own: list[np.ndarray], deadline: float
    ) -> tuple[Callable[[], bool], Callable[[], list[np.ndarray]]]:
        """Begin to merge in a thread of the first process.

        Returns:
          A function that tells if all is merged, or the time is over, and one that returns the mean.
        """
        if agent is None:
            return lambda: True, lambda: []
        late, self._names = agent.unfinished(), agent.active()
        peers = [name for name in self._names if name not in (self._own, *late)]
        if peers:
            self._report(f"merging the last weights with those of {', '.join(peers)}, {self._seconds:g} s at most")
        merging = thread.submit(self._mean, agent.network.clients, own, peers, deadline)

        def is_merged() -> bool:
            is_served = merging.done() and agent.snapshots.served >= set(peers)
            return (is_served and not agent.is_relaying) or time.monotonic() > deadline

        def mean() -> list[np.ndarray]:
            mean, merged = merging.result()
            missing = [name for name in self._names if name not in merged]
            without = f", without {', '.join(missing)}" if missing else ""
            if merged:
                self._report(f"merged model: the mean of {len(merged)} of {len(self._names)} islands{without}")
            else:
                self._report("not merged, as no island has finite weights that can be had")
            return mean

        return is_merged, mean

    def _mean(
        self, clients: Mapping[str, Client], own: list[np.ndarray], peers: Sequence[str], deadline: float
    ) -> tuple[list[np.ndarray], Sequence[str]]:
        """Return the mean of the own weights and the peers', added up in the order of ids, and whose are in it.

        Weights that are not finite are left out, on every island; the own ones are returned if nobody's are left.
        """
        total, merged = [np.zeros_like(x) for x in own], []
        for name in self._names:
            if name == self._own:
                if not all(np.isfinite(x).all() for x in own):
                    self._report(f"{name} is left out of the merge: its weights are not finite")
                    continue
                weights = own
            elif name in peers:
                found = self._fetch(clients[name], deadline)
                if isinstance(found, str):
                    self._report(f"{name} is left out of the merge: {found}")
                    continue
                weights = found
            else:
                continue
            for x, y in zip(total, weights, strict=True):
                x += y.reshape(x.shape)
            merged.append(name)
        return [x / np.float32(len(merged)) for x in total] if merged else own, merged

    def _fetch(self, client: Client, deadline: float) -> list[np.ndarray] | str:
        """Return a peer's weights, or why they cannot be had."""
        while True:
            if self._is_over.is_set():
                return "the time is over, or this island is told to stop"
            try:
                arrays = fetch_weights(client, self._specs, max(deadline - time.monotonic(), _LEAST_SECONDS)).arrays
                return [np.asarray(arrays[name], np.float32) for name in self._specs]
            except BusyError as error:
                if time.monotonic() > deadline or self._is_over.is_set():
                    return str(error)
                time.sleep(_RETRY_SECONDS)
            except PeerError as error:
                return str(error)
