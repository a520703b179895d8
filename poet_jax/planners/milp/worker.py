"""The process in which python-mip solves: reads programs, writes answers, until EOF.

`solver.py` starts it as a script, so it imports nothing of the package.
"""

import gc
import os
import pickle
import sys
import tempfile
import time
from typing import Any

import mip

# A linear program is solved to its last digit but one, whatever gap is asked for.
ROUNDING = 1e-6


def solve(problem: dict) -> tuple:
    """(values or None, objective, bound, whether it is infeasible) of the recorded
    minimisation."""
    since = time.monotonic()
    values, value, least = None, float("inf"), 0.0
    if problem["alike"]:
        values, value, least = solve_by_kinds(problem)
        if value - least <= problem["gap"] * abs(value) < float("inf"):
            return values, value, least, False
    model, variables = build(problem, set())
    if values is not None:
        model.start = list(zip(variables, values, strict=True))
    left = problem["seconds"] - (time.monotonic() - since)
    status = model.optimize(max_seconds=max(left, 1.0))
    bound = max(least, bound_of(problem, model))
    if model.num_solutions and model.objective_value <= value:
        value = model.objective_value
        values = [variable.x for variable in variables]
    infeasible = values is None and status == mip.OptimizationStatus.INFEASIBLE
    return values, value, bound, infeasible


def solve_by_kinds(problem: dict) -> tuple:
    """(values or None, objective, bound): first how many binaries of each kind are 1,
    then which.

    CBC branches on one after the other of binaries that may be exchanged, as those of
    equal layers, and gets nowhere. Their sum is an integer; with that alone a program
    is a relaxation, and its solution mostly one of the whole program.
    """
    kinds = problem["alike"]
    model, variables = build(problem, {n for members in kinds for n in members})
    sums = []
    for members in kinds:
        sums.append(model.add_var(ub=len(members), var_type=mip.INTEGER))
        model += mip.xsum(variables[n] for n in members) == sums[-1]
    model.optimize(max_seconds=problem["seconds"] / 2)
    bound = bound_of(problem, model)
    if not model.num_solutions:
        return None, float("inf"), bound
    counts = [round(total.x) for total in sums]
    model, variables = build(problem, set())
    for members, count in zip(kinds, counts, strict=True):
        model += mip.xsum(variables[n] for n in members) == count
    model.optimize(max_seconds=problem["seconds"] / 4)
    if not model.num_solutions:
        return None, float("inf"), bound
    return [variable.x for variable in variables], model.objective_value, bound


def bound_of(problem: dict, model: Any) -> float:
    """A lower bound after `model.optimize`."""
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


def build(problem: dict, relaxed: set[int]) -> tuple[Any, list]:
    """The program, with some binaries continuous, and its variables."""
    model = mip.Model(sense=mip.MINIMIZE, solver_name=problem["solver"])
    model.verbose = 0
    model.max_mip_gap = problem["gap"]
    model.max_mip_gap_abs = problem["absolute_gap"]
    variables = [
        model.add_var(
            ub=upper,
            var_type=mip.BINARY if binary and n not in relaxed else mip.CONTINUOUS,
        )
        for n, (upper, binary) in enumerate(
            zip(problem["upper"], problem["binary"], strict=True)
        )
    ]
    columns = [variables[column] for column in problem["columns"].tolist()]
    coefficients = problem["coefficients"].tolist()
    begin = 0
    for length, sense, constant in zip(
        problem["lengths"].tolist(),
        problem["senses"],
        problem["constants"].tolist(),
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
    return model, variables


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a solver prints is no answer
    os.chdir(tempfile.gettempdir())  # CBC writes programs that it fails at to files
    # A model collected while another one solves would deadlock in python-mip.
    gc.set_threshold(0)
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
