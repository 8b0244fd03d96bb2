"""The files of a checkpoint that have digests, and a command that trains and logs those that its process reads.

python -m support.digested FILE noloco_jax.train ARGUMENT...
"""

import runpy
import sys
from pathlib import Path

from noloco_jax.checkpoint import digests

# Files of a checkpoint without a digest: Orbax writes two of them after the digests, and the third holds them.
UNLISTED = {"digests.txt", "_CHECKPOINT_METADATA"} | {
    f"{item}commit_success.txt" for item in ("", "state/", "data/", "run/")
}


def main() -> None:
    _, log, module, *arguments = sys.argv
    entry = digests._entry

    def logged(file: Path) -> digests.Entry:
        with Path(log).open("a") as lines:
            lines.write(f"{file}\n")
        return entry(file)

    digests._entry = logged
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
