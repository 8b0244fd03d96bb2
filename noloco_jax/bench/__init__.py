"""The parts of `python -m noloco_jax.bench`."""
