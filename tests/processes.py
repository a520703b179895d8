"""Processes of their own: for Python code, programs, and cases of tests."""

import contextlib
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import traceback

import pytest

# Set where a case of tests/process/ runs by itself.
CASE = "POET_JAX_CASE"
SECONDS = 300.0


def python(code, **environment):
    """Standard output of a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return done.stdout


def run_python(code, folder):
    """A process that has `step(store)`, a step that pages, and the folder's store."""
    code = f"""
import os, resource, sys, time
sys.path.insert(0, {os.path.dirname(__file__)!r})
import poet_jax
from toy import W, X, paging
store = poet_jax.FileStore({str(folder)!r})
step = paging(store)
{textwrap.dedent(code)}
"""
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        text=True,
    )


def run_module(name, output, *flags):
    """The output of `python -m experiments.<name>`, which defines flags of its own."""
    command = [sys.executable, "-m", f"experiments.{name}", f"--output={output}"]
    done = subprocess.run([*command, *flags], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


class Cases:
    """A process in which cases of tests run, one after the other.

    Imports take seconds: it is forked from one that has only imported.
    """

    def __init__(self, folder):
        self.folder, self.process = folder, None

    def start(self):
        forking = multiprocessing.get_context("forkserver")
        forking.set_forkserver_preload(["optax", "flax", "poet_jax", "processes"])
        self.connection, theirs = forking.Pipe()
        arguments = theirs, self.folder
        self.process = forking.Process(target=_serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()

    def run(self, name):
        """What pytest says of a case, "" if it passes."""
        if self.process is None:
            self.start()
        with tempfile.TemporaryDirectory() as temporary:
            said = pathlib.Path(temporary) / "said"
            self.connection.send(([name, f"--basetemp={temporary}/folders"], said))
            code = None
            with contextlib.suppress(EOFError):
                if self.connection.poll(SECONDS):
                    code = self.connection.recv()
            if code is None:
                self.process.join(1.0)
                self.process.kill()
                code = self.end()
            return f"{said.read_text()}\nended with {code}" if code else ""

    def end(self):
        """How the process ends."""
        if self.process is None:
            return 0
        self.connection.close()
        self.process.join(SECONDS)
        code, self.process = self.process.exitcode, None
        return code


def _serve(connection, folder):
    os.chdir(folder)
    os.environ |= {CASE: "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    with contextlib.suppress(EOFError):
        while True:
            arguments, said = connection.recv()
            with open(said, "w") as file:
                for descriptor in (1, 2):
                    os.dup2(file.fileno(), descriptor)
            connection.send(int(pytest.main(arguments)))


def workers():
    """Numbers of the processes of solvers that this process has running (Linux)."""
    children: list[str] = []
    for path in pathlib.Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has ended since
            children += path.read_text().split()
    found = set()
    for number in children:
        with contextlib.suppress(OSError):
            command = pathlib.Path(f"/proc/{number}/cmdline").read_text()
            found |= {int(number)} if "worker.py" in command else set()
    return found


def at_each_worker(act):
    """Call `act(its number)` soon after a solver's process starts, before it can have
    an answer."""
    seen = workers()

    def look():
        for number in workers() - seen:
            seen.add(number)
            time.sleep(0.05)
            act(number)

    return _meanwhile(look)


@contextlib.contextmanager
def _meanwhile(look):
    """Call `look()` again and again in another thread."""
    is_over = threading.Event()

    def watch():
        while not is_over.wait(0.001):
            look()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def interrupted_waits(count):
    """Ctrl-C the first `count` times that this thread waits for JAX."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    waiting, seen = threading.get_ident(), []

    def look():
        for frame, _ in traceback.walk_stack(sys._current_frames()[waiting]):
            is_new = frame.f_code.co_name == "block_until_ready" and frame not in seen
            if is_new and len(seen) < count:
                seen.append(frame)
                os.kill(os.getpid(), signal.SIGINT)

    return _meanwhile(look)


def interrupted():
    """Ctrl-C whenever a solver has begun."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return at_each_worker(lambda number: os.kill(os.getpid(), signal.SIGINT))
