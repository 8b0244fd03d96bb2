"""The paper's analysis in numbers: each section computes its figures, draws its pictures and returns Markdown."""

import math
from pathlib import Path

import numpy as np

from noloco_jax.methods import METHODS
from noloco_jax.outer.pairing import consensus_limit
from noloco_jax.simulate import pictures, theory, waiting
from noloco_jax.simulate.report import markdown_table

_SEED = 0


def latency_section(out: Path | None) -> str:
    """Compare a tree all-reduce with a pair's exchange; picture latency.png."""
    variations, levels, runs = (0.0, 0.5, 1.0, 2.0), 10, 4000
    sizes = [2**k for k in range(1, levels + 1)]
    ratios = {v: waiting.tree_over_pair(v, levels, runs, _SEED) for v in variations}
    shown = (1, 3, 5, 7, 9)
    rows = []
    for variation, ratio in ratios.items():
        sigma = waiting.log_sigma(variation)
        slowest = waiting.expected_max_of_two(-(sigma**2) / 2, sigma)
        rows.append([f"{variation:g}", f"{slowest:.3f}", *(f"{ratio[k]:.1f}" for k in shown)])
    rows.append(["log₂ n", "", *(f"{k + 1:.1f}" for k in shown)])
    if out:
        pictures.latency(sizes, ratios, out / "latency.png")
    return "\n".join(
        [
            "## Latency: a tree all-reduce against a pair's exchange",
            "",
            "Message times are log-normal. Time of an all-reduce over n replicas over that of a pair's exchange:",
            "",
            markdown_table(["std/mean of a message", "E max of two / mean", *(f"n = {sizes[k]}" for k in shown)], rows),
            "",
            "Assumptions: each of the 2 log₂ n levels waits for the slower of two messages, "
            "E max = (1 + erf(σ/2)) exp(μ + σ²/2), and for the subtrees below it; a pair has one such level each way. "
            f"The paper's 2 t log₂ n leaves the subtrees' lateness out. {runs} simulated trees.",
        ]
    )


def blocking_section(out: Path | None) -> str:
    """Compute the run time of DiLoCo over NoLoCo's; picture blocking.png."""
    mu, variance, rounds = 1.0, 0.5, 100
    runs, steps = {16: 64, 64: 16, 256: 4, 1024: 4, 4096: 1}, (100, 50, 25, 10, 5)
    sizes = list(runs)
    ratios = {
        k: [waiting.idle_time_ratio(n, k, rounds, runs[n], mu, math.sqrt(variance), _SEED) for n in sizes]
        for k in steps
    }
    rows = [[str(k), *(f"{r:.2f}" for r in ratio)] for k, ratio in ratios.items()]
    if out:
        title = f"Waiting for all against waiting for a partner ({rounds} outer steps)"
        pictures.blocking(sizes, ratios, title, out / "blocking.png")
    return "\n".join(
        [
            "## Blocking: waiting for all against waiting for a partner",
            "",
            "Total run time of DiLoCo over NoLoCo's, by inner steps between outer steps and replicas N:",
            "",
            markdown_table(["inner steps", *(f"N = {n}" for n in sizes)], rows),
            "",
            f"Assumptions: an inner step takes a log-normal time, μ = {mu:g}, σ² = {variance:g}, on every replica "
            f"independently; messages are free; {rounds} outer steps; a run ends when its last replica does. "
            "DiLoCo: every round takes its slowest replica's time. NoLoCo: a replica waits for its partner only.",
        ]
    )


def theory_section(out: Path | None) -> str:
    """Check theorem and stable consensus strengths; pictures quadratic.png, stability.png."""
    return "\n\n".join([_quadratic_part(out), _stability_part(out)])


# Defaults of a training run; the consensus strength equals the outer learning rate.
_NOLOCO = METHODS["noloco"].defaults
_OUTER = theory.Outer(_NOLOCO["momentum"], _NOLOCO["lr"], _NOLOCO["lr"], _NOLOCO["group_size"])


def _loss(inner_lr: float) -> theory.Quadratic:
    return theory.Quadratic(curvatures=(0.5, 1.0, 2.0), noise=1.0, inner_lr=inner_lr, inner_steps=10)


def _quadratic_part(out: Path | None) -> str:
    replicas, runs = 64, 16
    small_W = np.geomspace(1e-5, 1e-3, 5)
    spread_WR = np.stack([_settled(lr, replicas, runs, [_SEED, i]) for i, lr in enumerate(small_W)])
    slope, error = theory.log_log_slope(small_W, spread_WR)
    rows = []
    for lr, simulated_R in zip(small_W, spread_WR, strict=True):
        spread, mean = theory.stationary_variances(_loss(lr), _OUTER, replicas)
        estimate, e = _estimate(simulated_R)
        rows.append([f"{lr:.3g}", f"{spread:.3e}", f"{estimate:.3e} ± {e:.0e}", f"{mean:.3e}"])

    start_D, num_rounds = np.ones(3), 240
    large_W = np.array([0.003, 0.01, 0.03])
    traces = [
        theory.simulate(_loss(lr), _OUTER, replicas, num_rounds, runs, start_D, [_SEED, 10 + i])
        for i, lr in enumerate(large_W)
    ]
    exact_W = [theory.mean_trajectory(_loss(lr), _OUTER, start_D, num_rounds) for lr in large_W]
    means = []
    for lr, trace, exact_TD in zip(large_W, traces, exact_W, strict=True):
        estimate, e = _estimate(trace.mean_TRD[-1, :, 0])
        means.append([f"{lr:g}", f"{exact_TD[-1, 0]:.4f}", f"{estimate:.4f} ± {e:.4f}"])
    if out:
        trajectories = {
            float(lr): (exact_TD[:, 0], np.append(start_D[0], trace.mean_TRD[:, :, 0].mean(axis=1)))
            for lr, trace, exact_TD in zip(large_W, traces, exact_W, strict=True)
        }
        line_W = np.geomspace(small_W[0], large_W[-1], 40)
        exact_W2 = np.array([theory.stationary_variances(_loss(lr), _OUTER, replicas) for lr in line_W])
        settled = slice(num_rounds // 2, None)
        of_mean = [_estimate((trace.mean_TRD[settled] ** 2).sum(-1).mean(0)) for trace in traces[1:]]
        over_replicas = [_estimate(y_R) for y_R in spread_WR]
        over_replicas += [_estimate(trace.spread_TR[settled].mean(0)) for trace in traces]
        pictures.quadratic(
            trajectories,
            line_W,
            {"over replicas": exact_W2[:, 0], "of their mean": exact_W2[:, 1]},
            {
                "over replicas": (np.append(small_W, large_W), *np.array(over_replicas).T),
                "of their mean": (large_W[1:], *np.array(of_mean).T),
            },
            out / "quadratic.png",
        )
    return "\n".join(
        [
            "## The theorem on a quadratic loss",
            "",
            f"SGD on ½ (θ − c)ᵀ A (θ − c), A with eigenvalues {', '.join(f'{a:g}' for a in _loss(1).curvatures)}, "
            f"a fresh c ~ N(0, I) a step, {_loss(1).inner_steps} inner steps; NoLoCo with α = {_OUTER.momentum:g}, "
            f"β = {_OUTER.lr:g}, γ = {_OUTER.consensus:g} in random pairs of {replicas} replicas; {runs} runs. "
            f"From 1, the mean of φ goes to the optimum 0; after {num_rounds} outer steps, in the flattest direction:",
            "",
            markdown_table(["inner learning rate ω", "exact", "simulated"], means),
            "",
            "Variance of φ where it settles:",
            "",
            markdown_table(
                ["ω", "over replicas, exact", "over replicas, simulated", "of the replicas' mean, exact"], rows
            ),
            "",
            f"Log-log slope of the variance over replicas, simulated: {slope:.3f} ± {error:.3f} (the theorem: 2). "
            "The replicas' mean keeps SGD's own noise about the optimum, which goes as ω/N: at a small ω or on few "
            "replicas that, not ω², is most of a single replica's variance.",
        ]
    )


def _settled(inner_lr: float, replicas: int, runs: int, seed: list[int]) -> np.ndarray:
    """Return (R,) variances over replicas, averaged over 100 outer steps after 50 to forget the start."""
    trace = theory.simulate(_loss(inner_lr), _OUTER, replicas, 150, runs, np.zeros(3), seed)
    return trace.spread_TR[50:].mean(axis=0)


def _estimate(x_R: np.ndarray) -> tuple[float, float]:
    """Return the mean over independent runs and its standard error."""
    return float(x_R.mean()), float(x_R.std(ddof=1) / math.sqrt(len(x_R)))


def _stability_part(out: Path | None) -> str:
    replicas, momenta, strengths = 16, (0.0, 0.3, 0.5, 0.7, 0.9), (2, 4, 16, 1024)
    rows = []
    for alpha in momenta:
        limits = [theory.stable_consensus_limit(alpha, n) for n in strengths]
        rows.append(
            [f"{alpha:g}", *(f"{found:.4f}" for found in limits), f"{consensus_limit(alpha, strengths[-1]):.4f}"]
        )
    if out:
        marks = {rf"default, $\gamma$ = $\beta$ = {_OUTER.lr:g}": (_OUTER.momentum, _OUTER.consensus)}
        pictures.stability(replicas, marks, out / "stability.png")
    return "\n".join(
        [
            "## Which consensus strengths keep replicas together",
            "",
            "Largest γ for which pairs without gradients come together in mean square, from the spectral radius of the "
            "second-moment operator, and from the closed form γ < 2(1 − α²)/(1 − α/(N − 1)):",
            "",
            markdown_table(
                ["momentum α", *(f"N = {n}" for n in strengths), f"closed form, N = {strengths[-1]}"],
                rows,
            ),
            "",
            "The paper's Eq. 74 is not this bound: at α = 0.9 it admits only γ that diverge.",
        ]
    )


# (section, names of the pictures that it draws into the folder, if one is given)
SECTIONS = [
    (latency_section, ("latency.png",)),
    (blocking_section, ("blocking.png",)),
    (theory_section, ("quadratic.png", "stability.png")),
]
