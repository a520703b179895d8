"""Solutions of the program of `Cuts` as plans, and plans as values of its binaries."""

import bisect
import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

from poet_jax.core.in_place import replaceable
from poet_jax.core.plan import Free, PageIn, Stages
from poet_jax.core.program import Run
from poet_jax.planners.milp.cuts import Cuts
from poet_jax.planners.planner import Judged, judge


def lifted(cuts: Cuts, values: np.ndarray) -> Judged:
    """The plan of a solution, [variables]."""
    return _Lift(cuts, values > 0.5).judged()


def repeats(judged: Judged, cuts: Collection[int]) -> set[tuple[int, int]]:
    """(node, segment between `cuts`) of each node that runs again."""
    nodes, found, computed = sorted(cuts), set(), set()
    for instruction in judged.program.instructions:
        if isinstance(instruction, Run):
            (node,) = instruction.nodes
            if node in computed:
                found.add((node, bisect.bisect_left(nodes, len(computed))))
            computed.add(node)
    return found


def values_of(cuts: Cuts, judged: Judged) -> list[tuple[Any, float]]:
    """What the plan `judged` does, as values of the binaries.

    A page-in counts where something reads it first, however early it is issued.
    """
    program, graph = judged.program, judged.graph
    resident, computed = set(graph.initial), set()
    arriving: set[int] = set()
    true: set[tuple[str, int, int]] = {("x", v, 0) for v in graph.resident}
    true |= {("r", *again) for again in repeats(judged, cuts.nodes)}

    def read(values: Iterable[int]) -> None:
        arrived = arriving.intersection(values)
        true.update(("in", v, cuts.segment(len(computed))) for v in arrived)
        resident.update(arrived)
        arriving.difference_update(arrived)

    for instruction in program.instructions:
        match instruction:
            case Run((number,), reads, writes, over):
                read(reads)
                resident.update(writes)
                resident.difference_update(old for old, _ in over)
                if number not in computed and number in cuts.nodes:
                    cut = cuts.nodes.index(number) + 1
                    true.update(("x", v, cut) for v in resident)
                computed.add(number)
            case PageIn(value):
                arriving.add(value)
            case Free(value):
                resident.discard(value)
                arriving.discard(value)
    read(graph.returned)
    values: dict[Any, float] = {}
    for kind, variables in (("x", cuts.x), ("r", cuts.r), ("in", cuts.page_in)):
        for key, y in variables.items():  # one variable may stand for many cuts
            on = (kind, *key) in true
            values[y] = min(values.get(y, 1.0), float(on))
    return list(values.items())


def crests(judged: Judged) -> list[tuple[int, int]]:
    """[N] (most bytes in RAM, node that runs then) of each base stage."""
    worst, stage = [(0, -1)] * len(judged.graph.nodes), 0
    for instruction, live in zip(
        judged.program.instructions, judged.usage.live_bytes, strict=True
    ):
        if isinstance(instruction, Run) and stage < len(worst):
            (node,) = instruction.nodes
            worst[stage] = max(worst[stage], (int(live), node))
            stage += node == stage
    return worst


def summits(nbytes: Sequence[int], count: int) -> set[int]:
    """Where `nbytes` is most in each of `count` stretches."""
    edges = [len(nbytes) * part // count for part in range(count + 1)]
    stretches = [range(a, b) for a, b in itertools.pairwise(edges) if a < b]
    return {max(stretch, key=nbytes.__getitem__) for stretch in stretches}


class _Lift:
    """A plan that does what a solution says, each thing when it is needed.

    What a segment makes for later ones is made once all that it is made from has no
    other use.
    """

    def __init__(self, cuts: Cuts, chosen: np.ndarray):
        self.cuts, self.chosen = cuts, chosen
        waiting = [v for v, y in cuts.waiting.items() if chosen[y.idx]]
        self.graph = cuts.graph.with_resident(waiting)
        self.stages = Stages.empty(self.graph)
        self.present = set(self.graph.initial)
        self.since = dict.fromkeys(self.present, 0)  # stage
        self.last_use: dict[int, int] = {}  # stage
        self.paged: set[int] = set()  # loaded early by the solution, here when needed
        for stage in range(len(self.graph.nodes) + 1):
            self.bring(self.reads(stage), stage)
            if stage in cuts.nodes:
                self.cut(stage)
            if stage == len(self.graph.nodes):
                return
            self.add(self.graph.nodes[stage].writes, stage + 1)
            ends = {*cuts.nodes, len(self.graph.nodes)}
            if ends.issuperset((stage, stage + 1)):
                # In a segment of one stage a value has one source.
                segment = cuts.segment(stage + 1)
                counted = self.present - cuts.small
                self.present -= {v for v in counted if self.comes(v, segment)}

    def reads(self, stage: int) -> tuple[int, ...]:
        if stage < len(self.graph.nodes):
            return self.graph.nodes[stage].reads
        return self.graph.returned

    def add(self, values: Iterable[int], stage: int) -> None:
        self.present.update(values)
        self.paged.difference_update(values)
        self.since.update(dict.fromkeys(values, stage))

    def judged(self) -> Judged:
        actions = self.stages.actions(self.graph)
        return judge(self.graph, self.cuts.costs, actions)

    def is_on(self, variables: dict, *key: int) -> bool:
        return key in variables and bool(self.chosen[variables[key].idx])

    def bring(self, values: Iterable[int], stage: int) -> None:
        """Page in, or produce again, what is not in RAM."""
        cuts, graph, stages = self.cuts, self.graph, self.stages
        segment, todo = cuts.segment(stage), list(values)
        while todo:
            v = todo.pop()
            self.last_use[v] = stage
            if v in self.present:
                continue
            node = graph.producer.get(v, -1)
            again = node >= 0 and graph.nodes[node].repeatable
            paged = v in self.paged or self.is_on(cuts.page_in, v, segment)
            if again and not paged:
                stages.reruns[stage].add(node)
                self.add(graph.nodes[node].writes, stage)
                todo.extend(graph.nodes[node].reads)
            else:
                stages.page_ins[stage].add(v)
                stages.page_outs.add(v)
                self.add([v], stage)
        for node in stages.reruns[stage]:
            stages.page_ins[stage] -= set(graph.nodes[node].writes)

    def cut(self, stage: int) -> None:
        """Make what the segment makes for later ones, and drop what it does not
        keep."""
        cuts = self.cuts
        segment = cuts.segment(stage)
        kept = {v for v, cut in cuts.x if cut == segment + 1}
        kept = {v for v in kept if self.is_on(cuts.x, v, segment + 1)}
        begin = cuts.nodes[segment - 1] + 1 if segment else 0
        for v in sorted(kept - self.present):
            node = self.graph.producer.get(v, -1)
            if not self.is_on(cuts.r, node, segment):
                self.paged.add(v)
                continue
            reads = self.graph.nodes[node].reads
            leaving = set(reads) - cuts.small - kept
            when = stage
            if leaving and self.present.issuperset(reads):
                first = max(begin, *(self.since[u] for u in reads))
                when = max(first, *(self.last_use.get(u, -1) + 1 for u in leaving))
                when = min(when, stage)
            self.bring([v], when)
        staying = {*self.reads(stage)} - {x for x, _ in replaceable(self.graph)[stage]}
        self.present &= kept | cuts.small | staying
        self.paged &= kept

    def comes(self, v: int, segment: int) -> bool:
        """Whether the solution brings a value in the segment."""
        producer = self.graph.producer.get(v, -1)
        return self.is_on(self.cuts.page_in, v, segment) or self.is_on(
            self.cuts.r, producer, segment
        )
