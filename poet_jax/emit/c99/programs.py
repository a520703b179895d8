"""A planned program as steps of C over buffers."""

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from poet_jax.core.equation import Equation
from poet_jax.core.graph import Graph, Node, Place
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
from poet_jax.emit.c99.expanding import as_words, parts
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
    """By argument in RAM that the step replaces, the value that takes its place."""
    found = {v: graph.successors[v] for v in graph.resident}
    held = graph.outputs[len(graph.results) :]
    found |= dict(zip(graph.references, held, strict=True))
    heirs = replacing(graph).items()
    return found | {v: graph.results[x] for v, x in heirs if v not in graph.stored}


def replacing(graph: Graph) -> dict[int, int]:
    """By donated argument, the flat result that takes its place for the next step.

    An argument, or else a part of one, is replaced by a part of the result that has its
    structure, shapes and types. The largest come first, so that moments of an optimizer
    are no parameters. If there are as many such results as arguments, their order pairs
    them. If not, position does: result `k` replaces argument `k`, or the one that is
    number `k` of the donated ones, and a part replaces the part at its place.

    Raises ValueError where several results fit, and position does not say which.
    """
    olds, found = _donated_parts(graph), {}
    fitting: dict[Any, list[_Part]] = {}
    results = _unflattened(graph.out_tree, len(graph.results))
    for part in _Part(graph, graph.results, results, "result", {()}).all_parts():
        fitting.setdefault(part.form, []).append(part)
    while olds:
        form = max((x.form for x in olds), key=lambda form: form[0].num_nodes)
        same = sorted((x for x in olds if x.form == form), key=lambda x: x.leaves)
        taken = set(found.values())
        news = [x for x in fitting.get(form, []) if taken.isdisjoint(x.leaves)]
        pairs = _paired(same, news)
        for old, new in pairs:
            values = (graph.arguments[leaf] for leaf in old.leaves)
            found.update(zip(values, new.leaves, strict=True))
        paired = {old for old, _ in pairs}
        olds = [x for x in olds if x.form != form]
        olds += [part for x in same if x not in paired for part in x.parts()]
    return found


class _Part:
    """A part of a tree of flat numbers, of arguments or of results.

    Attributes:
      leaves: its flat numbers.
      form: structure, shapes and types; keys are their words.
      name: for errors.
      places: of a part of the result, the keys that lead to it; of an argument, those
        of the results in its position.
    """

    def __init__(
        self,
        graph: Graph,
        values: Sequence[int],
        tree: Any,
        name: str,
        places: set[tuple[Any, ...]],
    ):
        self.graph, self.values, self.tree = graph, values, tree
        self.name, self.places = name, places
        self.leaves, structure = jax.tree.flatten(tree)
        avals = [as_words(graph.values[values[leaf]].aval) for leaf in self.leaves]
        self.form = structure, *((x.shape, x.dtype) for x in avals)

    def parts(self) -> Iterator["_Part"]:
        """Its children that have leaves; a leaf has none."""
        children, _ = jax.tree.flatten_with_path(
            self.tree, is_leaf=lambda x: x is not self.tree
        )
        for keys, child in children:
            if keys and jax.tree.leaves(child):
                name = self.name + jax.tree_util.keystr(keys)
                places = {(*place, *keys) for place in self.places}
                yield _Part(self.graph, self.values, child, name, places)

    def all_parts(self) -> Iterator["_Part"]:
        yield self
        for part in self.parts():
            yield from part.all_parts()


def _unflattened(structure: Any, count: int) -> Any:
    numbers = list(range(count))
    return numbers if structure is None else jax.tree.unflatten(structure, numbers)


def _donated_parts(graph: Graph) -> list[_Part]:
    """The donated arguments, or parts of them, that hold no references."""
    donated = graph.donated - set(graph.references)

    def donated_in(part: _Part) -> list[_Part]:
        if donated.issuperset(graph.arguments[leaf] for leaf in part.leaves):
            return [part]
        return [x for child in part.parts() for x in donated_in(child)]

    tree = _unflattened(graph.in_tree, len(graph.arguments))
    args, kwargs = (tree, {}) if graph.in_tree is None else tree
    found: list[list[_Part]] = []
    for key, argument in (*enumerate(args), *kwargs.items()):
        kind = jax.tree_util.DictKey if key in kwargs else jax.tree_util.SequenceKey
        places = {(), (kind(key),), (jax.tree_util.SequenceKey(len(found)),)}
        whole = _Part(graph, graph.arguments, argument, f"argument {key}", places)
        if whole.leaves and (parts := donated_in(whole)):
            found.append(parts)
    return [part for parts in found for part in parts]


def _paired(olds: Sequence[_Part], news: Sequence[_Part]) -> list[tuple[_Part, _Part]]:
    """(old, new) of one form: in order, or by position. Raises ValueError."""
    if len(olds) == len(news) or not news:
        return list(zip(olds, news, strict=False))
    pairs = [(x, y) for x in olds for y in news if not x.places.isdisjoint(y.places)]
    apart = {x for x, _ in pairs}, {y for _, y in pairs}
    if len(pairs) == min(*map(len, apart)) == min(len(olds), len(news)):
        return pairs
    old, new = (" or ".join(x.name for x in parts) for parts in (olds, news))
    raise ValueError(
        f"{new} may be the next {old}: structure, shapes and types are the same. A C "
        "program writes new state to the place of the old one. Let state be the first "
        "arguments, donate nothing else, and return new state first, in their order: "
        "`def step(state, batch): ...; return new_state, gradients`."
    )


def moved_results(graph: Graph) -> list[int]:
    """Arguments that the step replaces, and returns in another place."""
    heirs = replacing(graph)
    return [v for v in graph.results if v in heirs and graph.results[heirs[v]] != v]


def landing(graph: Graph) -> dict[int, int]:
    """By flat result that is new state on storage, the flat argument it replaces."""
    return {
        leaf: graph.stored[v].leaf
        for v, leaf in replacing(graph).items()
        if v in graph.stored and graph.results[leaf] != v
    }


def with_own_results(graph: Graph) -> Graph:
    """`graph`, of single equations, whose new state lies where `replacing` says.

    An argument may be replaced and be a result, too. It is copied before its
    replacement is computed, unless it replaces itself. Any other result for storage is
    copied if it also lies elsewhere.
    """
    heirs, replaced = replacing(graph), landing(graph)
    moved, end = set(moved_results(graph)), len(graph.nodes)
    values, outputs = list(graph.values), list(graph.outputs)
    nodes: list[list[Node]] = [[] for _ in range(end + 1)]
    places: dict[int, Place] = {}
    for leaf, v in enumerate(graph.results):
        is_own = v in graph.producer and v not in places and values[v].pageable
        if v in moved or (leaf in replaced and not is_own):
            part = trace_part(jnp.copy, jax.ShapeDtypeStruct(*values[v].kind))
            (argument,), (copy,) = part.arguments, part.outputs
            outputs[leaf] = len(values)
            values.append(dataclasses.replace(part.values[copy], name=values[v].name))
            equations = body(part, {argument: v, copy: outputs[leaf]})
            before = end
            if v in moved:
                before = graph.producer.get(graph.results[heirs[v]], end)
            nodes[before].append(Node.of("output/copy", equations, [outputs[leaf]]))
        if leaf in replaced:
            places[outputs[leaf]] = Place(leaf, replaces=replaced[leaf])
    for number, node in enumerate(graph.nodes):
        nodes[number].append(node)
    return dataclasses.replace(
        graph,
        values=tuple(values),
        nodes=tuple(itertools.chain(*nodes)),
        outputs=tuple(outputs),
        landing=places,
    )
