"""The process in which python-mip solves: reads programs, writes answers, until EOF.

`solver.py` starts it as a script, so it imports nothing of the package, and python-mip
only once it was told where modules are.
"""

import gc
import os
import pickle
import sys
import tempfile
from typing import Any

# A linear program is solved to its last digit but one, whatever gap is asked for.
ROUNDING = 1e-6


def solve(problem: dict) -> tuple:
    """(values or None, objective, bound, whether it is infeasible) of the recorded
    minimisation."""
    model, variables = build(problem)
    import mip

    status = model.optimize(max_seconds=problem["seconds"])
    bound = bound_of(problem, model)
    if not model.num_solutions:
        infeasible = status == mip.OptimizationStatus.INFEASIBLE
        return None, float("inf"), bound, infeasible
    return [variable.x for variable in variables], model.objective_value, bound, False


def bound_of(problem: dict, model: Any) -> float:
    """A lower bound after `model.optimize`."""
    import mip

    bound: Any = model.objective_bound
    if model.num_int == 0:
        # A linear program that ends early has no bound, and HiGHS never says one.
        optimal = model.status == mip.OptimizationStatus.OPTIMAL
        value = model.objective_value if optimal else 0.0
        return value - ROUNDING * abs(value)
    bound = 0.0 if bound is None or not abs(bound) < 1e30 else bound
    if model.num_solutions and problem["solver"] == "CBC":
        # Done within the gap, it calls the value of what it found the bound.
        value: Any = model.objective_value
        bound = min(bound, value - problem["gap"] * abs(value))
    return bound


def build(problem: dict) -> tuple[Any, list]:
    """The program and its variables."""
    import mip

    model = mip.Model(sense=mip.MINIMIZE, solver_name=problem["solver"])
    model.verbose = 0
    model.max_mip_gap = problem["gap"]
    model.max_mip_gap_abs = problem["absolute_gap"]
    variables = [
        model.add_var(ub=ub, var_type=mip.BINARY if binary else mip.CONTINUOUS)
        for ub, binary in zip(problem["upper"], problem["binary"], strict=True)
    ]
    columns = [variables[column] for column in problem["columns"].tolist()]
    coefficients, end = problem["coefficients"].tolist(), 0
    rows = (problem[name].tolist() for name in ("lengths", "senses", "constants"))
    for length, sense, constant in zip(*rows, strict=True):
        row = slice(end, end := end + length)
        model += mip.LinExpr(columns[row], coefficients[row], constant, sense)
    model.objective = mip.LinExpr(
        [variables[column] for column, _ in problem["objective"]],
        [coefficient for _, coefficient in problem["objective"]],
        problem["constant"],
    )
    if problem["start"]:
        model.start = [(variables[column], x) for column, x in problem["start"]]
    return model, variables


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a solver prints is no answer
    os.chdir(tempfile.gettempdir())  # CBC writes programs that it fails at to files
    # A model collected while another one solves would deadlock in python-mip.
    gc.set_threshold(0)
    try:
        sys.path[:] = pickle.load(sys.stdin.buffer)
    except EOFError:
        return
    while True:
        try:
            problem = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer = solve(problem)
        except Exception as error:
            answer = error
        pickle.dump(answer, answers)
        answers.flush()
        del problem, answer
        gc.collect()


if __name__ == "__main__":
    main()
