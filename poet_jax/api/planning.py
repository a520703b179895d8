"""A graph to a schedule: planned, and compiled until that is within the budget."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterable

from poet_jax.api.cache import PlanCache
from poet_jax.api.compiling import Target
from poet_jax.api.schedule import Schedule, as_compiled
from poet_jax.core.costs import Costs
from poet_jax.core.errors import BudgetTooSmall, PlanInvalid
from poet_jax.core.graph import Graph
from poet_jax.core.plan import (
    BasePlanner,
    BudgetLike,
    Plan,
    Planner,
    Status,
    is_percentage,
    parse_budget,
)
from poet_jax.core.units import format_bytes
from poet_jax.emit import compile_within, keep_all_bytes
from poet_jax.emit.executor import Step
from poet_jax.passes import Pass, refinable_of
from poet_jax.planners.advice import LEAST_BYTES, held_bytes, is_taken, pass_of
from poet_jax.planners.planner import (
    Judged,
    bounded,
    fits,
    keep_everything,
    objective_of,
)


def make_schedule(
    graph: Graph,
    costs: Costs,
    budget: BudgetLike,
    planner: Planner,
    store_bytes: float = math.inf,
) -> Schedule:
    """Plan `graph` within `budget`; nothing is compiled.

    A percentage is of what keep-all needs. `store_bytes` is the device's room, for a
    budget that does not say. Raises BudgetTooSmall, and PlanInvalid for a planner whose
    plan exceeds the budget.
    """
    most_bytes = keep_everything(graph, costs).usage.peak_bytes
    limits = parse_budget(budget, most_bytes).on_storage_of(store_bytes, graph)
    return _within(Schedule.of(graph, costs, limits, planner(graph, costs, limits)))


# XLA computes some values again inside a loop that would be kept otherwise, and so may
# need less than keep-all. What keep-all needs more of than this is not compiled whole.
HOPE = 1.25


class Compilation:
    """A step on its way to a schedule: as a whole, or planned and in stages.

    A percentage is of what keep-all needs as a compiled program: as planned, or by
    XLA's own count of the whole function if that is more. `store_bytes` is the device's
    room, for a budget that does not say. `cache` keeps plans, and what only compiling
    them told. `earlier` is of another graph of the same step: it tells what a
    percentage is of, and the bytes of the whole.
    """

    def __init__(
        self,
        graph: Graph,
        costs: Costs,
        budget: BudgetLike,
        planner: Planner,
        target: Target,
        store_bytes: float,
        cache: PlanCache | None,
        earlier: "Compilation | None" = None,
    ):
        self.graph, self.costs, self.target = graph, costs, target
        self.planner, self.budget, self.cache = planner, budget, cache
        self.everything = keep_everything(graph, costs)
        self.keep_all_bytes = keep_all_bytes(graph, costs, target.scratch)
        self.whole: Step | None = None
        self.facts: dict[str, int] = {}  # that only compiling tells
        if cache is not None:
            learnt = functools.partial(cache.learnt, graph, costs, budget, planner)
            self.facts = target.processes.agree(learnt)
        if earlier is not None and "whole_bytes" in earlier.facts:
            self.facts["whole_bytes"] = earlier.facts["whole_bytes"]
        self.most_bytes = self._most_bytes() if earlier is None else earlier.most_bytes
        limits = parse_budget(budget, self.most_bytes)
        self.limits = limits.on_storage_of(store_bytes, graph)

    def _most_bytes(self) -> int:
        if self.target.whole and is_percentage(self.budget):
            if "whole_bytes" not in self.facts:
                self._compile_whole(self.target.whole)
        return max(
            self.everything.usage.peak_bytes,
            self.keep_all_bytes,
            self.facts.get("whole_bytes", 0),
        )

    def _compile_whole(self, compile_whole: Callable[[], Step]) -> Step:
        if self.whole is None:
            self.whole = compile_whole()
            self.facts["whole_bytes"] = self.whole.nbytes
        return self.whole

    def schedule(self) -> Schedule:
        """The step as a whole if the budget covers that, else in stages; the other way
        around if the target says so.

        Raises BudgetTooSmall, of the planner alone (see `told`), and PlanInvalid for a
        planner whose plan exceeds the budget.
        """
        hoped_bytes = self.everything.usage.peak_bytes / HOPE
        is_roomy = self.keep_all_bytes <= self.limits.memory_bytes
        if not (self.target.stages_first and is_roomy):
            schedule = self.as_a_whole(hoped_bytes)
            if schedule is not None:
                return schedule
        try:
            return self.in_stages()
        except BudgetTooSmall as error:
            # Stages that need about as much as keep-all may need more than the whole.
            may_be_less = hoped_bytes < error.smallest_bytes
            is_last = self.target.refinable.isdisjoint(error.finer)
            schedule = self.as_a_whole(0 if may_be_less or is_last else hoped_bytes)
            if schedule is None:
                raise
            return schedule

    def told(self, error: BudgetTooSmall, tried: Iterable[Pass]) -> BudgetTooSmall:
        """`error` with the smallest percentage, with the need of `jax.jit`'s own
        program if that is less, and without what passes that were `tried` do.

        What the step holds throughout is named if it is more than the budget and passes
        would cut the graph finer in more."""
        least, whose, whole_bytes = error.smallest_bytes, "", 0
        if least <= self.limits.memory_bytes:
            return error  # something else than memory does not fit
        if self.target.whole and not self.target.in_stages:
            whole_bytes = self.facts.get("whole_bytes", 0)
        if 0 < whole_bytes < least:
            least, whose = whole_bytes, " for jax.jit's own program"
        wanted = f"a budget of at least {least}{whose}"
        if is_percentage(self.budget):
            share = math.ceil(100 * least / self.most_bytes)
            wanted = f'a budget of at least "{share}%" ({least} bytes{whose})'
        tried = tuple(tried)
        others = [x for x in error.remedies[1:] if not is_taken(x, tried)]
        remedies = (wanted, *others)
        problem = error.problem
        if least < error.least_bytes:  # which is of stages
            problem = problem.replace(bounded(error.least_bytes), "")
        held = held_bytes(self.graph)
        if self.limits.memory_bytes <= held and error.planned_bytes >= LEAST_BYTES:
            if not {pass_of(x) for x in others}.isdisjoint(refinable_of(tried)):
                problem = (
                    f"{problem.removesuffix('.')}; arguments or results alone take "
                    f"{held} bytes ({format_bytes(held)}), and budgets above that are "
                    "tried with finer graphs."
                )
        return error.but(
            problem=problem,
            remedies=remedies,
            smallest_bytes=least,
            least_bytes=min(error.least_bytes, least),
            exact=error.exact and least == error.smallest_bytes,
        )

    def as_a_whole(self, hoped_bytes: float) -> Schedule | None:
        """The function as `jax.jit` compiles it, if the budget covers that.

        It is not compiled for a budget below `hoped_bytes`.
        """
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
        if not fits(as_compiled(schedule.usage, step.nbytes), limits):
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
    if not fits(as_compiled(usage, schedule.compiled_bytes), budget):
        raise PlanInvalid(
            f"{plan.planner} returned a plan that uses {usage}, and the budget is "
            f"{budget}. The simulator judges plans, not the planner's own rules. "
            "Correct the planner, or use poet_jax.MilpPlanner()."
        )
    return schedule


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
