"""Numbers as people write them (`125M`, `1Gbit`, `40ms`), read and printed."""

import re

from noloco_jax.errors import UserError

_SCALES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
_SECONDS = {"": 1.0, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
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
    if unit not in _SECONDS:
        raise UserError(f"{name}={text}: unknown unit {unit!r}, write one of us, ms, s, min, h")
    return number if zero and number == 0 else _positive(number * _SECONDS[unit], name, text)


def parse_bandwidth(text: str, name: str) -> float:
    """A bandwidth in bits per second: `100Mbit`, `1Gbit/s`, `10Gbps`, `25GB/s`. `b` is a bit and `B` is a byte."""
    number, unit = _split(text, name, "a bandwidth such as 100Mbit or 1GB/s")
    bare = re.sub(r"(/s|ps)$", "", unit)
    match = re.fullmatch(r"([kKMGT]?)(bit|b|byte|B)", bare)
    if match is None:
        raise UserError(f"{name}={text}: say whether bits or bytes, such as 100Mbit, 10Gbps or 1GB/s")
    scale, kind = match.groups()
    return _positive(number * _SCALES[scale] * _BITS[kind], name, text)


def format_bytes(value: float) -> str:
    """Bytes with a decimal prefix and three digits: `500 MB`."""
    return _prefixed(value, "B", ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")))


def format_bandwidth(value: float) -> str:
    """Bits per second with a decimal prefix: `1 Gbit/s`."""
    return _prefixed(value, "bit/s", ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")))


def format_seconds(value: float) -> str:
    """Seconds, milliseconds or hours, whichever reads well: `40 ms`."""
    if value >= 3600:
        return f"{value / 3600:.3g} h"
    return _prefixed(value, "s", ((1.0, ""), (1e-3, "m"), (1e-6, "u")))


def format_percent(share: float) -> str:
    """A share of one in percent, three digits: `7.86 %`."""
    return f"{_digits(100 * share)} %"


def _prefixed(value: float, unit: str, prefixes: tuple[tuple[float, str], ...]) -> str:
    for scale, prefix in prefixes:
        if value >= 0.9995 * scale:
            return f"{_digits(value / scale)} {prefix}{unit}"
    return f"{_digits(value)} {unit}"


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
