"""Device profiles: how fast a device computes and pages, and at what power."""

import dataclasses
import itertools
import json
import math
import os
import pathlib
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from poet_jax.core.representation import brief

_CHECKED_ELSEWHERE = ("name", "node_costs", "node_costs_partial", "rates", "source")
_MAY_BE_ZERO = ("_watts", "_seconds", "store_bytes", "contention")  # endings
_MAY_BE_INFINITE = ("bytes_per_second", "_bytes", "flops_per_joule")  # endings

Rates = Mapping[str, Sequence[tuple[float, float]]]


@dataclasses.dataclass(frozen=True)
class DeviceProfile:
    """Constants of a device, in SI units.

    Attributes:
      name: for tables.
      ram_bytes: memory of the device.
      flops_per_second: of float32 matrix products and convolutions.
      flops_per_joule: of the same, over idle; the ratio of both is compute power.
      bytes_per_second: memory bandwidth; infinite counts FLOPs alone.
      link_bytes_per_second: at which a device receives from the others of a step.
      elementwise_flops_per_second: of other operations; None for flops_per_second.
      bfloat16_speedup, int8_speedup: of 16-bit floats and 8-bit integers over float32.
      page_in_latency_seconds, page_in_bytes_per_second: reading from storage.
      page_out_latency_seconds, page_out_bytes_per_second: writing to storage.
      paging_watts: of a transfer, over idle.
      store_bytes: capacity of the storage.
      store_endurance_bytes: writes in the storage's life; infinite if unknown.
      static_watts: of idle, drawn throughout the step.
      dispatch_seconds: to start a node, or with `rates` a kernel.
      contention: share of compute speed, below 1, that a transfer costs; 0 where the
        processor does not move pages (DMA).
      rates: of a calibrated device, in place of the FLOP and byte rates above. Keys are
        kind and dtype, as "dot_float32", or "moved" for memory traffic. Rows are (size,
        seconds per unit of work), of rising size; `work.Work` defines both. Joules are
        then seconds times `compute_watts`.
      node_costs: path of a CSV file with measured seconds and joules of nodes, which
        replace modelled ones; see `devices.write_node_costs`.
      node_costs_partial: whether nodes missing in that file are modelled.
      source: origin of the numbers, one sentence for all or a dict of one for each; an
        assumption says "assumed".

    Raises ValueError for a constant that is missing, negative, NaN, or zero where it
    divides, for a contention of 1 or more, and for `rates` that are not rows of rising
    sizes and positive seconds.
    """

    name: str
    ram_bytes: int
    flops_per_second: float
    flops_per_joule: float
    page_in_bytes_per_second: float
    page_out_bytes_per_second: float
    paging_watts: float
    bytes_per_second: float = math.inf
    link_bytes_per_second: float = math.inf
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

    __repr__ = brief

    def __post_init__(self):
        self._check_texts()
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            if name in _CHECKED_ELSEWHERE or value is None is field.default:
                continue
            least = 0.0 if name.endswith(_MAY_BE_ZERO) else math.nextafter(0, 1)
            most = math.inf if name.endswith(_MAY_BE_INFINITE) else sys.float_info.max
            most = math.nextafter(1, 0) if name == "contention" else most
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not least <= value <= most:
                sign = "positive" if least else "non-negative"
                finite = "" if most == math.inf else " finite"
                below = " below 1" if name == "contention" else ""
                raise ValueError(
                    f"DeviceProfile {self.name!r}: {name} must be a {sign}{finite} "
                    f"number{below} in SI units, got {value!r}. Use the data sheet's "
                    "value, or an assumed one and say so in source."
                )
        if not isinstance(self.rates, Mapping):
            raise ValueError(
                f"DeviceProfile {self.name!r}: rates must be a dict of rows by kind "
                f"and dtype, got {self.rates!r}. Correct them, or leave them out."
            )
        for kind, rows in self.rates.items():
            if not _are_rates(rows):
                raise ValueError(
                    f"DeviceProfile {self.name!r}: the rates of {kind} must be rows of "
                    f"(size, seconds), finite, positive and of rising sizes, got "
                    f"{rows!r}. Correct them, or delete the file to calibrate again."
                )

    def _check_texts(self) -> None:
        sources = {"source": self.source}
        if isinstance(self.source, Mapping):
            sources = {f"source of {name}": x for name, x in self.source.items()}
        path = {} if self.node_costs is None else {"node_costs": self.node_costs}
        for name, text in ({"name": self.name} | sources | path).items():
            kinds = (str, os.PathLike) if name == "node_costs" else str
            if not isinstance(text, kinds):
                raise ValueError(
                    f"DeviceProfile {self.name!r}: {name} must be text, got {text!r}. "
                    "Write it in quotes."
                )

    @property
    def compute_watts(self) -> float:
        """Power of compute over idle: flops_per_second / flops_per_joule."""
        return self.flops_per_second / self.flops_per_joule

    def slowdown(self, matrix: bool, dtype: Any) -> float:
        """Time of a FLOP over that of one in a float32 matrix product."""
        slower = 1.0
        if not matrix and self.elementwise_flops_per_second is not None:
            slower = self.flops_per_second / self.elementwise_flops_per_second
        if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits == 16:
            return slower / self.bfloat16_speedup
        if jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits <= 8:
            return slower / self.int8_speedup
        return slower

    def work_seconds(self, kind: str, dtype: Any, amount: float, size: float) -> float:
        """Time of an `amount` of work by `rates`, interpolated as a power of `size`.

        A dtype without rates takes those of float32, a kind without any those of
        "cheap"; "free" work takes no time.
        """
        names = f"{kind}_{dtype}", f"{kind}_float32", kind, "cheap_float32"
        rows = next((self.rates[name] for name in names if name in self.rates), None)
        if rows is None or kind == "free":
            return 0.0
        sizes, seconds = np.log(rows).T
        place = math.log(max(size, 1))
        return amount * math.exp(np.interp(place, sizes, seconds))

    def page_in_seconds(self, nbytes: int) -> float:
        """Time to read `nbytes` from storage."""
        return self.page_in_latency_seconds + nbytes / self.page_in_bytes_per_second

    def page_out_seconds(self, nbytes: int) -> float:
        """Time to write `nbytes` to storage."""
        return self.page_out_latency_seconds + nbytes / self.page_out_bytes_per_second

    def origin(self, attribute: str) -> str:
        """Origin of the number called `attribute`; "default" if it was not given."""
        if isinstance(self.source, str):
            return self.source
        is_given = attribute in self._given()
        return self.source.get(attribute, "no origin stated" if is_given else "default")

    def _given(self) -> dict[str, Any]:
        """The attributes that differ from their defaults."""
        return {
            field.name: value
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) not in (field.default, {})
        }

    def save(self, path: str | os.PathLike) -> None:
        """Write a file for `load`: TOML, or JSON if the path ends in .json.

        A relative `node_costs` is written relative to the file's folder.
        """
        data = {
            name: dict(value) if isinstance(value, Mapping) else value
            for name, value in self._given().items()
        }
        path = pathlib.Path(path)
        if self.node_costs:
            data["node_costs"] = os.fspath(self.node_costs)
            if not os.path.isabs(self.node_costs):
                data["node_costs"] = os.path.relpath(self.node_costs, path.parent)
        is_json = path.suffix == ".json"
        text = json.dumps(data, indent=1) + "\n" if is_json else _toml(data)
        path.write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike) -> "DeviceProfile":
        """Read a TOML or JSON file, whose keys are the attributes above.

        `source` may be a table with an origin per number. A relative `node_costs` is
        relative to the file. Raises FileNotFoundError, and ValueError for a constant
        that is missing, unknown or invalid.
        """
        path = pathlib.Path(path)
        try:
            text = path.read_text(encoding="utf-8")
            data = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
            if not isinstance(data, dict):
                raise ValueError(f"it holds {text[:60]!r}, and no keys")
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{path} is no TOML, or JSON with a name in .json: {error}. Write a "
                "profile with poet_jax.devices.RASPBERRY_PI_4.save(path) and change "
                "its numbers."
            ) from error
        fields = dataclasses.fields(cls)
        known = [field.name for field in fields]
        required = {
            field.name
            for field in fields
            if field.default is field.default_factory is dataclasses.MISSING
        }
        if required - data.keys() or data.keys() - set(known):
            problems = {
                "lacks": sorted(required - data.keys()),
                "has the unknown": sorted(data.keys() - set(known)),
            }
            what = (f"{verb} {', '.join(x)}" for verb, x in problems.items() if x)
            raise ValueError(
                f"The device profile {path} {' and '.join(what)}. Its keys are "
                f"{', '.join(known)}, in SI units; say in source what is assumed."
            )
        profile = cls(**data)
        if profile.node_costs:
            found = os.path.normpath(path.parent / profile.node_costs)
            profile = dataclasses.replace(profile, node_costs=found)
        rates = {kind: tuple(map(tuple, rows)) for kind, rows in profile.rates.items()}
        return dataclasses.replace(profile, rates=rates)

    def constants(self, defaults: bool = False) -> list[tuple[str, str, str]]:
        """(attribute, value in SI units, origin) of what the profile gives, or with
        `defaults` of every attribute but name and source."""
        rows = []
        listed = vars(self) if defaults else self._given()
        for name, value in listed.items():
            if name in ("name", "source"):
                continue
            if name == "rates":
                value = f"{len(value)} kinds"
            shown = f"{value:.6g}" if isinstance(value, float) else str(value)
            rows.append((name, shown, self.origin(name)))
        return rows

    def __str__(self) -> str:
        rows = (f"  {x:29s} {value:>12s}  {y}" for x, value, y in self.constants())
        return "\n".join([self.name, *rows])


def _are_rates(rows: Any) -> bool:
    """Whether they are finite, positive rows (size, seconds) of rising sizes."""
    pairs = [
        tuple(row)
        for row in (rows if isinstance(rows, Sequence) else ())
        if isinstance(row, Sequence) and len(row) == 2
        if all(isinstance(x, int | float) for x in row)
        if all(0 < x <= sys.float_info.max for x in row)
    ]
    rising = all(a < b for (a, _), (b, _) in itertools.pairwise(pairs))
    return rising and 0 < len(pairs) == len(rows)


_BARE_KEY = re.compile("[A-Za-z0-9_-]+")


def _toml_value(value: Any) -> str:
    """As JSON has it, where TOML demands that DEL is escaped, too."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _toml(data: Mapping[str, Any]) -> str:
    """TOML of strings, numbers, lists and tables; scalars first, as it demands."""
    lines, tables = [], []
    for name, value in data.items():
        name = name if _BARE_KEY.fullmatch(name) else _toml_value(name)
        if isinstance(value, Mapping):
            tables.append(f"\n[{name}]\n{_toml(value)}")
        else:  # written as in JSON
            text = _toml_value(value)
            lines.append(f"{name} = {'inf' if value == math.inf else text}\n")
    return "".join(lines + tables)
