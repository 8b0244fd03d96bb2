"""`python -m noloco_jax.island` with seconds between its steps, so that many rounds cost little.

python -m support.paced_island SECONDS ARGUMENT...
"""

import sys
import time

from noloco_jax import island
from noloco_jax.errors import main_with_errors
from noloco_jax.run.loop import Hooks


def main() -> int:
    seconds = float(sys.argv[1])
    Hooks.before_step = lambda self, step: time.sleep(seconds)
    return island.main(sys.argv[2:])


if __name__ == "__main__":
    main_with_errors(main)
