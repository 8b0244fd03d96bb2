"""A command that trains, with seconds between its steps, so that many rounds cost little and nobody waits for a core.

    python -m support.paced SECONDS noloco_jax.island train ARGUMENT...

An island begins without those that are not started, which it waits for otherwise.
"""

import runpy
import sys
import time

from noloco_jax.islands.protocol.catch_up import CatchUp
from noloco_jax.run.loop import Hooks


def main() -> None:
    _, seconds, module, *arguments = sys.argv
    CatchUp._waits_for_absent = lambda *_: False  # pyright: ignore[reportAttributeAccessIssue]
    Hooks.before_step = lambda self, step: time.sleep(float(seconds))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
