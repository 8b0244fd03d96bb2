"""The trainer, whose first process kills itself before the file operation of a number, of the kinds that are listed.

    python -m support.killed os.rename,os.remove:7 ARGUMENT...

Number 0: it never does.
"""

import os
import runpy
import signal
import sys
from typing import Any


def main() -> None:
    kinds, _, number = sys.argv.pop(1).rpartition(":")
    left = int(number) if os.environ.get("JAX_PROCESS_ID", "0") == "0" else 0

    def kill(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event in kinds.split(","):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(kill)
    runpy.run_module("noloco_jax.train", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
