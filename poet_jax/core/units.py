"""Parse and print sizes, times and energies."""

import math
import re

_BYTE_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SIZE = re.compile(
    r"\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([a-z]+)\s*", re.IGNORECASE
)


def parse_bytes(text: str) -> int:
    """Bytes named by a size such as `"64MiB"`, `"1.5 GB"` or `"3000B"`.

    Decimal (kB, MB, GB) and binary (KiB, MiB, GiB) units are both understood; a
    fraction of a byte is dropped. Raises ValueError for anything else.
    """
    match = _SIZE.fullmatch(text)
    if match is None or match[2].lower() not in _BYTE_UNITS:
        raise ValueError(
            f"{text!r} was given as a size. A size is a number and a unit: B, kB, MB, "
            'GB, KiB, MiB or GiB. Type for example "64MiB" or "1.5GB".'
        )
    return math.floor(float(match[1]) * _BYTE_UNITS[match[2].lower()])


def parse_percent(text: str) -> float:
    """The fraction named by a percentage: `"30%"` is 0.3. Raises ValueError for what is
    not a positive one."""
    try:
        fraction = float(text.strip().removesuffix("%")) / 100
    except ValueError:
        fraction = math.nan
    if not 0 < fraction < math.inf:
        raise ValueError(
            f"{text!r} was given as a percentage. A percentage is a positive number "
            'followed by a % sign. Type for example "30%".'
        )
    return fraction


def rounded_up(number: float) -> str:
    """At least `number`, in six digits: what to type so that it is enough."""
    return f"{number * (1 + 5e-6):.6g}"


def format_bytes(nbytes: float) -> str:
    """`123456789` is `"117.7 MiB"`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def format_seconds(seconds: float) -> str:
    """`0.0031` is `"3.1 ms"`."""
    return _format_si(seconds, "s")


def format_joules(joules: float) -> str:
    """`0.0031` is `"3.1 mJ"`."""
    return _format_si(joules, "J")


def format_count(count: int, noun: str) -> str:
    """`1, "node"` is `"1 node"` and `2, "node"` is `"2 nodes"`."""
    return f"{count} {noun}" + "s" * (count != 1)


def _format_si(value: float, unit: str) -> str:
    if abs(value) >= 1000:
        return f"{value:,.0f} {unit}"
    for scale, prefix in ((1.0, ""), (1e-3, "m"), (1e-6, "u"), (1e-9, "n")):
        if abs(value) >= scale:
            return f"{value / scale:.3g} {prefix}{unit}"
    return f"0 {unit}" if value == 0 else f"{value:.3g} {unit}"
