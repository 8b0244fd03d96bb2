"""A server of island paris in a process of its own, which opens files all the while: `python -m support.served KEYS`.

Prints its port, and once its input is closed the calls to open a file that failed and its highest memory in MiB.
"""

import re
import sys
import threading
from pathlib import Path

import numpy as np

from noloco_jax.islands.frames import ArraySpec
from noloco_jax.islands.keys import load_keys
from support.islands import Recorder, running

EXPECTED = ArraySpec((256 << 20,), np.dtype(np.uint8))  # of a call that exchanges
FILES = 20  # open at once, as a checkpoint has


def main() -> None:
    recorder = Recorder()
    recorder.exchange = lambda caller, hello, connect: connect(lambda _: [EXPECTED]).receive()
    failed = 0
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    with running(recorder, load_keys(Path(sys.argv[1]), "paris")) as server:
        print(server.port, flush=True)
        while not over.wait(0.01):
            files = []
            try:
                files = [open("/dev/null") for _ in range(FILES)]  # noqa: SIM115
            except OSError:
                failed += 1
            for file in files:
                file.close()
        print(failed, peak(), len(recorder.lines), flush=True)


def peak() -> int:
    """Return the highest memory in MiB; `getrusage` would count that of the process which started this one."""
    (line,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(line) >> 10


if __name__ == "__main__":
    main()
