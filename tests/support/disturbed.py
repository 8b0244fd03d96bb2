"""A command of the package with a disturbance.

python -m support.disturbed HOW MODULE ARGUMENT...

HOW is one of these:
  paced:SECONDS               sleep so long before each batch: many rounds cost little, and nobody waits for a core
  killed:KIND,...:NUMBER      the first process kills itself before the file operation of that number, of these kinds
  late:PROCESS:STEP:SECONDS   a process sleeps before a step; each prints `outer step after STEP: SECONDS`
  waiting                     an island waits for every exchange, as replicas of one program do
"""

import os
import runpy
import signal
import sys
import time
from typing import Any


def paced(seconds: str) -> None:
    from noloco_jax.spmd.batches import GlobalBatches

    take = GlobalBatches.__next__

    def take_later(self: GlobalBatches) -> Any:
        time.sleep(float(seconds))
        return take(self)

    GlobalBatches.__next__ = take_later


def killed(kinds: str, number: str) -> None:
    left = int(number) if os.environ.get("JAX_PROCESS_ID", "0") == "0" else 0

    def kill(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event in kinds.split(","):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(kill)


def late(process: str, late_step: str, seconds: str) -> None:
    import jax

    from noloco_jax.train import loop
    from noloco_jax.train.sync import CollectiveSync

    inner_step, after_step = loop._inner_step, CollectiveSync.after_step

    def sleep_and_step(run, state, step):
        if (jax.process_index(), step) == (int(process), int(late_step)):
            time.sleep(float(seconds))
        return inner_step(run, state, step)

    def timed(self, state, step, stride):
        state, taken = after_step(self, state, step, stride)
        if taken is not None:
            print(f"outer step after {step}: {taken.seconds:.3f}", flush=True)
        return state, taken

    loop._inner_step, CollectiveSync.after_step = sleep_and_step, timed


def waiting() -> None:
    from noloco_jax.islands import run
    from noloco_jax.islands.steps import IslandSteps
    from support.at_once import wait_for_exchanges

    class Waiting(IslandSteps):
        def __init__(self, *arguments: Any, **options: Any):
            super().__init__(*arguments, **options)
            wait_for_exchanges(self)

    run.IslandSteps = Waiting


if __name__ == "__main__":
    _, how, module, *arguments = sys.argv
    name, *values = how.split(":")
    {"paced": paced, "killed": killed, "late": late, "waiting": waiting}[name](*values)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
