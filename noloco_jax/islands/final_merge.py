"""The end of an island's run with the mean of all islands' last weights: `outer.final_merge`.

Every island that has taken its last step says so, serves its weights, and fetches those of the others that have. All
add them up in the order of their ids, so those that merge the same islands get the same bits. One that is missing when
`--linger` is over is left out, and named. Of an island of several processes the first one fetches, and all place the
mean.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np

from noloco_jax.islands import messages_pb2 as pb
from noloco_jax.islands.exchange import Broken, Unfit
from noloco_jax.islands.network import Link
from noloco_jax.islands.steps import IslandSteps
from noloco_jax.spmd.first_process import from_first_process, to_first_process
from noloco_jax.spmd.programs import TrainState

_RETRY_SECONDS = 0.2  # before asking again an island that gave nothing
_GONE_SECONDS = 30.0  # for an island to give its weights that needs none, and may have gone


class FinalMerge:
    """The merge of an island's last weights with those of the others.

    Args:
      steps: the island's outer steps.
      own: its name.
      seconds: to wait for islands that are later, and again for those that fetch its weights, at most.
      is_stopping: returns True to stop waiting.
      report: called with lines for people; the first process's are shown.
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
        self._seconds, self._is_stopping, self._report = seconds, is_stopping, report

    def __call__(self, state: TrainState, step: int) -> TrainState:
        """Return the state after the last inner step with the mean of the islands' weights, where there are others.

        An island that is no member, as it was removed, keeps its own weights: the others do not ask for them.
        """
        link, steps = self._steps.link, self._steps
        is_member = steps.processes.broadcast(
            lambda: link is not None and self._own in link.active() and not link.is_removed
        )
        if link is not None:
            link.leave(pb.Status.FINISHED if is_member else pb.Status.LEAVING)
        if not is_member:
            self._report(f"not merged, as {self._own} is no member of the run now: it keeps its own weights")
            return state
        steps.linger(state, step, self._seconds, self._is_stopping, self._report)
        if self._is_stopping():
            self._report("not merged, as it is told to stop: `island merge --workdirs` makes the mean of what is saved")
            return state
        likes, structure = jax.tree.flatten(state.params)
        own = [x.astype(np.float32, copy=False) for x in to_first_process(likes)]
        mean: list[np.ndarray] = []
        with ThreadPoolExecutor(1, thread_name_prefix="island-merge") as thread:
            deadline = time.monotonic() + self._seconds
            merging = None if link is None else thread.submit(self._mean, link, own, deadline)
            while not steps.processes.broadcast(lambda: merging is None or merging.done()):
                steps.serve(state, step)
                time.sleep(0.02)
            if link is not None and merging is not None:
                mean = [x.astype(like.dtype) for x, like in zip(merging.result(), likes, strict=True)]
        if link is not None:
            link.leave(pb.Status.MERGED)
        # Others still fetch these weights, until they have merged, too, or have gone.
        steps.serve_until(state, step, self._seconds, self._is_stopping, self._is_needless)
        if link is not None:
            link.take_all()  # what came meanwhile is in no mean, as the others may have had the weights before
        specs = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in likes]
        return state._replace(params=structure.unflatten(from_first_process(mean, specs)))

    def _is_needless(self, ask_seconds: float) -> bool:
        """Return whether no island that is merged here may still fetch these weights."""
        link = self._steps.link
        return link is None or not link.unmerged(self._peers, ask_seconds)

    def _mean(self, link: Link, own: list[np.ndarray], deadline: float) -> list[np.ndarray]:
        """Return the mean of the own weights and the peers', added up in the order of ids.

        Weights that are not finite are left out, on every island; the own ones are returned if nobody's are left.
        """
        names, late = link.active(), link.unfinished()
        self._peers: Sequence[str] = [name for name in names if name not in (self._own, *late)]
        if self._peers:
            self._report(
                f"merging the last weights with those of {', '.join(self._peers)}, {self._seconds:g} s at most"
            )
        total, merged = [np.zeros_like(x) for x in own], []
        for name in names:
            if name == self._own:
                if not all(np.isfinite(x).all() for x in own):
                    self._report(f"{name} is left out of the merge: its weights are not finite")
                    continue
                weights = own
            elif name in self._peers:
                found = self._fetch(link, name, deadline)
                if isinstance(found, str):
                    self._report(f"{name} is left out of the merge: {found}")
                    continue
                weights = found
            else:
                continue
            for x, y in zip(total, weights, strict=True):
                x += y.reshape(x.shape)
            merged.append(name)
        missing = [name for name in names if name not in merged]
        without = f", without {', '.join(missing)}" if missing else ""
        if not merged:
            self._report("not merged, as no island has finite weights that can be had")
            return own
        self._report(f"merged model: the mean of {len(merged)} of {len(names)} islands{without}")
        return [x / np.float32(len(merged)) for x in total]

    def _fetch(self, link: Link, name: str, deadline: float) -> list[np.ndarray] | str:
        """Return a peer's weights, or why they cannot be had."""
        started = time.monotonic()
        while True:
            try:
                return [x.astype(np.float32, copy=False) for x in link.fetch(name).result()]
            except Unfit as error:
                return str(error)
            except Broken as error:
                limit = deadline if link.unmerged([name]) else min(deadline, started + _GONE_SECONDS)
                if time.monotonic() > limit or self._is_stopping():
                    return str(error)
                time.sleep(_RETRY_SECONDS)
