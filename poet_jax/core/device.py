"""Device profiles: how fast a device computes and pages, and what energy that takes."""

import dataclasses
import json
import math
import os
import pathlib
import sys
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

_TEXTS = ("name", "node_costs", "source")
_OTHERS = ("node_costs_partial", "rates")
_MAY_BE_ZERO = ("_watts", "_seconds", "store_bytes", "contention")  # endings
# Endings of what may be infinite, which means that it does not count.
_BOUNDLESS = ("bytes_per_second", "_bytes", "flops_per_joule")


Rates = Mapping[str, Sequence[tuple[float, float]]]


@dataclasses.dataclass(frozen=True)
class DeviceProfile:
    """Constants of a device, in SI units.

    Attributes:
      name: for tables.
      ram_bytes: memory of the device.
      flops_per_second: of float32 matrix products and convolutions.
      flops_per_joule: of the same, over idle; their ratio is the power of compute.
      bytes_per_second: of memory traffic; infinite if only FLOPs are counted.
      elementwise_flops_per_second: of everything else; None if it is the same.
      bfloat16_speedup, int8_speedup: rates of 2-byte floats and of 1-byte types over
        float32's.
      page_in_latency_seconds, page_in_bytes_per_second: reading from storage.
      page_out_latency_seconds, page_out_bytes_per_second: writing to storage.
      paging_watts: drawn by a transfer, over idle.
      store_bytes: room on storage.
      store_endurance_bytes: that may be written in the storage's life; infinite if that
        is not known.
      static_watts: drawn throughout the step, whatever runs.
      dispatch_seconds: to start one node, or with `rates` one kernel of a node.
      contention: share of compute's speed, below 1, that a transfer takes while it
        lasts; 0 where other hardware than the processor moves pages.
      rates: of a calibrated device, what `price` computes seconds from instead of the
        FLOP and byte rates above: by kind of work and type, as "dot_float32", rows of
        (size, seconds for each unit of work), with rising sizes. `kernels.Work` says
        what a unit and a size is; "moved" is for a byte of memory traffic, by the bytes
        that a kernel moves. Joules are then seconds times `compute_watts`.
      node_costs: path of a CSV file with measured nodes, whose seconds and joules
        replace what is computed; see `devices.write_node_costs`.
      node_costs_partial: whether nodes that the file lacks are priced as without it.
      source: origin of each number, a sentence for all or one for each attribute; an
        assumption says "assumed".

    Raises ValueError for a rate or power that is missing, zero where it divides,
    negative or NaN, and for a contention of 1 or more.
    """

    name: str
    ram_bytes: int
    flops_per_second: float
    flops_per_joule: float
    page_in_bytes_per_second: float
    page_out_bytes_per_second: float
    paging_watts: float
    bytes_per_second: float = math.inf
    elementwise_flops_per_second: float | None = None
    bfloat16_speedup: float = 1.0
    int8_speedup: float = 1.0
    page_in_latency_seconds: float = 0.0
    page_out_latency_seconds: float = 0.0
    store_bytes: float = math.inf
    store_endurance_bytes: float = math.inf
    static_watts: float = 0.0
    dispatch_seconds: float = 0.0
    contention: float = 0.0
    rates: Rates = dataclasses.field(default_factory=dict, hash=False)
    node_costs: str | None = None
    node_costs_partial: bool = False
    source: str | Mapping[str, str] = dataclasses.field(default="assumed", hash=False)

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in (*_TEXTS, *_OTHERS):
                continue
            if value is None and field.default is None:
                continue
            number = isinstance(value, int | float) and not isinstance(value, bool)
            divides = not field.name.endswith(_MAY_BE_ZERO)
            most = math.inf if field.name.endswith(_BOUNDLESS) else sys.float_info.max
            if field.name == "contention":
                most = math.nextafter(1, 0)
            if not number or not 0 <= value <= most or (divides and value == 0):  # type: ignore[operator]
                sign = "positive" if divides else "non-negative"
                finite = "" if most == math.inf else ", finite"
                below = " below 1" if field.name == "contention" else ""
                raise ValueError(
                    f"The profile {self.name!r} was given {field.name}={value!r}. It "
                    f"must be a {sign}{finite} number{below} in SI units. Type the "
                    "data sheet's value, or an assumed one and say so in source."
                )

        for kind, rows in self.rates.items():
            sizes = [size for size, _ in rows]
            rising = all(a < b for a, b in zip(sizes, sizes[1:], strict=False))
            positive = all(0 < x < math.inf for row in rows for x in row)
            if not (rows and rising and positive):
                raise ValueError(
                    f"The profile {self.name!r} was given the rates {rows!r} of "
                    f"{kind}. They are rows of a size and seconds, finite and "
                    "positive, with rising sizes. Correct them, or delete the file of "
                    "a calibrated machine, which is then calibrated again."
                )

    @property
    def compute_watts(self) -> float:
        """Power of compute over idle: FLOP/s divided by FLOP/J."""
        return self.flops_per_second / self.flops_per_joule

    def slowdown(self, matrix: bool, dtype: Any) -> float:
        """How much longer than a FLOP of a float32 matrix product one FLOP takes."""
        slower = 1.0
        if not matrix and self.elementwise_flops_per_second is not None:
            slower = self.flops_per_second / self.elementwise_flops_per_second
        if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits == 16:
            return slower / self.bfloat16_speedup
        if jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits <= 8:
            return slower / self.int8_speedup
        return slower

    def work_seconds(self, kind: str, dtype: Any, amount: float, size: float) -> float:
        """Time of an `amount` of work by `rates`, between their sizes as a power law.

        Work in a type without a rate takes as long as in float32, and of a kind without
        one as "cheap"; "free" takes none.
        """
        names = f"{kind}_{dtype}", f"{kind}_float32", kind, "cheap_float32"
        rows = next((self.rates[name] for name in names if name in self.rates), None)
        if rows is None or kind == "free":
            return 0.0
        sizes, seconds = np.log(rows).T
        place = math.log(max(size, 1))
        return amount * math.exp(np.interp(place, sizes, seconds))

    def page_in_seconds(self, nbytes: int) -> float:
        """Time of reading a value of `nbytes` from storage."""
        return self.page_in_latency_seconds + nbytes / self.page_in_bytes_per_second

    def page_out_seconds(self, nbytes: int) -> float:
        """Time of writing a value of `nbytes` to storage."""
        return self.page_out_latency_seconds + nbytes / self.page_out_bytes_per_second

    def origin(self, attribute: str) -> str:
        """Where the number called `attribute` is from; "default" if nobody gave one."""
        field = {f.name: f for f in dataclasses.fields(self)}[attribute]
        if isinstance(self.source, str):
            return self.source
        given = getattr(self, attribute) not in (field.default, {})
        return self.source.get(attribute, "no origin stated" if given else "default")

    def save(self, path: str | os.PathLike) -> None:
        """Write the profile as TOML, or as JSON if the path ends so; see `load`."""
        data = {
            field.name: dict(value) if isinstance(value, Mapping) else value
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) not in (field.default, {})
        }
        if pathlib.Path(path).suffix == ".json":
            text = json.dumps(data, indent=1) + "\n"
        else:
            text = "".join(_toml_lines(data))
        pathlib.Path(path).write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike) -> "DeviceProfile":
        """The profile in a TOML or JSON file, whose keys are the attributes above.

        `source` may be a table with an origin for each number. A relative `node_costs`
        is looked for beside the file. Raises ValueError for a constant that is missing,
        unknown or makes no sense, and FileNotFoundError.
        """
        path = pathlib.Path(path)
        text = path.read_text(encoding="utf-8")
        try:
            data = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        except ValueError as error:
            raise ValueError(
                f"{path} was to be read as a device profile: {error}. A profile is a "
                "TOML file, or a JSON file whose name ends so. Write one with "
                "poet_jax.devices.RASPBERRY_PI_4.save(path), and change its numbers."
            ) from error
        known = {field.name: field for field in dataclasses.fields(cls)}
        missing = [
            name
            for name, field in known.items()
            if field.default is field.default_factory is dataclasses.MISSING
            and name != "source"
            and name not in data
        ]
        unknown = sorted(set(data) - set(known))
        if missing or unknown:
            what = f"lacks {', '.join(missing)}" if missing else ""
            what += " and " if missing and unknown else ""
            what += f"has the unknown {', '.join(unknown)}" if unknown else ""
            raise ValueError(
                f"The device profile {path} {what}. A profile has "
                f"{', '.join(n for n in known if n not in _TEXTS[1:])}. Correct the "
                "file, in SI units; what is assumed says so in source."
            )
        if "rates" in data:
            data["rates"] = {
                kind: tuple(tuple(row) for row in rows)
                for kind, rows in data["rates"].items()
            }
        if data.get("node_costs"):
            data["node_costs"] = str(path.parent / data["node_costs"])
        return cls(**data)

    def constants(self, defaults: bool = False) -> list[tuple[str, str, str]]:
        """(attribute, value in SI units, origin) of what the profile gives, or with
        `defaults` of every attribute but name and source."""
        rows = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            is_default = value in (field.default, {})
            if field.name in ("name", "source") or (is_default and not defaults):
                continue
            if field.name == "rates":
                value = f"{len(value)} kinds"
            shown = f"{value:.6g}" if isinstance(value, float) else str(value)
            origin = "default" if is_default else self.origin(field.name)
            rows.append((field.name, shown, origin))
        return rows

    def __str__(self) -> str:
        rows = (f"  {x:29s} {value:>12s}  {y}" for x, value, y in self.constants())
        return "\n".join([self.name, *rows])


def _toml_lines(data: dict[str, Any]):
    """Scalars first, as TOML wants; JSON's strings and numbers are TOML's, too."""
    for name, value in data.items():
        if not isinstance(value, Mapping):
            text = json.dumps(value, ensure_ascii=False)
            yield f"{name} = {'inf' if value == math.inf else text}\n"
    for name, table in data.items():
        if isinstance(table, Mapping):
            yield f"\n[{name}]\n"
            yield from _toml_lines(dict(table))
