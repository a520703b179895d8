"""A plan for a graph with everything that led to it and follows from it."""

import dataclasses
import functools
import json
import math
import os
import time
from collections.abc import Callable, Sequence, Set

import jax
from jax import export

from poet_jax.api.cache import PlanCache
from poet_jax.api.policy import CheckpointPolicy, checkpoint_policy
from poet_jax.api.processes import Processes
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
from poet_jax.core.representation import brief
from poet_jax.core.simulate import Usage, simulate
from poet_jax.emit import compile_within, keep_all_bytes
from poet_jax.emit.executor import Run, Step
from poet_jax.emit.exporting import exported
from poet_jax.emit.paged_step import PagedStep
from poet_jax.planners.planner import Judged, fits, keep_everything, objective_of
from poet_jax.viz import figures, table
from poet_jax.viz.dot import write_dot
from poet_jax.viz.html import summary, write_report
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

    __repr__ = brief

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
                "A schedule from a file holds a plan, but not the function to compile. "
                "Use Scheduled.lower(*args).compile()."
            )
        return Compiled(self, self.step.compiled)

    def export(self) -> export.Exported:
        """The step as `jax.export.export` gives it, to be serialized and to run
        elsewhere, on the kind of device that it was planned on.

        A step that was not compiled here, as of `Scheduled.plan_for_board`, has stages
        of the budget's bytes. Other compilers that read StableHLO take it.

        Raises PlanInvalid for a step that pages, as its pages are this process's; and
        for one that was not compiled here, and writes to references or runs on several
        devices.
        """
        if self.step is None or isinstance(self.step, PagedStep):
            return exported(self.program, self.costs, self.budget.memory_bytes)
        return self.step.exported()

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

    def _repr_html_(self) -> str:
        """Summary, figure and the largest values, for a notebook."""
        return summary(
            self.costs,
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
        with figures.drawn(path, figures.STEP_HEIGHT) as figure:
            figures.draw_step(
                figure,
                self.costs,
                self.budget,
                self.program,
                self.usage,
                self.baseline,
            )

    def plot_matrices(self, path: str | os.PathLike) -> None:
        """Write a figure of the plan's matrices R, S_RAM and S_storage, as `plot`."""
        figures.plot_matrices(path, self.graph, self.plan)

    def matrices(self) -> Matrices:
        """The plan's matrices R, S_RAM and S_storage, as in the paper."""
        return matrices(self.graph, self.plan)

    def reasons(self) -> tuple[Reason, ...]:
        """[V] what was decided for each value, and what else it would have cost."""
        return reasons(self.graph, self.costs, self.plan)

    def checkpoint_policy(self) -> CheckpointPolicy:
        """The nearest to the plan that `jax.checkpoint` can express, for those who keep
        a `jax.jit` of their own: `jax.checkpoint(loss, policy=policy)`.

        A policy goes by the names of `jax.ad_checkpoint.checkpoint_name`. A name is
        saved, offloaded to the host's memory or made again as the plan does with most
        of the bytes that have it. `print(policy)` says what is lost against the plan.

        Raises ValueError if the function names no value: the message lists what the
        plan keeps for the backward pass, and where it is made.
        """
        return checkpoint_policy(self.program, self.costs, self.usage)

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
                f"{os.fspath(path)} is not a file of Schedule.to_json: "
                f"{type(error).__name__}: {error}. Plan again with "
                "Scheduled.plan(...), and save that."
            ) from error
        if not fits(usage, budget):
            raise PlanInvalid(
                f"{os.fspath(path)} has a budget of {budget}, and its program uses "
                f"{schedule.usage}. Plan again with Scheduled.plan(...), and save that."
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

    __repr__ = brief


@dataclasses.dataclass(frozen=True, eq=False)
class Target:
    """What compiles a step.

    Attributes:
      build: compiles a program whose runs are stages.
      whole: compiles the function as `jax.jit` does; None where that cannot run.
      scratch: [N] bytes that libraries allocate for each node without XLA's knowledge.
      in_stages: whether stages run even where `whole` fits.
      is_rewritten: whether passes made stages faster than `whole`, so that they run
        where they fit.
      processes: that run the step together, and so have to have one plan.
      refinable: passes that can cut the graph finer; see `compile_within`.
    """

    build: Callable[[Program], Step | PagedStep]
    whole: Callable[[], Step] | None
    scratch: Sequence[int]
    in_stages: bool = False
    is_rewritten: bool = False
    processes: Processes = Processes()
    refinable: Set[str] = frozenset()


def make_schedule(
    graph: Graph,
    costs: Costs,
    budget: BudgetLike,
    planner: Planner,
    target: Target | None = None,
    store_bytes: float = math.inf,
    cache: PlanCache | None = None,
) -> Schedule:
    """Plan `graph` within `budget`, and compile the plan for `target`, if there is one.

    A percentage is of what keep-all needs as a compiled program: as planned, or by
    XLA's own count of the whole function if that is more. `store_bytes` is the device's
    room, for a budget that does not say. `cache` keeps plans, and what only compiling
    them told. Raises BudgetTooSmall, and PlanInvalid for a planner whose plan exceeds
    the budget.
    """
    if target is not None:
        return _Compilation(
            graph, costs, budget, planner, target, store_bytes, cache
        ).schedule()
    most_bytes = keep_everything(graph, costs).usage.peak_bytes
    limits = parse_budget(budget, most_bytes).on_storage_of(store_bytes, graph)
    return _within(Schedule.of(graph, costs, limits, planner(graph, costs, limits)))


# XLA computes some values again inside a loop that would be kept otherwise, and so may
# need less than keep-all. What keep-all needs more of than this is not compiled whole.
HOPE = 1.25


class _Compilation:
    """A step on its way to a schedule: as a whole, or planned and in stages."""

    def __init__(
        self,
        graph: Graph,
        costs: Costs,
        budget: BudgetLike,
        planner: Planner,
        target: Target,
        store_bytes: float,
        cache: PlanCache | None,
    ):
        self.graph, self.costs, self.target = graph, costs, target
        self.planner, self.budget, self.cache = planner, budget, cache
        self.everything = keep_everything(graph, costs)
        self.whole: Step | None = None
        self.facts: dict[str, int] = {}  # that only compiling tells
        if cache is not None:
            learnt = functools.partial(cache.learnt, graph, costs, budget, planner)
            self.facts = target.processes.agree(learnt)
        self.limits = self._limits().on_storage_of(store_bytes, graph)

    def _limits(self) -> Budget:
        if self.target.whole and is_percentage(self.budget):
            if "whole_bytes" not in self.facts:
                self._compile_whole(self.target.whole)
        most_bytes = max(
            self.everything.usage.peak_bytes,
            keep_all_bytes(self.graph, self.costs, self.target.scratch),
            self.facts.get("whole_bytes", 0),
        )
        self.most_bytes = most_bytes
        return parse_budget(self.budget, most_bytes)

    def _compile_whole(self, compile_whole: Callable[[], Step]) -> Step:
        if self.whole is None:
            self.whole = compile_whole()
            self.facts["whole_bytes"] = self.whole.nbytes
        return self.whole

    def schedule(self) -> Schedule:
        """The step as a whole if the budget covers that, else in stages; the other way
        around if passes made stages faster."""
        if not self.target.is_rewritten and (schedule := self.as_a_whole()) is not None:
            return schedule
        try:
            return self.in_stages()
        except BudgetTooSmall as error:
            # Stages that need about as much as keep-all may need more than the whole.
            hoped_bytes = self.everything.usage.peak_bytes / HOPE
            may_be_less = hoped_bytes < error.smallest_bytes
            schedule = self.as_a_whole(0 if may_be_less else hoped_bytes)
            if schedule is not None:
                return schedule
            raise self.told(error, may_be_less) from error.__cause__

    def told(self, error: BudgetTooSmall, may_be_less: bool) -> BudgetTooSmall:
        """`error` with the smallest percentage, and with the need of `jax.jit`'s own
        program if that is less and `may_be_less`."""
        least, whose, whole_bytes = error.smallest_bytes, "", 0
        if least <= self.limits.memory_bytes:
            return error  # something else than memory does not fit
        if may_be_less and self.target.whole and not self.target.in_stages:
            whole_bytes = self.facts.get("whole_bytes", 0)
        if 0 < whole_bytes < least:
            least, whose = whole_bytes, " for jax.jit's own program"
        wanted = f"a budget of at least {least}{whose}"
        if is_percentage(self.budget):
            share = math.ceil(100 * least / self.most_bytes)
            wanted = f'a budget of at least "{share}%" ({least} bytes{whose})'
        remedies = (wanted, *error.remedies[1:])
        if least == error.smallest_bytes and remedies == error.remedies:
            return error
        return error.but(
            remedies=remedies,
            smallest_bytes=least,
            least_bytes=min(error.least_bytes, least),
            exact=error.exact and least == error.smallest_bytes,
        )

    def as_a_whole(self, hoped_bytes: float | None = None) -> Schedule | None:
        """The function as `jax.jit` compiles it, if the budget covers that.

        It is not compiled for a budget below `hoped_bytes`, by default a part of
        keep-all's peak.
        """
        if hoped_bytes is None:
            hoped_bytes = self.everything.usage.peak_bytes / HOPE
        least_bytes = self.facts.get("whole_bytes", hoped_bytes)
        target, limits = self.target, self.limits
        if (
            target.whole is None
            or target.in_stages
            or least_bytes > limits.memory_bytes
        ):
            return None
        step = self._compile_whole(target.whole)
        plan = _best_of_all(self.everything, self.planner)
        schedule = Schedule.of(
            self.graph, self.costs, limits, plan, self.everything.program
        )
        if not fits(_as_compiled(schedule.usage, step.nbytes), limits):
            return None
        return dataclasses.replace(schedule, step=step, compilations=1)

    def in_stages(self) -> Schedule:
        """A plan of the planner's that fits as it is compiled."""
        graph, costs, cache, facts = self.graph, self.costs, self.cache, self.facts
        planner = self.planner if cache is None else cache.planner(self.planner)
        planner = self.target.processes.planner(planner)
        first = None
        if "allowed" in facts and "stage_bytes" in facts:
            first = facts["allowed"], facts["stage_bytes"]
        target = self.target
        fitted = compile_within(
            graph,
            costs,
            planner,
            self.limits,
            target.build,
            target.scratch,
            first,
            target.refinable,
        )
        facts |= {"allowed": fitted.allowed, "stage_bytes": fitted.stage_bytes}
        if cache is not None and not fitted.plan.statistics.get("interrupted"):
            cache.learn(graph, costs, self.budget, self.planner, facts)
        schedule = Schedule.of(graph, costs, self.limits, fitted.plan)
        step, compilations = fitted.step, fitted.compilations
        return _within(
            dataclasses.replace(schedule, step=step, compilations=compilations)
        )


def _within(schedule: Schedule) -> Schedule:
    """`schedule`; raises PlanInvalid if it exceeds its budget."""
    plan, usage, budget = schedule.plan, schedule.usage, schedule.budget
    if not fits(_as_compiled(usage, schedule.compiled_bytes), budget):
        raise PlanInvalid(
            f"{plan.planner} returned a plan that uses {usage}, and the budget is "
            f"{budget}. The simulator judges plans, not the planner's own rules. "
            "Correct the planner, or use poet_jax.MilpPlanner()."
        )
    return schedule


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
