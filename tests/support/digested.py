"""The files of a checkpoint that have digests, and the trainer that logs those that each process reads.

python -m support.digested FOLDER ARGUMENT...    a process logs to the file of its number
"""

import os
import runpy
import sys
from pathlib import Path

from noloco_jax.checkpoint import digests

# Files of a checkpoint without a digest: Orbax writes two of them after the digests, and the third holds them.
UNLISTED = {"digests.txt", "_CHECKPOINT_METADATA"} | {
    f"{item}commit_success.txt" for item in ("", "state/", "data/", "run/")
}


def main() -> None:
    log = Path(sys.argv.pop(1)) / os.environ["JAX_PROCESS_ID"]
    entry = digests._entry

    def logged(file: Path) -> digests.Entry:
        with log.open("a") as lines:
            lines.write(f"{file}\n")
        return entry(file)

    digests._entry = logged
    runpy.run_module("noloco_jax.train", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
