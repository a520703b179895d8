"""A plan for a graph with everything that led to it and follows from it."""

import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from poet_jax.api.cache import PlanCache
from poet_jax.core.costs import Costs, costs_from_dict, costs_to_dict
from poet_jax.core.errors import BudgetTooSmall, PlanInvalid
from poet_jax.core.graph import Graph
from poet_jax.core.plan import (
    BasePlanner,
    Budget,
    BudgetLike,
    Plan,
    Planner,
    Status,
    is_percentage,
    parse_budget,
    plan_from_dict,
    plan_to_dict,
    save_json,
)
from poet_jax.core.program import Program, lower, program_from_list, program_to_list
from poet_jax.core.simulate import Usage, simulate
from poet_jax.emit import compile_within, keep_all_bytes
from poet_jax.emit.executor import PagedStep, Run, Step
from poet_jax.planners.planner import Judged, fits, keep_everything, objective_of
from poet_jax.viz import figures, table
from poet_jax.viz.dot import write_dot
from poet_jax.viz.html import write_report
from poet_jax.viz.matrices import Matrices, matrices
from poet_jax.viz.perfetto import write_trace
from poet_jax.viz.reasons import Reason, reasons


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """A plan with everything that led to it and follows from it.

    Attributes:
      graph, costs, budget, plan, program: see their types.
      usage: what the program uses.
      baseline: what keep-all uses.
      step: the program as it was compiled, or as `jax.jit` compiles the function where
        the budget covers that; None for a schedule that was read from a file.
      compilations: how many it took until that was within the budget.
    """

    graph: Graph
    costs: Costs
    budget: Budget
    plan: Plan
    program: Program
    usage: Usage
    baseline: Usage
    step: Step | PagedStep | None = None
    compilations: int = 0

    @classmethod
    def of(
        cls,
        graph: Graph,
        costs: Costs,
        budget: Budget,
        plan: Plan,
        program: Program | None = None,
    ) -> "Schedule":
        """Simulate `program`, which is the plan node by node if it is left out."""
        if program is None:
            program = lower(graph, plan)
        usage = simulate(program, costs)
        baseline = keep_everything(graph, costs).usage
        return cls(graph, costs, budget, plan, program, usage, baseline)

    @property
    def compiled_bytes(self) -> int | None:
        """RAM while the step runs, by XLA's own count; None if it was not compiled.

        Arguments, results that replace none of them, and XLA's own room for the rest,
        with what libraries allocate beside that.
        """
        return None if self.step is None else self.step.nbytes

    def compile(self) -> "Compiled":
        """The step as `jax.jit(fun).lower(*args).compile()` gives it, and its schedule.

        Raises PlanInvalid for a schedule that was read from a file.
        """
        if self.step is None:
            raise PlanInvalid(
                "A schedule from a file was to be compiled. It holds a plan, but not "
                "the function. Use Scheduled.lower(*args).compile()."
            )
        return Compiled(self, self.step.compiled)

    def __str__(self) -> str:
        return table.table(
            self.budget,
            self.plan,
            self.program,
            self.usage,
            self.baseline,
            self.compiled_bytes,
            self.compilations,
        )

    def plot(self, path: str | os.PathLike) -> None:
        """Write a figure of live bytes over the planned step to `path`.

        The file's type follows its name (.png, .svg, .pdf). Needs matplotlib, which
        `pip install "poet_jax[plot]"` brings; raises ImportError without it.
        """
        figure = figures.step_figure(
            self.costs, self.budget, self.program, self.usage, self.baseline
        )
        figure.savefig(path, dpi=150)

    def plot_matrices(self, path: str | os.PathLike) -> None:
        """Write a figure of the plan's matrices R, S_RAM and S_storage, as `plot`."""
        figure = figures.matrices_figure(self.graph, self.plan)
        figure.savefig(path, dpi=200, bbox_inches="tight")

    def matrices(self) -> Matrices:
        """The plan's matrices R, S_RAM and S_storage, as in the paper."""
        return matrices(self.graph, self.plan)

    def reasons(self) -> tuple[Reason, ...]:
        """[V] what was decided for each value, and what else it would have cost."""
        return reasons(self.graph, self.costs, self.plan)

    def to_dot(self, path: str | os.PathLike) -> None:
        """Write the dependency graph to `path`: DOT, or drawn for .svg, .png and .pdf.

        Raises FileNotFoundError for a drawing if Graphviz is not installed.
        """
        write_dot(path, self.program, self.costs)

    def to_perfetto(self, path: str | os.PathLike, run: Run | None = None) -> None:
        """Write a trace of the planned step to `path`, for ui.perfetto.dev.

        With `run`, the `last_run` of the function that this schedule is for, the
        measured step is in it, too.
        """
        write_trace(path, self.program, self.costs, self.usage, run)

    def to_html(self, path: str | os.PathLike) -> None:
        """Write one page about the schedule to `path`: summary, figure, and values."""
        write_report(
            path,
            self.costs,
            self.budget,
            self.plan,
            self.program,
            self.usage,
            self.baseline,
        )

    def to_json(self, path: str | os.PathLike) -> None:
        """Write budget, plan, program, costs and compiled bytes to `path`, for
        `from_json`."""
        data = {
            "budget": dataclasses.asdict(self.budget),
            "plan": plan_to_dict(self.graph, self.plan),
            "program": program_to_list(self.program),
            "costs": costs_to_dict(self.costs),
            "compiled_bytes": self.compiled_bytes,
        }
        save_json(path, data)

    def from_json(self, path: str | os.PathLike) -> "Schedule":
        """The schedule saved at `path`, for this schedule's graph.

        A graph holds code, which a JSON file does not: trace it again with
        `Scheduled.plan`, or any planner, and read the saved plan into the result.
        Raises PlanInvalid if the file is of another graph, or its program exceeds its
        budget.
        """
        try:
            with open(path) as file:
                data = json.load(file)
            plan = plan_from_dict(self.graph, data["plan"])
            costs = costs_from_dict(data["costs"])
            budget = Budget(**data["budget"])
            graph = self.graph.with_resident(plan.resident)
            program = program_from_list(graph, data["program"])
            schedule = Schedule.of(self.graph, costs, budget, plan, program)
            usage = _as_compiled(schedule.usage, data["compiled_bytes"])
        except PlanInvalid:
            raise
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise PlanInvalid(
                f"{os.fspath(path)} was to be read as a schedule, and it is not one: "
                f"{type(error).__name__}: {error}. Schedule.to_json writes files that "
                "can be read. Plan again with Scheduled.plan(...), and save that."
            ) from error
        if not fits(usage, budget):
            raise PlanInvalid(
                f"{os.fspath(path)} was read as a schedule within {budget}, and its "
                f"program uses {schedule.usage}. Schedule.to_json writes only what "
                "fits. Plan again with Scheduled.plan(...), and save that."
            )
        return schedule


@dataclasses.dataclass(frozen=True, eq=False)
class Compiled:
    """A step, compiled.

    Attributes:
      schedule: what it keeps to.
      xla: XLA's compiled object, with `memory_analysis()`, `cost_analysis()` and
        `as_text()`.
    """

    schedule: Schedule
    xla: jax.stages.Compiled


# XLA computes some values again inside a loop that would be kept otherwise, and so may
# need less than keep-all. What keep-all needs more of than this is not compiled whole.
HOPE = 1.25


def make_schedule(
    graph: Graph,
    costs: Costs,
    budget: BudgetLike,
    planner: Planner,
    build: Callable[[Program, Sequence[Any]], Step | PagedStep] | None = None,
    whole: Callable[[], Step] | None = None,
    scratch: Sequence[int] = (),
    store_bytes: float = math.inf,
    *,
    in_stages: bool = False,
    is_rewritten: bool = False,
    cache: PlanCache | None = None,
) -> Schedule:
    """Plan `graph` within `budget`, and compile the plan.

    A percentage is of what keep-all needs as a compiled program: as planned, or by
    XLA's own count of `whole` if that is more. `store_bytes` is the device's room, for
    a budget that does not say. `build` compiles a program in stages; without it nothing
    is compiled. `whole` compiles the function as `jax.jit` does. That is what runs if
    the budget covers it, unless it is to be `in_stages`, or what passes made of the
    graph `is_rewritten` to be faster, and fits. `scratch` [N] is what libraries
    allocate for each node without XLA's knowledge. `cache` keeps plans, and what only
    compiling them told. Raises BudgetTooSmall, and PlanInvalid for a planner
    whose plan exceeds the budget.
    """
    everything = keep_everything(graph, costs)
    known, learnt, asked = {}, {}, planner
    if cache is not None:
        known = cache.learnt(graph, costs, budget, asked)
        planner = cache.planner(asked)
    step, whole_bytes = None, known.get("whole_bytes")
    if whole is not None and whole_bytes is None and is_percentage(budget):
        step = whole()
        whole_bytes = learnt["whole_bytes"] = step.nbytes
    most_bytes = everything.usage.peak_bytes
    if build is not None:
        most_bytes = keep_all_bytes(graph, costs, scratch or [0] * len(graph.nodes))
    most_bytes = max(most_bytes, whole_bytes or 0)
    limits = parse_budget(budget, most_bytes).on_storage_of(store_bytes, graph)

    def as_a_whole() -> Schedule | None:
        """The function as `jax.jit` compiles it, if the budget covers that."""
        hoped_bytes = whole_bytes or everything.usage.peak_bytes / HOPE
        if whole is None or in_stages or hoped_bytes > limits.memory_bytes:
            return None
        compiled = step or whole()
        learnt["whole_bytes"] = compiled.nbytes
        plan = _best_of_all(everything, planner)
        schedule = Schedule.of(graph, costs, limits, plan, everything.program)
        used = _as_compiled(schedule.usage, compiled.nbytes)
        if not fits(used, limits):
            return None
        return dataclasses.replace(schedule, step=compiled, compilations=1)

    if not is_rewritten and (schedule := as_a_whole()) is not None:
        return schedule
    compiled, compilations = None, 0
    if build is None:
        plan = planner(graph, costs, limits)
    else:
        first = None
        if "allowed" in known and "stage_bytes" in known:
            first = known["allowed"], known["stage_bytes"]
        try:
            fitted = compile_within(
                graph, costs, planner, limits, build, scratch, first
            )
        except BudgetTooSmall:
            if is_rewritten and (schedule := as_a_whole()) is not None:
                return schedule
            raise
        plan, compiled, compilations = fitted.plan, fitted.step, fitted.compilations
        learnt |= {"allowed": fitted.allowed, "stage_bytes": fitted.stage_bytes}
    if cache is not None and not plan.statistics.get("interrupted"):
        cache.learn(graph, costs, budget, asked, known | learnt)
    schedule = Schedule.of(graph, costs, limits, plan)
    used = _as_compiled(schedule.usage, None if compiled is None else compiled.nbytes)
    if not fits(used, limits):
        raise PlanInvalid(
            f"{plan.planner} was asked for a plan within {limits}, and its "
            f"plan uses {schedule.usage}. Its own rules allow that plan, the "
            "simulator's do not. Type a larger budget for it, or use "
            "poet_jax.MilpPlanner()."
        )
    return dataclasses.replace(schedule, step=compiled, compilations=compilations)


def _as_compiled(usage: Usage, compiled_bytes: int | None) -> Usage:
    """`usage` with XLA's own count of memory, if there is one, which is what counts."""
    if compiled_bytes is None:
        return usage
    return dataclasses.replace(usage, peak_bytes=compiled_bytes)


def _best_of_all(everything: Judged, planner: Planner) -> Plan:
    """Keep-all as a plan: nothing costs less than to run every node once."""
    objective = BasePlanner.of(planner).objective
    return everything.plan(
        "keep_all",
        time.monotonic(),
        objective=objective,
        bound=objective_of(everything.usage, objective),
        status=Status.OPTIMAL,
    )
