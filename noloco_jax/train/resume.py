"""Resume of a run: what may be asked of its checkpoint, and what is said of it."""

from rich.console import Console

from noloco_jax.checkpoint import elastic
from noloco_jax.checkpoint.saved import Saved
from noloco_jax.checkpoint.store import Checkpointer
from noloco_jax.config import TrainConfig
from noloco_jax.errors import UserError
from noloco_jax.metrics.finite import is_finite
from noloco_jax.spmd.programs import Programs, TrainState


def check_end(config: TrainConfig, saved: Saved) -> None:
    """Raise `UserError` where a run that was to be longer would end at or before its checkpoint.

    Nothing would be left to take, and so no last evaluation and no final merge.
    """
    start, wanted = saved.step, saved.config.num_steps
    if config.num_steps <= start < wanted:
        raise UserError(
            f"the run stopped at step {start} of {wanted}, and num_steps={config.num_steps} leaves no step to take: "
            f"give num_steps={start + 1} or more, or go back by --from_step"
        )


def completion(saved: Saved) -> str:
    """Return a line on a run that has ended: settings given too late for it, and how to continue."""
    late = "; ".join(str(change) for change in saved.changes if change.field != "num_steps")
    return (
        f"the run is complete ({saved.step} steps): give a larger --config.num_steps to continue it, or another "
        "--workdir to start a new run" + (f"; without effect: {late}" if late else "")
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
    state, resized = elastic.restore(saved, config.model, programs, config.elastic)
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
