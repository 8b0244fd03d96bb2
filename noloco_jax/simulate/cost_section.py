"""The section on the user's own links: what each method costs there, and what would hide it."""

from pathlib import Path

from noloco_jax.formatting import format_bandwidth, format_bytes, format_count, format_percent, format_seconds
from noloco_jax.simulate import cost, hiding, pictures
from noloco_jax.simulate.table import markdown_table
from noloco_jax.wires import FLOAT_BYTES, block_bytes, block_of


def cost_section(setting: cost.Setting, below: float, seed: int, out: Path | None) -> str:
    """What each method costs on the user's links, and what would hide it; pictures cost.png and exposed.png."""
    rows = []
    for c in cost.costs(setting, seed):
        lost = c.exposed_per_step + c.waiting_per_step
        rows.append(
            [
                c.method,
                f"{c.every:.3g} step{'' if c.every == 1 else 's'}",
                format_bytes(c.bytes_per_sync),
                format_bytes(c.bytes_per_step),
                format_bytes(c.bytes_in_all),
                format_seconds(c.seconds_per_sync),
                format_seconds(c.exposed_per_step),
                *([format_seconds(c.waiting_per_step)] if setting.step_spread else []),
                format_percent(lost / setting.step_time),
                format_percent(c.compute_share),
            ]
        )
    header = [
        "method",
        "every",
        "sent each time",
        "sent a step",
        "sent in all",
        "link time each time",
        "exposed a step",
    ]
    header += ["waiting a step"] if setting.step_spread else []
    header += ["added to a step", "time computing"]
    if out:
        pictures.costs(setting, out / "cost.png")
        pictures.exposed(setting, out / "exposed.png")
    spread = (
        f"Steps take log-normal times, standard deviation {setting.step_spread:g} of the mean; FSDP, DDP and DiLoCo "
        "wait for the slowest of all, NoLoCo for its group."
        if setting.step_spread
        else "Every step takes the same time; `--step-spread` adds the waiting for stragglers, NoLoCo's larger gain."
    )
    return "\n".join(
        [
            "## What communication costs a step",
            "",
            f"{format_count(setting.params)} parameters, {setting.replicas} replicas, "
            f"{format_bandwidth(setting.bandwidth)} each way, {format_seconds(setting.latency)} latency, "
            f"{format_seconds(setting.step_time)} of computing a step. Bytes are those that one replica sends, in "
            f"{setting.steps} steps in all. Exposed is the link time that computing does not hide.",
            "",
            markdown_table(header, rows),
            "",
            *_hiding(setting, below),
            "",
            "Assumptions:",
            "- A message of V bytes takes latency + 8V / bandwidth; all links are alike and full duplex.",
            f"- {_wires(setting)}",
            f"- {_overlap(setting)}",
            f"- NoLoCo: {_when(setting)}, one message of V bytes to each other member of its group of "
            f"{setting.group_size}; of more than 2, which the replicas make evenly, shares of it there and back, where "
            "that is less. Bytes are the mean over replicas, of which some may be in a smaller group.",
            f"- DiLoCo: {_when(setting)}, and DDP every step, one all-reduce ({setting.all_reduce}): "
            f"{_ALL_REDUCE_FORMULAS[setting.all_reduce]}.",
            "- FSDP: every step, two all-gathers of the weights and a reduce-scatter of the gradients, 3(N−1)/N · V, "
            "one collective of each for the whole model.",
            f"- {spread}",
        ]
    )


def _hiding(setting: cost.Setting, below: float) -> list[str]:
    """A table of what would hide the exchanges of the methods with outer steps."""

    def cell(answer: int | str | None) -> str:
        return "none" if answer is None else str(answer)

    rows = [
        [
            method,
            format_percent(hiding.exposed_share(setting, method)),
            cell(hiding.smallest_delay(setting, method)),
            cell(hiding.shortest_interval(setting, method, below)),
            cell(hiding.widest_wire(setting, below)) if method == "NoLoCo" else "",
        ]
        for method in cost.OUTER_METHODS
    ]
    limit = format_percent(below)
    header = ["method", "exposed", "smallest delay that hides all", f"shortest sync_every for {limit}"]
    return [
        f"What would hide the exchanges, or leave at most {limit} of the time exposed, all else equal:",
        "",
        markdown_table([*header, f"widest wire for {limit}"], rows),
    ]


def _when(setting: cost.Setting) -> str:
    each = f" with each of {setting.fragments} fragments" if setting.fragments > 1 else ""
    every = f"every {setting.sync_every} steps" if setting.sync_every > 1 else "every step"
    return every + each


def _wires(setting: cost.Setting) -> str:
    if setting.wire in FLOAT_BYTES:
        return f"Messages are {setting.wire}."
    bits = 8 * block_bytes(setting.wire) / block_of(setting.wire)
    return (
        f"NoLoCo's messages are {setting.wire}, {bits:g} bits a weight with what goes beside a block; all-reduces and "
        "FSDP, which add up what they send, have float32."
    )


def _overlap(setting: cost.Setting) -> str:
    if setting.delay == 0:
        return "All wait for an exchange; `--delay` lets DiLoCo's and NoLoCo's run beside inner steps."
    return (
        f"DiLoCo's and NoLoCo's exchanges run beside the {setting.delay} inner steps after them and do not slow them "
        "down, one at a time and evenly spaced; DDP and FSDP wait for all of theirs."
    )


_ALL_REDUCE_FORMULAS = {
    "halving": "2⌈log₂ N⌉ latency + 2(N−1)/N · V/bandwidth",
    "ring": "2(N−1) latency + 2(N−1)/N · V/bandwidth",
    "tree": "2⌈log₂ N⌉ (latency + V/bandwidth)",
}
