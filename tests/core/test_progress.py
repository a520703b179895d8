"""A line of progress is never a reason to fail."""

import io
import sys
import threading

import pytest

from poet_jax.core.progress import counted, line


class Hung(io.StringIO):
    """A terminal whose reader is gone."""

    def __init__(self):
        super().__init__()
        self.written = threading.Event()

    def isatty(self):
        return True

    def write(self, text):
        self.written.set()
        raise BrokenPipeError


def closed():
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("make", [lambda: None, closed, object, Hung])
def test_work_goes_on_where_standard_error_cannot_be_written(make, monkeypatch):
    stream = make()
    monkeypatch.setattr(sys, "stderr", stream)
    assert list(counted("abc", 3, "letters")) == ["a", "b", "c"]
    if isinstance(stream, Hung):
        stream.written.clear()
        with line(lambda: "working"):
            assert stream.written.wait(10)  # while the block runs, too


def test_the_line_stays_on_the_stream_that_it_began_on(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    first, second = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stderr", first)
    with line(lambda: "working"):
        monkeypatch.setattr(sys, "stderr", second)
    assert first.getvalue().endswith("\r\x1b[K") and second.getvalue() == ""
