"""Entry point of `python -m noloco_jax.island`; `islands.command` parses its arguments."""

from noloco_jax.errors import run_command

if __name__ == "__main__":
    run_command("noloco_jax.islands.command")
