"""Compile a plan until the compiler itself says that it fits."""

import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from poet_jax.core.costs import Costs
from poet_jax.core.errors import BudgetTooSmall
from poet_jax.core.graph import Graph, Value
from poet_jax.core.plan import Budget, Free, Plan, Planner
from poet_jax.core.program import Program, lower
from poet_jax.core.units import format_bytes
from poet_jax.emit.stages import cut
from poet_jax.planners.planner import budget_too_small, judge_plan, keep_everything

logger = logging.getLogger("poet_jax")

ROUNDS = 4
# Of what is beside arguments and results: XLA's arena was seen to be 2 to 12 % larger
# than what lives in it at once.
MARGIN = 0.1
# Of the room, what a stage may fill at first and if that does not fit. The wider stages
# are, the more XLA fuses in them, and the less it keeps to the plan's order.
WIDE, NARROW = 1.0, 0.5
# XLA pads each small array to 64 bytes: a transfer's record, its place among the
# results, and the number that says that it is done.
RECORD_BYTES = 3 * 64
# Of what a plan gives up, XLA's arena gives up so much: it packs less well the more is
# moved and made again.
SAVED = 0.5


@dataclasses.dataclass(frozen=True)
class Fitted:
    """A plan that fits as it was compiled.

    Attributes:
      step: what was compiled.
      compilations: how many it took.
      allowed, stage_bytes: what the planner and what each stage was given.
    """

    plan: Plan
    step: Any
    compilations: int
    allowed: int
    stage_bytes: int


def compile_within(
    graph: Graph,
    costs: Costs,
    planner: Planner,
    budget: Budget,
    build: Callable[[Program], Any],
    scratch: Sequence[int],
    first: tuple[int, int] | None = None,
) -> Fitted:
    """A plan whose compiled step needs at most the budget.

    Where the compiler needs a little more, stages are made narrower; where it needs far
    more, or that does not help, the plan is made again for so much less. At last the
    leanest plan is tried, with each node as a stage. Raises BudgetTooSmall if that does
    not fit either; it says what that needs, compiled.

    `build` compiles a program whose runs are stages. `scratch` [N] is what libraries
    allocate for each node without XLA's knowledge. `first` is (allowed, stage_bytes) to
    begin with, of what fitted in an earlier process.
    """
    limit = budget.memory_bytes
    seen, seen_costs = as_allocated(graph, costs, scratch)
    held_bytes = _held_bytes(seen, seen_costs)
    allowed = int(limit - MARGIN * max(0, limit - held_bytes))
    if first is not None:
        allowed = first[0]
    plan, share, refused = None, WIDE, None
    for number in range(1, ROUNDS + 1):
        if plan is None:
            within = dataclasses.replace(
                budget, memory_bytes=allowed if number < ROUNDS else 1
            )
            try:
                seen, plan = _planned(seen, seen_costs, planner, within)
            except BudgetTooSmall as error:
                if error.smallest_bytes <= within.memory_bytes:
                    raise  # something else than memory does not fit
                refused, allowed, share = error, error.smallest_bytes, 0.0
                within = dataclasses.replace(budget, memory_bytes=allowed)
                try:
                    seen, plan = _planned(seen, seen_costs, planner, within)
                except BudgetTooSmall:  # its time was up before it found that again
                    plan = error.plan
        program = lower(graph, plan)
        stage_bytes = held_bytes + int(share * (allowed - held_bytes)) if share else 0
        if first is not None and number == 1:
            stage_bytes = first[1]
        staged = cut(program, seen_costs, stage_bytes)
        judged = judge_plan(seen, seen_costs, plan)
        planned_bytes = judged.usage.peak_bytes
        step = build(staged)
        excess = step.nbytes - limit
        logger.info(
            "compilation %d: planned %s in %d stages and transfers, compiled %s of %s",
            number,
            format_bytes(planned_bytes),
            sum(not isinstance(x, Free) for x in staged.instructions),
            format_bytes(step.nbytes),
            format_bytes(limit),
        )
        if excess <= 0:
            return Fitted(plan, step, number, allowed, stage_bytes)
        if refused is not None or number == ROUNDS:
            raise budget_too_small(
                seen,
                seen_costs,
                budget,
                judged,
                plan.planner,
                least_bytes=0 if refused is None else refused.least_bytes,
                compiled_bytes=step.nbytes,
            )
        if share == WIDE and excess <= MARGIN * (limit - held_bytes):
            share = NARROW
        else:
            planned = min(allowed, planned_bytes) - held_bytes
            allowed = held_bytes + int(max(planned - excess / SAVED, planned / 2))
            plan, allowed = None, max(1, allowed)
    raise AssertionError("the last round returns or raises")


def _planned(
    graph: Graph, costs: Costs, planner: Planner, budget: Budget
) -> tuple[Graph, Plan]:
    """A plan that never drops resident state, since XLA holds arguments to the end.

    The graph is the one that it is for: its `waiting` excludes what an earlier plan
    dropped.
    """
    plan = planner(graph, costs, budget)
    while plan.resident:
        program = lower(graph, plan)
        freed = {x.value for x in program.instructions if isinstance(x, Free)}
        freed.update(v for v in plan.resident if graph.successors[v] in freed)
        if freed.isdisjoint(plan.resident):
            break
        # What stays may be freed in the next plan, which has less room.
        stays = plan.resident - freed if graph.waiting is None else frozenset()
        graph = dataclasses.replace(graph, waiting=stays)
        plan = planner(graph, costs, budget)
    return graph, plan


def keep_all_bytes(graph: Graph, costs: Costs, scratch: Sequence[int]) -> int:
    """What keep-all needs as one compiled program, as far as is known before."""
    seen, seen_costs = as_allocated(graph, costs, scratch)
    held_bytes = _held_bytes(seen, seen_costs)
    room_bytes = keep_everything(seen, seen_costs).usage.peak_bytes - held_bytes
    return held_bytes + math.ceil(room_bytes / (1 - MARGIN))


def _held_bytes(graph: Graph, costs: Costs) -> int:
    """In RAM throughout, beside what XLA plans its own room for."""
    return sum(int(costs.nbytes[v]) for v in graph.initial)


def as_allocated(
    graph: Graph, costs: Costs, scratch: Sequence[int]
) -> tuple[Graph, Costs]:
    """Graph and costs as a planner is to see them for one compiled program.

    XLA has room for each result from the beginning of the step, unless it replaces a
    donated argument of its shape and type, and keeps the room of each argument to the
    end. So results take no room of their own when they are computed; one argument more,
    which nobody reads, stands for them all. An argument that no result replaces is not
    freed, and neither arguments nor results are paged out. XLA's own room keeps its
    size, too, so that the most of `scratch` comes on top of that, whenever it is taken,
    and so do the records of transfers from and to state on storage.
    Nodes and values keep their numbers.
    """
    donated = [v for v in graph.donated if v not in graph.stored]
    unpaired: dict[Any, int] = {}
    for v in donated:
        kind = graph.values[v].kind
        unpaired[kind] = unpaired.get(kind, 0) + 1
    nbytes = np.array(costs.nbytes)
    own_bytes, replaced = max(scratch, default=0), set()
    own_bytes += RECORD_BYTES * (len(graph.stored) + len(graph.landing))
    for v in graph.returned:
        if v in graph.producer:
            kind = graph.values[v].kind
            if unpaired.get(kind):
                unpaired[kind] -= 1
                replaced.add(kind)
            elif v not in graph.landing:
                own_bytes += int(nbytes[v])
                nbytes[v] = 0
    given = (v for v in graph.arguments if v not in graph.stored)
    here = {x for v in given for x in graph.pieces(v)}
    here = here.union(graph.returned, graph.references)
    values = tuple(
        dataclasses.replace(
            value,
            nbytes=int(nbytes[v]),
            pageable=value.pageable and v not in here,
        )
        for v, value in enumerate(graph.values)
    )
    results = len(values)
    kept = {v for v in donated if graph.values[v].kind not in replaced}
    seen = dataclasses.replace(
        graph,
        values=(*values, Value("results", own_bytes, pageable=False)),
        constants={**graph.constants, results: None},
        donated=graph.donated - kept,
    )
    more = {
        name: np.append(column, 0)
        for name, column in vars(costs).items()
        if name.startswith("page_")
    }
    return seen, dataclasses.replace(
        costs,
        nbytes=np.append(nbytes, own_bytes),
        workspace_bytes=np.maximum(costs.workspace_bytes - np.array(scratch, int), 0),
        **more,
    )
