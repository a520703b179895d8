"""The process's memory, as Linux with glibc sees it; elsewhere nothing here acts."""

import contextlib
import ctypes
import functools
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

_M_ARENA_MAX = -8  # glibc's <malloc.h>
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
MAPPED_BYTES, _MOST_MAPPINGS = 2**25, 2**16
_RETURNED_BYTES, _MOST_FREE_BYTES = 2**20, 2**26
# To free 64 KiB or more makes glibc look at what is free at the heap's end.
_FOOTHOLD_BYTES = 2**17
PAGE_BYTES = mmap.PAGESIZE
# Of a block in glibc's heap: what lies before it, and the least that it occupies. To
# find 64 aligned bytes takes that much, and the least block, more.
_HEADER_BYTES, _LEAST_CHUNK_BYTES, _ALIGNING_BYTES = 8, 32, 96
# So far before a multiple of 64 bytes, what an array's block does not need is cut off
# its beginning. Elsewhere it is cut off its end, too, and splits what is free there.
LEAD_BYTES = 80
# Free blocks that may lie between the one that is looked for and what is asked for.
MOST_HOLES = 100
# Of free blocks, when the pages of the larger ones are returned.
_LARGEST_PIECE_BYTES, _SMALLEST_PIECE_BYTES = 2**26, 2**18
# XLA's threads free what they used a millisecond or more after results are ready.
SETTLING_SECONDS = 0.005
_MADV_DONTNEED, _MADV_FREE = 4, 8  # Linux's <mman.h>
_MADV_HUGEPAGE, _MADV_NOHUGEPAGE, _MADV_POPULATE_WRITE = 14, 15, 23
_MAP_FIXED = 16
_MREMAP_MAYMOVE, _MREMAP_FIXED, _MREMAP_DONTUNMAP = 1, 2, 4


class _HeapInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`, of which `keepcost` is the size of the heap's top."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks "
        "fordblks keepcost".split()
    )


def _find_glibc():
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    if not hasattr(library, "malloc_trim"):
        return None
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    size, flags = ctypes.c_size_t, ctypes.c_int
    library.mremap.argtypes = [ctypes.c_void_p, size, size, flags, ctypes.c_void_p]
    library.mremap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, size, flags, flags, flags, size]
    library.mmap.restype = ctypes.c_void_p
    library.mincore.argtypes = [ctypes.c_void_p, size, ctypes.c_void_p]
    library.malloc.argtypes = [size]
    library.malloc.restype = ctypes.c_void_p
    library.realloc.argtypes = [ctypes.c_void_p, size]
    library.realloc.restype = ctypes.c_void_p
    library.free.argtypes = [ctypes.c_void_p]
    library.free.restype = None
    library.sbrk.argtypes = [ctypes.c_ssize_t]
    library.sbrk.restype = ctypes.c_void_p
    library.open_memstream.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.open_memstream.restype = ctypes.c_void_p
    library.malloc_info.argtypes = [flags, ctypes.c_void_p]
    library.fclose.argtypes = [ctypes.c_void_p]
    if hasattr(library, "mallinfo2"):
        library.mallinfo2.restype = _HeapInfo
    # One heap for all threads: what one of XLA's threads frees serves the others.
    library.mallopt(_M_ARENA_MAX, 1)
    return library


_glibc = _find_glibc()


@functools.cache
def is_shared() -> bool:
    """Whether all threads allocate from one heap.

    Threads that ran before this module was imported, as in a notebook, have heaps of
    their own, and glibc has later ones, such as XLA's, share them.
    """
    return _count_heaps() <= 1


def _count_heaps() -> int:
    """How many glibc has; 0 where that is not known to be more than one."""
    if _glibc is None:
        return 0
    text, size = ctypes.c_void_p(), ctypes.c_size_t()
    file = _glibc.open_memstream(ctypes.byref(text), ctypes.byref(size))
    if not file:
        return 0
    _glibc.malloc_info(0, file)
    _glibc.fclose(file)
    count = ctypes.string_at(text.value or 0, size.value).count(b"<heap nr=")
    _glibc.free(text)
    return count


_releasing = threading.Lock()


@functools.cache
def _footholds() -> list[int]:
    """Blocks of all heaps, as far as new threads come by them."""
    blocks: list[int] = []
    count = 2 * _count_heaps()  # a thread that has ended may leave its heap to the next
    together = threading.Barrier(count)

    def take() -> None:
        blocks.append(allocate(_FOOTHOLD_BYTES))
        together.wait()

    threads = [threading.Thread(target=take, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return blocks


def release() -> None:
    """Return every free page of the C library's heap to the system.

    glibc keeps freed blocks of up to 32 MiB for later use, and a block that fits none
    of them comes on top.
    """
    if _glibc is None:
        return
    _glibc.malloc_trim(0)  # not the ends of other heaps than the first
    if is_shared():
        return
    with _releasing:
        blocks = _footholds()
        _glibc.mallopt(_M_TRIM_THRESHOLD, 0)
        for _ in range(len(blocks)):
            block = _glibc.realloc(blocks.pop(0), 1)
            blocks.append(_glibc.realloc(block, _FOOTHOLD_BYTES))
        _glibc.mallopt(_M_TRIM_THRESHOLD, _MOST_FREE_BYTES)


def release_blocks() -> None:
    """Return the pages of the larger free blocks, while `keeping_freed_blocks` lasts.

    `release` visits all, of which tracing and compiling leave tens of thousands, and
    took 10 ms where this took one, and left a megabyte of 27.
    """
    if _glibc is None:
        return
    end = _glibc.sbrk(0)
    # A piece for which there is no free block does not make the heap grow.
    _set_mappings(_SMALLEST_PIECE_BYTES, _MOST_MAPPINGS)
    free_all(_occupied(_LARGEST_PIECE_BYTES, _SMALLEST_PIECE_BYTES, end))
    _map_as_in_a_step()


def returns_pages() -> bool:
    """Whether pages can be returned to the system: not where the process locks them."""
    page = mmap.mmap(-1, PAGE_BYTES)
    return release_pages(ctypes.addressof(ctypes.c_char.from_buffer(page)), 1)


@contextlib.contextmanager
def keeping_freed_blocks() -> Iterator[None]:
    """While it lasts, freed blocks stay in the heap for the next ones, however large.

    Otherwise glibc maps a block of more than 32 MiB anew each time, and gives back what
    is free at the heap's top; these are the limits that it comes to by itself, too.
    Where threads do not share one heap, no other could use what one has freed, and
    blocks of a megabyte are returned to the system at once.
    """
    if _glibc is None:
        yield
        return
    try:
        _map_as_in_a_step()
        if is_shared():
            _glibc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        yield
    finally:
        _set_mappings(MAPPED_BYTES, _MOST_MAPPINGS)
        _glibc.mallopt(_M_TRIM_THRESHOLD, _MOST_FREE_BYTES)


def _map_as_in_a_step() -> None:
    if is_shared():
        _set_mappings(MAPPED_BYTES, 0)
    else:
        _set_mappings(_RETURNED_BYTES, _MOST_MAPPINGS)


def _set_mappings(least_bytes: int, most: int) -> None:
    """A block of at least so much, for which the heap has no room, is a mapping of its
    own, unless there are `most` of them."""
    assert _glibc is not None
    _glibc.mallopt(_M_MMAP_THRESHOLD, least_bytes)
    _glibc.mallopt(_M_MMAP_MAX, most)


def allocate(nbytes: int) -> int:
    """The address of a new block of the heap; 0 if there is none."""
    return (_glibc.malloc(nbytes) or 0) if _glibc is not None else 0


def free(address: int) -> None:
    """Give back a block that `allocate` returned, or 0."""
    if _glibc is not None:
        _glibc.free(address)


def occupy_holes(most_bytes: int, least_bytes: int) -> list[int]:
    """Blocks that take up what is free of the heap, in pieces of `most_bytes` down to
    `least_bytes`, but for its top: the next large block will come from there.

    The blocks take no memory: their pages are returned to the system.
    """
    if _glibc is None or not hasattr(_glibc, "mallinfo2"):
        return []
    top = _glibc.sbrk(0) - _glibc.mallinfo2().keepcost
    return _occupied(most_bytes, least_bytes, top)


def _occupied(most_bytes: int, least_bytes: int, end: int) -> list[int]:
    """Blocks that take up what is free before `end`; their pages are returned."""
    blocks, nbytes = [], most_bytes
    while nbytes >= least_bytes:
        block = allocate(nbytes)
        if 0 < block < end:
            release_pages(*whole_pages(block, nbytes))
            blocks.append(block)
        else:
            free(block)
            nbytes //= 2
    return blocks


def clear_way(nbytes: int, address: int, tolerance: int = 0) -> list[int]:
    """Blocks in the way, to be freed later: the next block of `nbytes` lies at
    `address`, or up to `tolerance` after it, if there is enough free.

    They are what would fit better, and what is free right before `address` and so part
    of the same free block. They take no pages, and keep what they have.
    """
    blocks: list[int] = []
    if _glibc is None:
        return blocks
    for _ in range(MOST_HOLES):
        block = allocate(nbytes)
        if not block:
            break
        before = address - block
        if -tolerance <= before < _LEAST_CHUNK_BYTES:
            free(block)
            return blocks
        if 0 < before < nbytes:  # made smaller, as a new one might lie elsewhere
            block = _glibc.realloc(block, before - _HEADER_BYTES)
        blocks.append(block)
    free_all(blocks)  # another thread was first
    return blocks


def free_all(blocks: list[int], free: Callable[[int], None] = free) -> None:
    """Free blocks, and empty the list."""
    while blocks:
        free(blocks.pop())


@contextlib.contextmanager
def block_at_a_page(nbytes: int) -> Iterator[None]:
    """While it lasts, the next array of `nbytes` starts at a page of memory.

    It does not where another thread takes the place, or the C library is another one.
    """
    if _glibc is None:
        yield
        return
    if not is_shared():
        _set_mappings(MAPPED_BYTES, 0)  # the block is one of the heap's
    blocks = []
    block = allocate(nbytes + 2 * PAGE_BYTES)
    if block:
        place = -(-(block + _LEAST_CHUNK_BYTES) // PAGE_BYTES) * PAGE_BYTES
        # All from there on is freed.
        block = _glibc.realloc(block, place - block - _HEADER_BYTES)
        blocks = [block, *clear_way(nbytes + _ALIGNING_BYTES, place)]
    try:
        yield
    finally:
        free_all(blocks)
        if not is_shared():
            _map_as_in_a_step()


def pages_in_ram(address: int, count: int) -> bytearray:
    """[count] 1 for each page that is in RAM, else 0."""
    flags = bytearray(count)
    if _glibc is not None and count:
        vector = (ctypes.c_char * count).from_buffer(flags)
        if _glibc.mincore(address, count * PAGE_BYTES, vector):
            return bytearray(count)
    return flags


def whole_pages(address: int, nbytes: int) -> tuple[int, int]:
    """(address, count) of the pages that lie within a block."""
    start = -(-address // PAGE_BYTES) * PAGE_BYTES
    return start, max(0, (address + nbytes - start) // PAGE_BYTES)


def move_pages(source: int, target: int, count: int) -> bool:
    """Give the physical memory of `count` pages to others; True if that was done.

    Nothing is copied or cleared, so it takes microseconds. Both blocks stay allocated;
    what the target held is lost, and the next write to the source takes new pages.
    """
    return moves_pages() and _remap(source, target, count)


@functools.cache
def moves_pages() -> bool:
    """Whether pages can be moved that were moved before, as on Linux since 6.17.

    Then a block is several mappings to the kernel. An older one refuses to move pages
    of more than one, after it has unmapped the target, which is safe to try out only
    on pages that nobody needs.
    """
    if _glibc is None:
        return False
    first, second = (
        mmap.mmap(-1, 2 * PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for _ in range(2)
    )
    here, there = (
        ctypes.addressof(ctypes.c_char.from_buffer(x)) for x in (first, second)
    )
    first[:PAGE_BYTES] = b"1" * PAGE_BYTES
    if _remap(here, there, 1) and _remap(there, here, 2):
        return True
    _unused.extend((first, second))  # what is there now may not be theirs to unmap
    return False


_unused: list[mmap.mmap] = []


def _remap(source: int, target: int, count: int) -> bool:
    assert _glibc is not None
    nbytes = count * PAGE_BYTES
    flags = _MREMAP_MAYMOVE | _MREMAP_FIXED | _MREMAP_DONTUNMAP
    return _glibc.mremap(source, nbytes, nbytes, flags, target) == target


def release_pages(address: int, count: int) -> bool:
    """Return pages to the system; True if that was done.

    Their block stays allocated. Its contents are lost, and the next write to it takes
    new pages.
    """
    return _advise(address, count, _MADV_DONTNEED)


def renew_pages(address: int, count: int) -> None:
    """Return pages to the system and make of them one mapping of the kernel's again.

    Each move of pages splits mappings, of which a process may have 65,530.
    """
    if _glibc is not None and count:
        access = mmap.PROT_READ | mmap.PROT_WRITE
        kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        _glibc.mmap(address, count * PAGE_BYTES, access, kind, -1, 0)


def count_mappings() -> int:
    """The kernel's mappings of this process; 0 where they are not known."""
    if _glibc is None:
        return 0
    with open("/proc/self/maps", "rb", buffering=0) as file:
        # In parts: all of it would be megabytes that no budget knows of.
        parts = iter(functools.partial(file.read, 2**16), b"")
        return sum(part.count(b"\n") for part in parts)


def lend_pages(address: int, count: int) -> None:
    """Let the system take pages if it runs short of memory.

    Until it does, writing to them costs nothing. Their contents may be lost.
    """
    _advise(address, count, _MADV_FREE)


def recall_pages(address: int, count: int) -> None:
    """Lent pages are not the system's any more; what it took of them is taken anew."""
    _advise(address, count, _MADV_POPULATE_WRITE)


def populate_pages(address: int, count: int) -> None:
    """Take released pages at once, huge ones where there are any.

    That costs half to a quarter of taking them one by one as they are written to.
    Afterwards huge ones are refused, as the kernel would go on to complete them with
    pages that are not needed. A kernel that does not know one of these requests (Linux
    before 5.14) ignores it.
    """
    _advise(address, count, _MADV_HUGEPAGE)
    _advise(address, count, _MADV_POPULATE_WRITE)
    _advise(address, count, _MADV_NOHUGEPAGE)


def refuse_huge_pages() -> None:
    """Have the kernel take pages of the heap one by one again, but in `populate_pages`.

    NumPy asks for huge ones for each array of 4 MiB or more, and the kernel remembers
    that of a place when the array is gone. Then the first byte that is written there
    takes 2 MiB, also of blocks beside it whose pages were returned.
    """
    start = _first_address()
    if _glibc is not None and start:
        _advise(start, (_glibc.sbrk(0) - start) // PAGE_BYTES, _MADV_NOHUGEPAGE)


@functools.cache
def _first_address() -> int:
    """Where the heap of the first thread begins; 0 where that is not known."""
    with contextlib.suppress(OSError), open("/proc/self/maps") as file:
        for line in file:
            if line.endswith("[heap]\n"):
                return int(line.split("-", 1)[0], 16)
    return 0


def _advise(address: int, count: int, advice: int) -> bool:
    if _glibc is None:
        return False
    return _glibc.madvise(address, count * PAGE_BYTES, advice) == 0


def growth_bytes(run: Callable[[], object]) -> int:
    """How much physical memory `run` takes at most, from a trimmed heap on.

    0 where it is not known. On Linux the process's high-water mark (VmHWM) is reset.
    """
    time.sleep(SETTLING_SECONDS)
    release()
    refuse_huge_pages()
    before = resident_bytes()
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        with keeping_freed_blocks():  # as in a step
            run()
        with open("/proc/self/status") as file:
            fields = dict(line.split(":", 1) for line in file)
        return max(0, int(fields["VmHWM"].split()[0]) * 1024 - before)
    except (OSError, KeyError):
        return 0


def resident_bytes() -> int:
    """Physical memory of this process now; 0 where it is not known."""
    return sum(held_bytes())


def held_bytes() -> tuple[int, int]:
    """(of its own, of files and shared) physical memory of this process now."""
    if _glibc is None:
        return 0, 0
    _, resident, shared, *_ = map(int, os.pread(_open_statm(), 256, 0).split())
    return (resident - shared) * PAGE_BYTES, shared * PAGE_BYTES


@functools.cache
def _open_statm() -> int:
    """A descriptor of the process's sizes: opening takes longer than reading."""
    return os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)


os.register_at_fork(after_in_child=_open_statm.cache_clear)
