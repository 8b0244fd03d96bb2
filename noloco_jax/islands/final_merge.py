"""The end of an island's run: it serves its last weights, and with `outer.final_merge` takes the mean of all islands'.

Every island that has taken its last step says so, serves its weights, and fetches those of the others that have. All
add them up in the order of their ids, so those that merge the same islands get the same bits. One that is missing when
`--linger` is over is left out, as are weights that are out of line (`checked_mean.py`), and named. Of an island of
several processes the first one fetches, and all place the mean.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from noloco_jax.islands import messages_pb2 as pb
from noloco_jax.islands.checked_mean import Arrays, checked_mean
from noloco_jax.islands.exchange import ConnectionLost, ProtocolError
from noloco_jax.islands.network import NetworkThread
from noloco_jax.islands.steps import IslandSteps
from noloco_jax.spmd.first_process import from_first_process, to_first_process
from noloco_jax.spmd.programs import TrainState

_RETRY_SECONDS = 0.2  # before asking again an island that gave nothing
_GONE_SECONDS = 30.0  # for an island to give its weights that needs none, and may have gone
_STOPPED = "not merged, as it is told to stop: `island merge --workdirs` makes the mean of what is saved"


class RunEnd:
    """The end of the run of the island `own`.

    It waits so many seconds for islands that are later. Then it waits as long, at least half a minute, to fetch their
    weights, and again for those that fetch its own; twice as long for weights that are on their way.
    """

    def __init__(
        self,
        steps: IslandSteps,
        own: str,
        seconds: float,
        is_stopping: Callable[[], bool],
        report: Callable[[str], None],
    ):
        self._steps, self._own = steps, own
        self._linger, self._seconds = seconds, max(seconds, _GONE_SECONDS)
        self._is_stopping, self._report = is_stopping, report

    def linger(self, state: TrainState, step: int) -> None:
        """Serve the weights after the last step until all islands have taken it."""
        link = self._steps.link
        if link is not None and self._linger and (unfinished := link.node.unfinished()):
            self._report(
                f"serves its weights until {', '.join(unfinished)} have finished, {self._linger:g} s at most, twice as "
                "long while they are fetched"
            )
        self._steps.serve_until(state, step, self._linger, self._is_stopping, lambda node: node.unfinished())
        if link is not None and (unfinished := link.node.unfinished()):
            self._report(f"leaves; not known to have finished: {', '.join(unfinished)}")

    def merge(self, state: TrainState, step: int) -> TrainState:
        """Return the state after the last inner step with the mean of the islands' weights, where there are others.

        An island that is no member, as it was removed, keeps its own weights: the others do not ask for them.
        """
        link, steps = self._steps.link, self._steps
        is_member = steps.processes.broadcast(
            lambda: link is not None and self._own in link.node.active() and not link.is_removed
        )
        if link is not None:
            link.leave(pb.Status.FINISHED if is_member else pb.Status.LEAVING)
        if not is_member:
            self._report(f"not merged, as {self._own} is no member of the run now: it keeps its own weights")
            return state
        self.linger(state, step)
        if self._is_stopping():
            return self._stopped(state)
        likes, structure = jax.tree.flatten(state.params)
        own = [x.astype(np.float32, copy=False) for x in to_first_process(likes)]
        peers = [] if link is None else link.node.finished()
        merging = None if link is None else link.submit(self._mean(link, peers, own))
        while not steps.processes.broadcast(lambda: merging is None or merging.done()):
            if self._is_stopping():
                if merging is not None:
                    merging.cancel()
                return self._stopped(state)
            steps.serve(state, step)
            time.sleep(0.02)
        mean: list[np.ndarray] = []
        if link is not None and merging is not None:
            mean = [x.astype(like.dtype) for x, like in zip(merging.result(), likes, strict=True)]
            link.leave(pb.Status.MERGED)
        # Others still fetch these weights, until they have merged, too, or have gone.
        steps.serve_until(state, step, self._seconds, self._is_stopping, lambda node: node.unmerged(peers))
        if link is not None:
            link.take_all()  # what came meanwhile is in no mean, as the others may have had the weights before
        specs = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in likes]
        return state._replace(params=structure.unflatten(from_first_process(mean, specs)))

    def _stopped(self, state: TrainState) -> TrainState:
        """Say that there is no merge here, to people and to the others, which then wait for no weights of it."""
        self._report(_STOPPED)
        if self._steps.link is not None:
            self._steps.link.leave(pb.Status.MERGED)
        return state

    async def _mean(self, link: NetworkThread, peers: Sequence[str], own: list[np.ndarray]) -> list[np.ndarray]:
        """Return the checked mean of the own weights and the peers'; the own ones if nobody's are left."""
        if peers:
            self._report(
                f"merging the last weights with those of {', '.join(peers)}: {self._seconds:g} s for each, twice as "
                "long for those that will have come by then at their speed"
            )
        fetched = await asyncio.gather(*(self._fetch(link, name) for name in peers))
        found = dict(zip(peers, fetched, strict=True)) | {self._own: own}
        names = link.node.active()
        weights = {name: x for name in names if (x := found.get(name)) is not None and not isinstance(x, str)}
        mean = await link.run(checked_mean, weights, self._own)
        left_out = {name: reason for name, reason in found.items() if isinstance(reason, str)} | mean.left_out
        for name, reason in left_out.items():
            self._report(f"{name} is left out of the merge: {reason}")
        merged = [name for name in weights if name not in left_out]
        if not merged:
            self._report("not merged, as no island has weights that can be had and trusted")
            return own
        missing = [name for name in names if name not in merged]
        without = f", without {', '.join(missing)}" if missing else ""
        self._report(f"merged model: the mean of {len(merged)} of {len(names)} islands{without}")
        return mean.arrays

    async def _fetch(self, link: NetworkThread, name: str) -> Arrays | str:
        """Return a peer's weights, or why they cannot be had."""
        now = asyncio.get_running_loop().time
        started = now()
        while True:
            left = max(started + self._seconds - now(), 0.0)
            try:
                return await link.fetch(name, left, self._seconds)
            except (ProtocolError, OSError) as error:
                return str(error)
            except ConnectionLost as error:
                limit = self._seconds if link.node.unmerged([name]) else min(self._seconds, _GONE_SECONDS)
                if now() - started >= limit:
                    return str(error)
                await asyncio.sleep(_RETRY_SECONDS)
