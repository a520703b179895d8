"""Consecutive computes as one executable, where that fits: `Program -> Program`.

A node that takes microseconds costs more to start than to compute, and XLA makes less
of nodes that it sees one by one. A fused run holds all that it reads until its end, and
the pages that arrive meanwhile from its beginning, so it takes more memory than its
nodes in turn; it is used where XLA's own analysis says that the budget holds.
"""

import dataclasses
import functools
import os
from collections.abc import Iterable, Iterator, Sequence

from poet_jax.compile import (
    RECYCLED_BYTES,
    Executable,
    Unit,
    compile_nodes,
    compile_units,
)
from poet_jax.graph import Graph, Literal, Node
from poet_jax.in_place import pairs
from poet_jax.plan import Compute, Free, PageIn, PageOut
from poet_jax.postpone import postpone
from poet_jax.price import Costs
from poet_jax.program import Fused, Instruction, Program, free_soon
from poet_jax.simulate import simulate, workspace_of
from poet_jax.timing import time_units

# A run that XLA gave more memory than guessed is guessed again with this margin.
MARGIN = 1.1


def fuse(program: Program, costs: Costs, memory_bytes: float) -> Program:
    """`program` with runs of computes as `Fused`, each within `memory_bytes`.

    Transfers are those of `program` in the same order, none later than there and the
    step no longer; so are results, but for the rounding of equations that XLA computes
    in one pass; memory inside a run differs. Runs are as long as possible: their length
    is guessed from the sizes of values, then they are compiled, and one that XLA gives
    more memory than guessed is cut again, or that takes more when it is tried, where
    nodes are measured. What goes to storage waits for it in the room that they leave,
    or if that takes longer, they get the room that it leaves.
    """
    if not all(node.equations for node in program.graph.nodes):
        return program  # an instance, which nobody runs
    late = postpone(program, costs, memory_bytes)
    usage = simulate(late, costs)
    begins, ends = (
        [t for t, x in zip(times, late.instructions, strict=True) if not _frees(x)]
        for times in (usage.start_seconds, usage.stop_seconds)
    )
    fused = program
    for base in (free_soon(program), late):
        stretches = _stretches(base, costs, zip(begins, ends, strict=True))
        fused = replace(base, _fitting(stretches, costs, memory_bytes))
        fused = postpone(fused, costs, memory_bytes)
        if simulate(fused, costs).seconds <= usage.seconds:
            break
    return timed(fused, costs, memory_bytes) if costs.measured else fused


def timed(program: Program, costs: Costs, memory_bytes: float) -> Program:
    """`program` with the seconds of its runs on this machine, as far as there is room
    for them beside the arguments of the step, or was for its largest node."""
    instructions = list(program.instructions)
    room_bytes = _room_bytes(program.graph, costs, memory_bytes)
    rows = [row for row, x in enumerate(instructions) if isinstance(x, Fused)]
    units = [program.units[row] for row in rows]
    rooms = [room_bytes - workspace_of(instructions[row], costs) for row in rows]
    times = time_units(program.graph, units, rooms)
    for row, seconds in zip(rows, times, strict=True):
        instructions[row] = dataclasses.replace(instructions[row], seconds=seconds)
    return dataclasses.replace(program, instructions=tuple(instructions))


def _room_bytes(graph: Graph, costs: Costs, memory_bytes: float) -> float:
    """For what is measured: what the budget leaves beside the step's arguments, or what
    timing its largest node took."""
    held = sum(int(costs.nbytes[v]) for v in graph.initial)
    nodes = (
        Unit.of(graph, number).nbytes(graph) + int(workspace)
        for number, workspace in enumerate(costs.workspace_bytes)
    )
    return max(memory_bytes - held, max(nodes, default=0))


def _frees(instruction: Instruction) -> bool:
    return isinstance(instruction, Free)


def _fitting(
    stretches: Iterable["Stretch"], costs: Costs, memory_bytes: float
) -> list["Stretch"]:
    """Parts of the stretches that fit, once compiled, and once run on a device that is
    measured."""
    fitting: list[Stretch] = []
    waiting = [x for run in stretches for x in run.cut(memory_bytes)]
    while waiting:
        graph = waiting[0].program.graph
        alone = compile_nodes(graph)
        executables = compile_units(graph, [run.unit for run in waiting])
        waiting = _compiled(waiting, executables, alone)
        if costs.measured:
            room_bytes = _room_bytes(graph, costs, memory_bytes)
            hopeful = [run for run in waiting if run.needed_bytes <= memory_bytes]
            rooms = [room_bytes - (run.workspace_bytes or 0) for run in hopeful]
            time_units(graph, [run.unit for run in hopeful], rooms)
            waiting = _compiled(waiting, executables, alone)
        fitting += [run for run in waiting if run.needed_bytes <= memory_bytes]
        too_large = [run for run in waiting if run.needed_bytes > memory_bytes]
        waiting = [x for run in too_large for x in run.cut(memory_bytes)]
    return fitting


def _compiled(
    runs: Iterable["Stretch"],
    executables: Iterable[Executable],
    alone: Sequence[Executable],
) -> list["Stretch"]:
    """Runs with what their executables take, as far as that is known."""
    return [
        run.with_workspace(
            max(
                x.workspace_bytes,
                x.temp_bytes + scratch_bytes(alone[n] for n in run.nodes),
            )
        )
        for run, x in zip(runs, executables, strict=True)
    ]


def scratch_bytes(alone: Iterable[Executable]) -> int:
    """What nodes may allocate without XLA's knowledge if they become one executable.

    It computes as many independent ones at a time as there are processors, and the heap
    keeps a freed block that is too small for the next one: ResNet-18 was seen to take
    one scratch more, and GPT-12 the larger one of two twice.
    """
    sizes = sorted((x.scratch_bytes for x in alone if x.scratch_bytes), reverse=True)
    most = (os.cpu_count() or 1) + 1
    if 1 < len(sizes) < most:
        sizes.append(sizes[0])
    return sum(sizes[:most])


def replace(program: Program, stretches: Iterable["Stretch"]) -> Program:
    """`program` with each of the stretches, which do not overlap, as one `Fused`."""
    instructions: list[Instruction] = []
    row = 0
    for stretch in sorted(stretches, key=lambda stretch: stretch.start):
        instructions.extend(program.instructions[row : stretch.start])
        instructions.extend(stretch.instructions())
        row = stretch.stop
    instructions.extend(program.instructions[row:])
    return dataclasses.replace(program, instructions=tuple(instructions))


@dataclasses.dataclass(frozen=True, eq=False)
class Stretch:
    """Rows `start` to `stop` of a program, to run as one.

    Transfers in them are issued before it, and values wait for it to be freed.

    Attributes:
      live_bytes: in RAM before.
      workspace_bytes: of the rows as one executable, once compiled.
      factor: of XLA's workspace over the guess, where that was too small.
    """

    program: Program
    costs: Costs
    start: int
    stop: int
    live_bytes: int
    workspace_bytes: int | None = None
    factor: float = 1.0

    @classmethod
    def all_of(cls, program: Program, costs: Costs) -> "Stretch":
        """The whole of a program that has computes and frees only."""
        live_bytes = sum(int(costs.nbytes[v]) for v in program.graph.initial)
        return cls(program, costs, 0, len(program.instructions), live_bytes)

    @functools.cached_property
    def rows(self) -> tuple[Instruction, ...]:
        return self.program.instructions[self.start : self.stop]

    @functools.cached_property
    def nodes(self) -> tuple[int, ...]:
        return tuple(x.node for x in self.rows if isinstance(x, Compute))

    @functools.cached_property
    def freed(self) -> dict[int, None]:
        return dict.fromkeys(x.value for x in self.rows if isinstance(x, Free))

    @functools.cached_property
    def saved(self) -> set[int]:
        """The values whose frees wait for storage."""
        waiting = self.program.waiting_frees
        return {
            x.value
            for row, x in enumerate(self.rows, self.start)
            if isinstance(x, Free) and row in waiting
        }

    @functools.cached_property
    def transfers(self) -> tuple[PageIn | PageOut, ...]:
        return tuple(x for x in self.rows if isinstance(x, PageIn | PageOut))

    @functools.cached_property
    def unit(self) -> Unit:
        """What is compiled: a result takes the memory of an equal operand that is not
        read after the result is made, and goes, and is not being copied to storage.
        """
        graph = self.program.graph
        nodes = [graph.nodes[number] for number in self.nodes]
        made = [v for node in nodes for v in node.writes]
        writes = tuple(v for v in made if v not in self.freed)
        reads = self.program.reads(Fused(self.nodes, writes))
        free = self.freed.keys() & set(reads) - self.saved
        return Unit(self.nodes, reads, writes, pairs(graph, nodes, writes, free))

    def _bytes(self, values: Iterable[int]) -> int:
        return sum(int(self.costs.nbytes[v]) for v in values)

    @functools.cached_property
    def guessed_bytes(self) -> int:
        """Its workspace, if what stays inside lives as long as in the program."""
        inside: set[int] = set()
        alive = most = 0
        for x in self.rows:
            if isinstance(x, Compute):
                written = self.program.graph.nodes[x.node].writes
                inside.update(v for v in written if v in self.freed)
                alive += self._bytes(v for v in written if v in self.freed)
                most = max(most, alive + int(self.costs.workspace_bytes[x.node]))
            elif isinstance(x, Free) and x.value in inside:
                alive -= self._bytes([x.value])
        return most

    @property
    def needed_bytes(self) -> float:
        """RAM while it runs, measured or guessed."""
        workspace = self.workspace_bytes
        if workspace is None:
            workspace = self.factor * self.guessed_bytes
        replaced = self._bytes(old for old, _ in self.unit.replaces)
        arriving = self._bytes(x.value for x in self.transfers if isinstance(x, PageIn))
        made = self._bytes(self.unit.writes)
        return self.live_bytes + arriving + made - replaced + workspace

    def with_workspace(self, workspace_bytes: int) -> "Stretch":
        """The same rows with what they really take."""
        factor = MARGIN * workspace_bytes / max(self.guessed_bytes, 1)
        return dataclasses.replace(
            self, workspace_bytes=workspace_bytes, factor=max(self.factor, factor)
        )

    def with_need(self, needed_bytes: int) -> "Stretch":
        """The same rows, which take `needed_bytes` in all while they run."""
        empty = dataclasses.replace(self, workspace_bytes=0)
        workspace_bytes = needed_bytes - int(empty.needed_bytes)
        return self.with_workspace(max(workspace_bytes, 0))

    def cut(self, memory_bytes: float) -> list["Stretch"]:
        """Parts of it of two computes or more that fit, it is guessed, in order.

        Parts are as long as they can be, and transfers after their last compute stay
        there. A run that was measured is cut at least once.
        """
        computes, ends, live = [], [], [self.live_bytes]
        for row, x in enumerate(self.rows):
            change = self._bytes(self.program.writes(x))
            match x:
                case Compute():
                    computes.append(row)
                    ends.append(row + 1)
                case Free(value):
                    change -= self._bytes([value])
                    if row == ends[-1]:
                        ends[-1] = row + 1
                case PageIn(value):
                    change += self._bytes([value])
            live.append(live[-1] + change)
        parts = []
        first = 0
        while first < len(computes):

            def part(last: int, first: int = first) -> Stretch:
                return dataclasses.replace(
                    self,
                    start=self.start + computes[first],
                    stop=self.start + ends[last],
                    live_bytes=live[computes[first]],
                    workspace_bytes=None,
                )

            whole = self.workspace_bytes is not None and first == 0
            low, high = first, len(computes) - 1 - whole
            last = high
            while low < high:
                if part(last).needed_bytes <= memory_bytes:
                    low = last
                else:
                    high = last - 1
                last = (low + high + 1) // 2
            if low > first:
                parts.append(part(low))
            first = low + 1
        return parts

    def instructions(self) -> Iterator[Instruction]:
        """What stands for the rows: their transfers, the run, and the frees that it
        does not do."""
        yield from self.transfers
        unit = self.unit
        made = {v for n in unit.nodes for v in self.program.graph.nodes[n].writes}
        replaced = {old for old, _ in unit.replaces}
        yield Fused(
            unit.nodes, unit.writes, unit.replaces, int(self.workspace_bytes or 0)
        )
        for value in self.freed:
            if value not in made and value not in replaced:
                yield Free(value)


def _stretches(
    program: Program, costs: Costs, times: Iterator[tuple[float, float]]
) -> Iterator[Stretch]:
    """The longest runs that mean the same as one executable, whatever they take.

    `times` are (start, stop) seconds of all instructions but the frees.

    Transfers move to their beginning. So a run ends before it saves what it has made,
    before it loads what it has met, before a node that waits for a page that is not
    there when the run begins, before one that has effects or writes what the run has
    met, and before the free of a page that nobody waited for. It also ends where XLA
    would be slower, before a node that `_reads_turned`.
    """
    nbytes = costs.nbytes
    resident = set(program.graph.initial)
    arrival: dict[int, float] = {}  # of pages that nobody has waited for
    met: set[int] = set()  # by the run: read, made or freed
    made: set[int] = set()
    live = sum(int(nbytes[v]) for v in resident)
    start, start_bytes, start_seconds = -1, 0, 0.0

    def run(stop: int) -> Iterator[Stretch]:
        nonlocal start
        if start >= 0:
            yield Stretch(program, costs, start, stop, start_bytes)
        start = -1

    for row, x in enumerate(program.instructions):
        begins, ends = (0.0, 0.0) if _frees(x) else next(times)
        match x:
            case Compute(number):
                node = program.graph.nodes[number]
                waits = max((arrival.pop(v, 0.0) for v in node.reads), default=0.0)
                repeats = not met.isdisjoint(node.writes)
                if repeats or waits > start_seconds:
                    yield from run(row)
                new = [v for v in node.writes if v not in resident]
                if _reads_turned(program.graph, node, made):
                    yield from run(row)
                if len(new) < len(node.writes) or not node.repeatable:
                    yield from run(row)  # it stays alone
                elif start < 0:
                    start, start_bytes = row, live
                    start_seconds = begins
                    met.clear()
                    made.clear()
                met.update(node.reads, node.writes)
                made.update(node.writes)
                resident.update(new)
                live += sum(int(nbytes[v]) for v in new)
            case Free(value):
                if value in arrival:
                    yield from run(row)
                    del arrival[value]
                met.add(value)
                resident.remove(value)
                live -= int(nbytes[value])
            case PageOut(value):
                if value in made:
                    yield from run(row)
            case PageIn(value):
                if value in met or value in resident:
                    yield from run(row)
                arrival[value] = ends
                if value not in resident:
                    resident.add(value)
                    live += int(nbytes[value])
    yield from run(len(program.instructions))


def _reads_turned(graph: Graph, node: Node, made: set[int]) -> bool:
    """Whether a product contracts a large one of `made` over its rows, as its first.

    XLA's CPU backend transposes that, and if it is made in the same executable, makes
    it again while it does so, column by column: GELU of [1024, 3072] with its residuals
    and the gradient of the kernel that reads it took 80 ms as one and 48 as two.
    """
    values = dict(enumerate(node.reads))
    for equation in node.equations:
        if equation.primitive.name == "dot_general":
            first = equation.operands[0]
            (contracted, _), _ = equation.params["dimension_numbers"]
            value = None if isinstance(first, Literal) else values.get(first)
            if value in made and graph.values[value].nbytes >= RECYCLED_BYTES:
                rank = len(graph.values[value].shape)
                if min(contracted, default=rank) < rank - len(contracted):
                    return True
    return False
