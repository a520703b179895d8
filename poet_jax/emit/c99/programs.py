"""A planned program as steps of C over buffers."""

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from poet_jax.core.equation import Equation
from poet_jax.core.graph import Graph, Node
from poet_jax.core.plan import Free, PageIn, PageOut
from poet_jax.core.program import Program, Run
from poet_jax.core.rebuilding import body
from poet_jax.core.trace import trace_part
from poet_jax.emit.c99 import (
    contractions,
    control,
    orders,
    places,
    reductions,
    windows,
)
from poet_jax.emit.c99.buffers import C_TYPES, Buffer, Pointer, Step
from poet_jax.emit.c99.buffers import needed as needed
from poet_jax.emit.c99.expanding import parts
from poet_jax.emit.c99.loops import VIRTUAL
from poet_jax.emit.c99.nodes import lower_node
from poet_jax.emit.c99.storage import Storage

RULES = {
    **contractions.RULES,
    **control.RULES,
    **orders.RULES,
    **places.RULES,
    **reductions.RULES,
    **windows.RULES,
}


@dataclasses.dataclass(frozen=True, eq=False)
class Steps:
    """A program as steps.

    Attributes:
      steps: in order. The first one writes what is in RAM as the step begins, the last
        one reads what is there as it ends.
      inputs: buffers of values in RAM, or in flash, as the step begins.
      outputs: buffers of the values that the step returns.
      ties: (buffer as the step begins, the one that takes its place for the next step).
      storage: where what is paged lies.
      kept: (run, name) of inner values that are arrays to save work, by their buffers.
      names: of the node of each run.
    """

    steps: tuple[Step, ...]
    inputs: dict[int, Buffer]
    outputs: dict[int, Buffer]
    ties: tuple[tuple[Buffer, Buffer], ...]
    storage: Storage
    kept: dict[Buffer, tuple[int, Any]]
    names: dict[int, str]


def unsupported(program: Program) -> list[str]:
    """What has no kernel, by name: primitives, and dtypes of operations."""
    found: dict[str, None] = {}
    for node in program.graph.nodes:
        for equation in _all(node.equations):
            name = equation.primitive.name
            if name not in VIRTUAL and name not in RULES:
                found[name] = None
                continue
            for aval in (*equation.operand_shapes, *equation.result_shapes):
                if aval.dtype.name not in C_TYPES:
                    found[f"{name} of {aval.dtype.name}"] = None
    return list(found)


def _all(equations: Iterable[Equation]) -> Iterator[Equation]:
    """Equations, and those of the bodies of control flow."""
    for equation in equations:
        yield equation
        for part in parts(equation):
            yield from _all(part.equations)


def steps_of(
    program: Program,
    flash: Mapping[int, np.ndarray],
    lean: Collection[tuple[int, Any]] = (),
) -> Steps:
    """The steps of a program, with the values `flash` as constants.

    `lean` are inner values, as (run, name), that are computed again for each reader.
    Raises Unsupported for an equation without a kernel.
    """
    return _Builder(program, flash, lean).build()


class _Builder:
    def __init__(
        self,
        program: Program,
        flash: Mapping[int, np.ndarray],
        lean: Collection[tuple[int, Any]],
    ):
        self.program, self.graph = program, program.graph
        self.flash = flash
        self.lean: dict[int, set[Any]] = {}
        for run, name in lean:
            self.lean.setdefault(run, set()).add(name)
        self.known: dict[int, Buffer] = {}
        self.waiting: dict[int, int] = {}  # row of each page-in that nobody needed yet
        self.steps: list[Step] = []
        self.kept: dict[Buffer, tuple[int, Any]] = {}
        self.names: dict[int, str] = {}
        self.storage = Storage.of(program)
        self.shared = set(range(len(self.graph.values))).difference(
            self.graph.returned, self.storage.begins
        )

    def buffer(self, value: int) -> Buffer:
        x = self.graph.values[value]
        return Buffer(x.name, x.shape, x.dtype.name, self.flash.get(value))

    def build(self) -> Steps:
        graph = self.graph
        self.known = {v: self.buffer(v) for v in graph.initial}
        inputs = dict(self.known)
        here = tuple(x for x in inputs.values() if not x.in_flash)
        self.steps.append(Step((), here, lambda pointer: [], run=-1, has_effect=True))
        wanted = _read_later(self.program)
        for row, x in enumerate(self.program.instructions):
            match x:
                case Run():
                    self.run(row, x, wanted[row])
                    for old, _ in x.over:
                        self.known.pop(old, None)
                case PageOut(value):
                    self.page_out(row, value)
                case PageIn(value) if value not in self.known:
                    self.waiting[value] = row
                case Free(value):
                    self.known.pop(value, None)
                    self.waiting.pop(value, None)
        self.arrive(self.waiting)
        outputs = {v: self.known[v] for v in graph.returned}
        ties = [
            (inputs[old], self.known[new])
            for old, new in successors(graph).items()
            if old in inputs and inputs[old] is not self.known[new]
        ]
        lasting = [inputs[v] for v in graph.pinned]
        at_end = [x for x in (*outputs.values(), *lasting) if not x.in_flash]
        end = len(self.program.instructions)
        last = Step(tuple(dict.fromkeys(at_end)), (), lambda pointer: [], run=end)
        steps = [*self.steps, dataclasses.replace(last, has_effect=True)]
        return Steps(
            tuple(needed(steps, ())),
            inputs,
            outputs,
            tuple(ties),
            self.storage,
            self.kept,
            self.names,
        )

    def run(self, row: int, x: Run, wanted: Collection[int]) -> None:
        self.arrive(v for number in x.nodes for v in self.graph.nodes[number].reads)
        for number in x.nodes:
            node = self.graph.nodes[number]
            made = [v for v in node.writes if v in wanted and v not in self.known]
            if not made:
                continue
            lean = self.lean.get(row, set())
            shared = self.shared.intersection(made)
            lowering = lower_node(
                node.equations, self.known, made, shared, row, lean, RULES
            )
            self.steps += lowering.steps
            for v in made:
                buffer = lowering.where[v]
                assert isinstance(buffer, Buffer)
                self.known[v] = buffer
            self.kept.update((b, (row, name)) for b, name in lowering.kept.items())
            self.names[row] = node.name

    def arrive(self, values: Iterable[int]) -> None:
        """Page in those of `values` that wait: no transfer runs beside the step, so
        that an earlier one would only take memory."""
        for value in [v for v in dict.fromkeys(values) if v in self.waiting]:
            self.page_in(self.waiting.pop(value), value)

    def page_out(self, row: int, value: int) -> None:
        self.arrive(v for v in self.waiting if self.overlaps(v, value))
        buffer, begin = self.known[value], self.storage.begins[value]

        def render(pointer: Pointer) -> list[str]:
            return [
                f"if (poet_page_out({begin}u, {pointer(buffer)}, {buffer.nbytes})) "
                "return -1;"
            ]

        self.steps.append(Step((buffer,), (), render, run=row, has_effect=True))

    def overlaps(self, *values: int) -> bool:
        """Whether two values share bytes on storage."""
        starts = [self.storage.begins[v] for v in values]
        sizes = [self.graph.values[v].nbytes for v in values]
        pairs = zip(starts, sizes, strict=True)
        return max(starts) < min(start + size for start, size in pairs)

    def page_in(self, row: int, value: int) -> None:
        buffer, begin = self.buffer(value), self.storage.begins[value]
        self.known[value] = buffer

        def render(pointer: Pointer) -> list[str]:
            return [
                f"if (poet_page_in({begin}u, {pointer(buffer)}, {buffer.nbytes})) "
                "return -1;"
            ]

        self.steps.append(Step((), (buffer,), render, run=row))


def _read_later(program: Program) -> list[set[int]]:
    """[I] values that each instruction writes and a later one reads."""
    graph = program.graph
    alive = {*graph.returned, *(graph.successors[v] for v in graph.resident)}
    found: list[set[int]] = []
    for x in reversed(program.instructions):
        match x:
            case Run():
                found.append(alive.intersection(x.writes))
                alive.difference_update(x.writes)
                alive.update(x.reads)
                continue
            case Free(value):
                alive.discard(value)
            case PageOut(value):
                alive.add(value)
            case PageIn(value):
                alive.discard(value)
        found.append(set())
    return found[::-1]


def successors(graph: Graph) -> dict[int, int]:
    """By argument in RAM that the step replaces, the value that takes its place.

    An output whose tree has the structure and types of a donated argument replaces it;
    of what is left, each output the first donated array of its shape and type.
    """
    found = {v: graph.successors[v] for v in graph.resident}
    held = graph.outputs[len(graph.results) :]
    found |= dict(zip(graph.references, held, strict=True))
    donated = graph.donated - graph.stored.keys() - set(graph.references)
    free = [v for v in graph.arguments if v in donated]
    left = [v for v in graph.results if v not in graph.landing]
    for olds, news in _matching(graph):
        if set(olds) <= set(free) and set(news) <= set(left):
            found.update(zip(olds, news, strict=True))
            free = [v for v in free if v not in olds]
            left = [v for v in left if v not in news]
    for new in left:
        kind = graph.values[new].kind
        same = [v for v in free if graph.values[v].kind == kind]
        if same:
            found[same[0]] = new
            free.remove(same[0])
    return found


def moved_results(graph: Graph) -> list[int]:
    """Arguments that the step replaces, and returns in another place."""
    heirs = successors(graph)
    return [v for v in graph.results if v in heirs and heirs[v] != v]


def with_own_results(graph: Graph) -> Graph:
    """`graph`, of single equations, that copies each replaced argument which is a
    result, too: what replaces it is written to its place.

    A result that takes the place of itself needs no copy.
    """
    moved = set(moved_results(graph))
    values, nodes, outputs = list(graph.values), list(graph.nodes), list(graph.outputs)
    for leaf, v in enumerate(graph.results):
        if v not in moved:
            continue
        part = trace_part(jnp.copy, jax.ShapeDtypeStruct(*values[v].kind))
        outputs[leaf] = copied = len(values)
        values.append(values[v])
        names = {part.arguments[0]: v, part.outputs[0]: copied}
        nodes.append(Node.of("output/copy", body(part, names), [copied]))
    return dataclasses.replace(
        graph, values=tuple(values), nodes=tuple(nodes), outputs=tuple(outputs)
    )


def _matching(graph: Graph) -> Iterable[tuple[list[int], list[int]]]:
    """(values of an argument, values of a part of the result) of one structure."""
    if graph.in_tree is None or graph.out_tree is None:
        return
    args, kwargs = jax.tree.unflatten(graph.in_tree, graph.arguments)
    results = jax.tree.unflatten(graph.out_tree, graph.results)
    parts = list(results) if isinstance(results, tuple | list) else [results]
    parts = [results, *parts] if len(parts) > 1 else parts
    for argument in (*args, *kwargs.values()):
        olds, structure = jax.tree.flatten(argument)
        for number, part in enumerate(parts):
            news, other = jax.tree.flatten(part)
            kinds = [graph.values[v].kind for v in olds]
            if olds and structure == other:
                if kinds == [graph.values[v].kind for v in news]:
                    del parts[number]
                    yield olds, news
                    break
