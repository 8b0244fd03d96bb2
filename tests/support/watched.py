"""The trainer as `python -m noloco_jax.train`, which tells from outside where it stands: for tests that kill it.

    python tests/support/watched.py TRACE KINDS:NUMBER ARGUMENT...

On SIGUSR1 every thread's stack is written to TRACE, at that moment. The file operation of that NUMBER, of those that
KINDS lists (such as os.rename,os.remove), is not done: the process writes its stacks and kills itself with SIGKILL
instead. NUMBER 0: it never does.
"""

import faulthandler
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    trace, operation = Path(sys.argv.pop(1)), sys.argv.pop(1)
    kinds, _, number = operation.rpartition(":")
    stacks = trace.with_name(f"{trace.name}.tmp").open("w")
    faulthandler.register(signal.SIGUSR1, stacks)
    if int(number):
        sys.addaudithook(_KillAt(frozenset(kinds.split(",")), int(number), stacks))
    Path(stacks.name).rename(trace)  # now, and not before, a signal writes stacks
    runpy.run_module("noloco_jax.train", run_name="__main__", alter_sys=True)


class _KillAt:
    """An audit hook that kills the process before the file operation of a number."""

    def __init__(self, kinds: frozenset[str], number: int, stacks: Any):
        self._kinds, self._left, self._stacks = kinds, number, stacks

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in self._kinds:
            return
        self._left -= 1
        if self._left == 0:
            faulthandler.dump_traceback(self._stacks)
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
