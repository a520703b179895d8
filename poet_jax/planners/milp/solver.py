"""The boundary to the solvers: a program is recorded here and solved in `worker.py`.

CBC may abort its process, and does not always stop in time. So python-mip runs in a
process of its own, which is killed and replaced where that happens: the planner then
goes on with what it has.
"""

import array
import concurrent.futures
import dataclasses
import importlib
import logging
import math
import os
import pathlib
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

# By so much a row of fixed variables may miss.
TOLERANCE = 1e-6
# So many programs are solved at once, each by a process on a core of its own.
TOGETHER = min(4, os.cpu_count() or 1)
# A solver that is not back this long after its time limit is killed.
GRACE_SECONDS = 10.0
# A process that solved for BERT-base holds 200 MB: it is not to last into training.
IDLE_SECONDS = 2.0

# Processes that wait for a program, and what will end each.
_idle: dict[subprocess.Popen, threading.Timer] = {}
os.register_at_fork(after_in_child=_idle.clear)  # they answer to the parent


def xsum(terms: Iterable[Any]) -> Any:
    """python-mip's sum of terms."""
    import mip  # not before something is solved: it loads a solver

    return mip.xsum(terms)


def check_solver(solver: str) -> None:
    """Raise ValueError for an unknown solver, ImportError if python-mip lacks it."""
    if solver not in ("CBC", "HIGHS"):
        raise ValueError(
            f"`solver` must be 'CBC' or 'HIGHS', got {solver!r}; use solver='CBC'"
        )
    if solver == "HIGHS" and not importlib.import_module("mip.highs").has_highs:
        raise ImportError(
            "solver='HIGHS' needs a highspy before 1.16, which python-mip does not "
            "find. Use pip install 'poet_jax[highs]', or solver='CBC'."
        )


@dataclasses.dataclass(frozen=True)
class Solution:
    """What a solver found in its time.

    Attributes:
      values: [variables], or None if it found no solution.
      objective: of `values`.
      bound: no solution has less; 0.0 where the solver has none, as no program here
        has a negative cost.
      infeasible: whether it is proven that there is no solution.
    """

    values: np.ndarray | None = None
    objective: float = math.inf
    bound: float = 0.0
    infeasible: bool = False


class Model:
    """A minimisation over variables that are at least zero.

    `model += row` takes a comparison of python-mip's expressions. What is minimised is
    one, and no solution has less than `least`, of which gaps are fractions at least:
    CBC leaves the constant part of an objective out of its relative gap, and for a step
    that is almost all of it.

    Rows are recorded as numbers: their expressions refer to the model, and would live
    on with it until a garbage collection.
    """

    def __init__(self, solver: str, gap: float):
        self.solver, self.gap = solver, gap
        self.upper: list[float] = []
        self.binary: list[bool] = []
        self.least = 0.0
        self._minimised: dict[str, Any] = {}
        self._lengths, self._columns = array.array("q"), array.array("q")
        self._coefficients, self._constants = array.array("d"), array.array("d")
        self._senses: list[str] = []

    def add_var(self, *, ub: float = math.inf, binary: bool = False) -> Any:
        """A variable, continuous or binary, of at most `ub`."""
        import mip

        self.upper.append(min(ub, 1.0) if binary else ub)
        self.binary.append(binary)
        return mip.Var(self, len(self.upper) - 1)  # pyright: ignore[reportArgumentType]

    def __iadd__(self, row: Any) -> "Model":
        terms = row.expr
        self._lengths.append(len(terms))
        self._columns.extend([y.idx for y in terms])
        self._coefficients.extend(terms.values())
        self._constants.append(row.const)
        self._senses.append(row.sense)
        return self

    @property
    def rows(self) -> int:
        """How many there are."""
        return len(self._senses)

    def minimise(self, value: Any, least: float = 0.0) -> None:
        """Set the objective, which is at least `least` in every solution."""
        terms = [(y.idx, float(c)) for y, c in value.expr.items()]
        self._minimised = {"objective": terms, "constant": value.const}
        self.least = least

    def optimize(
        self,
        seconds: float,
        start: Iterable[tuple[Any, float]] = (),
        *,
        relaxed: bool = False,
        fixed: Mapping[int, float] = MappingProxyType({}),
    ) -> Solution:
        """The Solution after `seconds` or at the relative gap, `start` given; with all
        binaries from 0 to 1 if `relaxed`, and with variables, by number, `fixed`."""
        problem = self._minimised | {
            "solver": self.solver,
            "gap": self.gap,
            "absolute_gap": max(self.gap * self.least, 1e-12),
            "seconds": seconds,
            "upper": self.upper,
            "binary": [binary and not relaxed for binary in self.binary],
            "start": [(y.idx, value) for y, value in start],
            "lengths": np.array(self._lengths),
            "columns": np.array(self._columns),
            "coefficients": np.array(self._coefficients),
            "constants": np.array(self._constants),
            "senses": np.array(self._senses),
        }
        known = np.full(len(self.upper), np.nan)
        known[[*fixed]] = [*fixed.values()]
        if fixed and not _fix(problem, known):
            return Solution(infeasible=True)
        answer = _ask(problem, seconds)
        if isinstance(answer, Exception):
            raise answer
        if answer is None:
            logging.getLogger(__name__).warning(
                "%s gave no answer; planning goes on without it", self.solver
            )
            return Solution()
        values, *rest = answer
        if values is not None:
            known[np.isnan(known)] = values
            values = known
        return Solution(values, *rest)


def together(function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    """The function's results for some items, each solved for beside the others."""
    with concurrent.futures.ThreadPoolExecutor(TOGETHER) as threads:
        return list(threads.map(function, items))


def _fix(problem: dict[str, Any], known: np.ndarray) -> bool:
    """Leave of a program what is NaN in `known`, [variables]; False if a row that has
    no such variable does not hold."""
    free, lengths, columns = np.isnan(known), problem["lengths"], problem["columns"]
    number, is_left = np.cumsum(free) - 1, free[columns]
    rows = np.repeat(np.arange(len(lengths)), lengths)
    added = np.where(is_left, 0.0, problem["coefficients"] * known[columns])
    constants = problem["constants"] + np.bincount(rows, added, len(lengths))
    lengths = np.bincount(rows[is_left], minlength=len(lengths))
    left, senses = lengths > 0, problem["senses"]
    over = np.where(senses == ">", -constants, constants)[~left]
    over = np.where(senses[~left] == "=", abs(over), over)
    fixed = [(n, c) for n, c in problem["objective"] if not free[n]]
    problem |= {
        "constant": problem["constant"] + sum(c * known[n] for n, c in fixed),
        "lengths": lengths[left],
        "columns": number[columns[is_left]],
        "coefficients": problem["coefficients"][is_left],
        "constants": constants[left],
        "senses": senses[left],
        "objective": [(number[n], c) for n, c in problem["objective"] if free[n]],
        "upper": np.array(problem["upper"])[free].tolist(),
        "binary": np.array(problem["binary"])[free].tolist(),
        "start": [(number[n], x) for n, x in problem["start"] if free[n]],
    }
    return bool((over < TOLERANCE).all())


def _ask(problem: dict, seconds: float) -> Any:
    """The worker's answer; None if it crashed or had to be killed.

    Raises RuntimeError if there can be no worker.
    """
    worker = _idle_worker()
    is_new = worker is None or worker.poll() is not None
    if worker is None or is_new:
        worker = _start()
    assert worker.stdin and worker.stdout
    timer = _timer(seconds + GRACE_SECONDS, worker.kill)
    timer.start()
    answer = None
    try:
        if is_new:
            pickle.dump(sys.path, worker.stdin)
        pickle.dump(problem, worker.stdin)
        worker.stdin.flush()
        answer = pickle.load(worker.stdout)
    except (EOFError, OSError, pickle.UnpicklingError):
        pass
    finally:
        timer.cancel()
        if answer is None:
            worker.kill()
            worker.communicate()
    if answer is None and is_new and worker.returncode > 0:
        raise _cannot_start(f"It ended with {worker.returncode}")
    if isinstance(answer, ImportError):
        raise _cannot_start(str(answer)) from answer
    if answer is not None:
        _idle[worker] = end = _timer(IDLE_SECONDS, _end_if_idle, worker)
        end.start()
    return answer


def _start() -> subprocess.Popen:
    path = str(pathlib.Path(__file__).with_name("worker.py"))
    try:
        return subprocess.Popen(
            [sys.executable, "-P", path],  # -P: files beside it hide no module
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C is this process's to handle
        )
    except (OSError, TypeError) as error:
        raise _cannot_start(str(error)) from error


def _cannot_start(reason: str) -> RuntimeError:
    return RuntimeError(
        f"python-mip cannot run in a process of {sys.executable!r}: {reason}. Set "
        "sys.executable to a Python that can import mip, or use "
        "planner=poet_jax.greedy, which needs no solver."
    )


def _idle_worker() -> subprocess.Popen | None:
    try:
        worker, end = _idle.popitem()
    except KeyError:
        return None
    end.cancel()
    return worker


def _end_if_idle(worker: subprocess.Popen) -> None:
    if _idle.pop(worker, None) is not None:
        worker.communicate()


def _timer(seconds: float, function: Callable[..., None], *args: Any):
    timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), function, args)
    timer.daemon = True
    return timer
