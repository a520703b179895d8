"""Parse and print sizes, times and energies."""

import math
import re

_BYTE_UNITS = {"b": 1}
for _power, _prefix in enumerate("kmgt", start=1):
    _BYTE_UNITS |= {f"{_prefix}b": 1000**_power, f"{_prefix}ib": 1024**_power}
_SIZE = re.compile(
    r"\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([a-z]+)\s*", re.IGNORECASE
)


def parse_bytes(text: str) -> int:
    """Bytes of a size such as `"64MiB"`, `"1.5 GB"` or `"3000B"`, rounded down.

    Units are decimal (kB, MB, GB, TB) or binary (KiB, MiB, GiB, TiB). Raises ValueError
    for anything else.
    """
    match = _SIZE.fullmatch(text)
    number, unit = match.groups() if match else ("inf", "b")
    nbytes = float(number) * _BYTE_UNITS.get(unit.lower(), math.inf)
    if not math.isfinite(nbytes):
        raise ValueError(
            f"{text!r} is not a size: a finite number and one of B, kB, MB, GB, TB, "
            'KiB, MiB, GiB, TiB. Use for example "64MiB", or "30%" for a percentage.'
        )
    return math.floor(nbytes)


def parse_percent(text: str) -> float:
    """Fraction of a percentage: `"30%"` is 0.3. Raises ValueError unless positive."""
    try:
        fraction = float(text.strip().removesuffix("%")) / 100
    except ValueError:
        fraction = math.nan
    if not 0 < fraction < math.inf:
        raise ValueError(
            f'{text!r} is not a positive percentage; use for example "30%".'
        )
    return fraction


def rounded_up(number: float) -> str:
    """`number` in six digits, rounded up: a bound to pass that is enough."""
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
