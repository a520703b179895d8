"""The instructions that the executor runs and the simulator judges."""

import dataclasses
import functools

from poet_jax.errors import PlanInvalid
from poet_jax.graph import Graph
from poet_jax.plan import Action, Compute, PageIn, PageOut, Plan


@dataclasses.dataclass(frozen=True)
class Free:
    """Drop a value from RAM; waits for its copy to storage."""

    value: int


Instruction = Action | Free


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """Instructions over the values and nodes of a graph.

    Attributes:
      graph: what the numbers refer to.
      instructions: [I].
    """

    graph: Graph
    instructions: tuple[Instruction, ...]

    @functools.cached_property
    def last_page_in(self) -> dict[int, int]:
        """Instruction after which the storage of each paged value is free again."""
        return {
            x.value: number
            for number, x in enumerate(self.instructions)
            if isinstance(x, PageIn)
        }

    @functools.cached_property
    def recomputed(self) -> int:
        """How many `Compute`s run a node again."""
        computes = [x.node for x in self.instructions if isinstance(x, Compute)]
        return len(computes) - len(set(computes))

    def __str__(self) -> str:
        lines = []
        seen = set()
        for number, x in enumerate(self.instructions):
            if isinstance(x, Compute):
                text = f"compute   {self.graph.nodes[x.node].name}"
                if x.node in seen:
                    text += "  (again)"
                seen.add(x.node)
            else:
                word = {Free: "free", PageOut: "page out", PageIn: "page in"}[type(x)]
                text = f"{word:9s} {self.graph.values[x.value].name}"
            lines.append(f"{number:5d}  {text}")
        return "\n".join(lines)


def lower(graph: Graph, plan: Plan) -> Program:
    """Insert every `Free`: right after the last read before a value is dropped.

    A value is dropped where it is produced again or paged in again, and at the end of
    the step unless it is an output. Raises PlanInvalid if an action needs a value that
    is not in RAM, pages in what was not written out, or writes a value out twice.
    """
    actions = plan.actions
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
    for value in list(last_use):
        if value not in graph.outputs:
            drop(value)
    instructions: list[Instruction] = [Free(v) for v in free_after[0]]
    for position, action in enumerate(actions, start=1):
        instructions.append(action)
        instructions.extend(map(Free, free_after[position]))
    return Program(graph, tuple(instructions))


def _check(graph: Graph, actions: tuple[Action, ...]) -> None:
    present = set(graph.initial)
    stored: set[int] = set()
    done: set[int] = set()

    def need(condition: bool, problem: str) -> None:
        if not condition:
            raise PlanInvalid(
                f"The plan {problem}. Every action needs its values in RAM, or on "
                "storage for a page-in. Make the plan again with the planner that "
                "belongs to it."
            )

    for action in actions:
        match action:
            case Compute(number):
                node = graph.nodes[number]
                for value in node.reads:
                    need(
                        value in present,
                        f"computes {node.name!r} before {graph.values[value].name!r}",
                    )
                need(
                    node.repeatable or number not in done,
                    f"repeats {node.name!r}, which has effects",
                )
                done.add(number)
                present.update(node.writes)
            case PageOut(value):
                name = graph.values[value].name
                need(value in present, f"pages out {name!r}, which is not in RAM")
                need(value not in stored, f"pages out {name!r} twice")
                need(graph.values[value].pageable, f"pages out the PRNG key {name!r}")
                stored.add(value)
            case PageIn(value):
                name = graph.values[value].name
                need(value in stored, f"pages in {name!r}, which was not paged out")
                present.add(value)
    need(len(done) == len(graph.nodes), "does not compute every node")
