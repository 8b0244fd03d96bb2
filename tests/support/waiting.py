"""An island that waits for every exchange, as replicas of one program do, so that it can be compared with one.

python -m support.waiting ARGUMENT...    those of `noloco_jax.island train`
"""

import sys
from typing import Any

from noloco_jax.errors import run_command
from noloco_jax.islands import mode
from noloco_jax.islands.steps import IslandSteps
from support.at_once import wait_for_exchanges


class Waiting(IslandSteps):
    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        wait_for_exchanges(self)


if __name__ == "__main__":
    mode.IslandSteps = Waiting
    sys.argv = ["noloco_jax.island", "train", *sys.argv[1:]]
    run_command("noloco_jax.island.command")
