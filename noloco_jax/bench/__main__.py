"""Runs `python -m noloco_jax.bench`; what it does stands in `command`."""

from noloco_jax.bench.command import main
from noloco_jax.errors import main_with_errors

if __name__ == "__main__":
    main_with_errors(main)
