"""Numbers as people write them (`125M`, `1Gbit`, `40ms`), read and printed: the one place of number formats."""

import re
from collections.abc import Sequence

from noloco_jax.errors import UserError

_SCALES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
_SECONDS_OF_UNIT = {"": 1.0, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_BITS = {"bit": 1.0, "b": 1.0, "byte": 8.0, "B": 8.0}


def parse_count(text: str, name: str) -> float:
    """A positive count: `125M`, `1.3B`, `6.8e9`."""
    number, unit = _split(text, name, "a number such as 125M or 1.3B")
    if unit not in _SCALES:
        raise UserError(f"{name}={text}: unknown suffix {unit!r}, write one of K, M, B, T")
    return _positive(number * _SCALES[unit], name, text)


def parse_seconds(text: str, name: str, zero: bool = False) -> float:
    """A time in seconds: `40ms`, `1.2s`, `2min`, `0.5`. Zero only where `zero` allows it."""
    number, unit = _split(text, name, "a time such as 40ms or 1.2s")
    if unit not in _SECONDS_OF_UNIT:
        raise UserError(f"{name}={text}: unknown unit {unit!r}, write one of us, ms, s, min, h")
    return number if zero and number == 0 else _positive(number * _SECONDS_OF_UNIT[unit], name, text)


def parse_bandwidth(text: str, name: str) -> float:
    """A bandwidth in bits per second: `100Mbit`, `1Gbit/s`, `10Gbps`, `25GB/s`. `b` is a bit and `B` is a byte."""
    number, unit = _split(text, name, "a bandwidth such as 100Mbit or 1GB/s")
    bare = re.sub(r"(/s|ps)$", "", unit)
    match = re.fullmatch(r"([kKMGT]?)(bit|b|byte|B)", bare)
    if match is None:
        raise UserError(f"{name}={text}: say whether bits or bytes, such as 100Mbit, 10Gbps or 1GB/s")
    scale, kind = match.groups()
    return _positive(number * _SCALES[scale] * _BITS[kind], name, text)


def format_count(value: float) -> str:
    """A count with three digits: `125M`, `12.3k`."""
    return _scaled(value, _COUNT)


def format_tokens_per_second(value: float) -> str:
    """A training speed: `12.3k tokens/s`."""
    return f"{format_count(value)} tokens/s"


def format_si(value: float, unit: str = "") -> str:
    """Any figure with a decimal prefix before its unit: `19.5 TFLOP/s`, or `19.5 T` where a heading has the unit."""
    return _prefixed(value, unit).rstrip()


def format_bytes(value: float) -> str:
    """Bytes of a message or of a file, with a decimal prefix: `500 MB`."""
    return _prefixed(value, "B")


def format_memory(value: float) -> str:
    """Bytes of a device's or a host's memory, with a binary prefix: `1.5 GiB`."""
    return _scaled(value, _MEMORY)


def format_bandwidth(value: float) -> str:
    """Bits per second with a decimal prefix: `1 Gbit/s`."""
    return _prefixed(value, "bit/s")


def format_seconds(value: float) -> str:
    """Microseconds, milliseconds, seconds or hours, whichever reads well: `40 ms`."""
    return _scaled(value, _DURATION) if value else "0 s"


def format_clock(seconds: float) -> str:
    """Minutes and seconds, with hours where there are any: `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_percent(share: float) -> str:
    """A share of one in percent, three digits: `7.86 %`."""
    return f"{_digits(100 * share)} %"


def format_perplexity(value: float | None) -> str:
    """Three decimals, or four digits of a huge one: `4.804`. None is shown as infinite, see `or_infinity`."""
    number = or_infinity(value)
    return f"{number:.4g}" if number >= 1e5 else f"{number:.3f}"


def format_spread(value: float | None) -> str:
    """A replica spread: `9.60e-05`. None is shown as infinite, see `or_infinity`."""
    return f"{or_infinity(value):.2e}"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Format a Markdown table that is also aligned as plain text; all columns but the first `left` end at the right."""
    widths = [max(len(cells[i]) for cells in (header, *rows)) for i in range(len(header))]
    sides = ["<" if i < left else ">" for i in range(len(header))]
    rule = ["-" * (width - 1) + ("-" if side == "<" else ":") for width, side in zip(widths, sides, strict=True)]
    return "\n".join(
        f"| {' | '.join(f'{cell:{side}{width}}' for cell, side, width in zip(cells, sides, widths, strict=True))} |"
        for cells in (header, rule, *rows)
    )


def or_infinity(value: float | None) -> float:
    """A figure that was not finite is None in metrics.jsonl; here it is infinite."""
    return float("inf") if value is None else float(value)


# Sizes of units with what is written behind the number, the largest first.
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_COUNT = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_MEMORY = ((2.0**40, " TiB"), (2.0**30, " GiB"), (2.0**20, " MiB"), (2.0**10, " KiB"), (1.0, " B"))
_DURATION = ((3600.0, " h"), (1.0, " s"), (1e-3, " ms"), (1e-6, " us"))


def _prefixed(value: float, unit: str) -> str:
    return _scaled(value, [(size, f" {prefix}{unit}") for size, prefix in _PREFIXES])


def _scaled(value: float, units: Sequence[tuple[float, str]]) -> str:
    """Three digits and the largest unit that leaves a number of one or more."""
    size, unit = next((entry for entry in units if value >= 0.9995 * entry[0]), units[-1])
    return f"{_digits(value / size)}{unit}"


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.3g}"


def _split(text: str, name: str, example: str) -> tuple[float, str]:
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?|[0-9]+\.)\s*([A-Za-z/]*)\s*", text)
    if match is None:
        raise UserError(f"{name}={text}: write {example}")
    return float(match.group(1)), match.group(2)


def _positive(value: float, name: str, text: str) -> float:
    if not 0 < value < float("inf"):
        raise UserError(f"{name}={text}: must be greater than zero and finite")
    return value
