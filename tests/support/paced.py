"""A command that trains, with seconds between its steps, so that many rounds cost little and nobody waits for a core.

python -m support.paced SECONDS noloco_jax.island train ARGUMENT...
"""

import runpy
import sys
import time

from noloco_jax.run.loop import Hooks


def main() -> None:
    _, seconds, module, *arguments = sys.argv
    Hooks.before_step = lambda self, step: time.sleep(float(seconds))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
