"""Report of `python -m noloco_jax.simulate`: a setting that fits the link, and the cost of methods and formats."""

from collections.abc import Sequence
from dataclasses import replace

from noloco_jax.formatting import format_bandwidth, format_bytes, format_count, format_percent, format_seconds
from noloco_jax.simulate import cost

_MODEL = (
    "A message of V bytes takes latency + 8V / bandwidth; links are alike and full duplex; an exchange does not slow "
    "computing down. All-reduces are recursive halving and doubling; FSDP gathers twice and reduces once a "
    "step; both send float32 where the wire is quantized."
)


def report(setting: cost.Setting) -> str:
    """Return the answer, then a table of NoLoCo's wire formats and one of the methods, as Markdown."""
    spread = (
        f"Steps take log-normal times, standard deviation {setting.step_spread:g} of the mean; FSDP, DDP and DiLoCo "
        "wait for the slowest of all, NoLoCo for its group."
        if setting.step_spread
        else "Every step takes the same time; `--step-spread` adds the waiting for stragglers."
    )
    return "\n\n".join(
        [
            f"{format_count(setting.params)} parameters, {setting.replicas} replicas, "
            f"{format_bandwidth(setting.bandwidth)} each way, {format_seconds(setting.latency)} latency, "
            f"{format_seconds(setting.step_time)} of computing a step.",
            answer(setting),
            f"NoLoCo {schedule(setting)}, by wire format:",
            _wires(setting),
            f"Methods, DiLoCo and NoLoCo {schedule(setting)}; bytes are those that one replica sends, in "
            f"{setting.steps} steps in all:",
            _methods(setting),
            f"{_MODEL} {spread}",
        ]
    )


def answer(setting: cost.Setting) -> str:
    """Return a sentence on whether a delay hides NoLoCo's exchange on this link, and the trainer's flags for it."""
    seconds = cost.cost_of(setting, "NoLoCo").seconds_per_sync
    every = setting.sync_every / setting.fragments
    fits = cost.fitting(setting)
    takes = f"an exchange takes {format_seconds(seconds)}"
    if (fits.wire, fits.sync_every) == (setting.wire, setting.sync_every):
        exposed = format_percent(cost.exposed_share(replace(setting, delay=0)))
        text = (
            f"This setting fits the link: {takes}, and outer.delay={fits.delay} is the smallest delay that hides it "
            f"(without a delay, {exposed} of the time is exposed):"
        )
    else:
        text = (
            f"This setting does not fit the link: {takes}, and the {every:.3g} steps to the next one take "
            f"{format_seconds(every * setting.step_time)}. The nearest that fits, with the smallest delay that hides "
            "its exchange:"
        )
    fields = {name: getattr(fits, name) for name in ("sync_every", "fragments", "wire", "delay")}
    return f"{text}\n\n    {' '.join(f'--config.outer.{name}={value}' for name, value in fields.items())}"


def schedule(setting: cost.Setting) -> str:
    """Describe when outer steps happen."""
    each = f" with each of {setting.fragments} fragments" if setting.fragments > 1 else ""
    every = f"every {setting.sync_every} steps" if setting.sync_every > 1 else "every step"
    return every + each + (f", delay {setting.delay}" if setting.delay else "")


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table that is also aligned as plain text; all columns but the first are right-aligned."""
    widths = [max(len(cells[i]) for cells in (header, *rows)) for i in range(len(header))]
    sides = "<" + ">" * (len(header) - 1)
    lines = [
        " | ".join(f"{cell:{side}{width}}" for cell, side, width in zip(cells, sides, widths, strict=True))
        for cells in (header, *rows)
    ]
    rule = " | ".join(
        "-" * width if side == "<" else "-" * (width - 1) + ":" for side, width in zip(sides, widths, strict=True)
    )
    return "\n".join(f"| {line} |" for line in (lines[0], rule, *lines[1:]))


def _wires(setting: cost.Setting) -> str:
    rows = []
    for wire in cost.wires_for(setting.group_size):
        own = replace(setting, wire=wire)
        c = cost.cost_of(own, "NoLoCo")
        rows.append(
            [
                wire,
                format_bytes(c.bytes_per_sync),
                format_seconds(c.seconds_per_sync),
                format_percent(cost.exposed_share(own)),
                _or_none(cost.smallest_delay(own)),
                _or_none(cost.shortest_interval(own)),
            ]
        )
    header = ["wire", "sent each time", "link time", "exposed", "smallest delay that hides it"]
    return markdown_table([*header, "shortest sync_every so hidden"], rows)


def _methods(setting: cost.Setting) -> str:
    rows = []
    for c in cost.costs(setting):
        delay = _or_none(cost.smallest_delay(setting, c.method)) if c.method in cost.OUTER_METHODS else ""
        rows.append(
            [
                c.method,
                f"{c.every:.3g} step{'' if c.every == 1 else 's'}",
                format_bytes(c.bytes_per_step),
                format_bytes(c.bytes_in_all),
                format_seconds(c.seconds_per_sync),
                format_seconds(c.exposed_per_step),
                *([format_seconds(c.waiting_per_step)] if setting.step_spread else []),
                format_percent(c.compute_share),
                delay,
            ]
        )
    waiting = ["waiting a step"] if setting.step_spread else []
    header = ["method", "every", "sent a step", "sent in all", "link time", "exposed a step", *waiting]
    return markdown_table([*header, "time computing", "smallest delay that hides it"], rows)


def _or_none(answer: int | None) -> str:
    return "none" if answer is None else str(answer)
