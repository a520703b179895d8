"""Ctrl-C in the middle of a step, when the old state is partly gone and the new one not
yet there."""

import contextlib
import signal
import threading
from collections.abc import Iterator

# Long enough for the caller to take the result of a step, and not felt by anybody.
DELAY_SECONDS = 0.01


class _Waiting:
    """A handler that notes one Ctrl-C, and leaves the next ones to that before it."""

    def __init__(self, previous):
        self.previous = previous
        self.came = False

    def __call__(self, number, frame) -> None:
        if self.came:
            self.previous(number, frame)
        self.came = True


_timer: threading.Timer | None = None  # of a Ctrl-C that has waited


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Ctrl-C while it lasts takes effect when the caller has the result; a second one
    at once.

    That is at the next use of this, or soon after this one. Only the main thread is
    ever interrupted, and only if Ctrl-C calls a Python function, as it does by default.
    """
    global _timer
    handler = signal.getsignal(signal.SIGINT)
    main = threading.current_thread() is threading.main_thread()
    if not main or not callable(handler) or isinstance(handler, _Waiting):
        yield
        return
    if _timer is not None:
        timer, _timer = _timer, None
        timer.cancel()
        signal.raise_signal(signal.SIGINT)
    waiting = _Waiting(handler)
    signal.signal(signal.SIGINT, waiting)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if waiting.came:
            _timer = threading.Timer(DELAY_SECONDS, _interrupt)
            _timer.daemon = True
            _timer.start()


@contextlib.contextmanager
def let_through() -> Iterator[None]:
    """While it lasts, Ctrl-C is not held back: what runs is not yet the step."""
    handler = signal.getsignal(signal.SIGINT)
    main = threading.current_thread() is threading.main_thread()
    if not main or not isinstance(handler, _Waiting):
        yield
        return
    signal.signal(signal.SIGINT, handler.previous)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _interrupt() -> None:
    global _timer
    if _timer is not threading.current_thread():
        return
    _timer = None
    if hasattr(signal, "pthread_kill"):  # which ends a wait of the main thread's
        main = threading.main_thread().ident
        signal.pthread_kill(main, signal.SIGINT)  # type: ignore[arg-type]
    else:
        signal.raise_signal(signal.SIGINT)
