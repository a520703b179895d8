"""Progress in one line on a terminal's standard error."""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

_SECONDS = 0.5  # between updates


def counted(items: Iterable, total: int, label: str) -> Iterable[Any]:
    """Yield `items` and show how many of `total` were reached."""
    number = 0
    with line(lambda: f"{label}: {number} of {total}", show=total > 0):
        for number, item in enumerate(items, start=1):  # noqa: B007
            yield item


@contextlib.contextmanager
def line(text: Callable[[], str], show: bool = True) -> Iterator[None]:
    """Show `text()` while the block runs, then erase it.

    Nothing is shown if `show` is False or standard error is no terminal.
    """
    if not (show and sys.stderr.isatty()):
        yield
        return
    done = threading.Event()

    def rewrite() -> None:
        while not done.wait(_SECONDS):
            print(f"\r\x1b[K{text()}", end="", file=sys.stderr, flush=True)

    thread = threading.Thread(target=rewrite, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
