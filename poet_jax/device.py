"""Device profiles: how fast a device computes and pages, and what energy that takes."""

import dataclasses
import functools
import math
import os
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from poet_jax.store import FileStore


@dataclasses.dataclass(frozen=True)
class DeviceProfile:
    """Constants of a device, in SI units.

    Attributes:
      name: for tables.
      ram_bytes: memory of the device.
      flops_per_second, flops_per_joule: of compute.
      bytes_per_second: of memory traffic; infinite if only FLOPs are counted.
      page_in_latency_seconds, page_in_bytes_per_second: reading from storage.
      page_out_latency_seconds, page_out_bytes_per_second: writing to storage.
      paging_watts: drawn by a transfer, over idle.
      static_watts: drawn throughout the step, whatever runs.
      dispatch_seconds: to start one node.
      measured: True if `price` times each node on this machine instead of computing its
        seconds from the FLOP and byte rates; joules are then seconds times
        flops_per_second / flops_per_joule.
      source: origin of each number; an assumption says "assumed".

    Raises ValueError for a rate or power that is missing, zero where it divides,
    negative or NaN.
    """

    name: str
    ram_bytes: int
    flops_per_second: float
    flops_per_joule: float
    page_in_bytes_per_second: float
    page_out_bytes_per_second: float
    paging_watts: float
    bytes_per_second: float = math.inf
    page_in_latency_seconds: float = 0.0
    page_out_latency_seconds: float = 0.0
    static_watts: float = 0.0
    dispatch_seconds: float = 0.0
    measured: bool = False
    source: str = "assumed"

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int | float):
                continue
            divides = field.name.endswith(("_per_second", "_per_joule", "ram_bytes"))
            if not value >= 0 or (divides and value == 0):
                raise ValueError(
                    f"The profile {self.name!r} was given {field.name}={value}. It "
                    f"must be a {'positive' if divides else 'non-negative'} number in "
                    "SI units. Type the data sheet's value, or an assumed one and say "
                    "so in source."
                )

    @property
    def compute_watts(self) -> float:
        """Power of compute over idle: FLOP/s divided by FLOP/J."""
        return self.flops_per_second / self.flops_per_joule

    def page_in_seconds(self, nbytes: int) -> float:
        return self.page_in_latency_seconds + nbytes / self.page_in_bytes_per_second

    def page_out_seconds(self, nbytes: int) -> float:
        return self.page_out_latency_seconds + nbytes / self.page_out_bytes_per_second


_SD_CARD: dict[str, Any] = {
    "page_in_latency_seconds": 0.109e-3,
    "page_in_bytes_per_second": 4.61651e6,
    "page_out_latency_seconds": 0.113e-3,
    "page_out_bytes_per_second": 4.440e6,
    "paging_watts": 0.33,
}
_PUBLISHED = "constants published with the POET code (Patil et al., ICML 2022)"

MKR1000 = DeviceProfile(
    name="MKR1000 (Cortex-M0+, 48 MHz)",
    ram_bytes=32 * 2**10,
    flops_per_second=2000 / 12e-3,
    flops_per_joule=2000 / 12e-3 / (20e-3 * 3.3),
    source=_PUBLISHED,
    **_SD_CARD,
)
NRF52840 = DeviceProfile(
    name="nRF52840 (Cortex-M4F, 64 MHz)",
    ram_bytes=256 * 2**10,
    flops_per_second=1.6283e9 / 255.6237,
    flops_per_joule=1.6283e9 / 255.6237 / (3.328e-3 * 3.3),
    source=_PUBLISHED,
    **_SD_CARD,
)
RASPBERRY_PI_4 = DeviceProfile(
    name="Raspberry Pi 4B (Cortex-A72), cached storage",
    ram_bytes=2 * 2**30,
    flops_per_second=1.2035e8,
    flops_per_joule=4.0117e7,
    page_in_latency_seconds=5.096e-6,
    page_in_bytes_per_second=45.5e6,
    page_out_latency_seconds=18.53e-6,
    page_out_bytes_per_second=24.5e6,
    paging_watts=0.15,
    source=_PUBLISHED
    + "; FLOP/s from its uncached profile, as 2.0e9 would draw 50 W instead of the "
    "measured 3 W",
)
RASPBERRY_PI_4_UNCACHED = dataclasses.replace(
    RASPBERRY_PI_4,
    name="Raspberry Pi 4B (Cortex-A72), uncached storage",
    page_out_latency_seconds=4.235e-3,
    page_out_bytes_per_second=17.1e6,
)
JETSON_TX2 = DeviceProfile(
    name="Jetson TX2, one core",
    ram_bytes=8 * 2**30,
    flops_per_second=2.0e9,
    flops_per_joule=2.0e9 / 0.766,
    page_in_latency_seconds=0.54e-3,
    page_in_bytes_per_second=108.5e6,
    page_out_latency_seconds=2.396e-3,
    page_out_bytes_per_second=94.37e6,
    paging_watts=0.309,
    source=_PUBLISHED + "; FLOP/s assumed, as none is published",
)

_PROBE_BYTES = 32 * 2**20


@functools.cache
def host() -> DeviceProfile:
    """This machine: nodes are timed one by one, storage by a probe of a second.

    Rates are measured once per process. Power is assumed (10 W for compute on all
    cores; for a transfer, which copies and sums, 2 W and one core's share; over 5 W of
    idle), so its joules are modelled, never measured.
    """
    a = jnp.ones((1024, 1024), jnp.float32)
    matmul = jax.jit(jnp.dot).lower(a, a).compile()
    seconds = best_seconds(lambda: matmul(a, a))
    flops_per_second = 2 * 1024**3 / seconds
    b = jnp.ones(_PROBE_BYTES // 4, jnp.float32)
    negate = jax.jit(jnp.negative).lower(b).compile()
    bytes_per_second = 2 * _PROBE_BYTES / best_seconds(lambda: negate(b))
    page_out, page_in = _storage_bytes_per_second()
    return DeviceProfile(
        name="this machine",
        ram_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        flops_per_second=flops_per_second,
        flops_per_joule=flops_per_second / 10.0,
        bytes_per_second=bytes_per_second,
        page_in_bytes_per_second=page_in,
        page_out_bytes_per_second=page_out,
        paging_watts=2.0 + 10.0 / (os.cpu_count() or 1),
        static_watts=5.0,
        dispatch_seconds=50e-6,
        measured=True,
        source="rates measured in this process; watts and dispatch_seconds assumed",
    )


def best_seconds(run, repeats: int = 3) -> float:
    """Shortest of `repeats` runs after one that warms up; `run` returns jax arrays."""
    jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return min(times)


def _storage_bytes_per_second() -> tuple[float, float]:
    """Rates of writing to and reading from a FileStore, checksums included.

    The first writing does not count: a store reuses its file, so its blocks exist.
    """
    store, data = FileStore(), np.empty(_PROBE_BYTES, np.uint8)
    outs, ins = [], []
    for _ in range(4):
        start = time.perf_counter()
        store.write(0, data, "probe")
        middle = time.perf_counter()
        store.read(0, data, "probe")
        stop = time.perf_counter()
        store.delete(0)
        outs.append(middle - start)
        ins.append(stop - middle)
    store.close()
    return _PROBE_BYTES / min(outs[1:]), _PROBE_BYTES / min(ins[1:])
