"""A command that trains, with seconds between its steps, so that many rounds cost little and nobody waits for a core.

python -m support.paced SECONDS noloco_jax.island train ARGUMENT...
"""

import runpy
import sys
import time

from noloco_jax.spmd.batches import GlobalBatches
from noloco_jax.spmd.gradients import Batch


def main() -> None:
    _, seconds, module, *arguments = sys.argv
    take = GlobalBatches.__next__

    def take_later(self: GlobalBatches) -> Batch:
        time.sleep(float(seconds))
        return take(self)

    GlobalBatches.__next__ = take_later
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
