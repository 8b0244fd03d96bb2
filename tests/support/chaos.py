"""Islands under faults, beside one DiLoCo program that starts again from its checkpoint after each.

    PYTHONPATH=.:tests python -m support.chaos --data=c4/en --workdir=runs/chaos

Faults come as a Poisson process, of all islands together: SIGKILL with a restart, SIGSTOP, partitions
(`fault_tape.py`). Time is compressed: a second of the tape lasts 1/COMPRESSION, so that rates are as many times higher
and faults shorter. What it takes to start a process is not compressed: starts weigh COMPRESSION times what they would.
Processes sleep before a step, so that those that are left gain nothing from the cores of those that are away. A program
across a partition stands still as long as that lasts.

All rows train on equally many tokens: islands end once all together have taken their steps, and the learning rate is
constant after its warm-up. "present" is the share of the islands' time in which the tape kept none of them away, the
most that goodput can be; "of present" is goodput as a share of it. Two hours on two quiet cores.

The table is printed row by row, and kept in `table.json`; what is there is not run again.
"""

import argparse
import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from noloco_jax.checkpoint.store import Checkpointer
from noloco_jax.config import load_saved
from noloco_jax.data import ByteTokenizer, validation_batches
from noloco_jax.metrics.evaluate import Validation, evaluate
from noloco_jax.spmd.mesh import make_mesh
from noloco_jax.spmd.programs import build_programs
from support import platforms
from support.archipelago import Archipelago
from support.chaos_arms import Result, run_islands, run_together
from support.fault_tape import tape
from support.paths import ROOT

COLUMNS = (
    *("faults/h", "method", "kills", "stops", "partitions", "seconds", "steps", "goodput", "present", "of present"),
    *("participation", "heals", "one-sided", "crashes", "load", "perplexity"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="a folder of C4's files")
    parser.add_argument("--workdir", required=True, type=Path)
    parser.add_argument("--faults", default="0,12,60,125", help="an hour, of all islands together; 0 comes first")
    parser.add_argument("--methods", default="noloco,diloco", help="islands of noloco, one program of diloco")
    parser.add_argument("--islands", type=int, default=6)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--seconds_per_step", type=float, default=0.1, help="that a process sleeps before a step")
    parser.add_argument("--compression", type=float, default=4.0)
    parser.add_argument("--limit", type=float, default=4.0, help="times the seconds without faults, for each")
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    rates = sorted({0.0, *map(float, flags.faults.split(","))})
    names = [f"i{number}" for number in range(flags.islands)]
    flags.workdir.mkdir(parents=True, exist_ok=True)
    kept = flags.workdir / "table.json"
    rows: dict[str, dict[str, Any]] = json.loads(kept.read_text()) if kept.exists() else {}
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS), flush=True)
    for rate, method in [(rate, method) for rate in rates for method in flags.methods.split(",")]:
        key = f"{method} {rate:g}"
        if key not in rows:
            free = rows.get(f"{method} 0", {})
            result = run(flags, names, method, rate, flags.limit * free["seconds"] if free else 1e9)
            rows[key] = row(rate, method, result, free)
            kept.write_text(json.dumps(rows, indent=1))
        print("| " + " | ".join(str(rows[key][column]) for column in COLUMNS) + " |", flush=True)


def run(flags: argparse.Namespace, names: Sequence[str], method: str, rate: float, limit: float) -> Result:
    """A side, under faults of a rate; the tape is that of the seed and the rate, for both."""
    folder = (flags.workdir / f"{method}-{rate:g}").resolve()
    arguments = [f"--config={ROOT / 'configs/c4_bytes.py'}", f"--config.data.path={Path(flags.data).resolve()}"]
    num_steps = flags.steps if method == "diloco" else 100 * flags.steps  # islands are ended once all have enough
    values = {"method": method, "num_replicas": len(names), "num_steps": num_steps, "log_every": 1}
    values |= {"inner.lr": 2e-3, "inner.min_lr": 2e-3}
    values |= {"eval_every": 0, "checkpoint_every": 50, "keep_checkpoints": 1, "seed": flags.seed, "sample_tokens": 0}
    values |= {"model.num_layers": 1, "model.hidden_size": 64, "model.intermediate_size": 256}
    arguments += [f"--config.{name}={value}" for name, value in values.items()]
    faults = tape(names, rate, flags.compression, flags.seed + int(1000 * rate))
    common = folder, names, arguments, environment(folder), flags.seconds_per_step
    if method == "noloco":
        with Archipelago(*common) as islands:
            return run_islands(islands, faults, flags.steps * len(names), limit)
    return run_together(*common, faults, flags.steps, limit)


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of all processes: a CPU device each, and compiled programs cached for restarts."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    return inherited | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": platforms.programs(folder.parent),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        "PYTHONUNBUFFERED": "1",
    }


def row(rate: float, method: str, result: Result, free: dict[str, Any]) -> dict[str, Any]:
    """A line of the table; `free` is that of the same method without faults, or empty."""
    speed = result.steps / result.seconds
    goodput = speed / free.get("speed", speed)
    return {
        "faults/h": f"{rate:g}",
        "method": method,
        **{f"{kind}s": result.strikes[kind] for kind in ("kill", "stop", "partition")},
        "seconds": round(result.seconds, 1),
        "steps": result.steps if result.finished else f"{result.steps}, not all",
        "speed": speed,
        "goodput": f"{100 * goodput:.0f} %",
        "present": f"{100 * result.present:.0f} %" if method == "noloco" else "",
        "of present": f"{100 * goodput / result.present:.0f} %" if method == "noloco" else "",
        "participation": f"{100 * result.met / result.due:.0f} %" if result.due else "",
        "heals": result.heals,
        "one-sided": result.one_sided,
        "crashes": result.crashes,
        "load": f"{os.getloadavg()[2]:.1f}",
        "perplexity": f"{merged_perplexity(result.workdirs):.3f}",
        "result": {name: str(value) for name, value in dataclasses.asdict(result).items()},
    }


def merged_perplexity(workdirs: Sequence[Path]) -> float:
    """Return the perplexity of the mean of all replicas' weights, on the configuration's validation documents."""
    parts = []
    for workdir in workdirs:
        checkpoints = Checkpointer(workdir, load_saved(workdir), read_only=True)
        step = checkpoints.latest_step()
        if step is not None:  # else it never came so far
            parts.append(checkpoints.restore_params(step))
        checkpoints.close()
    config = load_saved(workdirs[0])
    params = jax.tree.map(lambda *x: np.concatenate(x), *parts)
    config = dataclasses.replace(config, num_replicas=jax.tree.leaves(params)[0].shape[0])
    programs = build_programs(config, make_mesh(config, jax.devices()[:1]))
    vocab_size = config.model.vocab_size
    batches = validation_batches(config.data, ByteTokenizer(), num_batches=config.eval_batches, vocab_size=vocab_size)
    return evaluate(programs, params, Validation(batches))["perplexity_merged"]


if __name__ == "__main__":
    main()
