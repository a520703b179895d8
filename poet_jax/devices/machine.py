"""This machine as a device: rates are measured once and kept in a file."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import math
import os
import pathlib
import platform
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from poet_jax.core.device import DeviceProfile
from poet_jax.devices.calibrate import calibrated, described_probes
from poet_jax.stores import library
from poet_jax.stores.store import FileStore, HostStore, Store

_SMALL_BYTES, _PROBE_BYTES = 2**16, 2**25
_PROBES = 12
_PAUSE_SECONDS = 0.005  # between small transfers, about as in a step
_MOST_CONTENTION = 0.9  # even if the machine was busy
# Of a device's memory, for fragments and what else runs there.
RESERVE = 1 / 16
# For a machine that cannot page; its plans do not read these.
_ASSUMED = {
    "page_out_bytes_per_second": 1e9,
    "page_in_bytes_per_second": 1e9,
    "contention": 0.0,
}


def default_store() -> Store:
    """A FileStore on the CPU, host memory on an accelerator."""
    return FileStore() if on_cpu() else HostStore()


def paging_problem() -> str:
    """Why this machine cannot page; empty if it can."""
    return library.problem() if on_cpu() else ""


def _transfers() -> str:
    """Origin of the transfer rates."""
    if on_cpu():
        return "measured: FileStore, 64 KiB and 32 MiB, with checksum, beside products"
    return "measured: HostStore, 64 KiB and 32 MiB, pinned memory, beside products"


def on_cpu() -> bool:
    """Whether JAX's default backend is the CPU."""
    return jax.default_backend() == "cpu"


def host_path() -> pathlib.Path:
    """The file in which `host()` keeps this machine's rates; delete it to recalibrate.

    It is in the folder `poet_jax` of $XDG_CACHE_HOME or ~/.cache. Its name has a hash
    of the machine, JAX's version and devices, the calibration programs, and what a
    profile has.
    """
    folder = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    fields = (field.name for field in dataclasses.fields(DeviceProfile))
    parts = (*described(), _transfers(), described_probes(), *fields)
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
    return pathlib.Path(folder) / "poet_jax" / f"host-{key}.toml"


@functools.cache
def host() -> DeviceProfile:
    """This machine, calibrated: small programs and transfers are timed.

    The first call takes about six seconds on two cores; later ones read the file at
    `host_path()`. Without a writable file, or without paging, every process measures.
    Storage rates are assumed where the machine cannot page. Joules are modelled, never
    measured: 10 W for compute on all cores, 2 W and one core's share for a transfer,
    over 5 W of idle.
    """
    path = host_path()
    try:
        return DeviceProfile.load(path)
    except (OSError, ValueError):
        profile = _measured()
    if paging_problem():
        return profile
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.toml")
        profile.save(part)
        part.replace(path)
    except OSError:  # a read-only home
        pass
    return profile


def described() -> tuple[str, ...]:
    """Processor, cores, host, JAX and its devices, which measured costs depend on."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        names = (x.split(":", 1)[1].strip() for x in file if "model name" in x)
        model = next(names, model)
    devices = sorted({device.device_kind for device in jax.devices()})
    return model, str(os.cpu_count()), platform.node(), jax.__version__, *devices


def _measured() -> DeviceProfile:
    launch_seconds, rates = calibrated()
    problem = paging_problem()
    transfers: dict[str, Any] = _ASSUMED if problem else _transfer_rates()
    said = dict.fromkeys(transfers, f"assumed: {problem}")
    if not problem:
        said = dict.fromkeys(transfers, _transfers()) | {
            "contention": "measured: products done beside those transfers, and alone"
        }
    ram_bytes, memory = _memory()
    flops_per_second = 1 / rates["dot_float32"][-1][1]
    return DeviceProfile(
        name="this machine",
        ram_bytes=ram_bytes,
        flops_per_second=flops_per_second,
        flops_per_joule=flops_per_second / 10.0,
        bytes_per_second=1 / rates["moved"][-1][1],
        link_bytes_per_second=1 / rates["moved"][-1][1],
        paging_watts=2.0 + 10.0 / (os.cpu_count() or 1),
        static_watts=5.0,
        dispatch_seconds=launch_seconds,
        rates=rates,
        **transfers,
        source={
            "ram_bytes": memory,
            "flops_per_second": "measured: the largest product of `rates`",
            "flops_per_joule": "assumed: 10 W for compute on all cores",
            "bytes_per_second": "measured: the largest traffic of `rates`",
            "link_bytes_per_second": "assumed: devices share the memory",
            **said,
            "paging_watts": "assumed: 2 W and one core's share",
            "static_watts": "assumed: 5 W",
            "dispatch_seconds": "measured: a program of a hundred small kernels",
            "rates": "measured: a program for each, see calibrate.PROBES",
        },
    )


def free_bytes(
    devices: Iterable[Any], given_bytes: int, device: DeviceProfile
) -> float:
    """Memory for a step on the fullest of `devices`: free bytes and those of arguments,
    less a reserve of a sixteenth.

    A CPU does not report what is free, and counts with the profile's RAM. The result is
    rounded down to a 64th of the memory, so that a restarted job finds its plan.

    Args:
      given_bytes: of the arguments that each device holds already.
    """
    return min(_free_bytes(x, given_bytes, device) for x in devices)


def _free_bytes(accelerator: Any, given_bytes: int, device: DeviceProfile) -> float:
    try:
        counts = accelerator.memory_stats() or {}
    except jax.errors.JaxRuntimeError:  # it is not on this machine
        counts = {}
    limit = counts.get("bytes_limit") or device.ram_bytes
    used_bytes = max(0, counts.get("bytes_in_use", 0) - given_bytes)
    if math.isinf(limit):
        return limit
    unit = limit // 64 or 1
    return int((1 - RESERVE) * limit - used_bytes) // unit * unit


def _memory() -> tuple[int, str]:
    """(bytes, origin) of the memory that holds arrays.

    An allocator such as `cuda_async` reports a limit of 0, which means none.
    """
    counts = jax.local_devices()[0].memory_stats() or {}
    if limit := counts.get("bytes_limit"):
        return limit, "what JAX may take of the accelerator's memory"
    nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return nbytes, "the system's physical memory"


def _transfer_rates() -> dict[str, Any]:
    """The default store's latencies, rates (checksums included) and contention.

    All cores, or the accelerator, compute meanwhile, as in a step: transfers then take
    up to twice as long. The first transfer, which extends the file, does not count.
    """
    small, large = (np.empty(n, np.uint8) for n in (_SMALL_BYTES, _PROBE_BYTES))
    of_small, of_large, shares = [], [], []
    with (
        contextlib.closing(default_store()) as store,
        concurrent.futures.ThreadPoolExecutor(1) as storage,
        _busy_cores() as count,
    ):

        def transfer(data: np.ndarray) -> tuple[float, float]:
            """Seconds to write and to read, on another thread as in a step."""
            times = [time.perf_counter()]
            for move in _moves(store, data):
                storage.submit(move).result()
                times.append(time.perf_counter())
            return times[1] - times[0], times[2] - times[1]

        for _ in range(_PROBES):
            counts = [count()]
            start = time.perf_counter()
            of_large.append(transfer(large))
            stop = time.perf_counter()
            counts.append(count())
            time.sleep(stop - start)
            counts.append(count())
            rest = time.perf_counter() - stop
            beside, alone = np.diff(counts) / (stop - start, rest)
            shares.append(1 - beside / max(alone, 1))
        for _ in range(_PROBES):
            time.sleep(_PAUSE_SECONDS)
            of_small.append(transfer(small))
    of_small, of_large, share = (
        np.median(x[1:], axis=0) for x in (of_small, of_large, shares)
    )
    per_byte = np.maximum(of_large - of_small, 1e-9) / (_PROBE_BYTES - _SMALL_BYTES)
    latency = np.maximum(0.0, of_small - _SMALL_BYTES * per_byte)
    return {
        "page_out_latency_seconds": float(latency[0]),
        "page_in_latency_seconds": float(latency[1]),
        "page_out_bytes_per_second": float(1 / per_byte[0]),
        "page_in_bytes_per_second": float(1 / per_byte[1]),
        "contention": min(max(0.0, float(share)), _MOST_CONTENTION),
    }


def _moves(store: Store, data: np.ndarray) -> tuple[Callable[[], Any], ...]:
    """Functions that write `data` to the store, or from an accelerator to host memory,
    and read it back."""
    if not on_cpu():
        kinds = ("pinned_host", "device")
        array = jax.block_until_ready(jnp.asarray(data))
        there, here = (array.sharding.with_memory_kind(kind) for kind in kinds)
        page = jax.block_until_ready(jax.device_put(array, there))
        return (
            lambda: jax.block_until_ready(jax.device_put(array, there)),
            lambda: jax.block_until_ready(jax.device_put(page, here)),
        )
    offset = store.allocate(data.nbytes, "probe")
    store.free(offset)  # for the next probe
    place = store.page_at(offset)

    def out() -> None:
        nonlocal place
        place = store.page_at(offset, library.write(place, data, "probe"))

    return out, lambda: library.read(place, data, "probe")


@contextlib.contextmanager
def _busy_cores() -> Iterator[Callable[[], int]]:
    """Compute matrix products on all cores; gives a function that counts them."""
    a = jnp.ones((512, 512), jnp.float32)
    matmul = jax.jit(jnp.dot).lower(a, a).compile()
    done = threading.Event()
    products = 0

    def compute() -> None:
        nonlocal products
        while not done.is_set():
            jax.block_until_ready(matmul(a, a))
            products += 1

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        yield lambda: products
    finally:
        done.set()
        thread.join()
