"""Entry point of `python -m noloco_jax.simulate`; see `tools.simulate`."""

from noloco_jax.errors import run_command

if __name__ == "__main__":
    run_command("noloco_jax.tools.simulate")
