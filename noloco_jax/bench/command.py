"""Measure how fast a configuration trains, and its variants: time, FLOPs, memory, messages, data, compilation.

    python -m noloco_jax.bench --config=configs/quickstart.py --vary num_replicas=2,4,8
    python -m noloco_jax.bench --config=configs/c4_125m.py --vary method=noloco,diloco,ddp --json=bench.json
    python -m noloco_jax.bench --config=configs/quickstart.py --vary num_replicas=2,16,64 --compile_only

Every variant runs in a process of its own, one after another, on random tokens. Data that are there are read as fast as
possible, without training. `--json` writes all figures and the whole configurations.

*step*: median of the inner steps, one dispatched ahead; *share of run*: of the outer steps, without what outer.delay
adds to the inner ones; *sent*: bytes that a replica sends to others in an outer step (with ddp in every step), in the
mean over replicas, and in an inner step; *memory* by XLA's account: arguments + temporaries + outputs - aliased, and
the state that lies beside.

Model FLOPs per token are 3 times those of the forward pass: 2 per weight of every matrix product (the head is in, the
embedding out) and causal attention counted once, 2 x T x heads x head size per layer at sequence length T, in a
sliding window of W tokens 4 x (W - W²/2T) x heads x head size; what is computed again in the backward pass does not
count. MFU is the model's FLOP/s over the rate that large matrix products
in the compute dtype reach on the same devices in the same run.

Exit status: 0; 1 if a variant failed; 2 for bad input, which includes variants that do not fit the devices.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from noloco_jax.bench.options import FAILED, REFUSED, Options, Result
from noloco_jax.bench.report import VariantResult, show
from noloco_jax.bench.variants import Variant, make_variants
from noloco_jax.cluster.host import keep_freed_memory
from noloco_jax.config import parse_args, split_overrides, to_dict
from noloco_jax.errors import UserError
from noloco_jax.files import write_whole
from noloco_jax.metrics.console import make_console


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every variant, or, as the process of one, that one; return the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    config, flags = parse_args(arguments, __doc__ or "", _define_flags, prog="python -m noloco_jax.bench")
    _check(flags)
    options = Options(flags.steps, flags.data_seconds, flags.compile_only, flags.profile)
    if flags.result is not None:
        keep_freed_memory()
        from noloco_jax.bench.worker import work  # imports jax, for which the other processes need not wait

        return work(config, options, flags.result)
    overrides, _ = split_overrides(arguments)
    variants = make_variants(flags.config, overrides, flags.vary)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # SIGTERM ends the variant's process too
    console = make_console()
    rows: list[VariantResult] = []
    for number, variant in enumerate(variants, start=1):
        if len(variants) > 1:
            console.print(f"{number}/{len(variants)}  {variant.label}", style="dim")
        rows.append((variant, launch(flags.config, variant, options)))
        if flags.json is not None:
            _write(flags.json, flags.config, rows)
    statuses = {result["status"] for _, result in rows if "error" in result}
    if len(rows) == 1 and statuses == {REFUSED}:
        raise UserError(rows[0][1]["error"])
    show(rows, _title(flags.config, rows), compile_only=flags.compile_only, console=console)
    if flags.json is not None:
        console.print(f"all figures: {flags.json}")
    return max(statuses, default=0)


def _define_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--vary",
        nargs="+",
        action="extend",
        default=[],
        metavar="FIELD=A,B,...",
        help="config fields and the values to measure, in all combinations",
    )
    parser.add_argument("--steps", type=int, default=20, help="inner steps to time (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to a new file")
    parser.add_argument("--profile", type=Path, metavar="DIR", help="write a trace for xprof and Perfetto")
    parser.add_argument(
        "--data_seconds",
        type=float,
        default=3.0,
        help="how long to read the data alone, 0 for not at all (default %(default)s)",
    )
    parser.add_argument("--compile_only", action="store_true", help="only compile: time and memory of that")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)  # be the process of one variant


def _check(flags: argparse.Namespace) -> None:
    if flags.steps < 1:
        raise UserError(f"--steps={flags.steps} is no number of steps: give 1 or more")
    if not 0 <= flags.data_seconds < float("inf"):
        raise UserError(f"--data_seconds={flags.data_seconds:g} is no time: give 0 or more")
    if flags.compile_only and flags.profile is not None:
        raise UserError("--profile traces steps and --compile_only takes none: leave one of them out")
    if flags.profile is not None and flags.profile.exists() and not flags.profile.is_dir():
        raise UserError(f"--profile={flags.profile} is a file: name a folder")
    if flags.json is not None and flags.json.exists():
        raise UserError(f"--json={flags.json} is there already: name another file, or remove it")
    if flags.json is not None and not flags.json.absolute().parent.is_dir():
        raise UserError(f"--json={flags.json}: there is no folder {flags.json.parent}, make it first")


def _title(file: str, rows: Sequence[VariantResult]) -> str:
    measured = [result for _, result in rows if "error" not in result]
    if not measured:
        return file
    title = f"{file}: jax {measured[0]['jax']}, {measured[0]['device']}"
    first, _ = rows[0]
    return title if first.varied else f"{title}, {first.label}"


def _write(path: Path, file: str, rows: Sequence[VariantResult]) -> None:
    """Write the figures measured so far."""
    runs: list[dict[str, Any]] = [
        {"varied": variant.varied, "note": variant.note, **result, "config": to_dict(variant.config)}
        for variant, result in rows
    ]
    write_whole(path, json.dumps({"config_file": file, "runs": runs}, indent=1) + "\n")


def launch(file: str, variant: Variant, options: Options) -> Result:
    """Measure a variant of a config file in a new process; of one that fails, the result has `error` and `status`.

    A variant may need other CPU devices, and its peak memory is its own.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        command = [
            *(sys.executable, "-m", "noloco_jax.bench", f"--config={file}", *variant.overrides),
            *(f"--steps={options.steps}", f"--data_seconds={options.data_seconds}", f"--result={path}"),
            *(["--compile_only"] if options.compile_only else []),
            *([f"--profile={options.profile}"] if options.profile else []),
        ]
        status = subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode
        if path.exists():
            result = json.loads(path.read_text(encoding="utf-8"))
            return result | ({"status": status} if "error" in result else {})
    if status < 0:
        return {"error": f"its process was ended by {signal.Signals(-status).name}", "status": FAILED}
    return {"error": f"its process ended with status {status}, see above", "status": FAILED}
