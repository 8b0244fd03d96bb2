"""The end of an island's run with the mean of all islands' last weights: `outer.final_merge`.

Every island that has taken its last step says so, serves its weights, and fetches those of the others that have. All
add them up in the order of their ids, so those that merge the same islands get the same bits. One that is missing when
`--linger` is over is left out, and named.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np

from noloco_jax.islands.client import Client
from noloco_jax.islands.frames import ArraySpec
from noloco_jax.islands.peer_errors import BusyError, PeerError
from noloco_jax.islands.query import fetch_weights
from noloco_jax.islands.steps import IslandSteps
from noloco_jax.spmd.programs import TrainState, shardings_of

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
      report: is given lines for people.
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
        self._steps, self._agent = steps, steps.agent
        self._names: Sequence[str] = ()  # of the members at the end, by their ids
        self._own, self._specs = own, specs
        self._seconds, self._is_stopping, self._report = seconds, is_stopping, report

    def __call__(self, state: TrainState, step: int) -> TrainState:
        """Return the state after the last inner step with the mean of the islands' weights, where there are others."""
        self._agent.snapshots.served.clear()  # of copies taken while it trained
        self._agent.leave(finished=True)
        self._steps.linger(state, step, self._seconds, self._is_stopping, self._report)
        if self._is_stopping():
            self._report("not merged, as it is told to stop: `island merge --workdirs` makes the mean of what is saved")
            return state
        late, self._names = self._agent.unfinished(), self._agent.active()
        peers = [name for name in self._names if name not in (self._own, *late)]
        own = [np.asarray(x, np.float32) for x in jax.device_get(jax.tree.leaves(state.params))]
        deadline = time.monotonic() + self._seconds
        with ThreadPoolExecutor(1, thread_name_prefix="merge") as thread:
            merging = thread.submit(self._mean, own, peers, deadline)
            while self._agent.is_relaying or not (merging.done() and self._agent.snapshots.served >= set(peers)):
                if time.monotonic() > deadline or self._is_stopping():
                    break
                self._steps.serve(state, step)
                time.sleep(0.02)
            mean, merged = merging.result()
        missing = [name for name in self._names if name not in merged]
        without = f", without {', '.join(missing)}" if missing else ""
        self._report(f"merged model: the mean of {len(merged)} of {len(self._names)} islands{without}")
        leaves = [x.astype(like.dtype) for x, like in zip(mean, jax.tree.leaves(state.params), strict=True)]
        params = jax.tree.unflatten(jax.tree.structure(state.params), leaves)
        return state._replace(params=jax.device_put(params, shardings_of(state.params)))

    def _mean(
        self, own: list[np.ndarray], peers: Sequence[str], deadline: float
    ) -> tuple[list[np.ndarray], Sequence[str]]:
        """Return the mean of the own weights and the peers', added up in the order of ids, and whose are in it."""
        total, merged = [np.zeros_like(x) for x in own], []
        for name in self._names:
            if name == self._own:
                weights = own
            elif name in peers:
                found = self._fetch(self._agent.clients[name], deadline)
                if isinstance(found, str):
                    self._report(f"{name} is left out of the merge: {found}")
                    continue
                weights = found
            else:
                continue
            for x, y in zip(total, weights, strict=True):
                x += y.reshape(x.shape)
            merged.append(name)
        return [x / np.float32(len(merged)) for x in total], merged

    def _fetch(self, client: Client, deadline: float) -> list[np.ndarray] | str:
        """Return a peer's weights, or why they cannot be had."""
        while True:
            try:
                arrays = fetch_weights(client, self._specs, max(deadline - time.monotonic(), _LEAST_SECONDS)).arrays
                return [np.asarray(arrays[name], np.float32) for name in self._specs]
            except BusyError as error:
                if time.monotonic() > deadline or self._is_stopping():
                    return str(error)
                time.sleep(_RETRY_SECONDS)
            except PeerError as error:
                return str(error)
