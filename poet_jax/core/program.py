"""The instructions that are emitted and that the simulator judges."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any, NamedTuple

from poet_jax.core.errors import PlanInvalid
from poet_jax.core.graph import Graph
from poet_jax.core.in_place import Pairs, replaced
from poet_jax.core.plan import Action, Compute, Free, PageIn, PageOut, Plan, checked
from poet_jax.core.representation import brief


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """Run nodes as one stage: the compiler may fuse them, and run them in any order.

    Attributes:
      nodes: each once.
      reads: values that they need from before, in order of first use.
      writes: values that they leave in RAM.
      over: pairs (old, new) of values: `new` takes the memory of `old`, which is gone.
    """

    nodes: tuple[int, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    over: Pairs = ()


Instruction = Run | PageOut | PageIn | Free


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """Instructions over the values and nodes of a graph.

    Attributes:
      graph: what the numbers refer to.
      instructions: [I].
    """

    graph: Graph
    instructions: tuple[Instruction, ...]

    __repr__ = brief

    @functools.cached_property
    def last_page_in(self) -> dict[int, int]:
        """Instruction after which the storage of each paged value is free again."""
        return {
            x.value: number
            for number, x in enumerate(self.instructions)
            if isinstance(x, PageIn)
        }

    @functools.cached_property
    def runs(self) -> Counter[int]:
        """How often each node runs."""
        return Counter(
            n for x in self.instructions if isinstance(x, Run) for n in x.nodes
        )

    @functools.cached_property
    def recomputed(self) -> int:
        """How often a node runs again."""
        return self.runs.total() - len(self.runs)

    def __str__(self) -> str:
        nodes, values = self.graph.nodes, self.graph.values
        lines = []
        seen: set[int] = set()
        for number, x in enumerate(self.instructions):
            match x:
                case Run():
                    names = [nodes[n].name + "  (again)" * (n in seen) for n in x.nodes]
                    seen.update(x.nodes)
                    text = f"run       {', '.join(names)}"
                    olds = ", ".join(values[old].name for old, _ in x.over)
                    text += f"  (over {olds})" if olds else ""
                case Free(value) | PageOut(value) | PageIn(value):
                    word = {Free: "free", PageOut: "page out", PageIn: "page in"}
                    text = f"{word[type(x)]:9s} {values[value].name}"
            lines.append(f"{number:5d}  {text}")
        return "\n".join(lines)


class Moment(NamedTuple):
    """An instruction, and what it changes in RAM.

    Attributes:
      present: values in RAM while it runs. The set changes as the walk goes on.
      arrives: values that it brings, as it starts.
      leaves: values that go: what a `Run` writes over, as it starts, or what a `Free`
        drops, as it ends.
      waits: whether what leaves has to be on storage first.
    """

    instruction: Instruction
    present: Set[int]
    arrives: Sequence[int] = ()
    leaves: Sequence[int] = ()
    waits: bool = False


def walk(program: Program) -> Iterator[Moment]:
    """What is in RAM at each instruction of a program, [I].

    Raises PlanInvalid where one needs a value that is not in RAM, or not on storage,
    where a node with effects runs again, and at the end if a node or an output is
    missing.
    """
    graph = program.graph
    nodes, values, pinned = graph.nodes, graph.values, graph.pinned
    present, stored = set(graph.initial), set(graph.stored)
    leaving: set[int] = set()  # on their way to storage
    done: set[int] = set()
    every = set(range(len(nodes)))
    for x in program.instructions:
        match x:
            case Run():
                if not every.issuperset(x.nodes):
                    raise _invalid(f"runs the nodes {x.nodes}, {_extent(graph)}")
                if not present.issuperset(x.reads):
                    _refuse_early(graph, x, present)
                for number in x.nodes:
                    if number in done and not nodes[number].repeatable:
                        name = nodes[number].name
                        raise _invalid(f"repeats {name!r}, which runs once")
                done.update(x.nodes)
                olds = [old for old, _ in x.over]
                new = [v for v in x.writes if v not in present]
                present.difference_update(olds)
                present.update(new)
                yield Moment(x, present, new, olds, not leaving.isdisjoint(olds))
                leaving.difference_update(olds)
            case Free(value):
                if value not in present or value in pinned:
                    raise _refused(graph, x, "frees {}, which is not there to be freed")
                yield Moment(x, present, (), (value,), value in leaving)
                present.remove(value)
                leaving.discard(value)
            case PageOut(value):
                if value not in present:
                    raise _refused(graph, x, "pages out {}, not in RAM")
                if value in stored:
                    raise _refused(graph, x, "pages out {} twice")
                if not values[value].pageable:
                    raise _refused(graph, x, "pages out {}, which may not be paged")
                stored.add(value)
                leaving.add(value)
                yield Moment(x, present)
            case PageIn(value):
                if value not in stored:
                    raise _refused(graph, x, "pages in {}, which was not paged out")
                new = [] if value in present else [value]
                present.update(new)
                yield Moment(x, present, new)
    if done != every:
        raise _invalid("does not run every node")
    if not stored.issuperset(graph.landing):
        raise _invalid("leaves state in RAM that lives on storage")
    if not present.issuperset(graph.returned):
        raise _invalid("ends without an output in RAM")


def _refuse_early(graph: Graph, x: Run, present: Set[int]) -> None:
    missing = next(v for v in x.reads if v not in present)
    node = next(graph.nodes[n] for n in x.nodes if missing in graph.nodes[n].reads)
    raise _invalid(f"runs {node.name!r} before {graph.values[missing].name!r}")


def _refused(graph: Graph, x: Free | PageOut | PageIn, problem: str) -> PlanInvalid:
    if not 0 <= x.value < len(graph.values):
        return _invalid(f"has {x!r}, {_extent(graph)}")
    return _invalid(problem.format(repr(graph.values[x.value].name)))


def _extent(graph: Graph) -> str:
    nodes, values = len(graph.nodes), len(graph.values)
    return f"and the graph has {nodes} nodes and {values} values"


def _invalid(problem: str) -> PlanInvalid:
    return PlanInvalid(
        f"The plan {problem}. Every instruction needs its values in RAM, or on storage "
        "for a page-in. Make the plan again with the planner that belongs to it."
    )


def lower(graph: Graph, plan: Plan) -> Program:
    """The program of a plan, with every `Free`. Raises PlanInvalid as `walk` does."""
    plan = checked(graph, plan, getattr(plan, "planner", "The planner"))
    program = lower_actions(graph.with_resident(plan.resident), plan.actions)
    for _ in walk(program):
        pass
    return program


def lower_actions(graph: Graph, actions: Sequence[Action]) -> Program:
    """A `Run` for each node, and every `Free`: right after the last read before a value
    is dropped, or where the actions have it.

    A value is dropped where it is produced again or paged in again, and at the end of
    the step unless it is an output. `walk` says whether the program can run.
    """
    free_after: list[list[int]] = [[] for _ in range(len(actions) + 1)]
    last_use = {v: 0 for v in graph.initial}  # position after which it may go

    def drop(value: int) -> None:
        if value not in graph.pinned and value in last_use:
            free_after[last_use.pop(value)].append(value)

    for position, action in enumerate(actions, start=1):
        match action:
            case Compute(number):
                node = graph.nodes[number]
                for value in node.reads:
                    last_use[value] = position
                for value in node.writes:
                    drop(value)
                    last_use[value] = position
            case PageOut(value):
                last_use[value] = position
            case PageIn(value):
                drop(value)
                last_use[value] = position
            case Free(value):
                last_use[value] = position
                drop(value)
    returned = frozenset(graph.returned)
    for value in list(last_use):
        if value not in returned:
            drop(value)
    instructions: list[Instruction] = [Free(v) for v in free_after[0]]
    for position, action in enumerate(actions, start=1):
        if isinstance(action, Compute):
            node = graph.nodes[action.node]
            instructions.append(Run((action.node,), node.reads, node.writes))
        elif not isinstance(action, Free):
            instructions.append(action)
        instructions.extend(map(Free, free_after[position]))
    return Program(graph, _in_place(graph, instructions))


def _in_place(
    graph: Graph, instructions: Sequence[Instruction]
) -> tuple[Instruction, ...]:
    """Let each node write over what is freed right after it, where `replaced` allows.

    So a node does that runs for the first time, over what no other node's first run
    reads later.
    """
    last_read: dict[int, int] = {}
    firsts: set[int] = set()
    seen: set[int] = set()
    for row, x in enumerate(instructions):
        if isinstance(x, Run) and seen.isdisjoint(x.nodes):
            firsts.add(row)
            seen.update(x.nodes)
            last_read |= dict.fromkeys(x.reads, row)
    result: list[Instruction] = []
    freed: dict[int, Free] = {}  # right after the instruction that is looked at
    for row in reversed(range(len(instructions))):
        x = instructions[row]
        if isinstance(x, Free):
            freed[x.value] = x
            continue
        if isinstance(x, Run) and row in firsts and freed:
            dead = [v for v in freed if last_read.get(v, -1) <= row]
            if over := replaced(graph, x.nodes[0], dead):
                x = dataclasses.replace(x, over=over)
                for old, _ in over:
                    del freed[old]
        result += [*freed.values(), x]
        freed = {}
    result += freed.values()
    return tuple(reversed(result))


def moving(instructions: Iterable[Instruction | Action]) -> tuple[Action, ...]:
    """The computes and transfers, as a plan has them: without the frees."""
    actions: list[Action] = []
    for x in instructions:
        if isinstance(x, Run):
            actions += map(Compute, x.nodes)
        elif not isinstance(x, Free):
            actions.append(x)
    return tuple(actions)


def program_to_list(program: Program) -> list[list[Any]]:
    """The instructions, as JSON types."""
    return [
        [type(x).__name__, *(getattr(x, f.name) for f in dataclasses.fields(x))]
        for x in program.instructions
    ]


def program_from_list(graph: Graph, rows: list[list[Any]]) -> Program:
    """The program whose instructions `program_to_list` wrote, of the same graph.

    Raises ValueError for a Run of other values than its nodes'.
    """

    def instruction(kind: str, *fields: Any) -> Instruction:
        if kind == "Run":
            nodes, reads, writes, over = fields
            pairs = tuple((old, new) for old, new in over)
            needs = {v for n in nodes for v in graph.nodes[n].reads}
            makes = {v for n in nodes for v in graph.nodes[n].writes}
            if not needs - makes <= set(reads) <= needs or not makes.issuperset(writes):
                raise ValueError(
                    f"a Run of {nodes} reads {reads} and writes {writes}, and these "
                    f"nodes read {sorted(needs)} and write {sorted(makes)}"
                )
            return Run(tuple(nodes), tuple(reads), tuple(writes), pairs)
        kinds = {kind.__name__: kind for kind in (Free, PageIn, PageOut)}
        return kinds[kind](*fields)

    return Program(graph, tuple(instruction(*row) for row in rows))
