"""Importing the package does nothing beyond that."""

import os
import subprocess
import sys

CODE = """
import os, signal, sys, threading
import jax
from jax._src import xla_bridge

def state():
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    return dict(os.environ), handlers, threading.active_count()

before = state()
import poet_jax
assert state() == before
assert not xla_bridge.backends_are_initialized()
heavy = {"flax", "mip", "matplotlib", "optax"}
assert heavy.isdisjoint(sys.modules), heavy.intersection(sys.modules)
"""


def test_an_import_starts_no_backend_and_no_thread_and_loads_nothing_heavy():
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
