"""The program with a cut at every base node, and rows for what its plans break.

Each segment is one stage, and what a solution says of it is what a staged plan does.
What may be wrong with that plan is memory while nodes run again, and waiting for pages.
Rows about those, (9) and (10) of docs/explanation/formulation.md, are added where a
plan breaks them, until one breaks none: it is the best of all staged plans.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from poet_jax.core.program import Run
from poet_jax.planners.milp.cuts import Cuts
from poet_jax.planners.milp.lift import lifted, values_of
from poet_jax.planners.milp.solver import xsum
from poet_jax.planners.milp.state import State
from poet_jax.planners.planner import ROUNDING, Judged, prefetch

# Rows about seconds are broken by more than this share of them.
TOLERANCE = 1e-6

# So many plans that wait beyond the deadline are forbidden, one by one.
LATE_PLANS = 30


class Exact(Cuts):
    """A source: the program of a small graph, which gets more and more rows."""

    share = 1.0

    def __init__(self, state: State):
        graph = state.graph
        parts = graph, state.costs, state.budget, state.planner
        super().__init__(*parts, range(len(graph.nodes)))
        self.state = state
        self.late_plans = 0  # that were forbidden: then the minimum is no bound
        self._limited: set[tuple[int, int]] = set()
        self._readers: dict[tuple[int, int], list[int]] = {}
        for i, t in self.r:
            for v in graph.nodes[i].reads:
                self._readers.setdefault((v, t), []).append(i)

    def __iter__(self) -> Iterator[tuple[float, Judged | None]]:
        state, rounds = self.state, 0
        while True:
            rounds += 1
            state.statistics |= self.statistics | {"rounds": rounds}
            known = [] if state.best is None else values_of(self, state.best)
            seconds = max(1.0, state.seconds_left())
            solution = self.model.optimize(seconds, known)
            bound = 0.0 if self.late_plans else solution.bound * self.unit
            if solution.values is None:
                yield bound, None
                return
            state.solved, judged = True, lifted(self, solution.values)
            yield bound, state.repaired(judged)
            if not self.tighten(judged, solution.values):
                return

    def tighten(self, judged: Judged, values: np.ndarray) -> bool:
        """Add rows that a solution, [variables], and its plan break; False if there are
        none."""
        if self.budget is None:
            least = float(values[self.memory.idx]) * self.unit
            return self._limit_repeats(judged, least)
        if judged.usage.peak_bytes > self.budget.memory_bytes:
            return self._limit_repeats(judged, self.budget.memory_bytes)
        return self._stall_rows(values) or self._forbid_late(judged, values)

    def _limit_repeats(self, judged: Judged, limit: float) -> bool:
        found, computed = set(), set()
        for row, instruction in enumerate(judged.program.instructions):
            if isinstance(instruction, Run):
                (node,) = instruction.nodes
                again = node in computed
                computed.add(node)
                if again and judged.usage.live_bytes[row] > limit:
                    found.add((node, len(computed)))
        found &= self.r.keys() - self._limited
        for again, stage in sorted(found):
            self._limit_repeat(again, stage)
        self._limited |= found
        return bool(found)

    def _limit_repeat(self, again: int, stage: int) -> None:
        """(9) RAM while a node runs again in a stage."""
        graph, model, runs = self.graph, self.model, self.r[again, stage]
        node = graph.nodes[again]
        own = {*node.reads, *node.writes} - graph.pinned
        own_bytes = sum(self.nbytes[v] for v in own)
        own_bytes += int(self.costs.workspace_bytes[again])
        used = [(own_bytes, runs)]
        for v in range(len(graph.values)):
            if v in own or not self.is_older(v, stage):
                continue
            here, after = self.x.get((v, stage)), self.x.get((v, stage + 1))
            if here is not None and here is after:  # nothing about it changes here
                used.append((self.nbytes[v], here))
                continue
            producer, readers = graph.producer.get(v, -1), self._readers.get((v, stage))
            made, loaded = self.r.get((producer, stage)), self.page_in.get((v, stage))
            new = [y for y in (made, loaded) if y is not None]
            sources = [] if here is None else [here - xsum(new)]
            if made is not None and producer < again:
                sources.append(made)
            if loaded is not None:
                before = (i for i in readers or () if i < again)
                sources += [loaded + self.r[i, stage] - 1 for i in before]
            uses = [*self.needed[stage].get(v, ())]
            if not any(isinstance(use, int) for use in uses):
                uses += [self.r[i, stage] for i in readers or () if i > again]
                uses += [] if after is None else [after]
            if sources and uses:
                alive = model.add_var(ub=1)
                used.append((self.nbytes[v], alive))
                for source in sources:
                    for use in uses:
                        model += alive >= source + use + runs - 2
        pinned = sum(self.nbytes[v] for v in graph.pinned) / self.memory_unit
        total = xsum(nbytes / self.memory_unit * y for nbytes, y in used)
        model += total + pinned <= self.memory

    def _stall_rows(self, values: np.ndarray) -> bool:
        """Add the rows (10) that the solution breaks."""
        assert self.budget is not None
        is_time = self.planner.objective == "time" or self.costs.static_watts > 0
        if not is_time and self.budget.seconds is None:
            return False
        found, model = False, self.model
        for outside, terms in self.stalls(values):
            least = outside + sum(n * values[y.idx] for n, y in terms)
            if least > values[self.seconds.idx] * (1 + TOLERANCE):
                total = xsum(float(n) * y for n, y in terms) + float(outside)
                model += self.seconds >= total
                found = True
        return found

    def stalls(
        self, values: np.ndarray
    ) -> Iterator[tuple[float, list[tuple[float, Any]]]]:
        """(10) Right sides, as a constant and terms, about the solution's page-ins:
        what is written after base node `first` and read for base node `last` moves both
        ways between them, while nothing else need be computed."""
        costs, producer = self.costs, self.graph.producer
        moved = [key for key, y in self.page_in.items() if values[y.idx] > 0.5]
        for first in {producer.get(v, -1) for v, _ in moved}:
            for last in {t for _, t in moved if t > first}:
                outside = costs.seconds[: first + 1].sum() + costs.seconds[last:].sum()
                terms = [
                    (costs.seconds[i], y)
                    for (i, t), y in self.r.items()
                    if t <= first or t > last
                ]
                terms += [
                    (costs.page_in_seconds[v], y)
                    for (v, t), y in self.page_in.items()
                    if producer.get(v, -1) >= first and t <= last
                ]
                written = {v: t for v, t in sorted(moved, reverse=True) if t <= last}
                terms += [
                    (costs.page_out_seconds[v], self.page_in[v, t])
                    for v, t in written.items()
                    if producer.get(v, -1) >= first and v in self.page_out
                ]
                yield outside, terms

    def _forbid_late(self, judged: Judged, values: np.ndarray) -> bool:
        """A plan that waits beyond the deadline, with no room to issue its page-ins
        earlier: ask for one that leaves out some of them."""
        assert self.budget is not None
        deadline = self.budget.seconds
        chosen = [y for y in self.page_in.values() if values[y.idx] > 0.5]
        if deadline is None or not chosen or self.late_plans == LATE_PLANS:
            return False
        timely = prefetch(self.costs, judged, self.budget)
        if timely.usage.seconds <= deadline * ROUNDING:
            return False
        self.late_plans += 1
        model = self.model
        model += xsum(chosen) <= len(chosen) - 1
        return True
