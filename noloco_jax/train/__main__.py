"""Runs `python -m noloco_jax.train`; what it does stands in `command` and `training`."""

from noloco_jax.errors import main_with_errors
from noloco_jax.train.command import main

if __name__ == "__main__":
    main_with_errors(main)
