"""The parts of `python -m noloco_jax.compare`: which runs, their figures, the table and the picture."""
