"""Run `python -m noloco_jax.evaluate`; see `command`."""

from noloco_jax.errors import run_command

if __name__ == "__main__":
    run_command("noloco_jax.evaluate.command")
