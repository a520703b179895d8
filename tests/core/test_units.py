"""Sizes, times and energies, as read and as printed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poet_jax.core.units import (
    format_bytes,
    format_joules,
    format_seconds,
    parse_bytes,
    parse_percent,
)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("64MiB", 64 * 2**20),
        ("1.5 GB", 1_500_000_000),
        ("3000B", 3000),
        (" 2 kib ", 2048),
        (".5KiB", 512),
        ("1e3 kB", 1_000_000),
        ("1.9B", 1),
        ("2TiB", 2 * 2**40),
    ],
)
def test_sizes_are_read(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    "text",
    [
        *("", "64", "MiB", "-1MiB", "64 MiBs", "1.2.3MB", "%", "150 percent"),
        *("1e400B", "1e300TB"),
    ],
)
def test_what_is_not_a_size_is_refused_with_what_to_use(text):
    with pytest.raises(ValueError, match='"64MiB", or "30%"'):
        parse_bytes(text)


@given(st.integers(0, 2**40), st.sampled_from(["B", "kB", "KiB", "MiB"]))
def test_whole_numbers_of_units_are_exact(count, unit):
    size = {"B": 1, "kB": 1000, "KiB": 1024, "MiB": 2**20}[unit]
    assert parse_bytes(f"{count}{unit}") == count * size


def test_percentages():
    assert parse_percent("30%") == 0.3
    assert parse_percent(" 12.5 % ") == 0.125
    with pytest.raises(ValueError, match='"30%"'):
        parse_percent("much%")


@pytest.mark.parametrize(
    ("show", "value", "text"),
    [
        (format_bytes, 0, "0 B"),
        (format_bytes, 1023, "1023 B"),
        (format_bytes, 1024, "1.0 KiB"),
        (format_bytes, 123456789, "117.7 MiB"),
        (format_bytes, 2**42, "4.0 TiB"),
        (format_seconds, 0.0031, "3.1 ms"),
        (format_seconds, 0, "0 s"),
        (format_seconds, 12.34, "12.3 s"),
        (format_joules, 0.0031, "3.1 mJ"),
        (format_joules, 2e-6, "2 uJ"),
        (format_joules, 5e-9, "5 nJ"),
    ],
)
def test_numbers_are_printed(show, value, text):
    assert show(value) == text


@given(st.integers(0, 2**50))
def test_what_is_printed_is_read_back_within_its_rounding(nbytes):
    read = parse_bytes(format_bytes(nbytes))
    assert read == pytest.approx(nbytes, rel=0.06, abs=1)
