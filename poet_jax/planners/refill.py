"""Take back what a plan that fits has room for."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from poet_jax.core.costs import Costs
from poet_jax.core.plan import Budget, Compute, PageIn
from poet_jax.core.program import Run
from poet_jax.planners.evict import Eviction, Life
from poet_jax.planners.planner import Judged, fits, judge, objective_of


def refill(costs: Costs, budget: Budget, judged: Judged, objective: str) -> Judged:
    """`judged`, which fits, without the repeats and page-ins for which there is room to
    wait in RAM, if need be from the step before."""
    while True:
        eviction = Eviction(costs, judged, True, True, objective)
        stages, live = eviction.stages, judged.usage.live_bytes.copy()
        kept, resident = 0, set(judged.graph.resident)
        for back in sorted(_returns(judged, eviction), key=lambda back: -back.worth):
            if not back.waits_in(live, budget.memory_bytes):
                continue
            kept += 1
            if isinstance(back.action, Compute):
                stages.reruns[back.stage].discard(back.action.node)
            else:
                stages.page_ins[back.stage].discard(back.action.value)
                if back.from_home:
                    resident.add(back.action.value)
        graph = judged.graph.with_resident(resident)
        at_home = {*graph.stored, *graph.landing}
        stages.page_outs &= at_home.union(*stages.page_ins)
        better = judge(graph, costs, stages.actions(graph))
        before, after = (objective_of(x.usage, objective) for x in (judged, better))
        if not (kept and fits(better.usage, budget)) or after > before:
            return judged
        judged = better


@dataclasses.dataclass
class _Return:
    """A repeat or a page-in, and the values that would wait in RAM instead of it.

    Attributes:
      worth: what it costs per byte of them.
      waits: (first row, last row, bytes) of each in which it would be in RAM.
      from_home: whether they would have to be in RAM between steps.
    """

    action: Compute | PageIn
    stage: int
    worth: float
    waits: list[tuple[int, int, int]]
    from_home: bool

    def waits_in(self, live: np.ndarray, memory_bytes: int) -> bool:
        """Add the values to `live` if they fit."""
        for left, back, nbytes in self.waits:
            live[left:back] += nbytes
        if all(live[i:k].max(initial=0) <= memory_bytes for i, k, _ in self.waits):
            return True
        for left, back, nbytes in self.waits:
            live[left:back] -= nbytes
        return False


def _returns(judged: Judged, eviction: Eviction) -> Iterator[_Return]:
    """Every repeat and page-in of a plan."""
    nbytes, life = eviction.nbytes, Life(judged)
    graph, stage = judged.graph, 0
    for row, x in enumerate(judged.program.instructions):
        if isinstance(x, Run) and x.nodes == (stage,):
            stage += 1
            continue
        from_home = False
        match x:
            case Run((node,)):
                action, values, cost = Compute(node), x.writes, eviction.node_cost[node]
            case PageIn(value):
                action, values, cost = x, (value,), eviction.in_cost[value]
                from_home = life.is_first(value, row)
            case _:
                continue
        if from_home and values[0] not in graph.successors:
            continue
        waits = [
            (left, back, nbytes[u])
            for v in values
            for left, back, u in life.waits(v, row)
        ]
        worth = cost / max(1, sum(n for _, _, n in waits))
        yield _Return(action, stage, worth, waits, from_home)
