"""Commands of islands: see `command`, and `noloco_jax.islands` for what they do."""
