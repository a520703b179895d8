"""The process in which python-mip solves: reads programs, writes answers, until EOF.

`solver.py` starts it as a script, so it imports nothing of the package.
"""

import gc
import os
import pickle
import signal
import sys
from typing import Any

import mip


def solve(problem: dict) -> tuple:
    """(values or None, objective, bound, whether it is infeasible) of the recorded
    minimisation."""
    model = mip.Model(sense=mip.MINIMIZE, solver_name=problem["solver"])
    model.verbose = 0
    model.max_mip_gap = problem["gap"]
    model.max_mip_gap_abs = problem["absolute_gap"]
    variables = [
        model.add_var(ub=upper, var_type=mip.BINARY if binary else mip.CONTINUOUS)
        for upper, binary in zip(problem["upper"], problem["binary"], strict=True)
    ]
    columns = [variables[column] for column in problem["columns"].tolist()]
    coefficients = problem["coefficients"].tolist()
    begin = 0
    for length, sense, constant in zip(
        problem["lengths"].tolist(),
        problem["senses"],
        problem["constants"],
        strict=True,
    ):
        end = begin + length
        model += mip.LinExpr(
            columns[begin:end], coefficients[begin:end], constant, sense
        )
        begin = end
    model.objective = mip.LinExpr(
        [variables[column] for column, _ in problem["objective"]],
        [coefficient for _, coefficient in problem["objective"]],
        problem["constant"],
    )
    if problem["start"]:
        model.start = [(variables[column], x) for column, x in problem["start"]]
    status = model.optimize(max_seconds=problem["seconds"])
    bound: Any = model.objective_bound
    bound = 0.0 if bound is None or not abs(bound) < 1e30 else bound
    if not model.num_solutions:
        return None, float("inf"), bound, status == mip.OptimizationStatus.INFEASIBLE
    value: Any = model.objective_value
    if problem["solver"] == "CBC":
        # Done within the gap, it calls the value of what it found the bound.
        bound = min(bound, value - problem["gap"] * abs(value))
    return [variable.x for variable in variables], value, bound, False


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a solver prints is no answer
    # A model collected while another one solves would deadlock in python-mip.
    gc.disable()
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
