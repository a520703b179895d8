"""Memory of processes, as the operating system counts and limits it (Linux)."""

import contextlib
import ctypes
import gc
import os
import pathlib
import signal
import threading
import time
from collections.abc import Callable, Iterator

import jax

ROOT = pathlib.Path("/sys/fs/cgroup")
SAMPLE_SECONDS = 2e-4


def high_water_bytes() -> int:
    """VmHWM: the most physical memory that the process held since the last reset."""
    return _status_bytes("VmHWM")


def resident_bytes() -> int:
    """VmRSS: the physical memory that the process holds now."""
    return _status_bytes("VmRSS")


def reset_high_water() -> None:
    """Start VmHWM afresh from the memory held now (see proc(5), clear_refs)."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def _status_bytes(field: str) -> int:
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    raise OSError(
        f"{field} was asked for, and /proc/self/status does not list it. It is there "
        "on Linux only. Run this measurement on Linux."
    )


def settle() -> None:
    """Give the system back what nobody uses: what Python has not collected, and what
    malloc (glibc's) keeps."""
    time.sleep(0.1)  # XLA frees a little after its results are ready
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


class Rise:
    """How far steps raise what the process holds, over what it held besides their
    arguments when this was made; to be compared with a budget.

    On an accelerator it is what its allocator was seen to have in use.

    Attributes:
      last_bytes: of the last step that was watched.
      most_bytes: of all of them.
    """

    def __init__(self):
        settle()
        self.held_bytes = _held_bytes()
        self.last_bytes = self.most_bytes = 0

    @contextlib.contextmanager
    def of(self, argument_bytes: int) -> Iterator[None]:
        """While it lasts, steps run whose arguments, held before, have so many."""
        with _most_held() as most:
            yield
            self.last_bytes = most() - (self.held_bytes - argument_bytes)
        self.most_bytes = max(self.most_bytes, self.last_bytes)


def _held_bytes() -> int:
    """By the process, or on an accelerator by its allocator's count."""
    counts = jax.local_devices()[0].memory_stats()
    return resident_bytes() if counts is None else counts["bytes_in_use"]


@contextlib.contextmanager
def _most_held() -> Iterator[Callable[[], int]]:
    """While it lasts, what `_held_bytes` was at most since it began."""
    if jax.default_backend() == "cpu":
        reset_high_water()
        yield high_water_bytes
        return
    # Its own high-water mark has what autotuning took, and cannot be reset.
    most, done = 0, threading.Event()

    def sample() -> None:
        nonlocal most
        while not done.wait(SAMPLE_SECONDS):
            most = max(most, _held_bytes())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield lambda: most
    finally:
        done.set()
        thread.join()


class MemoryGroup:
    """A cgroup, of version 1 or 2, in which processes share a limit."""

    def __init__(self, name: str, root: pathlib.Path = ROOT):
        old, new = root / "memory", root / "cgroup.controllers"
        self._is_new = new.exists()
        parent = root if self._is_new else old
        self.folder = parent / name
        try:
            if self._is_new and "memory" not in new.read_text().split():
                raise OSError("no memory controller")
            self.folder.mkdir()
        except OSError as error:
            raise OSError(
                f"A memory cgroup was to be made in {parent}, which failed: {error}. "
                "The experiment needs Linux and the right to make one. Run it as root, "
                "or in a container that passes the memory cgroup on."
            ) from error

    def add(self, pid: int) -> None:
        (self.folder / "cgroup.procs").write_text(str(pid))

    def held_bytes(self) -> int:
        """What the group is charged with and cannot drop: all but cached files."""
        text = (self.folder / "memory.stat").read_text()
        stat = {key: int(value) for key, value in map(str.split, text.splitlines())}
        if self._is_new:
            return stat["anon"] + stat["shmem"] + stat["kernel"]
        kernel = (self.folder / "memory.kmem.usage_in_bytes").read_text()
        return stat["rss"] + stat["shmem"] + int(kernel)

    def limit(self, more_bytes: int) -> int:
        """Allow `more_bytes` over what is held now; the limit."""
        limit = self.held_bytes() + more_bytes
        name = "memory.max" if self._is_new else "memory.limit_in_bytes"
        (self.folder / name).write_text(str(limit))
        return limit

    def remove(self) -> None:
        """End what is still in the group, such as a solver, and the group."""
        for _ in range(50):
            for pid in (self.folder / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            with contextlib.suppress(OSError):
                self.folder.rmdir()
                return
            time.sleep(0.1)
