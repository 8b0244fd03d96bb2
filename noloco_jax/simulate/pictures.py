"""Pictures of `python -m noloco_jax.simulate`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from noloco_jax.files import write_picture
from noloco_jax.formatting import format_bandwidth, format_count, format_seconds
from noloco_jax.outer.pairing import consensus_limit
from noloco_jax.simulate import cost, theory
from noloco_jax.simulate.report import schedule
from noloco_jax.wires import FLOAT_BYTES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = {"FSDP": "#7f7f7f", "DDP": "#9467bd", "DiLoCo": "#d95f02", "NoLoCo": "#1b7837"}
_DASHES = {"FSDP": "-", "DDP": ":", "DiLoCo": "--", "NoLoCo": "-"}
_CONSENSUS_MAX = 3.0  # top of the γ axis


def latency(sizes: Sequence[int], ratios: Mapping[float, np.ndarray], path: Path) -> None:
    """Draw tree all-reduce over pair exchange against replicas, a line for each std/mean of a message."""
    named = {f"std/mean {variation:g}: {ratio[-1]:.1f}": ratio for variation, ratio in ratios.items()}
    figure, axes = _ratios(sizes, named, "time of an all-reduce / time of a pair's exchange")
    axes.plot(sizes, np.log2(sizes), "k--", lw=1.2, label=r"paper's estimate, $\log_2 n$", zorder=3)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="upper left")
    axes.set_title("A tree all-reduce against NoLoCo's pair, log-normal message times")
    _save(figure, path)


def blocking(sizes: Sequence[int], ratios: Mapping[int, Sequence[float]], title: str, path: Path) -> None:
    """Draw DiLoCo's run time over NoLoCo's against replicas, a line for each number of inner steps."""
    named = {f"{steps} inner steps": ratio for steps, ratio in ratios.items()}
    figure, axes = _ratios(sizes, named, "DiLoCo's run time / NoLoCo's")
    axes.set_ylim(bottom=1)
    axes.set_title(title)
    _save(figure, path)


def costs(setting: cost.Setting, path: Path) -> None:
    """Draw seconds of communication a step against replicas, and share of time computing against bandwidth."""
    figure = _figure(11)
    left, right = figure.subplots(1, 2)
    replicas, bandwidths = [2**k for k in range(1, 13)], _bandwidths_around(setting)
    hidden: list[str] = []
    for method in cost.METHODS:
        style = {"color": _COLORS[method], "ls": _DASHES[method], "lw": 2, "label": method}
        added = [cost.cost_of(_with_replicas(setting, n), method).exposed_per_step for n in replicas]
        left.plot(replicas, added, **style)
        hidden += [] if any(added) else [method]
        share = [100 * cost.cost_of(replace(setting, bandwidth=b), method).compute_share for b in bandwidths]
        right.plot(bandwidths, share, **style)
    left.axhline(setting.step_time, color="k", lw=1)
    left.annotate(
        f"computing: {format_seconds(setting.step_time)} a step",
        (replicas[-1], setting.step_time),
        xytext=(0, 4),
        textcoords="offset points",
        ha="right",
        fontsize=9,
    )
    if hidden:
        left.text(0.98, 0.02, f"hidden: {', '.join(hidden)}", transform=left.transAxes, ha="right", fontsize=9)
    left.axvline(setting.replicas, color="k", lw=0.8, ls=":")
    _log_2_axis(left, replicas[::2])
    left.set_yscale("log")
    left.yaxis.set_major_formatter(lambda value, _: format_seconds(value))
    left.set_ylabel("communication added to a step")
    left.set_title(f"{format_bandwidth(setting.bandwidth)}, {format_seconds(setting.latency)} latency")
    _bandwidth_axis(right, setting)
    right.set_ylabel("share of the time spent computing (%)")
    right.set_ylim(0, 101)
    right.set_title(f"{setting.replicas} replicas")
    right.legend(frameon=False)
    figure.suptitle(f"{format_count(setting.params)} parameters, DiLoCo and NoLoCo {schedule(setting)}")
    _save(figure, path)


def exposed(setting: cost.Setting, path: Path) -> None:
    """Draw the share of time that NoLoCo's exchanges cost against bandwidth: float32 whole, in fragments, quantized.

    A setting with the defaults is drawn with 8 fragments, int6 and the delay from one fragment to the next.
    """
    fragments = setting.fragments if setting.fragments > 1 else 8
    quantized = "int6" if setting.wire in FLOAT_BYTES else setting.wire
    delay = setting.delay or max(setting.sync_every // fragments, 1)
    whole = replace(setting, wire="float32", fragments=1, delay=delay)
    in_parts = replace(whole, fragments=fragments)
    lines = {
        "float32, whole": whole,
        f"float32, {fragments} fragments": in_parts,
        f"{quantized}, {fragments} fragments": replace(in_parts, wire=quantized),
    }
    figure, bandwidths = _figure(6.4), _bandwidths_around(setting)
    axes = figure.subplots()
    for (name, line), color in zip(lines.items(), _shades(len(lines)), strict=True):
        shares = [100 * cost.exposed_share(replace(line, bandwidth=b)) for b in bandwidths]
        axes.plot(bandwidths, shares, color=color, lw=2, label=name)
    _bandwidth_axis(axes, setting)
    axes.set_ylabel("share of the time that waits for links (%)")
    axes.set_ylim(-1, 101)
    axes.legend(frameon=False)
    axes.set_title(f"{format_count(setting.params)} parameters, NoLoCo {schedule(whole)}")
    _save(figure, path)


def quadratic(
    trajectories: Mapping[float, tuple[np.ndarray, np.ndarray]],
    inner_lrs: np.ndarray,
    exact: Mapping[str, np.ndarray],
    simulated: Mapping[str, tuple[np.ndarray, np.ndarray, np.ndarray]],
    path: Path,
) -> None:
    """Draw the theorem on the quadratic loss.

    Args:
      trajectories: for an inner learning rate, the exact and the simulated distance of mean φ from the optimum by
        outer step.
      inner_lrs: abscissae of `exact`.
      exact: variances by name.
      simulated: by the same names, inner learning rates, estimates and their standard errors.
      path: path of the PNG.
    """
    figure = _figure(11)
    left, right = figure.subplots(1, 2)
    for (lr, (line, points)), color in zip(trajectories.items(), _shades(len(trajectories)), strict=True):
        left.plot(line, color=color, label=rf"$\omega$ = {lr:g}")
        every = max(1, len(points) // 30)
        left.plot(np.arange(len(points))[::every], points[::every], "o", markersize=3.5, color=color)
    left.axhline(0, color="k", lw=0.8)
    left.set_xlabel("outer step")
    left.set_ylabel(r"mean of $\phi$ (flattest direction; optimum 0)")
    left.set_title("The mean goes to the optimum")
    left.legend(frameon=False, title="lines exact, dots simulated")
    for (name, values), color in zip(exact.items(), ("#1b7837", "#d95f02"), strict=True):
        right.loglog(inner_lrs, values, color=color, label=name)
        if name in simulated:
            lrs, estimate, error = simulated[name]
            right.errorbar(lrs, estimate, 2 * error, fmt="o", markersize=4.5, color=color, capsize=2)
    corner = float(inner_lrs[0])
    for slope, values in ((2, exact["over replicas"]), (1, exact["of their mean"])):
        reference = values[0] * (inner_lrs / corner) ** slope
        right.loglog(inner_lrs, reference, "k:", lw=1, label="slopes 2 and 1" if slope == 2 else None)
    right.set_xlabel(r"inner learning rate $\omega$")
    right.set_ylabel(r"stationary variance of $\phi$")
    right.set_title(r"Replicas differ as $\omega^2$, their mean as $\omega/N$")
    right.legend(frameon=False, loc="upper left")
    _save(figure, path)


def stability(num_replicas: int, marks: Mapping[str, tuple], path: Path) -> None:
    """Draw the spectral radius of the second-moment operator over (α, γ), with the exact limit of γ.

    Args:
      num_replicas: N of the map; the limit is also drawn for 2 replicas and for very many.
      marks: (α, γ) points by name.
      path: path of the PNG.
    """
    figure = _figure(7.6)
    axes = figure.subplots()
    alphas, gammas = np.linspace(0, 0.995, 161), np.linspace(0.003, _CONSENSUS_MAX, 161)
    operator = theory.moment_operator(alphas, gammas[:, None], theory.removed_share(num_replicas))
    radius = theory.spectral_radius(operator)
    stable = np.ma.masked_greater(radius, 1)
    mesh = axes.pcolormesh(
        alphas, gammas, stable, cmap="YlGnBu_r", vmin=0.5, vmax=1, shading="gouraud", rasterized=True
    )
    axes.set_facecolor("#f2dcd5")
    axes.contour(alphas, gammas, radius, levels=[1.0], colors="#c51b7d", linewidths=4, alpha=0.5)
    fine = np.linspace(0, 0.999, 400)
    for n, style in ((num_replicas, "k-"), (2, "k--"), (10**9, "k:")):
        name = {2: "2 replicas", 10**9: "very many replicas"}.get(n, f"{n} replicas")
        axes.plot(fine, [consensus_limit(float(a), n) for a in fine], style, lw=1.6, label=rf"exact limit, {name}")
    axes.plot([], [], color="#c51b7d", lw=4, alpha=0.5, label=f"spectral radius 1, {num_replicas} replicas")
    for (name, (alpha, gamma)), marker in zip(marks.items(), "o^sD", strict=False):
        axes.plot(alpha, gamma, marker, color="white", markeredgecolor="k", markersize=8, label=name, ls="none")
    axes.text(0.78, 0.6 * _CONSENSUS_MAX, "replicas drift apart", ha="center", color="#7a3b2a")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, _CONSENSUS_MAX)
    axes.set_xlabel(r"outer momentum $\alpha$")
    axes.set_ylabel(r"consensus strength $\gamma$")
    axes.set_title(f"Where pairs keep {num_replicas} replicas together")
    axes.legend(loc="upper right", fontsize=8.5, framealpha=0.95)
    figure.colorbar(mesh, label="mean-square deviation left after a round (slowest mode)")
    _save(figure, path)


def _figure(width: float) -> "Figure":
    from matplotlib.figure import Figure  # here: slow to import

    return Figure(figsize=(width, 4.6), dpi=150, layout="constrained")


def _ratios(sizes: Sequence[int], named: Mapping[str, Any], ylabel: str) -> "tuple[Figure, Axes]":
    """Return a figure with a labelled line a name over the numbers of replicas."""
    figure = _figure(6.4)
    axes = figure.subplots()
    for (name, ratio), color in zip(named.items(), _shades(len(named)), strict=True):
        axes.plot(sizes, ratio, marker="o", markersize=4, color=color)
        end = (sizes[-1], float(ratio[-1]))
        axes.annotate(name, end, xytext=(8, 0), textcoords="offset points", va="center", color=color)
    _log_2_axis(axes, sizes)
    axes.set_xlim(right=sizes[-1] * 6)
    axes.set_ylabel(ylabel)
    return figure, axes


def _save(figure: "Figure", path: Path) -> None:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    write_picture(path, figure)


def _shades(count: int) -> list:
    import matplotlib

    return [matplotlib.colormaps["viridis"](x) for x in np.linspace(0, 0.8, count)]


def _log_2_axis(axes: "Axes", sizes: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(sizes), [str(n) for n in sizes])
    axes.minorticks_off()
    axes.set_xlabel("replicas")


def _with_replicas(setting: cost.Setting, replicas: int) -> cost.Setting:
    return replace(setting, replicas=replicas, group_size=min(setting.group_size, replicas))


def _bandwidths_around(setting: cost.Setting) -> np.ndarray:
    return np.geomspace(setting.bandwidth / 1e3, setting.bandwidth * 1e3, 121)


def _bandwidth_axis(axes: "Axes", setting: cost.Setting) -> None:
    axes.axvline(setting.bandwidth, color="k", lw=0.8, ls=":")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: format_bandwidth(value))
    axes.tick_params(axis="x", labelsize=8)
    axes.set_xlabel("bandwidth of a replica's link")
