"""An island that waits for every exchange, as replicas of one program do, so that it can be compared with one.

python -m support.waiting ARGUMENT...    those of `noloco_jax.island train`
"""

import sys
from functools import partial

from noloco_jax.errors import run_command
from noloco_jax.island import joining

if __name__ == "__main__":
    joining.Membership = partial(joining.Membership, at_once=True)  # pyright: ignore[reportAttributeAccessIssue]
    sys.argv = ["noloco_jax.island", "train", *sys.argv[1:]]
    run_command("noloco_jax.island.command")
