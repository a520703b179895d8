"""Cut a program into stages: what the compiler may reorder and fuse at will."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from poet_jax.core.costs import Costs
from poet_jax.core.graph import Graph
from poet_jax.core.plan import Compute, Free, PageIn, PageOut
from poet_jax.core.program import Program


@dataclasses.dataclass(frozen=True)
class Stage:
    """Consecutive computes of a program.

    Attributes:
      nodes: in order, each once.
      reads: values that they need from before, in order of first use.
      writes: values that are needed after them.
    """

    nodes: tuple[int, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]


Step = Stage | PageOut | PageIn | Free


def cut(
    program: Program, costs: Costs | None = None, memory_bytes: float = 0
) -> tuple[Step, ...]:
    """`program` as stages, transfers and frees that wait for some, in its order.

    Stages are as long as `memory_bytes` allow, in whatever order the compiler runs
    their nodes: all that a stage reads and makes is in RAM until it ends. A transfer
    ends one. So does a node that would wait for a page, since the others need not, and
    a node that would be there twice, since the compiler would merge them. By default
    each node is a stage of its own.
    """
    return tuple(_Cutter(program, costs, memory_bytes).steps())


class _Cutter:
    def __init__(self, program: Program, costs: Costs | None, memory_bytes: float):
        self.program, self.graph = program, program.graph
        self.memory_bytes = memory_bytes
        if costs is None:
            self.nbytes = [value.nbytes for value in self.graph.values]
            self.workspaces = [0] * len(self.graph.nodes)
        else:
            self.nbytes = [int(n) for n in costs.nbytes]
            self.workspaces = [int(n) for n in costs.workspace_bytes]
        self.present = set(self.graph.initial)
        self.arriving: set[int] = set()  # paged in, and not read yet
        self.live_bytes = self._total(self.present)
        self._begin()

    def _begin(self) -> None:
        self.nodes: list[int] = []
        self.made: dict[int, None] = {}  # by the stage, and needed after it
        self.held_bytes = 0  # freed or written over, and there until the stage ends
        self.waiting: list[Free] = []  # for what follows the stage

    def _total(self, values: Iterable[int]) -> int:
        return sum(self.nbytes[v] for v in values)

    def steps(self) -> Iterator[Step]:
        for row, x in enumerate(self.program.instructions):
            match x:
                case Compute(number):
                    yield from self._compute(row, number)
                case Free(value):
                    self._free(row, value)
                case PageOut():
                    yield from self._end()
                    yield x
                case PageIn(value):
                    yield from self._end()
                    self.live_bytes += self._total({value} - self.present)
                    self.present.add(value)
                    self.arriving.add(value)
                    yield x
        yield from self._end()

    def _compute(self, row: int, number: int) -> Iterator[Stage | Free]:
        node = self.graph.nodes[number]
        olds = [old for old, _ in self.program.replaces.get(row, ())]
        new = [v for v in node.writes if v not in self.present]
        # Beside other nodes nothing is sure to be written over: they may read it later.
        need_bytes = self.live_bytes + self.held_bytes + self._total(new)
        need_bytes += self.workspaces[number]
        arriving = self.arriving.intersection(node.reads)
        if number in self.nodes or need_bytes > self.memory_bytes or arriving:
            yield from self._end()
        self.arriving -= arriving
        self.nodes.append(number)
        self.made.update(dict.fromkeys(new))
        self.held_bytes += self._total(olds)
        self.present.update(new)
        self.present.difference_update(olds)
        self.live_bytes += self._total(new) - self._total(olds)

    def _free(self, row: int, value: int) -> None:
        if row in self.program.done_frees:
            return
        self.present.discard(value)
        self.live_bytes -= self.nbytes[value]
        if row in self.program.waiting_frees:
            self.waiting.append(Free(value))
        self.made.pop(value, None)
        if self.nodes:
            self.held_bytes += self.nbytes[value]

    def _end(self) -> Iterator[Stage | Free]:
        nodes, made, waiting = tuple(self.nodes), tuple(self.made), self.waiting
        self._begin()
        if nodes:
            yield Stage(nodes, read_by(self.graph, nodes), made)
        yield from waiting


def read_by(graph: Graph, nodes: Sequence[int]) -> tuple[int, ...]:
    """What nodes read that none of them wrote before, in order of first use."""
    reads: dict[int, None] = {}
    made: set[int] = set()
    for number in nodes:
        node = graph.nodes[number]
        reads.update((v, None) for v in node.reads if v not in made)
        made.update(node.writes)
    return tuple(reads)
