"""Cut a program into stages: what the compiler may reorder and fuse at will."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from poet_jax.graph import Graph
from poet_jax.plan import Compute, Free, PageIn, PageOut
from poet_jax.price import Costs
from poet_jax.program import Program


@dataclasses.dataclass(frozen=True)
class Stage:
    """Consecutive computes of a program.

    Attributes:
      nodes: in order, each once.
      reads: values that they need from before, in order of first use.
      writes: values that are needed after them.
      is_open: whether it is not to be a branch: so what has effects, and an update that
        is written over arguments, which a branch would copy.
      over: values of `reads` that are written over.
    """

    nodes: tuple[int, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    is_open: bool = False
    over: tuple[int, ...] = ()


Step = Stage | PageOut | PageIn | Free

# Adam replaces one array of the four that it reads if its moments are on storage.
UPDATE = 0.2


def cut(
    program: Program, costs: Costs | None = None, memory_bytes: float = 0
) -> tuple[Step, ...]:
    """`program` as stages, transfers and frees that wait for some, in its order.

    Stages are as long as `memory_bytes` allow, in whatever order the compiler runs
    their nodes: all that a stage reads and makes is in RAM until it ends. A transfer
    ends one, and so does a node that would be there twice, which the compiler would
    merge. What is written over an argument follows the stage that it belongs to. By
    default each node is a stage of its own.
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
        self.live_bytes = self._total(self.present)
        self._begin()

    def _begin(self) -> None:
        self.nodes: list[int] = []
        self.open: dict[
            int, list[int]
        ] = {}  # nodes that follow it, and what they are over
        self.made: dict[int, None] = {}  # by the stage, and needed after it
        self.held_bytes = 0  # freed within the stage, and there until its end
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
                    yield x
        yield from self._end()

    def _compute(self, row: int, number: int) -> Iterator[Stage | Free]:
        node = self.graph.nodes[number]
        olds = [old for old, _ in self.program.replaces.get(row, ())]
        new = [v for v in node.writes if v not in self.present]
        new_bytes = self._total(new) - self._total(olds)
        need_bytes = self.live_bytes + self.held_bytes + new_bytes
        need_bytes += self.workspaces[number]
        if (
            number in self.nodes
            or need_bytes > self.memory_bytes
            or self._follows(node.reads)
        ):
            yield from self._end()
        if self._is_update(number, olds) or not node.repeatable:
            self.open[number] = olds
        else:
            self.nodes.append(number)
            self.made.update(dict.fromkeys(new))
        self.present.update(new)
        self.present.difference_update(olds)
        self.live_bytes += new_bytes

    def _is_update(self, number: int, olds: list[int]) -> bool:
        """Whether much of what a node reads is what it is written over, as with an
        optimizer.

        What it reads besides may be of the stage's size: such a node is better a part
        of that, and the little that it replaces is copied.
        """
        reads = self.graph.nodes[number].reads
        return bool(olds) and self._total(olds) >= UPDATE * self._total(reads)

    def _follows(self, reads: Iterable[int]) -> bool:
        """Whether some of the values are made by what follows the stage."""
        made = {v for number in self.open for v in self.graph.nodes[number].writes}
        return not made.isdisjoint(reads)

    def _free(self, row: int, value: int) -> None:
        if row in self.program.done_frees:
            return
        self.present.discard(value)
        self.live_bytes -= self.nbytes[value]
        if row in self.program.waiting_frees:
            self.waiting.append(Free(value))
        is_read = any(value in self.graph.nodes[number].reads for number in self.open)
        if value in self.made and not is_read:
            del self.made[value]
        if self.nodes or self.open:
            self.held_bytes += self.nbytes[value]

    def _end(self) -> Iterator[Stage | Free]:
        nodes, made = tuple(self.nodes), tuple(self.made)
        following, waiting = self.open, self.waiting
        self._begin()
        if nodes:
            yield Stage(nodes, read_by(self.graph, nodes), made)
        for number, olds in following.items():
            node = self.graph.nodes[number]
            over = tuple(olds)
            yield Stage((number,), node.reads, node.writes, is_open=True, over=over)
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
