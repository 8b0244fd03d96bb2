"""Trains as one of the islands."""

import argparse
import math

from noloco_jax.cluster.host import use_cpu_cores, use_gpu_memory
from noloco_jax.config import TrainConfig
from noloco_jax.errors import UserError
from noloco_jax.files import full_disk_told
from noloco_jax.island.mode import IslandMode
from noloco_jax.islands.keys import credentials_for
from noloco_jax.islands.roster import Roster
from noloco_jax.run.island import Membership
from noloco_jax.train.training import train


def train_island(config: TrainConfig, roster: Roster, flags: argparse.Namespace) -> int:
    """Trains as the island that the flags name; what is wrong is told before anything is compiled."""
    credentials = credentials_for(roster, flags.name, flags.keys)
    member = Membership(roster, flags.name, credentials, pace=flags.pace, linger=flags.linger)
    if not 0 <= flags.linger < math.inf:
        raise UserError(f"--linger={flags.linger}: give seconds, 0 to leave at once")
    member.check(config)
    use_gpu_memory()
    with full_disk_told(flags.workdir):
        use_cpu_cores(member.own(config))
        return train(
            config,
            flags.workdir,
            from_step=flags.from_step,
            dry_run=flags.dry_run,
            wandb_project=flags.wandb,
            mode=IslandMode(member),
        )
