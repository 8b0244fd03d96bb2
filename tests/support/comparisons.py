"""Comparisons of small runs, and what the runs leave, for the tests of `compare`."""

from collections.abc import Sequence
from pathlib import Path

from noloco_jax.config import save_config
from noloco_jax.metrics.writer import MetricWriter
from noloco_jax.spmd.inner import learning_rates
from noloco_jax.tools.compare.plan import ComparisonPlan, PlannedRun, make_plan, make_variants
from noloco_jax.tools.sweep import parse_sweep

METHODS = ["ddp", "diloco", "noloco", "local"]
CONFIG = """
from ml_collections import ConfigDict


def get_config(method="noloco"):
    config = ConfigDict({{
        "method": method, "num_steps": 40, "eval_every": 4, "num_replicas": 4, "seed": 7,
        "model": {{"hidden_size": 8, "intermediate_size": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1}},
        "inner": {{"lr": 1e-2, "warmup_steps": 8}},
        "outer": {{"sync_every": 4, "lr": 0.6, "momentum": 0.4}},
        "data": {{"path": {data!r}, "sequence_length": 16, "batch_size": 2}},
    }})
    config.inner.min_lr = config.inner.get_oneway_ref("lr") / 10
    return config
"""


def write_config(folder: Path) -> str:
    """Writes a small configuration and its data into a folder; returns its file."""
    (folder / "data").mkdir()
    for number in range(100):
        (folder / "data" / f"{number:03}.txt").write_text("a few words " * 9)
    path = folder / "config.py"
    path.write_text(CONFIG.format(data=str(folder / "data")))
    return str(path)


def plan_of(
    config_file: str,
    *overrides: str,
    methods: Sequence[str] = METHODS,
    variants: Sequence[str] = (),
    seeds: int = 1,
    vary: str | Sequence[str] = (),
    tune: str | None = None,
) -> ComparisonPlan:
    choices = [parse_sweep(text, "--vary") for text in ([vary] if isinstance(vary, str) else vary)]
    return make_plan(
        config_file,
        overrides,
        make_variants(",".join(methods) if methods else None, variants, choices),
        seeds,
        choices,
        parse_sweep(tune, "--tune") if tune else None,
    )


def only(plan: ComparisonPlan, title: str) -> PlannedRun:
    (run,) = (run for run in plan.runs if run.variant.title == title)
    return run


def train(
    run: PlannedRun,
    workdir: Path,
    perplexity: float,
    merged: float = 5.0,
    spread=lambda lr: 0.1 * lr,
    steps=None,
    sent=None,
):
    """Write the metrics of a run as the trainer does: its last evaluation has the perplexities, the others more."""
    save_config(run.config, workdir / run.name)
    writer = MetricWriter(workdir / run.name, resume_step=None, tensorboard=False)
    lr = learning_rates(run.config.inner, run.config.num_steps)
    for step in range(4, (steps or run.config.num_steps) + 1, 4):
        excess = (run.config.num_steps - step) / 4
        writer.write(
            step,
            "eval",
            perplexity=perplexity + excess,
            perplexity_replicas=[perplexity + excess] * run.config.num_replicas,
            perplexity_merged=merged + excess,
            replica_spread=float(spread(lr[step - 1])),
        )
    if sent is not None:
        writer.write(steps or run.config.num_steps, "train", loss=1.0, bytes_sent_total=sent)
    writer.close()


def arguments(config_file: str, workdir: Path, *others: str) -> list[str]:
    return [f"--config={config_file}", f"--workdir={workdir}", *others]


def finished(config_file: str, workdir: Path, **settings) -> ComparisonPlan:
    """Plans runs and writes what each leaves at its end."""
    plan = plan_of(config_file, **settings)
    for number, run in enumerate(plan.runs):
        equal = run.variant.method == "ddp"
        sent = {"ddp": 1e9, "local": 0.0}.get(run.variant.method, 1e8 / (1 + number))
        train(run, workdir, 5.0 + number, spread=lambda lr, equal=equal: 1e-10 if equal else 0.1 * lr, sent=sent)
    return plan
