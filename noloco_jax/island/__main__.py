"""Runs `python -m noloco_jax.island`; what it does stands in `command`."""

from noloco_jax.errors import main_with_errors
from noloco_jax.island.command import main

if __name__ == "__main__":
    main_with_errors(main)
