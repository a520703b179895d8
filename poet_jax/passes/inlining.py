"""What the backward pass reads of a light node is computed there again, from less.

JAX saves for the backward pass whatever its derivative rules ask for: of a GELU five
arrays, all of them functions of one. XLA computes such arrays in the loops that read
them. Nodes that are scheduled one by one pass them through memory instead, where they
count, and where writing and reading them takes longer than computing them.

PyTorch's `min_cut_rematerialization_partition` decides the same for a whole graph, as a
minimal cut. Here each forward node is looked at by itself, and across nodes it is the
planner that rematerialises.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax

from poet_jax.core.equation import Equation, Inner, Literal, Name, nbytes_of
from poet_jax.core.graph import Graph, Node, Value
from poet_jax.core.rebuilding import with_nodes
from poet_jax.passes.grouping import TINY_BYTES
from poet_jax.passes.operations import is_light


def inline_cheap(graph: Graph) -> Graph:
    """`graph`, of `group`, whose backward nodes read less of light forward ones.

    Light are nodes that XLA computes in loops over their operands. Those of a light
    forward node's large results that no backward node reads but light ones are computed
    again inside these, if what that reads and is not in RAM by then anyway has fewer
    bytes. Results of reductions are read, not computed again.

    The operations are the same, but XLA may round them differently where it computes
    them in one pass with others. A plan does not count them as rematerialised.
    """
    recomputer = _Recomputer(graph)
    for number in reversed(range(len(graph.nodes))):
        recomputer.visit(number)
    return recomputer.result()


@dataclasses.dataclass(frozen=True)
class _Moved:
    """What is computed in the readers of a node, instead of kept.

    Attributes:
      values: these.
      read: what they are computed from that is not in RAM by then anyway.
      again: equations that compute them.
      stops: what these read instead of computing it.
    """

    values: list[int]
    read: list[Name]
    again: list[Equation]
    stops: set[Name]


class _Recomputer:
    def __init__(self, graph: Graph):
        self.graph = graph
        self.nodes, self.values = list(graph.nodes), list(graph.values)
        self.readers = [set(numbers) for numbers in graph.readers]
        self.always_kept = graph.pinned | set(graph.returned)
        self.late = _late(graph)
        self.is_changed = False

    def result(self) -> Graph:
        """The graph as it is now; the given one if unchanged."""
        if not self.is_changed:
            return self.graph
        graph = dataclasses.replace(self.graph, values=tuple(self.values))
        left = (node for node in self.nodes if node.writes or not node.repeatable)
        return with_nodes(graph, left)

    def visit(self, number: int) -> None:
        """Let backward nodes compute what they read of a light forward node."""
        node = self.nodes[number]
        if number in self.late or not is_light(node):
            return
        kinds = _kinds(node.equations)
        moved = self.moved(node, kinds)
        if not moved.values:
            return
        inner = [x for x in moved.read if isinstance(x, Inner)]
        names: dict[Name, int] = {x: self.new_value(node, kinds[x]) for x in inner}
        rows, again = (
            [e.renamed(names) for e in each] for each in (node.equations, moved.again)
        )
        stops = {names.get(x, x) for x in moved.stops}
        for reader in sorted({n for v in moved.values for n in self.late_readers(v)}):
            own = [v for v in moved.values if v in self.nodes[reader].reads]
            added = _needed(again, own, stops)
            made = set(_made_by(added))
            both = [
                e for e in self.nodes[reader].equations if made.isdisjoint(e.results)
            ]
            self.replace(reader, [*added, *both], self.nodes[reader].writes)
        writes = [v for v in node.writes if self.readers[v] or v in self.graph.leaving]
        writes += names.values()
        self.replace(number, _needed(rows, writes, set()), writes)

    def moved(self, node: Node, kinds: dict[Any, jax.ShapeDtypeStruct]) -> "_Moved":
        """What to compute again of a light forward node, so that the least is kept.

        A value stays kept if keeping it takes no more memory. So a residual stream is
        kept: a layer's summand is as large as the sum, and without the sum each layer
        would add up all layers below it.
        """

        def of(values: list[int]) -> tuple[int, _Moved]:
            moved = self.moving(node, values)
            kept_bytes = sum(nbytes_of(kinds[x]) for x in moved.read)
            left = (v for v in candidates if v not in values)
            return kept_bytes + sum(self.values[v].nbytes for v in left), moved

        reduced = {x for e in node.equations if _is_reduction(e) for x in e.results}
        candidates = [v for v in node.writes if v not in reduced and self.may_move(v)]
        least_bytes, best = of(candidates)
        for v in candidates:
            nbytes, moved = of([x for x in best.values if x != v])
            if nbytes <= least_bytes:
                least_bytes, best = nbytes, moved
        return best

    def moving(self, node: Node, values: list[int]) -> "_Moved":
        """As if these values of a node moved."""
        rows = node.equations
        reduced = {x for e in rows if _is_reduction(e) for x in e.results}
        kept = {v for v in node.writes if v not in values and self.is_kept(v)}
        stops: set[Name] = kept | reduced
        shared = {v for v in node.writes if not self.is_only_multiplied(v)}
        again = [*rows, *_softmax_numerators(rows, stops, shared)]
        read = _reads(_needed(again, values, stops))
        return _Moved(values, [x for x in read if not self.is_kept(x)], again, stops)

    def new_value(self, node: Node, kind: jax.ShapeDtypeStruct) -> int:
        """A value for what was inside a node."""
        number = len(self.values)
        name = f"{node.name}:{number}"
        weak_type = bool(getattr(kind, "weak_type", False))
        value = Value(name, nbytes_of(kind), kind.shape, kind.dtype, weak_type)
        self.values.append(value)
        self.readers.append(set())
        return number

    def replace(
        self, number: int, equations: Iterable[Equation], writes: Iterable[int]
    ) -> None:
        """Let node `number` consist of `equations`."""
        old = self.nodes[number]
        new = Node.of(old.name, equations, writes, old.backward)
        for value in old.reads:
            self.readers[value].discard(number)
        for value in new.reads:
            self.readers[value].add(number)
        self.nodes[number] = new
        self.is_changed = True

    def late_readers(self, value: int) -> set[int]:
        return self.readers[value] & self.late

    def is_only_multiplied(self, value: int) -> bool:
        """Whether backward nodes alone read it, in products."""
        nodes = [self.nodes[number] for number in self.readers[value]]
        return all(node.backward for node in nodes) and all(
            equation.primitive.name == "mul"
            for node in nodes
            for equation in node.equations
            if value in equation.operands
        )

    def is_kept(self, value: Name) -> bool:
        """Whether it is in RAM in the backward pass anyway."""
        if isinstance(value, Inner) or value in self.graph.stored:
            return False
        return value in self.always_kept or bool(self.late_readers(value))

    def may_move(self, value: int) -> bool:
        """Whether it is large, and in the backward pass light nodes alone read it."""
        readers = self.late_readers(value)
        return (
            self.values[value].nbytes > TINY_BYTES
            and value not in self.graph.leaving
            and bool(readers)
            and all(is_light(self.nodes[number]) for number in readers)
        )


def _late(graph: Graph) -> set[int]:
    """Numbers of the nodes of the backward pass, and of all that comes of them."""
    late: set[int] = set()
    made: set[int] = set()
    for number, node in enumerate(graph.nodes):
        if node.backward or not made.isdisjoint(node.reads):
            late.add(number)
            made.update(node.writes)
    return late


def _kinds(equations: Iterable[Equation]) -> dict[Any, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of all that equations read and make."""
    kinds: dict[Any, jax.ShapeDtypeStruct] = {}
    for e in equations:
        kinds |= zip(e.operands, e.operand_shapes, strict=True)
        kinds |= zip(e.results, e.result_shapes, strict=True)
    return kinds


def _is_reduction(equation: Equation) -> bool:
    return equation.primitive.name.startswith("reduce")


def _softmax_numerators(
    equations: Sequence[Equation], kept: set[Name], shared: set[int]
) -> Iterator[Equation]:
    """Another way to each exponential that is divided by its own sum, which is kept.

    JAX saves both for the backward pass of a softmax. The quotient times the sum is the
    exponential, but for rounding: no term exceeds the sum of all, so what is lost where
    the quotient underflows is nothing beside the others. It would be something to
    other readers, so exponentials that are `shared` or read by others stay as they are.
    """
    made_by = _made_by(equations)

    def maker(x: Any, name: str) -> Equation | None:
        equation = None if isinstance(x, Literal) else made_by.get(x)
        return equation if equation and equation.primitive.name == name else None

    for equation in equations:
        if equation.primitive.name != "div" or equation.results[0] not in kept:
            continue
        top, bottom = equation.operands
        spread = maker(bottom, "broadcast_in_dim")
        total = spread and maker(spread.operands[0], "reduce_sum")
        power = maker(top, "exp")
        if not (spread and total and power and total.operands == (top,)):
            continue
        if maker(power.operands[0], "sub") is None:
            continue  # the sum may be infinite
        assert not isinstance(top, Literal)
        others = (e for e in equations if e not in (equation, total))
        if top in shared or any(top in e.operands for e in others):
            continue
        top_shape, bottom_shape = equation.operand_shapes
        if top_shape.shape != equation.result_shapes[0].shape:
            continue
        summed = total.params["axes"]
        rest = tuple(d for d in range(top_shape.ndim) if d not in summed)
        if tuple(spread.params["broadcast_dimensions"]) == rest:
            yield dataclasses.replace(
                equation,
                primitive=jax.lax.mul_p,
                operands=(*equation.results, bottom),
                results=(top,),
                operand_shapes=(*equation.result_shapes, bottom_shape),
            )


def _made_by(equations: Iterable[Equation]) -> dict[Name, Equation]:
    return {x: equation for equation in equations for x in equation.results}


def _needed(
    equations: Iterable[Equation], targets: Iterable[Name], stops: set[Name]
) -> list[Equation]:
    """Those that `targets` are computed by, from `stops` where they meet one.

    One stands after those that it reads. Of two for one value the last counts.
    """
    made_by = _made_by(equations)
    needed: dict[Equation, None] = {}
    waiting = [made_by[x] for x in targets]
    while waiting:
        equation = waiting[-1]
        before = [made_by[x] for x in equation.reads if x in made_by and x not in stops]
        before = [x for x in before if x not in needed]
        if before and equation not in needed:
            waiting.extend(before)
        else:
            needed.setdefault(waiting.pop())
    return list(needed)


def _reads(equations: Sequence[Equation]) -> dict[Name, None]:
    """What equations read that none of them makes, in order."""
    made = _made_by(equations)
    return dict.fromkeys(x for e in equations for x in e.reads if x not in made)
