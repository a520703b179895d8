"""A plan for a graph with everything that led to it and follows from it."""

import dataclasses
import json
import logging
import math
import os
import time
from collections.abc import Callable

from poet_jax import explain, figures
from poet_jax.dot import write_dot
from poet_jax.errors import BudgetTooSmall, PlanInvalid
from poet_jax.executors.host import Run
from poet_jax.graph import Graph
from poet_jax.matrices import Matrices, matrices
from poet_jax.perfetto import write_trace
from poet_jax.plan import (
    Budget,
    BudgetLike,
    Plan,
    Planner,
    Status,
    parse_budget,
    plan_from_dict,
    plan_to_dict,
    save_json,
)
from poet_jax.planners.judge import Judged, fits, keep_everything, objective_of
from poet_jax.price import Costs, costs_from_dict, costs_to_dict
from poet_jax.program import Program, lower, program_from_list, program_to_list
from poet_jax.reasons import Reason, reasons
from poet_jax.report import write_report
from poet_jax.simulate import Usage, expected_seconds, simulate
from poet_jax.units import format_bytes

logger = logging.getLogger("poet_jax")


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """A plan with everything that led to it and follows from it.

    Attributes:
      graph, costs, budget, plan, program: see their types.
      usage: what the program uses.
      baseline: what keep-all uses.
    """

    graph: Graph
    costs: Costs
    budget: Budget
    plan: Plan
    program: Program
    usage: Usage
    baseline: Usage

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
    def expected_seconds(self) -> float:
        """How long a step is expected to take on this machine.

        `usage.seconds` are of nodes that run one by one, as they were priced. Here
        nodes that run as one executable take what that took when it was compiled, where
        there was room to time it, and to hand memory from one executable to the next
        takes `costs.handover_seconds`. The same for a device that is modelled.
        """
        return expected_seconds(self.program, self.costs)

    def __str__(self) -> str:
        return explain.table(
            self.costs,
            self.budget,
            self.plan,
            self.program,
            self.usage,
            self.baseline,
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
        measured step is in it, too. Raises ValueError for a run of another program.
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
        """Write budget, plan, program and costs to `path`; `from_json` reads them."""
        data = {
            "budget": dataclasses.asdict(self.budget),
            "plan": plan_to_dict(self.graph, self.plan),
            "program": program_to_list(self.program),
            "costs": costs_to_dict(self.costs),
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
        except PlanInvalid:
            raise
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise PlanInvalid(
                f"{os.fspath(path)} was to be read as a schedule, and it is not one: "
                f"{type(error).__name__}: {error}. Schedule.to_json writes files that "
                "can be read. Plan again with Scheduled.plan(...), and save that."
            ) from error
        if not fits(schedule.usage, budget):
            raise PlanInvalid(
                f"{os.fspath(path)} was read as a schedule within {budget}, and its "
                f"program uses {schedule.usage}. Schedule.to_json writes only what "
                "fits. Plan again with Scheduled.plan(...), and save that."
            )
        return schedule


def make_schedule(
    graph: Graph,
    costs: Costs,
    budget: BudgetLike,
    planner: Planner,
    whole: Callable[[Program, Costs, float], Program | None] | None = None,
    prepare: Callable[[Program, Costs, float], Program] | None = None,
    store_bytes: float = math.inf,
) -> Schedule:
    """Plan `graph` within `budget` and check the plan in the simulator.

    `store_bytes` is the device's room, for a budget that does not say; `whole` makes
    one instruction of keep-all's program if the budget allows it, and then nothing
    needs a plan; `prepare` is the executor's. Raises BudgetTooSmall, and PlanInvalid
    for a planner whose plan exceeds the budget.
    """
    everything = keep_everything(graph, costs)
    keep_all_bytes = everything.usage.peak_bytes
    budget = parse_budget(budget, keep_all_bytes).on_storage_of(store_bytes, graph)
    if budget.memory_bytes >= keep_all_bytes:
        logger.info(
            "the budget, %s, covers the %s that keep-all needs: nothing is repeated or "
            "paged",
            budget,
            format_bytes(keep_all_bytes),
        )
    if whole is not None:
        program = whole(everything.program, costs, budget.memory_bytes)
        if program is not None:
            plan = _best_of_all(everything, planner)
            schedule = Schedule.of(graph, costs, budget, plan, program)
            if fits(schedule.usage, budget):
                return schedule
    try:
        plan = planner(graph, costs, budget)
    except BudgetTooSmall as error:
        if whole is not None and budget.memory_bytes < error.smallest_bytes:
            program = whole(everything.program, costs, error.smallest_bytes - 1)
            if program is not None:
                raise _whole_is_leaner(budget, program, costs, error) from error
        raise
    schedule = Schedule.of(graph, costs, budget, plan)
    if not fits(schedule.usage, budget):
        raise PlanInvalid(
            f"{plan.planner} was asked for a plan within {budget}, and its plan uses "
            f"{schedule.usage}. Its own rules allow that plan, the simulator's do not. "
            "Type a larger budget for it, or use poet_jax.MilpPlanner()."
        )
    if prepare is None:
        return schedule
    program = prepare(schedule.program, costs, budget.memory_bytes)
    return Schedule.of(graph, costs, budget, plan, program)


def _best_of_all(everything: Judged, planner: Planner) -> Plan:
    """Keep-all as a plan: nothing costs less than to run every node once."""
    objective = getattr(planner, "objective", "energy")
    return everything.plan(
        "keep_all",
        time.monotonic(),
        objective=objective,
        bound=objective_of(everything.usage, objective),
        status=Status.OPTIMAL,
    )


def _whole_is_leaner(
    budget: Budget, program: Program, costs: Costs, error: BudgetTooSmall
) -> BudgetTooSmall:
    """`error`, with what the step needs as one executable, which is less."""
    least = simulate(program, costs).peak_bytes
    return BudgetTooSmall(
        f"A plan was asked for within {budget}. The step as one executable, as under "
        f"jax.jit, needs {least} bytes ({format_bytes(least)}), and node by node at "
        f"least {error.smallest_bytes}. Type a budget of at least {least}, or lower "
        "the need: a smaller batch, or donate_argnums for the state that the step "
        "replaces.",
        smallest_bytes=least,
        exact=error.exact,
        least_bytes=least if error.exact else min(least, error.least_bytes),
        node=error.node,
        values=error.values,
    )
