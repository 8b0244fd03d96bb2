"""Entry point of `python -m noloco_jax.train`; see `command`."""

from noloco_jax.errors import end_at_once_on_ctrl_c, run_command

if __name__ == "__main__":
    end_at_once_on_ctrl_c()
    run_command("noloco_jax.train.command")
