"""Promises of each method about its communication, checked in a run's compiled programs."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from noloco_jax.communication.report import EVALUATION, Report, bytes_across_replicas, crosses_replicas, operands_text
from noloco_jax.formatting import format_bytes
from noloco_jax.methods import Method, method_of
from noloco_jax.spmd.hlo import Collective, Traffic

_MESSAGE = "collective-permute"  # sent to a partner, who alone waits for it
_EXCHANGES = ("outer_step", "exchange")


def _may_cross(method: Method, program: str, collective: Collective) -> bool:
    """Return True if the method allows a collective of a program to cross replicas.

    An inner step may only where the method averages gradients, and for micro-batches on their way to another replica's
    stage. A program that brings batches to devices never may: each replica's data are its own.
    """
    if program in _EXCHANGES:
        return collective.kind in method.outer_collectives
    if program != "inner_step":
        return False
    return method.averages_gradients or (collective.kind == _MESSAGE and "stage" in collective.axes)


def _num_partners(report: Report) -> int | None:
    """Return the number of others that a replica sends to in an outer step; None where all wait for each other."""
    num_partners = method_of(report.config).num_partners
    return num_partners and num_partners(report.config)


_TITLES = {
    "share_batch": "batches",
    "inner_step": "inner step",
    "outer_step": "outer step",
    "solo": "solo step",
    "exchange": "exchange",
    "keep": "arrival",
    "moved": "movement",
    "correct_step": "correction",
}


def broken_promises(report: Report) -> list[str]:
    """Return a line for each collective that crosses replicas against the method's promise, and for each excess."""
    method = method_of(report.config)
    broken = [
        f"{title}: {collective.kind} of {operands_text(collective)} crosses {' and '.join(collective.axes)}"
        for program, title in _TITLES.items()
        for collective in (report.traffic[program].collectives() if program in report.traffic else ())
        if crosses_replicas(collective) and not _may_cross(method, program, collective)
    ]
    num_partners = _num_partners(report)
    if num_partners is not None and report.exchanging is not None:
        _, sent = bytes_across_replicas(report.exchanging)
        due = num_partners * report.slots * report.parameter_bytes
        if sent > due:
            broken.append(f"outer step: a device sends {format_bytes(sent)} and its parameters are {format_bytes(due)}")
    return broken


def verdict(report: Report) -> list[str]:
    """Return the findings in plain words, a line a program."""
    lines = [_batch_verdict(report.traffic["share_batch"])] if "share_batch" in report.traffic else []
    lines.append(_inner_verdict(report))
    if report.exchanging is not None:
        lines.append(_outer_verdict(report, report.exchanging))
    lines.append(f"evaluation: {_crossing([report.traffic[name] for name in EVALUATION]) or 'nothing crosses replica'}")
    if report.mesh_shape["replica"] == 1:
        lines.append(f"the replica axis has one device: all {report.slots} replicas meet in its memory")
    lines += [f"BROKEN PROMISE: {text}" for text in broken_promises(report)]
    return lines


def _batch_verdict(traffic: Traffic) -> str:
    return f"batches: one process of a replica reads them; {_crossing([traffic]) or _inside(traffic)}"


def _inner_verdict(report: Report) -> str:
    traffic = report.traffic["inner_step"]
    text = f"inner step: {_crossing([traffic]) or 'nothing crosses replica'}"
    inside = _inside(traffic)
    return text + (f"; {inside}" if inside else "")


def _inside(traffic: Traffic) -> str:
    """Describe the collectives inside replicas; empty if there are none."""
    text = _by_axes([traffic], lambda collective: collective.axes and not crosses_replicas(collective))
    return f"inside a replica {text}" if text else ""


def _outer_verdict(report: Report, traffic: Traffic) -> str:
    partners, name = _num_partners(report), "outer step"
    if "exchange" in report.traffic:
        name = "outer step, over the hosts while the devices train"
    crossing = [collective for collective in traffic.collectives() if crosses_replicas(collective)]
    if partners is None or {collective.kind for collective in crossing} != {_MESSAGE}:
        return f"{name}: {_crossing([traffic]) or 'nothing crosses replica'}"
    least, most = (format_bytes(sent / report.slots / partners) for sent in bytes_across_replicas(traffic))
    _, pieces = traffic.extent(lambda collective: int(crosses_replicas(collective)))
    devices = math.prod(report.mesh_shape.values()) // report.mesh_shape["replica"]  # of one replica
    text = (
        f"{name}: collective-permute alone crosses replica: "
        f"{'a replica' if devices == 1 else f'each of the {devices} devices of a replica'} sends {most} to "
        f"{f'each of its {partners} partners' if partners > 1 else 'its partner'} "
        f"(its parameters are {format_bytes(report.parameter_bytes)}) in {pieces} pieces; "
        f"{report.num_pairings} pairings"
    )
    return text + (f", the fewest bytes of one {least}" if least != most else "")


def _crossing(traffics: Sequence[Traffic]) -> str:
    """Describe the collectives that cross replicas; empty if there are none."""
    text = _by_axes(traffics, crosses_replicas)
    blocking = any(
        crosses_replicas(collective) and collective.kind != _MESSAGE
        for traffic in traffics
        for collective in traffic.collectives()
    )
    return text + (": every replica waits for all others" if blocking else "")


def _by_axes(traffics: Sequence[Traffic], chosen: Callable[[Collective], Any]) -> str:
    """`over fsdp all-gather 2 MB, all-reduce 3 MB and over tensor ...`: bytes of one device in one run."""
    found = {(c.axes, c.kind) for traffic in traffics for c in traffic.collectives() if chosen(c)}
    texts: dict[tuple[str, ...], list[str]] = {}
    for axes, kind in sorted(found):
        most = sum(
            traffic.extent(lambda c, axes=axes, kind=kind: c.bytes * ((c.axes, c.kind) == (axes, kind)))[1]
            for traffic in traffics
        )
        texts.setdefault(axes, []).append(f"{kind} {format_bytes(most)}")
    return " and ".join(f"over {' and '.join(axes)} {', '.join(kinds)}" for axes, kinds in texts.items())
