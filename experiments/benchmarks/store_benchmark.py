"""How fast pages move, beside plain direct reads and writes of the same folder.

    python -m experiments.benchmarks.store_benchmark

pages arrays of several sizes out of and into a program, by the custom calls that a step
is made of, checksums included, in turns with a plain loop of direct transfers over a
file of the same bytes, and writes medians to experiments/results/store_benchmark. A
second part pages activations of a network whose layers take about as long as their
transfers, and tells how much of these its gradient hides: what it takes longer than
`jax.jit`, over the seconds of all transfers. Takes a minute. Expect ratios of 0.7 to
1.5, by what else the machine does: two chunks of a large page are on their way at a
time.
"""

import contextlib
import fcntl
import mmap
import os
import statistics
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

import poet_jax
from experiments.program import program, result_flags, write_result
from poet_jax.core.units import format_bytes
from poet_jax.stores import library

FOLDER = flags.DEFINE_string(
    "folder", None, "Where the files are; the system's folder for temporary files."
)
ROUNDS, TOTAL = 5, 2**27  # rounds of each in turns, and bytes moved in each
result_flags("store_benchmark")
SIZES = (2**20, 8 * 2**20, 32 * 2**20)
CHUNK_BYTES = 4 * 2**20
ROWS, WIDTH, LAYERS = 32768, 256, 8  # activations of 32 MiB


@contextlib.contextmanager
def timed(seconds: list[float]):
    start = time.perf_counter()
    yield
    seconds.append(time.perf_counter() - start)


def plain_round(total: int, writes: list[float], reads: list[float]) -> None:
    """A file of `total` bytes, written and read in order past the page cache."""
    with tempfile.TemporaryFile(dir=FOLDER.value, buffering=0) as file:
        flags_now = fcntl.fcntl(file, fcntl.F_GETFL)
        fcntl.fcntl(file, fcntl.F_SETFL, flags_now | os.O_DIRECT)
        buffer = mmap.mmap(-1, CHUNK_BYTES)
        buffer.write(os.urandom(CHUNK_BYTES))
        with timed(writes):
            for offset in range(0, total, CHUNK_BYTES):
                os.pwrite(file.fileno(), buffer, offset)
        with timed(reads):
            for offset in range(0, total, CHUNK_BYTES):
                os.preadv(file.fileno(), [buffer], offset)


def places_in(store: poet_jax.FileStore, nbytes: int, count: int) -> np.ndarray:
    """[count, 4] of room for as many pages."""
    offsets = [store.allocate(nbytes, "page") // 4096 for _ in range(count)]
    file, flags = store.descriptor(), int(store.is_direct)
    return np.array([(file, sector, flags, 0) for sector in offsets], np.uint32)


def programs(nbytes: int, count: int) -> tuple[Any, Any]:
    """Compiled: (`count` page-outs of an array, as many page-ins one after another)."""
    kind = (nbytes,), jnp.uint8
    data = jax.ShapeDtypeStruct(*kind)
    places = jax.ShapeDtypeStruct((count, 4), jnp.uint32)
    records = [jax.ShapeDtypeStruct((1, 6), jnp.uint32)] * count

    def out(data, places):
        return [
            library.page_out(data, data[0], places, row=row, name="page")
            for row in range(count)
        ]

    def back(records, places):
        after, page = records[0], None
        for row, record in enumerate(records):
            page, after = library.page_in(
                kind, after, record, places, row=row, name="page"
            )
        return page

    return (
        jax.jit(out).lower(data, places).compile(),
        jax.jit(back).lower(records, places).compile(),
    )


def store_round(out, back, data: jax.Array, count: int, writes, reads) -> None:
    """`count` pages of `data` through a FileStore."""
    store = poet_jax.FileStore(FOLDER.value)
    places = places_in(store, data.nbytes, count)
    with timed(writes):
        records = jax.block_until_ready(out(data, places))
    with timed(reads):
        into = jax.block_until_ready(back(records, places))
    store.close()
    assert np.array_equal(data, into)


def hidden_share() -> float:
    """Of the seconds of transfers, those that do not make a gradient take longer."""

    def loss(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    weights = [jnp.eye(WIDTH) for _ in range(LAYERS)]
    x = jnp.ones((ROWS, WIDTH))
    plain = jax.jit(jax.grad(loss))
    paged = poet_jax.schedule(
        jax.grad(loss),
        "60%",
        planner=poet_jax.planners.paging_only,
        executor=poet_jax.HostExecutor(poet_jax.FileStore(FOLDER.value)),
    )
    times: tuple[list[float], list[float]] = ([], [])
    longer = []
    for _ in range(ROUNDS + 1):
        for run, seconds in zip((paged, plain), times, strict=True):
            with timed(seconds):
                jax.block_until_ready(run(weights, x))
        longer.append((times[0][-1] - times[1][-1]) / paged.last_run.storage_seconds)
    return 1 - statistics.median(longer[1:])  # without the round that compiles


@program
def main() -> None:
    rows, total = [], TOTAL
    for size in SIZES:
        data = jnp.asarray(np.random.default_rng(0).integers(0, 256, size, np.uint8))
        count = max(1, total // size)
        out, back = programs(size, count)
        store: tuple[list[float], list[float]] = ([], [])
        plain: tuple[list[float], list[float]] = ([], [])
        for _ in range(ROUNDS):
            plain_round(total, *plain)
            store_round(out, back, data, count, *store)
        moved = count * size
        row: dict[str, float] = {"page_bytes": size}
        for verb, ours, theirs in zip(("write", "read"), store, plain, strict=True):
            rate = moved / statistics.median(ours)
            direct = total / statistics.median(theirs)
            row |= {
                f"{verb}_bytes_per_second": rate,
                f"plain_{verb}_bytes_per_second": direct,
                f"{verb}_ratio": rate / direct,
            }
            print(
                f"{format_bytes(size):>9s} pages, {verb:5s} {rate / 1e9:5.2f} GB/s, "
                f"plain {direct / 1e9:5.2f} GB/s, ratio {rate / direct:.2f}",
                flush=True,
            )
        rows.append(row)
    share = hidden_share()
    print(f"{share:.0%} of transfers are hidden under layers that take as long")
    write_result("store", {"rows": rows, "hidden_share": share})


if __name__ == "__main__":
    app.run(main)
