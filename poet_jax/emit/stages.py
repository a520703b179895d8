"""Cut a program into stages: what the compiler may reorder and fuse at will."""

from collections.abc import Iterable, Iterator, Sequence

from poet_jax.core.costs import Costs
from poet_jax.core.graph import Graph
from poet_jax.core.in_place import Pairs
from poet_jax.core.plan import Free, PageIn, PageOut
from poet_jax.core.program import Instruction, Moment, Program, Run, walk

# Transfers of at most so many bytes are light. They share a stage, up to so many bytes
# in all: one stage for each of them would take longer than the transfer.
LIGHT_BYTES, TOGETHER_BYTES = 1 << 20, 8 << 20
# A stage that takes longer so far does not wait for pages of nodes that would join it.
BRIEF_SECONDS = 1e-3


def cut(program: Program, costs: Costs, memory_bytes: float = 0) -> Program:
    """`program` with as many nodes in each `Run` as `memory_bytes` allows.

    The compiler runs the nodes of a stage in whatever order it likes: all that a stage
    reads and makes is in RAM until it ends. What ends a stage:

    - a transfer, unless it is light: a light page-in comes before the stage, and a
      light page-out after it;
    - a node that would wait for a page, since the others need not;
    - a node that is in the stage already, since the compiler would merge the two;
    - a node that makes again what the stage has dropped.
    """
    return Program(program.graph, tuple(_Cutter(program, costs, memory_bytes).result()))


class _Cutter:
    def __init__(self, program: Program, costs: Costs, memory_bytes: float):
        self.program, self.graph = program, program.graph
        self.memory_bytes = memory_bytes
        self.nbytes = costs.nbytes.tolist()
        self.workspaces = costs.workspace_bytes.tolist()
        self.node_seconds = costs.seconds.tolist()
        self.arriving: set[int] = set()  # paged in, and not read yet
        self.live_bytes = self._total(self.graph.initial)
        self._begin()

    def _begin(self) -> None:
        self.nodes: list[int] = []
        self.page_ins: list[PageIn] = []  # light ones, before the stage
        self.page_outs: dict[int, PageOut] = {}  # and after it, by value
        self.made: dict[int, None] = {}  # by the stage, and needed after it
        self.over: dict[int, int] = {}  # what is written over which older value
        self.freed: list[Free] = []
        self.held_bytes = 0  # freed or written over, and there until the stage ends

    def _total(self, values: Iterable[int]) -> int:
        return sum(self.nbytes[v] for v in values)

    def result(self) -> Iterator[Instruction]:
        for moment in walk(self.program):
            x = moment.instruction
            if isinstance(x, Run):
                yield from self._run(x, moment)
            elif isinstance(x, Free):
                yield from self._free(x)
            else:
                yield from self._transfer(x)
            self.live_bytes += self._total(moment.arrives) - self._total(moment.leaves)
        yield from self._end()

    def _run(self, x: Run, moment: Moment) -> Iterator[Instruction]:
        # Beside other nodes nothing is sure to be written over: they may read it later.
        need_bytes = self.live_bytes + self.held_bytes + self._total(moment.arrives)
        workspaces = [self.workspaces[n] for n in (*self.nodes, *x.nodes)]
        # Several devices may hold what they gathered until the stage ends.
        need_bytes += (sum if self.graph.devices > 1 else max)(workspaces)
        arriving = self.arriving.intersection(x.reads)
        if self._has_to_end(x) or need_bytes > self.memory_bytes or arriving:
            yield from self._end()
        self.arriving -= arriving
        self.nodes += x.nodes
        self.made.update(dict.fromkeys(moment.arrives))
        for old, new in x.over:
            first = self.over.pop(old, old)
            if old not in self.made or first != old:
                self.over[new] = first
            self.made.pop(old, None)
        self.held_bytes += self._total(moment.leaves)

    def _has_to_end(self, x: Run) -> bool:
        """Whether the stage holds one of the nodes already, has dropped what they
        write, or pages out what they write over."""
        return not (
            self._gone().isdisjoint(x.writes)
            and set(self.nodes).isdisjoint(x.nodes)
            and self.page_outs.keys().isdisjoint(old for old, _ in x.over)
        )

    def _gone(self) -> set[int]:
        """What the stage frees or writes over, of what was there before."""
        return {free.value for free in self.freed}.union(self.over.values())

    def _transfer(self, x: PageIn | PageOut) -> Iterator[Instruction]:
        value = x.value
        moved = (value, *(y.value for y in self.page_ins), *self.page_outs)
        is_light = self.nbytes[value] <= LIGHT_BYTES
        if self.nodes and is_light and self._total(moved) <= TOGETHER_BYTES:
            if isinstance(x, PageOut):
                self.page_outs[value] = x
                return
            if self._is_early(value):
                self.page_ins.append(x)
                return
        yield from self._end()
        yield x
        if isinstance(x, PageIn):
            self.arriving.add(value)

    def _is_early(self, value: int) -> bool:
        """Whether a value may be paged in before the stage."""
        need_bytes = self.live_bytes + self.held_bytes + self.nbytes[value]
        need_bytes += max(self.workspaces[n] for n in self.nodes)
        return (
            self._gone().union(self.made, self.page_outs).isdisjoint([value])
            and sum(self.node_seconds[n] for n in self.nodes) < BRIEF_SECONDS
            and need_bytes <= self.memory_bytes
        )

    def _free(self, x: Free) -> Iterator[Instruction]:
        if not self.nodes:
            yield x
            return
        self.held_bytes += self.nbytes[x.value]
        if x.value in self.made and x.value not in self.page_outs:
            del self.made[x.value]
        else:
            self.freed.append(x)

    def _end(self) -> Iterator[Instruction]:
        if not self.nodes:
            return
        over: Pairs = tuple(
            (old, new) for new, old in self.over.items() if new in self.made
        )
        gone = (Free(old) for new, old in self.over.items() if new not in self.made)
        reads = read_by(self.graph, self.nodes)
        yield from self.page_ins
        yield Run(tuple(self.nodes), reads, tuple(self.made), over)
        yield from gone
        yield from self.page_outs.values()
        yield from self.freed
        self._begin()


def read_by(graph: Graph, nodes: Sequence[int]) -> tuple[int, ...]:
    """What nodes read that none of them wrote before, in order of first use."""
    reads: dict[int, None] = {}
    made: set[int] = set()
    for number in nodes:
        node = graph.nodes[number]
        reads.update((v, None) for v in node.reads if v not in made)
        made.update(node.writes)
    return tuple(reads)
