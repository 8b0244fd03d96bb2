"""Start of an island of the trainer, or of one of its processes."""

import argparse
import math

from noloco_jax.cluster.host import use_cpu_cores, use_gpu_memory
from noloco_jax.cluster.place import Place
from noloco_jax.cluster.start import joined
from noloco_jax.config import TrainConfig, to_dict
from noloco_jax.errors import UserError
from noloco_jax.files import full_disk_told
from noloco_jax.islands.keys import open_membership
from noloco_jax.islands.membership import Membership
from noloco_jax.islands.mode import IslandMode
from noloco_jax.islands.roster import parse_address, parse_dialled
from noloco_jax.train.training import train


def train_island(config: TrainConfig, place: Place | None, flags: argparse.Namespace) -> int:
    """Train as the island that the flags name; check everything before compiling.

    Args:
      config: the run.
      place: of this process among the island's; None: the only one.
      flags: those of `island train`.
    """
    roster, credentials = open_membership(flags.roster, flags.name, flags.keys, flags.workdir)
    if not 0 <= flags.linger < math.inf:
        raise UserError(f"--linger={flags.linger}: give seconds, 0 to leave at once")
    member = Membership(
        roster,
        flags.name,
        credentials,
        flags.pace,
        flags.linger,
        None if flags.listen is None else parse_address(flags.listen),
        None if flags.address is None else parse_dialled(flags.address),
    )
    member.check(config)
    use_gpu_memory()
    with joined(place, to_dict(config), flags.start_timeout) as num_processes, full_disk_told(flags.workdir):
        use_cpu_cores(member.own(config), num_processes)
        return train(
            config,
            flags.workdir,
            from_step=flags.from_step,
            dry_run=flags.dry_run,
            force_unlock=flags.force_unlock,
            wandb_project=flags.wandb,
            mode=IslandMode(member),
        )
