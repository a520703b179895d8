"""How fast pages move, beside plain direct reads and writes of the same folder.

    python -m experiments.store_benchmark

writes and reads arrays of several sizes through `FileStore`, checksums included, in
turns with a plain loop of direct transfers over a file of the same bytes, and writes
medians to experiments/results/store_benchmark. The arrays start at pages of memory, as
those of a step do. Takes a minute. Expect ratios of 0.7 to 1, by what else the
machine does.
"""

import contextlib
import fcntl
import mmap
import os
import statistics
import sys
import tempfile
import time

import numpy as np
from absl import app, flags

import poet_jax
from experiments.steps import write_result
from poet_jax.units import format_bytes

FOLDER = flags.DEFINE_string(
    "folder", None, "Where the files are; the system's folder for temporary files."
)
ROUNDS = flags.DEFINE_integer("rounds", 5, "Rounds of each, in turns.", 1)
TOTAL = flags.DEFINE_integer("total_mib", 128, "MiB moved in a round.", 1)
OUTPUT = flags.DEFINE_string(
    "output", "experiments/results/store_benchmark", "Folder for the result."
)
SIZES = (2**20, 8 * 2**20, 32 * 2**20)
CHUNK_BYTES = 4 * 2**20


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


def pages(nbytes: int) -> np.ndarray:
    """[nbytes] that start at a page of memory, and are in RAM as a step's buffers."""
    memory = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
    memory[:] = 1
    return memory


def store_round(data: np.ndarray, count: int, writes, reads) -> None:
    """`count` pages of `data` through a FileStore."""
    store, into = poet_jax.FileStore(FOLDER.value), pages(data.nbytes)
    with timed(writes):
        for key in range(count):
            store.write(key, data, "page")
    with timed(reads):
        for key in range(count):
            store.read(key, into, "page")
    store.close()
    assert np.array_equal(data, into)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    total = TOTAL.value * 2**20
    rows = []
    for size in SIZES:
        data = pages(size)
        data[:] = np.random.default_rng(0).integers(0, 256, size, np.uint8)
        store: tuple[list[float], list[float]] = ([], [])
        plain: tuple[list[float], list[float]] = ([], [])
        for _ in range(ROUNDS.value):
            plain_round(total, *plain)
            store_round(data, max(1, total // size), *store)
        moved = max(1, total // size) * size
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
    command = f"python -m experiments.store_benchmark {' '.join(sys.argv[1:])}".strip()
    result = {"command": command, "rows": rows}
    write_result(OUTPUT.value, "store", result)


if __name__ == "__main__":
    app.run(main)
