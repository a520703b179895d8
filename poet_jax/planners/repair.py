"""From a plan that is almost right to one that fits and leaves no room unused."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from poet_jax.graph import Graph
from poet_jax.plan import Budget, Compute, PageIn
from poet_jax.planners.greedy import Eviction, Life
from poet_jax.planners.judge import Judged, fits, judge, objective_of
from poet_jax.price import Costs


def evictions(
    graph: Graph, costs: Costs, budget: Budget, judged: Judged, objective: str
) -> Iterator[Judged]:
    """`judged`, and then with more and more evictions until its peak is within the
    budget."""
    eviction = Eviction(graph, costs, judged, True, True, objective)
    while True:
        yield judged
        over = judged.usage.peak_bytes - budget.memory_bytes
        if over <= 0 or not eviction.step(judged, over):
            return
        judged = eviction.judged()


def refill(
    graph: Graph, costs: Costs, budget: Budget, judged: Judged, objective: str
) -> Judged:
    """`judged`, which fits, without the repeats and page-ins for which there is room to
    wait in RAM."""
    while True:
        eviction = Eviction(graph, costs, judged, True, True, objective)
        stages, live = eviction.stages, judged.usage.live_bytes.copy()
        kept = 0
        for back in sorted(_returns(judged, eviction), key=lambda back: -back.worth):
            if not back.waits_in(live, budget.memory_bytes):
                continue
            kept += 1
            if isinstance(back.action, Compute):
                stages.reruns[back.stage].discard(back.action.node)
            else:
                stages.page_ins[back.stage].discard(back.action.value)
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
      row: its instruction.
      waits: (row at which a value was freed, its bytes).
    """

    action: Compute | PageIn
    stage: int
    row: int
    worth: float
    waits: list[tuple[int, int]]

    def waits_in(self, live: np.ndarray, memory_bytes: int) -> bool:
        """Add the values to `live` if they fit."""
        before = live[
            min((left for left, _ in self.waits), default=self.row) : self.row
        ]
        saved = before.copy()
        for left, nbytes in self.waits:
            live[left : self.row] += nbytes
        if before.size and before.max() > memory_bytes:
            before[:] = saved
            return False
        return True


def _returns(judged: Judged, eviction: Eviction) -> Iterator[_Return]:
    """Every repeat and page-in of a plan."""
    nbytes, life = eviction.costs.nbytes, Life(judged)
    stage = 0
    for row, x in enumerate(judged.program.instructions):
        if isinstance(x, Compute) and x.node == stage:
            stage += 1
            continue
        if isinstance(x, Compute):
            values, cost = eviction.graph.nodes[x.node].writes, eviction.node_cost
            cost = float(cost[x.node])
        elif isinstance(x, PageIn):
            if life.is_first(x.value, row):
                continue  # from its home on storage
            values, cost = (x.value,), float(eviction.in_cost[x.value])
        else:
            continue
        waits = [
            (left, int(nbytes[v]))
            for v in values
            if (left := life.left(v, row)) is not None
        ]
        worth = cost / max(1, sum(n for _, n in waits))
        yield _Return(x, stage, row, worth, waits)
