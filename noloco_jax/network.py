"""Entry point of `python -m noloco_jax.network`; see `tools.network`."""

from noloco_jax.errors import run_command

if __name__ == "__main__":
    run_command("noloco_jax.tools.network.command")
