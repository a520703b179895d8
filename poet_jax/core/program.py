"""The instructions that are emitted and that the simulator judges."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from poet_jax.core.errors import PlanInvalid
from poet_jax.core.graph import Graph
from poet_jax.core.in_place import Pairs, replaced
from poet_jax.core.plan import Action, Compute, Free, PageIn, PageOut, Plan


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """Instructions over the values and nodes of a graph.

    Attributes:
      graph: what the numbers refer to.
      instructions: [I].
    """

    graph: Graph
    instructions: tuple[Action, ...]

    @functools.cached_property
    def last_page_in(self) -> dict[int, int]:
        """Instruction after which the storage of each paged value is free again."""
        return {
            x.value: number
            for number, x in enumerate(self.instructions)
            if isinstance(x, PageIn)
        }

    @functools.cached_property
    def waiting_frees(self) -> frozenset[int]:
        """The instructions that free a value whose copy goes to storage first, but for
        `done_frees`."""
        saving: set[int] = set()
        found = set()
        for number, x in enumerate(self.instructions):
            if isinstance(x, PageOut):
                saving.add(x.value)
            elif isinstance(x, Free) and x.value in saving:
                saving.remove(x.value)
                found.add(number)
        return frozenset(found) - self.done_frees

    @functools.cached_property
    def replaces(self) -> dict[int, Pairs]:
        """By instruction, pairs (old, new): `new` is written over `old`.

        So a node does that runs for the first time, with what is freed right after it
        and read by no other node's first run later, where `replaced` allows it.
        """
        found: dict[int, Pairs] = {}
        last_read, firsts = self._first_runs
        for row, x in enumerate(self.instructions):
            if isinstance(x, Compute) and row in firsts:
                dead = [
                    v for v in self._freed_after(row) if last_read.get(v, -1) <= row
                ]
                if pairs := replaced(self.graph, x.node, dead):
                    found[row] = pairs
        return found

    @property
    def _first_runs(self) -> tuple[dict[int, int], set[int]]:
        """The last row at which each value is read by a node that runs for the first
        time, and the rows of all such runs."""
        last_read: dict[int, int] = {}
        firsts: set[int] = set()
        run: set[int] = set()
        for row, x in enumerate(self.instructions):
            if isinstance(x, Compute) and x.node not in run:
                firsts.add(row)
                run.add(x.node)
                last_read |= dict.fromkeys(self.graph.nodes[x.node].reads, row)
        return last_read, firsts

    @functools.cached_property
    def done_frees(self) -> frozenset[int]:
        """The instructions that free what the compute before has written over."""
        return frozenset(
            free
            for row, pairs in self.replaces.items()
            for value, free in self._freed_after(row).items()
            if value in dict(pairs)
        )

    def _freed_after(self, row: int) -> dict[int, int]:
        """What is freed right after an instruction, with the one that does."""
        freed: dict[int, int] = {}
        for free in range(row + 1, len(self.instructions)):
            x = self.instructions[free]
            if not isinstance(x, Free):
                break
            freed[x.value] = free
        return freed

    @functools.cached_property
    def runs(self) -> Counter[int]:
        """How often each node runs."""
        return Counter(x.node for x in self.instructions if isinstance(x, Compute))

    @functools.cached_property
    def recomputed(self) -> int:
        """How many `Compute`s run a node again."""
        return self.runs.total() - len(self.runs)

    def __str__(self) -> str:
        lines = []
        seen: set[int] = set()
        for number, x in enumerate(self.instructions):
            match x:
                case Compute(node):
                    text = f"compute   {self.graph.nodes[node].name}"
                    text += "  (again)" * (node in seen)
                    seen.add(node)
                    olds = self.replaces.get(number, ())
                    names = [self.graph.values[old].name for old, _ in olds]
                    text += f"  (over {', '.join(names)})" if names else ""
                case Free(value) | PageOut(value) | PageIn(value):
                    word = {Free: "free", PageOut: "page out", PageIn: "page in"}
                    text = f"{word[type(x)]:9s} {self.graph.values[value].name}"
            lines.append(f"{number:5d}  {text}")
        return "\n".join(lines)


def program_to_list(program: Program) -> list[list[Any]]:
    """The instructions, as JSON types."""
    return [[type(x).__name__, *vars(x).values()] for x in program.instructions]


def program_from_list(graph: Graph, rows: list[list[Any]]) -> Program:
    """The program whose instructions `program_to_list` wrote, of the same graph."""
    kinds = {kind.__name__: kind for kind in (Compute, Free, PageIn, PageOut)}
    return Program(graph, tuple(kinds[kind](number) for kind, number in rows))


def lower(graph: Graph, plan: Plan) -> Program:
    """The program of a plan, with every `Free`. Raises PlanInvalid; see
    `lower_actions`."""
    return lower_actions(graph.with_resident(plan.resident), plan.actions)


def lower_actions(graph: Graph, actions: Sequence[Action]) -> Program:
    """Insert every `Free`: right after the last read before a value is dropped, or
    where the actions have it.

    A value is dropped where it is produced again or paged in again, and at the end of
    the step unless it is an output. Raises PlanInvalid if an action needs a value that
    is not in RAM, pages in what was not written out, or writes a value out twice.
    """
    _check(graph, actions)
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
    instructions: list[Action] = [Free(v) for v in free_after[0]]
    for position, action in enumerate(actions, start=1):
        if not isinstance(action, Free):
            instructions.append(action)
        instructions.extend(map(Free, free_after[position]))
    return Program(graph, tuple(instructions))


def moving(instructions: Iterable[Action]) -> tuple[Action, ...]:
    """The computes and transfers, without the frees."""
    return tuple(x for x in instructions if isinstance(x, Compute | PageIn | PageOut))


def _check(graph: Graph, actions: Sequence[Action]) -> None:
    present = set(graph.initial)
    stored = set(graph.stored)
    done: set[int] = set()
    for action in actions:
        match action:
            case Compute(number):
                node = graph.nodes[number]
                for value in node.reads:
                    if value not in present:
                        missing = graph.values[value].name
                        raise _invalid(f"computes {node.name!r} before {missing!r}")
                if number in done and not node.repeatable:
                    raise _invalid(f"repeats {node.name!r}, which has effects")
                done.add(number)
                present.update(node.writes)
            case PageOut(value):
                name = graph.values[value].name
                if value not in present:
                    raise _invalid(f"pages out {name!r}, which is not in RAM")
                if value in stored:
                    raise _invalid(f"pages out {name!r} twice")
                if not graph.values[value].pageable:
                    raise _invalid(f"pages out the PRNG key {name!r}")
                stored.add(value)
            case PageIn(value):
                if value not in stored:
                    name = graph.values[value].name
                    raise _invalid(f"pages in {name!r}, which was not paged out")
                present.add(value)
            case Free(value):
                if value not in present or value in graph.pinned:
                    name = graph.values[value].name
                    raise _invalid(f"frees {name!r}, which is not there to be freed")
                present.remove(value)
    if len(done) != len(graph.nodes):
        raise _invalid("does not compute every node")
    if not stored.issuperset(graph.landing):
        raise _invalid("leaves state in RAM that lives on storage")


def _invalid(problem: str) -> PlanInvalid:
    return PlanInvalid(
        f"The plan {problem}. Every action needs its values in RAM, or on storage for "
        "a page-in. Make the plan again with the planner that belongs to it."
    )
