"""The process's memory, as Linux with glibc sees it; elsewhere nothing here acts."""

import ctypes
import mmap
import sys
from collections.abc import Callable

_M_ARENA_MAX = -8  # glibc's <malloc.h>
_PAGE_BYTES = mmap.PAGESIZE
_MADV_DONTNEED, _MADV_FREE = 4, 8  # Linux's <mman.h>
_MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 14, 23


def _find_glibc():
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    if not hasattr(library, "malloc_trim"):
        return None
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    # One heap for all threads: what one of XLA's threads frees serves the others.
    library.mallopt(_M_ARENA_MAX, 1)
    return library


_glibc = _find_glibc()


def release() -> None:
    """Return every free page of the C library's heap to the system.

    glibc keeps freed blocks of up to 32 MiB for later use, and a block that fits none
    of them comes on top.
    """
    if _glibc is not None:
        _glibc.malloc_trim(0)


def release_pages(address: int, nbytes: int) -> bool:
    """Return the whole pages of a block to the system; True if that was done.

    The block stays allocated. Its contents are lost, and the next write to it takes new
    pages.
    """
    return _advise(address, nbytes, _MADV_DONTNEED)


def lend_pages(address: int, nbytes: int) -> None:
    """Let the system take the whole pages of a block if it runs short of memory.

    Until it does, writing to the block costs nothing. Its contents may be lost.
    """
    _advise(address, nbytes, _MADV_FREE)


def populate_pages(address: int, nbytes: int) -> None:
    """Take the pages of a released block at once, huge ones where there are any.

    That costs a quarter of taking them one by one as they are written to. A kernel that
    does not know one of these requests (Linux before 5.14) ignores it.
    """
    _advise(address, nbytes, _MADV_HUGEPAGE)
    _advise(address, nbytes, _MADV_POPULATE_WRITE)


def _advise(address: int, nbytes: int, advice: int) -> bool:
    start = -(-address // _PAGE_BYTES) * _PAGE_BYTES
    stop = (address + nbytes) // _PAGE_BYTES * _PAGE_BYTES
    if _glibc is None or stop <= start:
        return False
    return _glibc.madvise(start, stop - start, advice) == 0


def growth_bytes(run: Callable[[], object]) -> int:
    """How much physical memory `run` takes at most, from a trimmed heap on.

    0 where it is not known. On Linux the process's high-water mark (VmHWM) is reset.
    """
    release()
    before = resident_bytes()
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        run()
        with open("/proc/self/status") as file:
            fields = dict(line.split(":", 1) for line in file)
        return max(0, int(fields["VmHWM"].split()[0]) * 1024 - before)
    except (OSError, KeyError):
        return 0


def resident_bytes() -> int:
    """Physical memory of this process now; 0 where it is not known."""
    if _glibc is None:
        return 0
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * _PAGE_BYTES
