"""Training run of all replicas in one program, over one process or several: all of it, in order."""

from functools import partial
from pathlib import Path
from typing import Any

from noloco_jax.checkpoint import elastic
from noloco_jax.cluster.host import use_cpu_cores, use_gpu_memory
from noloco_jax.cluster.process_rank import ProcessRank
from noloco_jax.cluster.processes import Processes
from noloco_jax.cluster.start import distributed_runtime
from noloco_jax.config import TrainConfig, to_dict
from noloco_jax.files import full_disk_reported
from noloco_jax.metrics.evaluate import evaluate
from noloco_jax.optim.exchange.swap import choose_form
from noloco_jax.spmd.background import compile_background, host_mesh, is_in_background
from noloco_jax.spmd.compile import PROGRAMS
from noloco_jax.train import phases
from noloco_jax.train.banner import banner_rows
from noloco_jax.train.bytes_sent import bytes_sent_of
from noloco_jax.train.phases import RunFlags
from noloco_jax.train.sync import BackgroundSync, CollectiveSync


def train_at(
    rank: ProcessRank | None, config: TrainConfig, workdir: Path, *, start_timeout: float, **flags: Any
) -> int:
    """Train as the process of this rank; return the exit status.

    Args:
      rank: of this process in the run; None: the only process.
      config: the run.
      workdir: its folder.
      start_timeout: seconds that the processes wait for one another at the start.
      **flags: see `train`.
    """
    use_gpu_memory()
    with distributed_runtime(rank, to_dict(config), start_timeout) as num_processes:
        use_cpu_cores(config.mesh, config.num_replicas, config.delay, num_processes)
        with full_disk_reported(workdir):
            return train(config, workdir, **flags)


def train(config: TrainConfig, workdir: Path, *, processes: Processes | None = None, **flags: Any) -> int:
    """Train until `num_steps`, resuming from the workdir's newest checkpoint if it has one; return the exit status.

    Every process of a run calls this. The first one prints, draws and writes the metrics, with its own losses.

    Args:
      config: the run.
      workdir: its folder, the same one for all processes.
      processes: processes that train together; None: all processes of JAX.
      **flags: fields of `RunFlags`.

    Raises:
      UserError: if the configuration does not fit the devices, the data or what the workdir holds.
    """
    # Check.
    setup = phases.check_run(config, config, workdir, RunFlags(**flags), processes)
    mesh = setup.programs.mesh
    in_background = is_in_background(config.delay, mesh)
    exchange_mesh = host_mesh(mesh) if in_background else mesh
    bytes_sent = bytes_sent_of(config, mesh.shape)

    # Open.
    with phases.open_run(setup) as opened:
        saved, stop = opened.saved, opened.stop
        if phases.is_complete(setup, saved):
            return 0
        phases.check_room(setup)
        positions = []
        if saved is not None:
            elastic.check_elastic(config.elastic, config.num_replicas, saved.shape)
            positions = elastic.data_positions(saved, config.num_replicas)
        rows, numbers = banner_rows(config, setup.programs, bytes_sent, setup.memory), (0, config.num_replicas)
        validation, streams, given = phases.open_data(setup, saved, positions, numbers, rows)
        if setup.flags.dry_run:
            return 0

        # Compile.
        if config.schedule is not None and (line := choose_form(exchange_mesh, int(bytes_sent.outer_step))):
            setup.console.print(line)
        streams.start()  # the first batches are made during compilation
        needed = [name for name in PROGRAMS if name != "outer_step" or not in_background]
        programs = phases.compile_run(setup, stop, needed, draws_weights=saved is None and given is None)
        if programs is None:
            return phases.before_training(setup, stop)
        if in_background:
            sync = BackgroundSync(config, programs, compile_background(programs, exchange_mesh))
        else:
            sync = CollectiveSync(config, programs)

        # Resume.
        state = phases.first_state(setup, opened, programs, given)
        del given  # its memory

        # Loop.
        evaluation = partial(evaluate, programs, validation=validation)
        outcome = phases.train_to_end(setup, opened, programs, sync, state, streams, evaluation, bytes_sent)

    # Finish.
    streams.close()  # after a failure the streams close when the process ends
    return phases.finish(setup, stop, sync, programs, outcome)
