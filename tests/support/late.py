"""A trainer of which one process is late in one step, and which prints what every outer step took.

    python -m support.late PROCESS STEP SECONDS ARGUMENT...

PROCESS sleeps for SECONDS before STEP. Every process prints a line `outer step after STEP: SECONDS`.
"""

import sys
import time

import jax

from noloco_jax.train import command, loop
from noloco_jax.train.sync import CollectiveSync


def main() -> int:
    late_process, late_step, seconds, *arguments = sys.argv[1:]
    inner_step, after_step = loop._inner_step, CollectiveSync.after_step

    def sleep_and_step(run, state, step):
        if (jax.process_index(), step) == (int(late_process), int(late_step)):
            time.sleep(float(seconds))
        return inner_step(run, state, step)

    def timed(self, state, step, stride):
        state, taken = after_step(self, state, step, stride)
        if taken is not None:
            print(f"outer step after {step}: {taken.seconds:.3f}", flush=True)
        return state, taken

    loop._inner_step, CollectiveSync.after_step = sleep_and_step, timed
    return command.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
