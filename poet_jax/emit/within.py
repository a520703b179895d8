"""Compile a plan until the compiler itself says that it fits."""

import dataclasses
import logging
import math
import sys
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import numpy as np

from poet_jax.core.costs import Costs
from poet_jax.core.errors import BudgetTooSmall
from poet_jax.core.graph import Graph, Value
from poet_jax.core.in_place import versions
from poet_jax.core.plan import BasePlanner, Budget, Free, Plan, Planner
from poet_jax.core.program import Program, lower
from poet_jax.core.units import format_bytes
from poet_jax.emit.stages import cut
from poet_jax.planners.planner import (
    Judged,
    budget_too_small,
    floor_bytes,
    judge_plan,
    keep_everything,
)

logger = logging.getLogger("poet_jax")

# Of what is beside arguments and results: XLA's arena was seen to be 2 to 12 % larger
# than what lives in it at once.
MARGIN = 0.1
# Of the room, what a stage may fill at first and if that does not fit. The wider stages
# are, the more XLA fuses in them, and the less it keeps to the plan's order.
SHARES = 1.0, 0.5, 0.5
# Each stage was measured to cost 20 to 40 us, which steps of fewer seconds feel. XLA
# holds less at once than all that a stage makes: 1.1 fitted in eleven of twelve steps.
BRIEF_SECONDS, BRIEF_SHARES = 0.1, (1.1, 0.9, 0.5)
# However large the budget is, a stage fills at most so many times the plan's peak: on a
# CPU, steps in less memory save page faults where their workspace is mapped anew.
SPREAD = 1.5
# XLA pads each small array to 64 bytes: a transfer's record, its place among the
# results, and the number that says that it is done.
RECORD_BYTES = 3 * 64
# The last bytes cost most: with so much more than the leanest plan, plans are far
# cheaper.
EASE = 0.03
# Of what a plan gives up, XLA's arena gives up so much: it packs less well the more is
# moved and made again.
SAVED = 0.8
# A plan that is made again gets at least this share of the room less. XLA may pack its
# arena less well than the last one, by more than a small excess.
LEAST_CUT = 0.03
# What a plan needs over the budget, so that no compiler makes up for it.
HOPELESS = 1.1
# The last one is of the leanest plan.
MOST_COMPILATIONS = 4


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
    first: tuple[int, int] | None,
    refinable: Set[str],
) -> Fitted:
    """A plan whose compiled step needs at most the budget.

    Where the compiler needs more, the plan is made again for so much less, with
    narrower stages. At last come a plan near the leanest one and that one itself, with
    each node as a stage. Raises BudgetTooSmall if that does not fit either; it says
    what fits, compiled.

    `build` compiles a program whose runs are stages. `scratch` [N] is what libraries
    allocate for each node without XLA's knowledge. `first` is (allowed, stage_bytes) to
    begin with, of what fitted in an earlier process. `refinable` are passes that can
    cut the graph finer: where the leanest plan is far above the budget and one of them
    would help, BudgetTooSmall is raised without compiling that plan.
    """
    fitting = _Fitting(graph, costs, planner, budget, build, scratch, refinable)
    for plan, allowed, stage_bytes in fitting.attempts(first):
        step = fitting.compiled(plan, stage_bytes)
        if fitting.excess_bytes <= 0:
            return Fitted(plan, step, fitting.compilations, allowed, stage_bytes)
    raise fitting.too_small()


class _Fitting:
    """Plans for a step until one fits; see `compile_within`.

    Attributes:
      compilations: how many there were.
      compiled_bytes: what the last one needs in RAM.
      leanest: the plan of least memory that was seen; None before there is any.
      refused: the planner's latest error, and whether it was about a budget under what
        single nodes need (`was_hopeless`), so that all its time went to lean plans.
      least_bytes: what every plan needs.
    """

    def __init__(
        self,
        graph: Graph,
        costs: Costs,
        planner: Planner,
        budget: Budget,
        build: Callable[[Program], Any],
        scratch: Sequence[int],
        refinable: Set[str],
    ):
        self.graph, self.budget, self.build = graph, budget, build
        self.refinable = refinable
        self.planner = BasePlanner.of(planner)
        self.limit = min(budget.memory_bytes, sys.maxsize)
        self.seen, self.costs = as_allocated(graph, costs, scratch)
        self.held_bytes = _held_bytes(self.seen, self.costs)
        self.compilations = self.compiled_bytes = 0
        self.is_close = False
        self.leanest: Plan | None = None
        self.refused: BudgetTooSmall | None = None
        self.was_hopeless = False
        self.least_bytes = 0

    @property
    def excess_bytes(self) -> int:
        """Of what was compiled last, over the budget."""
        return self.compiled_bytes - self.limit

    def attempts(
        self, first: tuple[int, int] | None
    ) -> Iterator[tuple[Plan, int, int]]:
        """(plan, bytes that the planner and each stage were given), one after the other
        as long as none fits."""
        room_bytes = max(0, self.limit - self.held_bytes)
        allowed, stage_bytes = max(1, int(self.limit - MARGIN * room_bytes)), None
        if first is not None:
            allowed, stage_bytes = first
        is_brief = self.costs.seconds.sum() < BRIEF_SECONDS
        plan = None
        for share in BRIEF_SHARES if is_brief else SHARES:
            if plan is None or stage_bytes is None:
                plan = self.planned(allowed)
            if plan is None:
                break
            if stage_bytes is None:
                stage_bytes = self.stage_bytes(plan, allowed, share)
            yield plan, allowed, stage_bytes
            stage_bytes = self.narrower(stage_bytes)
            if self.peak_bytes(plan) < min(stage_bytes, (1 - MARGIN) * allowed):
                continue  # the stages need too much, and not the plan
            allowed, stage_bytes = self.less(allowed), None
        yield from self.lean_attempts()

    def stage_bytes(self, plan: Plan, allowed: int, share: float) -> int:
        """What a stage may fill: of a plan's room, a share."""
        most_bytes = min(allowed, SPREAD * self.peak_bytes(plan))
        return self.held_bytes + int(share * max(0, most_bytes - self.held_bytes))

    def less(self, allowed: int) -> int:
        """What the planner may fill if a plan within `allowed` needs too much."""
        room_bytes = max(0, allowed - self.held_bytes)
        over = max(self.excess_bytes / SAVED, LEAST_CUT * room_bytes)
        less = max(room_bytes - over, room_bytes / 2)
        return max(1, self.held_bytes + int(less))

    def narrower(self, stage_bytes: int) -> int:
        """What a stage may fill if those that were compiled last need too much."""
        over = self.excess_bytes / max(1, self.compiled_bytes - self.held_bytes)
        share = max(0.0, 1 - over) * (1 - MARGIN)
        return self.held_bytes + int(share * (stage_bytes - self.held_bytes))

    def lean_attempts(self) -> Iterator[tuple[Plan, int, int]]:
        """As `attempts`, of plans in little more than the least memory, or in that."""
        if self.refused is not None and not self.refinable.isdisjoint(
            self.refused.finer
        ):
            if self.smallest_bytes > HOPELESS * self.limit:
                raise self.refused
        # The leanest plan that is looked for with all the time is that which an error
        # names: without it, the budget that an error names might not work.
        if self.refused is None or not (self.refused.exact or self.was_hopeless):
            self.is_close = False
            if (plan := self.planned(1)) is not None:
                yield plan, 1, 0
                return
        assert self.leanest is not None
        least = self.smallest_bytes
        allowed = int(least * (1 + EASE))
        self.is_close = False  # there is much to gain, and a plan is hard to find
        while allowed > least and self.compilations < MOST_COMPILATIONS - 1:
            if (plan := self.planned(allowed)) is None:
                break
            yield plan, allowed, 0
            room_bytes = allowed - self.held_bytes
            if self.excess_bytes > allowed - least + MARGIN * room_bytes:
                return  # the leanest will not make up for that
            allowed = self.less(allowed)
        yield self.leanest, least, 0

    def planned(self, allowed: int) -> Plan | None:
        """A plan within so many bytes that never drops resident state, since XLA holds
        arguments to the end; None if there is none. Half the time is enough where only
        a little less is asked for than before.
        """
        within = dataclasses.replace(self.budget, memory_bytes=allowed)
        is_hastened, self.is_close = self.is_close, True
        planner = self.planner.hastened() if is_hastened else self.planner
        try:
            plan = planner(self.seen, self.costs, within, self.leanest)
            while plan.resident:
                program = lower(self.seen, plan)
                freed = {x.value for x in program.instructions if isinstance(x, Free)}
                successors = self.seen.successors
                freed.update(v for v in plan.resident if successors[v] in freed)
                if freed.isdisjoint(plan.resident):
                    break
                # What stays may be freed in the next plan, which has less room.
                waiting = self.seen.waiting
                stays = plan.resident - freed if waiting is None else frozenset()
                self.seen = dataclasses.replace(self.seen, waiting=stays)
                if self.leanest is not None and not self.leanest.resident <= stays:
                    self.leanest = None  # no plan of what may wait now
                plan = planner(self.seen, self.costs, within, self.leanest)
        except BudgetTooSmall as error:
            if error.plan is None or error.smallest_bytes <= allowed:
                # Something else than memory does not fit.
                asked = error.problem.replace(str(within), str(self.budget), 1)
                raise error.but(problem=asked) from error.__cause__
            self.least_bytes = max(self.least_bytes, error.least_bytes)
            floor = floor_bytes(self.seen, self.costs)
            self.was_hopeless = allowed < floor and not is_hastened
            self.refused, plan, found = error, None, error.plan
        else:
            found = plan
        if self.leanest is None or self.peak_bytes(found) < self.smallest_bytes:
            self.leanest = found
        return plan

    def compiled(self, plan: Plan, stage_bytes: int) -> Any:
        """The step of a plan whose stages fill so many bytes."""
        staged = cut(lower(self.graph, plan), self.costs, stage_bytes)
        step = self.build(staged)
        self.compilations += 1
        self.compiled_bytes = step.nbytes
        logger.info(
            "compilation %d: planned %s in %d stages and transfers, compiled %s of %s",
            self.compilations,
            format_bytes(self.peak_bytes(plan)),
            sum(not isinstance(x, Free) for x in staged.instructions),
            format_bytes(step.nbytes),
            format_bytes(self.limit),
        )
        return step

    def judged(self, plan: Plan) -> Judged:
        return judge_plan(self.seen, self.costs, plan)

    def peak_bytes(self, plan: Plan) -> int:
        return self.judged(plan).usage.peak_bytes

    @property
    def smallest_bytes(self) -> int:
        """What the leanest plan needs."""
        assert self.leanest is not None
        return self.peak_bytes(self.leanest)

    def too_small(self) -> BudgetTooSmall:
        """The error after the last attempt."""
        assert self.leanest is not None
        return budget_too_small(
            self.seen,
            self.costs,
            self.budget,
            self.judged(self.leanest),
            self.leanest.planner,
            least_bytes=self.least_bytes,
            compiled_bytes=self.compiled_bytes,
        )


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
    freed, and neither arguments nor results are paged out, nor is what lies there in
    between. XLA's own room keeps its size, too, so that the most of `scratch` comes on
    top of that, whenever it is taken, and so do the records of transfers from and to
    state on storage.
    Nodes and values keep their numbers.
    """
    donated = [v for v in graph.donated if v not in graph.stored]
    unpaired: dict[Any, int] = {}
    for v in donated:
        room = graph.values[v].room
        unpaired[room] = unpaired.get(room, 0) + 1
    nbytes = np.array(costs.nbytes)
    own_bytes, replaced = max(scratch, default=0), set()
    own_bytes += RECORD_BYTES * (len(graph.stored) + len(graph.landing))
    for v in graph.returned:
        if v in graph.producer:
            room = graph.values[v].room
            if unpaired.get(room):
                unpaired[room] -= 1
                replaced.add(room)
            elif v not in graph.landing:
                own_bytes += int(nbytes[v])
                nbytes[v] = 0
    given = (v for v in graph.arguments if v not in graph.stored)
    here = {x for v in given for x in graph.pieces(v)}
    here = here.union(graph.returned, graph.references, versions(graph))
    values = tuple(
        dataclasses.replace(
            value, nbytes=int(nbytes[v]), pageable=value.pageable and v not in here
        )
        for v, value in enumerate(graph.values)
    )
    results = len(values)
    kept = {v for v in donated if graph.values[v].room not in replaced}
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
