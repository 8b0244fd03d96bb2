"""Small programs that show the transforms: `python -m noloco_jax.examples.NAME`."""
