"""A program over a few moments: what is in RAM there, and what happens between.

The equations carry the numbers of docs/explanation/formulation.md. A cut is the moment
at which a base node runs, and segment j lies between cut j and cut j + 1, from the
start of the step (j = 0) to its end. Whatever a plan does, it gives values to

    x[v, j]   v is in RAM at cut j
    r[i, j]   node i runs again in segment j     in[v, j]  v is paged in in segment j
    out[v]    v is written to storage
    x[v, 0]   v, which is on storage, is in RAM when the step begins, and what takes its
              place when it ends

so the minimum is a lower bound for all plans, and few cuts make a small program. RAM
is limited at the cuts alone, which are added where the plan of a solution exceeds it.
"""

import bisect
import math
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from poet_jax.core.costs import Costs
from poet_jax.core.graph import Graph
from poet_jax.core.in_place import replaceable
from poet_jax.core.plan import Budget
from poet_jax.planners.milp.choice import Choice, Chosen
from poet_jax.planners.milp.solver import Model, xsum
from poet_jax.planners.planner import least_objective

# Values below this share of the memory stay in RAM and are not counted, if there are
# fewer cuts than nodes.
SMALL = 2e-4


class Cuts:
    """The program with cuts at some base nodes.

    Args:
      graph, costs: what is planned.
      budget: None to minimise the memory at the cuts, in bytes.
      planner: a MilpPlanner.
      nodes: base nodes to cut at.
      reserve_bytes: left free at every cut. With it the minimum is no bound.
      reserves: bytes left free, by (cut, node), at a cut if the node runs again in the
        segment that it ends, or is its own. With any the minimum is no bound.
      horizon: nodes that run again are at most so many before one whose results a
        segment reads; None for no limit. With it the minimum is no bound.
      again: (node, segment) of nodes that may run again beyond the horizon.
      windows: whether (6) are between any two cuts. They make relaxations stronger,
        and far larger.
      choice: what may be left out. With it the objective is what that would gain.
    """

    def __init__(
        self,
        graph: Graph,
        costs: Costs,
        budget: Budget | None,
        planner: Any,
        nodes: Iterable[int],
        choice: Choice | None = None,
        reserve_bytes: int = 0,
        reserves: Mapping[tuple[int, int], int] = MappingProxyType({}),
        horizon: int | None = None,
        again: Collection[tuple[int, int]] = (),
        windows: bool = False,
    ):
        self.graph, self.costs, self.budget = graph, costs, budget
        self.planner, self.horizon, self.again = planner, horizon, again
        self.nodes = sorted(nodes)
        self.last = len(self.nodes)  # the last segment
        self.nbytes = [int(n) for n in costs.nbytes]
        limit = costs.nbytes.sum() if budget is None else budget.memory_bytes
        exact = self.last == len(graph.nodes)
        self.small = graph.pinned | {
            v
            for v, n in enumerate(self.nbytes)
            if (n == 0 and v not in graph.stored if exact else n < SMALL * limit)
        }
        self.model = Model(planner.solver, planner.gap / 2)
        self.x: dict[tuple[int, int], Any] = {}
        self.r: dict[tuple[int, int], Any] = {}
        self.page_in: dict[tuple[int, int], Any] = {}
        self.page_out: dict[int, Any] = {}
        self.waiting = {}  # x[v, 0]
        if budget is not None and choice is None:
            waiting = [v for v in graph.successors if v not in self.small]
            self.waiting = {v: self.model.add_var(binary=True) for v in waiting}
            self.x |= {(v, 0): y for v, y in self.waiting.items()}
        self.chosen = None if choice is None else Chosen(self.model, choice)
        # In each segment: whether the base nodes there that read a value run.
        self.needed: list[dict[int, list[Any]]] = [{} for _ in range(self.last + 1)]
        for stage in range(len(graph.nodes) + 1):
            segment = self.segment(stage)
            for v, runs in self.needs(stage):
                known = self.needed[segment].setdefault(v, [])
                if self.is_older(v, segment) and not any(x is runs for x in known):
                    known.append(runs)
        self.needed = [{v: x for v, x in y.items() if x} for y in self.needed]
        self._variables()
        self._source_rows()
        for stop in range(3 if windows else self.last + 1, self.last + 2):
            for start in range(1, stop - 1, 1 if horizon is None else 3):
                self._window_rows(start, stop)
        self._memory_rows(reserve_bytes, reserves)
        self._store_rows()
        self._time_rows()
        self.unit = self._minimise()
        self.statistics = {
            "binaries": sum(self.model.binary),
            "rows": self.model.rows,
            "cuts": self.last,
        }

    def segment(self, stage: int) -> int:
        """The segment in which what is done for a base stage happens."""
        return bisect.bisect_left(self.nodes, stage)

    def is_older(self, value: int, segment: int) -> bool:
        """Whether a value that counts exists when the segment starts."""
        start = self.nodes[segment - 1] if segment else -1
        return value not in self.small and self.graph.producer.get(value, -1) <= start

    def runs(self, stage: int) -> Any:
        """Whether a base node runs: 1, but for what may be left out."""
        return 1 if self.chosen is None else self.chosen.runs(stage)

    def needs(self, stage: int) -> list[tuple[int, Any]]:
        """(value, whether it is read) of what a base node may read."""
        if stage < len(self.graph.nodes):
            return [(v, self.runs(stage)) for v in self.graph.nodes[stage].reads]
        if self.chosen is not None:
            return self.chosen.returned(self.graph.returned)
        waiting = [(self.graph.successors[v], y) for v, y in self.waiting.items()]
        return [(v, 1) for v in self.graph.returned] + waiting

    def _time_rows(self) -> None:
        """(8) Seconds are at least those of each lane, and meet the deadline."""
        costs, model = self.costs, self.model
        if self.budget is None:
            return
        self.seconds = model.add_var()
        storage = [float(cost[v]) * y for cost, _, v, y in self._transfers()]
        again = xsum(float(costs.seconds[i]) * y for (i, _), y in self.r.items())
        once = xsum(
            float(cost) * self.runs(stage) for stage, cost in enumerate(costs.seconds)
        )
        model += self.seconds >= once + again + costs.contention * xsum(storage)
        model += self.seconds >= xsum(storage)
        if self.budget.seconds is not None:
            model += self.seconds <= self.budget.seconds

    def _transfers(self) -> list[tuple[np.ndarray, np.ndarray, int, Any]]:
        """(seconds, joules, value, variable) of what may move, by value the costs."""
        costs = self.costs
        loads = costs.page_in_seconds, costs.page_in_joules
        stores = costs.page_out_seconds, costs.page_out_joules
        return [(*loads, v, y) for (v, _), y in self.page_in.items()] + [
            (*stores, v, y) for v, y in self.page_out.items()
        ]

    def _minimise(self) -> float:
        """Set the objective; how much counts as one in the model."""
        costs, planner = self.costs, self.planner
        if self.chosen is not None:
            self.model.minimise(self.chosen.loss())
            return 1.0
        if self.budget is None:
            self.model.minimise(self.memory * 1.0)
            return self.memory_unit
        value = self.seconds * 1.0
        if planner.objective == "energy":
            joules = [float(costs.joules[i]) * y for (i, _), y in self.r.items()]
            joules += [float(cost[v]) * y for _, cost, v, y in self._transfers()]
            value = costs.static_watts * self.seconds + xsum(joules)
            value += float(costs.joules.sum())
        # Solvers stop at absolute differences too, so keep-all counts as 1000.
        least = least_objective(self.graph, costs, planner.objective)
        unit = least / 1000 or 1.0
        self.model.minimise(value * (1 / unit), least / unit)
        return unit

    def _variables(self) -> None:
        """From the last segment back: what it or a later one may need, and from
        where."""
        graph, model, later = self.graph, self.model, set()
        for segment in range(self.last, -1, -1):
            later = {v for v in later if self.is_older(v, segment)}
            needed = self.needed[segment]
            wanted = set(needed) if self.horizon is not None else later | set(needed)
            nodes = {n for n, k in self.again if k == segment}
            nodes |= self.ancestors(wanted)
            touched = set(needed)
            if segment:  # what the node of the cut needs may go right after it
                cut = graph.nodes[self.nodes[segment - 1]]
                touched.update(later & {*cut.reads, *cut.writes})
            for node in sorted(nodes):
                self.r[node, segment] = model.add_var(binary=True)
                both = (*graph.nodes[node].reads, *graph.nodes[node].writes)
                touched.update(v for v in both if self.is_older(v, segment))
            later |= touched
            for v in later if segment else later.intersection(graph.stored):
                if segment and v not in touched:  # nothing about it changes here
                    self.x[v, segment] = self.x[v, segment + 1]
                    continue
                if segment:
                    self.x[v, segment] = model.add_var(binary=True)
                if graph.values[v].pageable:
                    self.page_in[v, segment] = model.add_var(binary=True)
                    if v in graph.stored:
                        continue
                    if v not in self.page_out:
                        self.page_out[v] = model.add_var(ub=1)
                    model += self.page_in[v, segment] <= self.page_out[v]  # (4)
        for v in graph.landing.keys() - self.page_out:
            self.page_out[v] = model.add_var(ub=1)
        for v in graph.landing:
            model += self.page_out[v] >= 1

    def ancestors(self, values: Iterable[int]) -> set[int]:
        """Nodes that may run again for `values`.

        With a horizon, those at most so many nodes before the one that made a value.
        """
        graph, oldest = self.graph, {}
        horizon = len(graph.nodes) if self.horizon is None else self.horizon
        todo = [(v, max(0, graph.producer.get(v, -1) - horizon)) for v in values]
        while todo:
            v, first = todo.pop()
            node = graph.producer.get(v, -1)
            if node < first or not graph.nodes[node].repeatable:
                continue
            if first < oldest.get(node, math.inf):
                oldest[node] = first
                todo.extend((u, first) for u in graph.nodes[node].reads)
        return set(oldest)

    def sources(self, value: int, segment: int) -> Any:
        """What may bring `value` into RAM during the segment."""
        node = self.graph.producer.get(value, -1)
        places = ((self.x, value), (self.page_in, value), (self.r, node))
        return xsum(y[n, segment] for y, n in places if (n, segment) in y)

    def _source_rows(self) -> None:
        model, stored = self.model, self.graph.stored
        for segment, needed in enumerate(self.needed):
            for v in needed if segment else stored.keys() & needed.keys():
                for runs in needed[v]:
                    model += self.sources(v, segment) >= runs  # (1)
        for (node, segment), again in self.r.items():
            for v in self.graph.nodes[node].reads:
                if (segment or v in stored) and self.is_older(v, segment):
                    model += again <= self.sources(v, segment)  # (2)
        for (v, cut), kept in self.x.items():
            same = cut == 0 or self.x.get((v, cut - 1)) is kept
            begins = cut == 1 and v not in stored  # in RAM, then
            if not (begins or same) and self.is_older(v, cut - 1):
                model += kept <= self.sources(v, cut - 1)  # (3)

    def _window_rows(self, start: int, stop: int) -> None:
        """(6) From cut `start` to cut `stop`, or the end of the step, as one segment.

        Without them a fraction of a kept value serves a fraction of a repeat in every
        segment, and these fractions add up to a whole one.
        """
        graph, model = self.graph, self.model
        segments = range(start, stop)
        windows: dict[tuple[str, int], Any] = {}
        todo: list[int] = []

        def once(kind: str, parts: dict, number: int) -> Any:
            """Whether it happens in the window at all; None where it cannot."""
            found = [parts[number, k] for k in segments if (number, k) in parts]
            if found and (kind, number) not in windows:
                windows[kind, number] = once = model.add_var(ub=1)
                self.model += once <= xsum(found)
                if kind == "r":
                    todo.append(number)
                elif number in self.page_out:
                    self.model += once <= self.page_out[number]
            return windows.get((kind, number))

        def sources(v: int) -> Any:
            ways = (
                self.x.get((v, start)),
                once("in", self.page_in, v),
                once("r", self.r, graph.producer.get(v, -1)),
            )
            return xsum(way for way in ways if way is not None)

        wanted = {
            (v, id(runs)): runs
            for k in segments[1:]
            for v, reads in self.needed[k].items()
            for runs in reads
            if self.is_older(v, start)
        }
        for (v, _), runs in wanted.items():
            model += sources(v) >= runs
        for (v, cut), kept in self.x.items():
            if cut == stop and self.is_older(v, start):
                model += kept <= sources(v)
        while todo:
            node = todo.pop()
            for v in graph.nodes[node].reads:
                if self.is_older(v, start):
                    model += windows["r", node] <= sources(v)

    def _memory_rows(
        self, reserve_bytes: int, reserves: Mapping[tuple[int, int], int]
    ) -> None:
        """(5) RAM while the base node of each cut runs, and with `reserves`."""
        graph, nbytes = self.graph, self.nbytes
        unit = self.memory_unit = float(max([*nbytes, 1]))
        if self.budget is None:
            self.memory: Any = self.model.add_var()
        else:
            self.memory = (self.budget.memory_bytes - reserve_bytes) / unit
        pinned = sum(nbytes[v] for v in graph.pinned)
        held: dict[int, list[Any]] = {cut: [] for cut in range(self.last + 1)}
        for (v, cut), kept in self.x.items():
            held[cut].append(nbytes[v] / unit * kept)
        for both in (graph.initial, graph.returned) if held[0] else ():
            fixed = sum(nbytes[v] for v in both)
            self.model += xsum([*held[0], fixed / unit]) <= self.memory
        for cut, number in enumerate(self.nodes, start=1):
            node, runs = graph.nodes[number], self.runs(number)
            own_bytes = int(self.costs.workspace_bytes[number])
            written_over = {old for old, _ in replaceable(graph)[number]}
            for v in {*node.reads, *node.writes} - graph.pinned - written_over:
                if (v, cut) in self.x:
                    self.model += self.x[v, cut] >= runs
                else:
                    own_bytes += nbytes[v]
            total = xsum([*held[cut], own_bytes / unit * runs])
            self.model += total + pinned / unit <= self.memory
            for (stage, again), free_bytes in reserves.items():
                if stage == number:
                    runs = self.r.get((again, cut - 1), 1)
                    used = total + pinned / unit + free_bytes / unit * runs
                    self.model += used <= self.memory

    def _store_rows(self) -> None:
        """(7) Room on storage at each cut: what is still to be paged in."""
        if self.budget is None or self.budget.store_bytes is None:
            return
        unit = self.memory_unit
        for cut in range(1, self.last + 1):
            stored: dict[int, Any] = {}
            for (v, segment), loaded in self.page_in.items():
                at_home = v in self.graph.stored or v in self.graph.landing
                if segment >= cut and self.is_older(v, cut) and not at_home:
                    if v not in stored:
                        stored[v] = self.model.add_var(ub=1)
                    self.model += loaded <= stored[v]
            total = xsum(self.nbytes[v] / unit * y for v, y in stored.items())
            room_bytes = self.budget.store_bytes - self.graph.stored_bytes
            self.model += total <= room_bytes / unit

    def relaxed(self, seconds: float) -> float:
        """A lower bound in the objective's unit: the least in fractions, or 0 if that
        takes longer."""
        return self.model.optimize(seconds, relaxed=True).bound * self.unit
