"""Runs of the trainer in real processes, for tests: small, on the CPU, and quick to compile a second time."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from noloco_jax.checkpoint.store import Checkpointer
from noloco_jax.config import load_saved
from support import events, platforms, tiny_model, warm
from support.paths import ROOT
from support.ports import free_port
from support.texts import lines_of_words

PATIENCE = 600  # seconds: cores may be few and busy
# Files of a checkpoint without a digest: Orbax writes two of them after the digests, and the third holds them.
UNLISTED = {"digests.txt", "_CHECKPOINT_METADATA"} | {
    f"{item}commit_success.txt" for item in ("", "state/", "data/", "run/")
}
TIMINGS = (
    *("tokens_per_second", "outer_step_seconds", "evaluation_seconds", "time"),
    *("seconds", "seconds_waiting_for_data", "seconds_in_outer_steps"),
)

CONFIG = """
from ml_collections import ConfigDict


def get_config():
    return ConfigDict({{
        "num_replicas": 4, "num_steps": 24, "eval_every": 12, "eval_batches": 2, "log_every": 1, "checkpoint_every": 4,
        "log_replicas": True,
        "model": {{"kind": {kind!r}, "hidden_size": 32, "intermediate_size": 64, "num_layers": 2}},
        "inner": {{"lr": 1e-2, "min_lr": 1e-3, "warmup_steps": 2, "eps": 1e-4}},
        "outer": {{"sync_every": 4}},
        "data": {{"kind": "text", "path": {data!r}, "validation_path": {held_out!r}, "sequence_length": 32,
                  "batch_size": 2, "shuffle_buffer": 16}},
    }})
"""


def write_config(folder: Path, kind: str = tiny_model.KIND) -> Path:
    """Write the configuration of a small run of a kind of model, and a few files of text."""
    lines = lines_of_words(210)
    (folder / "data").mkdir(parents=True)
    (folder / "held_out").mkdir()
    for number in range(16):
        (folder / "data" / f"{number:02}.txt").write_text("".join(lines[8 * number : 8 * number + 40]))
    (folder / "held_out/text.txt").write_text("".join(lines[150:]))
    path = folder / "config.py"
    path.write_text(CONFIG.format(kind=kind, data=str(folder / "data"), held_out=str(folder / "held_out")))
    return path


def environment(config: Path, devices: int = 1) -> dict[str, str]:
    """Return the environment of a run's processes: so many CPU devices each (or GPUs), and a compile cache."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_", "SLURM_"))}
    return (
        inherited
        | platforms.of_a_run(devices)
        | {
            "JAX_COMPILATION_CACHE_DIR": platforms.programs(config.parent),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),  # the latter for `support`
            "PYTHONUNBUFFERED": "1",
        }
    )


def set_environment(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives this process `environment`, for processes that what a test calls will start."""
    wanted = environment(config)
    for name in os.environ.keys() - wanted.keys():
        monkeypatch.delenv(name)
    for name, value in wanted.items():
        monkeypatch.setenv(name, value)


def command(
    config: Path,
    workdir: Path | str,
    *arguments: str,
    seconds_per_step: float = 0.0,
    module: Sequence[str] = ("noloco_jax.train",),
) -> list[str]:
    if seconds_per_step:
        module = ("support.disturbed", f"paced:{seconds_per_step}", *module)
    return [sys.executable, "-m", *module, f"--config={config}", f"--workdir={workdir}", *arguments]


def start(
    config: Path,
    workdir: Path | str,
    *arguments: str,
    number: int = 1,
    devices: int = 1,
    folders: Sequence[Path] = (),
    outputs: Sequence[Path] = (),
    seconds_per_step: float = 0.0,
    module: Sequence[str] = ("noloco_jax.train",),
    variables: Mapping[str, str] | None = None,
) -> list[subprocess.Popen[str]]:
    """Start the processes of a run, with so many devices each.

    A run that a test interrupts sleeps so many seconds before a step, so that it is not over before.

    Args:
      config: file of the configuration.
      workdir: of the run.
      *arguments: of the trainer.
      number: of processes.
      devices: of each.
      folders: working directory of each.
      outputs: file to which each appends what it prints; without, that is in its `stdout`.
      seconds_per_step: see above.
      module: the trainer, or a program that takes its arguments after its own.
      variables: further ones of the environment.
    """
    place = dict(variables or {})
    if number > 1:
        place |= {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}", "JAX_NUM_PROCESSES": str(number)}
    started = []
    for process in range(number):
        with outputs[process].open("a") if outputs else nullcontext(subprocess.PIPE) as output:
            started.append(
                warm.Popen(
                    command(config, workdir, *arguments, seconds_per_step=seconds_per_step, module=module),
                    env=environment(config, devices) | place | {"JAX_PROCESS_ID": str(process)},
                    cwd=folders[process] if folders else ROOT,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
    return started


def finish(processes: Sequence[subprocess.Popen[str]], patience: float = PATIENCE) -> list[tuple[int, str]]:
    """(exit status, output) of every process; none outlives this call."""
    deadline = time.monotonic() + patience
    results = []
    try:
        for process in processes:
            output, _ = process.communicate(timeout=max(deadline - time.monotonic(), 1))
            results.append((process.returncode, output))
    finally:
        kill(processes)
    return results


def kill(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
    for process in processes:
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def run(config: Path, workdir: Path | str, *arguments: str, number: int = 1, devices: int = 1) -> list[tuple[int, str]]:
    return finish(start(config, workdir, *arguments, number=number, devices=devices))


def report(results: Sequence[tuple[int, str]]) -> str:
    """Format processes' output for a failing assertion; pytest would cut a list short."""
    return "\n".join(f"exit status {status}:\n{output}" for status, output in results)


def trained(
    config: Path, name: str, *arguments: str, number: int = 1, devices: int = 1, folders: Sequence[Path] = ()
) -> Path:
    """The workdir, beside the configuration, of a run that comes to its end."""
    workdir = config.parent / name
    results = finish(start(config, workdir, *arguments, number=number, devices=devices, folders=folders))
    assert [status for status, _ in results] == [0] * number, report(results)
    return workdir


def wait_until(
    condition: Callable[[], bool],
    processes: Sequence[subprocess.Popen[str]],
    patience: float = PATIENCE,
    interval: float = 0.002,
) -> bool:
    """Check a condition every `interval` seconds; False if a process ended without it. None outlives a failure."""
    deadline = time.monotonic() + patience
    try:
        while not condition():
            if any(process.poll() is not None for process in processes):
                return condition()
            assert time.monotonic() < deadline, "nothing happened"
            time.sleep(interval)
    except BaseException:
        kill(processes)
        raise
    return True


def reached(workdir: Path, step: int) -> Callable[[], bool]:
    """Return whether the run has written metrics of a step."""
    return lambda: any(line["step"] >= step for line in metrics(workdir))


def metrics(workdir: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """Read a run's metrics without timings; a run that starts anew takes its file away for a moment."""
    try:
        lines = (workdir / name).read_text().splitlines(keepends=True)
    except FileNotFoundError:
        lines = []
    entries = [json.loads(line) for line in lines if line.endswith("\n")]
    return [{name: value for name, value in entry.items() if name not in TIMINGS} for entry in entries]


def weights(workdir: Path) -> dict[str, np.ndarray]:
    """The fast weights of all replicas in the newest checkpoint."""
    checkpoints = Checkpointer(workdir, load_saved(workdir), read_only=True)
    newest = checkpoints.newest()
    assert newest is not None
    params = newest.params()
    checkpoints.close()
    return {jax.tree_util.keystr(path): np.array(x) for path, x in jax.tree.leaves_with_path(params)}


def assert_equal_runs(workdir: Path, other: Path) -> None:
    """Compare metrics, what TensorBoard shows, and the weights, bitwise."""
    assert metrics(workdir) == metrics(other)
    mine, theirs = (
        [value for value in events.shown(run) if not value[1].endswith(TIMINGS)] for run in (workdir, other)
    )
    assert mine == theirs
    mine, theirs = weights(workdir), weights(other)
    assert mine.keys() == theirs.keys()
    for name in theirs:
        np.testing.assert_array_equal(mine[name], theirs[name], err_msg=name)


def assert_same_losses(workdir: Path, other: Path, since: int = 0) -> None:
    """Compare the losses, to float32 rounding, of the first process's replicas of `workdir` after step `since`."""
    mine, theirs = ([line for line in metrics(folder) if line["kind"] == "train"] for folder in (workdir, other))
    assert [line["step"] for line in mine] == [line["step"] for line in theirs]
    for line, expected in zip(mine, theirs, strict=True):
        found = line["loss_replicas"]
        assert found
        if line["step"] > since:
            wanted = [expected["loss_replicas"][replica] for replica in found]
            np.testing.assert_allclose([*found.values()], wanted, rtol=1e-5)


def assert_same_training(workdir: Path, other: Path) -> None:
    """Weights and evaluations to float32 rounding."""
    mine, theirs = weights(workdir), weights(other)
    for name in theirs:
        np.testing.assert_allclose(mine[name], theirs[name], rtol=1e-4, atol=2e-5, err_msg=name)
    mine, theirs = ([line for line in metrics(folder) if line["kind"] == "eval"] for folder in (workdir, other))
    assert [line["step"] for line in mine] == [line["step"] for line in theirs]
    for line, expected in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(line["perplexity_replicas"], expected["perplexity_replicas"], rtol=1e-5)
        np.testing.assert_allclose(line["perplexity_merged"], expected["perplexity_merged"], rtol=1e-5)
        np.testing.assert_allclose(line["replica_spread"], expected["replica_spread"], rtol=1e-3)
