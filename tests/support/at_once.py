"""Outer steps of islands that wait for their exchange, as replicas of one program do: to compare with other runs."""

import threading
import time
from collections.abc import Callable

from noloco_jax.islands.steps import IslandSteps
from noloco_jax.spmd.programs import TrainState

_SECONDS = 600.0


def wait_for_exchanges(steps: IslandSteps) -> None:
    """Apply every correction of these outer steps directly after its local step."""
    alone = steps.outer_step

    def outer_step(state: TrainState, step: int, count: int) -> TrainState:
        for _ in range(count):
            state = steps.settle(alone(state, step, 1), _SECONDS)
        return state

    steps.outer_step = outer_step  # type: ignore[method-assign]


def side_by_side(*works: Callable[[], None]) -> None:
    """Run them in threads; raise what one of them raises."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 500
    while any(thread.is_alive() for thread in threads) and not errors and time.monotonic() < deadline:
        time.sleep(0.02)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads)
