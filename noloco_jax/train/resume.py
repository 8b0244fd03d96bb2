"""Resume of a run: what may be asked of its checkpoint, and what is said of it."""

from pathlib import Path

import jax
from rich.console import Console

from noloco_jax.checkpoint import elastic
from noloco_jax.checkpoint.saved import Saved
from noloco_jax.checkpoint.store import Checkpointer
from noloco_jax.config import TrainConfig
from noloco_jax.errors import UserError
from noloco_jax.methods import method_of
from noloco_jax.metrics.divergence import is_finite
from noloco_jax.metrics.writer import read_metrics
from noloco_jax.spmd.programs import Programs, TrainState
from noloco_jax.train.banner import show_results
from noloco_jax.train.loop import is_evaluated


def check_end(config: TrainConfig, saved: Saved) -> None:
    """Raise `UserError` where a run that was to be longer would end at or before its checkpoint without its last step.

    Args:
      config: the run.
      saved: the checkpoint that it would resume from.
    """
    start, wanted = saved.step, saved.config.num_steps
    if wanted <= start or config.num_steps > start:
        return
    stopped = f"the run stopped at step {start} of {wanted}"
    if config.num_steps < start:
        raise UserError(
            f"{stopped}, which is beyond num_steps={config.num_steps}: give num_steps={start} to end it there, or go "
            "back by --from_step"
        )
    if config.outer.final_merge and method_of(config).has_outer_steps:
        raise UserError(
            f"{stopped}, and num_steps={start} leaves no step after which outer.final_merge merges the replicas: give "
            f"num_steps={start + 1} or more, or leave it out and export their mean"
        )


def lacks_evaluation(config: TrainConfig, saved: Saved | None) -> bool:
    """Return True if the run stopped after the step of its checkpoint without evaluating it."""
    return saved is not None and is_evaluated(config, saved.step) and saved.totals.evaluated_step != saved.step


def is_complete(config: TrainConfig, saved: Saved | None) -> bool:
    """Return True if nothing is left to do after a checkpoint."""
    return saved is not None and saved.step >= config.num_steps and not lacks_evaluation(config, saved)


def show_complete(console: Console, workdir: Path, saved: Saved) -> None:
    """Print that the workdir's run is complete, its results, settings given too late for it, and how to continue."""
    if jax.process_index() > 0:
        return
    evaluations = [line for line in read_metrics(workdir) if line["kind"] == "eval"]
    if evaluations:  # num_steps may have been lowered to a step before the first evaluation
        show_results(console, workdir, evaluations[-1], sample=None)
    late = "; ".join(str(change) for change in saved.changes if change.field != "num_steps")
    if late:
        console.print(f"without effect on a run that has ended: {late}")
    console.print(
        f"the run is complete ({saved.step} steps): give a larger --config.num_steps to continue it, or another "
        "--workdir to start a new run"
    )


def restored_state(
    config: TrainConfig,
    programs: Programs,
    checkpoints: Checkpointer,
    saved: Saved,
    from_step: int | None,
    console: Console,
) -> TrainState:
    """Restore the state of a checkpoint; print the differences from the run that saved it."""
    state, resized = elastic.restore(saved, config, programs)
    if not is_finite(state):
        raise UserError(
            f"the checkpoint of step {saved.step} has values that are not finite: give --from_step of one before it, "
            "or start anew in an empty --workdir"
        )
    since = "" if from_step in (None, saved.step) else f", saved since the run went back to step {from_step}"
    console.print(f"resuming from the checkpoint of step {saved.step}{since}" + (f"; {resized}" if resized else ""))
    for line in [*map(str, saved.changes), *saved.version_changes]:
        console.print(line)
    if set_aside := checkpoints.set_aside_after(saved.step):
        console.print(f"checkpoints of later steps: {set_aside} moved to checkpoints_set_aside")
    return state
