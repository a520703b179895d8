"""The boundary to python-mip: models, bounds, and two of its pitfalls.

Its annotations do not admit Python floats, so what it returns counts as `Any` here. And
a model that the garbage collector finds while another model is in a call to the
solver's library deadlocks: one thread takes the library's lock twice. `solving` keeps
the collector out.
"""

import contextlib
import gc
import importlib.util
import logging
from typing import Any

import mip

# `verbose = 0` silences the solvers; python-mip itself still tells of every start.
logging.getLogger("mip").setLevel(logging.WARNING)

BINARY = mip.BINARY
xsum: Any = mip.xsum


@contextlib.contextmanager
def solving():
    """Every model is built, solved and dropped within such a block."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.collect(0)  # what was made in the block is young still
        if enabled:
            gc.enable()


def check_solver(solver: str) -> None:
    """Raise ValueError for an unknown solver, ImportError for one not installed."""
    if solver not in ("CBC", "HIGHS"):
        raise ValueError(
            f"A planner was asked for with solver={solver!r}. The solvers are 'CBC' "
            "and 'HIGHS'. Type solver='CBC'."
        )
    if solver == "HIGHS" and importlib.util.find_spec("highspy") is None:
        raise ImportError(
            "A planner was asked for with solver='HIGHS', and HiGHS is not installed. "
            "CBC comes with python-mip, HiGHS is an extra. Type pip install "
            "'poet_jax[highs]', or solver='CBC'."
        )


def new_model(solver: str, gap: float) -> Any:
    """An empty, silent minimisation that stops at the relative gap."""
    model = mip.Model(sense=mip.MINIMIZE, solver_name=solver)
    model.verbose = 0
    model.max_mip_gap = gap
    model.max_mip_gap_abs = 1e-12
    return model


def bound_of(model: Any) -> float | None:
    """The proven lower bound of the last solve, or None if there is none."""
    bound = model.objective_bound
    return None if bound is None or not abs(bound) < 1e30 else float(bound)
