"""Run `python -m noloco_jax.evaluate`; see `tools.evaluate`."""

from noloco_jax.errors import run_command

if __name__ == "__main__":
    run_command("noloco_jax.tools.evaluate")
