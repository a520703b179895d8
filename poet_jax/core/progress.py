"""Progress in one line on a terminal's standard error."""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

_SECONDS = 0.5  # between updates
# Of a stream that is None, has no `isatty`, is closed, or whose reader is gone.
_UNUSABLE = AttributeError, ValueError, OSError


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
    stream = sys.stderr
    if not (show and _is_terminal(stream)):
        yield
        return
    done = threading.Event()

    def rewrite() -> None:
        while not done.wait(_SECONDS):
            _write(stream, text())

    thread = threading.Thread(target=rewrite, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        _write(stream, "")


def _is_terminal(stream: Any) -> bool:
    try:
        return stream.isatty()
    except _UNUSABLE:
        return False


def _write(stream: Any, text: str) -> None:
    """Replace the line by `text`, if the stream still takes it."""
    with contextlib.suppress(*_UNUSABLE):
        print(f"\r\x1b[K{text}", end="", file=stream, flush=True)
