"""Runs `python -m noloco_jax.compare`; what it does stands in `command`."""

from noloco_jax.compare.command import main
from noloco_jax.errors import main_with_errors

if __name__ == "__main__":
    main_with_errors(main)
