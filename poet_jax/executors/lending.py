"""What a step keeps for the next one is lent to the system if that does not come."""

import threading
import time
import weakref
from typing import Protocol

# Lending and taking back costs a step of a third of a second 20 to 30 ms, and who
# computes something else meanwhile has hardly begun.
PAUSE_SECONDS = 0.02


class Lendable(Protocol):
    """What may be lent after a pause, by a thread beside its owner's.

    Attributes:
      rests_since: `time.monotonic()` since when nobody uses it; None while somebody
        does, and once it is lent.
    """

    rests_since: float | None

    def lend(self, since: float) -> None:
        """Lend it if it still rests since then."""
        ...


class Lender:
    """A thread that lends what has rested for PAUSE_SECONDS."""

    def __init__(self):
        self._changed = threading.Condition()
        self._known: weakref.WeakSet[Lendable] = weakref.WeakSet()
        self._thread: threading.Thread | None = None

    def watch(self, lendable: Lendable) -> None:
        """Lend it after a pause from now on, unless it is used again."""
        with self._changed:
            self._known.add(lendable)
            if self._thread is None or not self._thread.is_alive():  # as after a fork
                self._thread = threading.Thread(
                    target=self._run, name="poet_jax-lender", daemon=True
                )
                self._thread.start()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (resting := self._resting()):
                    self._changed.wait()
            time.sleep(PAUSE_SECONDS)
            for reference, since in resting:
                if lendable := reference():
                    lendable.lend(since)
                del lendable  # or it would live until the next round

    def _resting(self) -> list[tuple[weakref.ref[Lendable], float]]:
        """What rests, which may be gone before the pause is over."""
        seen = [(weakref.ref(x), x.rests_since) for x in self._known]
        return [(reference, since) for reference, since in seen if since is not None]


lender = Lender()
