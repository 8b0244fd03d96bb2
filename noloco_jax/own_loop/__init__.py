"""Islands in a user's own loop: `noloco_jax.Island`."""
