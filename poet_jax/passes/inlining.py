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
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

import jax

from poet_jax.core.graph import Equation, Graph, Literal, Node, Value, renumber
from poet_jax.passes.grouping import HEAVY, TINY_BYTES


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


@dataclasses.dataclass(frozen=True, eq=False)
class _Row:
    """An equation over keys: numbers of values, and others for what stays inside."""

    equation: Equation
    operands: tuple[Any, ...]
    results: tuple[Hashable, ...]

    @property
    def reads(self) -> list[Hashable]:
        return [x for x in self.operands if not isinstance(x, Literal)]

    @property
    def is_reduction(self) -> bool:
        return self.equation.primitive.name.startswith("reduce")

    def renamed(self, names: dict[Hashable, int]) -> "_Row":
        operands, results = (
            tuple(x if isinstance(x, Literal) else names.get(x, x) for x in keys)
            for keys in (self.operands, self.results)
        )
        return _Row(self.equation, operands, results)


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
        return renumber(graph, left)

    def visit(self, number: int) -> None:
        """Let backward nodes compute what they read of a light forward node."""
        node = self.nodes[number]
        if number in self.late or not self.is_light(number):
            return
        rows, kinds = self.rows(number)
        reduced = {key for row in rows if row.is_reduction for key in row.results}
        moving = [v for v in node.writes if v not in reduced and self.may_move(v)]
        stops = {v for v in node.writes if v not in moving and self.is_kept(v)}
        stops |= reduced
        again = [*rows, *_softmax_numerators(rows, stops)]
        read = _reads(_needed(again, moving, stops))
        taken = sum(_nbytes(kinds[key]) for key in read if not self.is_kept(key))
        if taken >= sum(self.values[v].nbytes for v in moving):
            return
        names = {
            key: self.new_value(node, kinds[key])
            for key in read
            if not isinstance(key, int)
        }
        rows, again = ([x.renamed(names) for x in each] for each in (rows, again))
        stops = {names.get(key, key) for key in stops}
        for reader in sorted({n for v in moving for n in self.late_readers(v)}):
            own = [v for v in moving if v in self.nodes[reader].reads]
            added = _needed(again, own, stops)
            both = [*added, *self.rows(reader)[0]]
            self.replace(reader, both, self.nodes[reader].writes)
        writes = [v for v in node.writes if self.readers[v] or v in self.graph.outputs]
        writes += names.values()
        self.replace(number, _needed(rows, writes, set()), writes)

    def rows(self, number: int) -> tuple[list[_Row], dict[Hashable, Any]]:
        """The equations of a node, and shapes and dtypes by key."""
        node = self.nodes[number]
        keys: dict[int, Hashable] = dict(enumerate(node.reads))
        keys |= zip(node.outputs, node.writes, strict=True)
        rows, kinds = [], {}

        def key(local: int) -> Hashable:
            return keys.setdefault(local, (number, local))

        for e in node.equations:
            operands = tuple(
                x if isinstance(x, Literal) else key(x) for x in e.operands
            )
            results = tuple(map(key, e.results))
            rows.append(_Row(e, operands, results))
            kinds |= zip(operands, e.operand_shapes, strict=True)
            kinds |= zip(results, e.result_shapes, strict=True)
        return rows, kinds

    def new_value(self, node: Node, kind: jax.ShapeDtypeStruct) -> int:
        """A value for what was inside a node."""
        number = len(self.values)
        name = f"{node.name}:{number}"
        weak_type = bool(getattr(kind, "weak_type", False))
        value = Value(name, _nbytes(kind), kind.shape, kind.dtype, weak_type)
        self.values.append(value)
        self.readers.append(set())
        return number

    def replace(self, number: int, rows: Sequence[_Row], writes: Sequence[int]) -> None:
        """Let node `number` consist of `rows`."""
        old, reads = self.nodes[number], _reads(rows)
        for value in old.reads:
            self.readers[value].discard(number)
        for value in reads:
            self.readers[value].add(number)
        local: dict[Hashable, int] = {}

        def place(key: Hashable) -> int:
            return local.setdefault(key, len(local))

        list(map(place, reads))
        equations = [
            dataclasses.replace(
                row.equation,
                operands=tuple(
                    x if isinstance(x, Literal) else place(x) for x in row.operands
                ),
                results=tuple(map(place, row.results)),
            )
            for row in rows
        ]
        outputs = tuple(map(place, writes))
        self.nodes[number] = dataclasses.replace(
            old,
            reads=tuple(reads),
            writes=tuple(writes),
            equations=tuple(equations),
            outputs=outputs,
        )
        self.is_changed = True

    def is_light(self, number: int) -> bool:
        """Whether XLA computes it in loops, and each result by an equation."""
        node = self.nodes[number]
        made = {local for e in node.equations for local in e.results}
        heavy = any(
            e.primitive.name in HEAVY or e.inner or e.lowering for e in node.equations
        )
        each = len(made.intersection(node.outputs)) == len(node.writes)
        return node.repeatable and each and not heavy

    def late_readers(self, value: int) -> set[int]:
        return self.readers[value] & self.late

    def is_kept(self, key: Hashable) -> bool:
        """Whether it is in RAM in the backward pass anyway."""
        if not isinstance(key, int) or key in self.graph.stored:
            return False
        return key in self.always_kept or bool(self.late_readers(key))

    def may_move(self, value: int) -> bool:
        """Whether it is large, and in the backward pass light nodes alone read it."""
        readers = self.late_readers(value)
        return (
            self.values[value].nbytes > TINY_BYTES
            and value not in self.graph.outputs
            and bool(readers)
            and all(map(self.is_light, readers))
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


def _nbytes(kind: Any) -> int:
    return kind.size * kind.dtype.itemsize


def _softmax_numerators(rows: Sequence[_Row], kept: set[Hashable]) -> Iterator[_Row]:
    """Another way to each exponential that is divided by its own sum, which is kept.

    JAX saves both for the backward pass of a softmax. The quotient times the sum is the
    exponential, but for rounding: no term exceeds the sum of all, so what is lost where
    the quotient underflows is nothing beside the others.
    """
    made_by = _made_by(rows)

    def maker(key: Any, name: str) -> _Row | None:
        row = None if isinstance(key, Literal) else made_by.get(key)
        return row if row and row.equation.primitive.name == name else None

    for row in rows:
        if row.equation.primitive.name != "div" or row.results[0] not in kept:
            continue
        top, bottom = row.operands
        spread = maker(bottom, "broadcast_in_dim")
        total = spread and maker(spread.operands[0], "reduce_sum")
        if not (spread and total and maker(top, "exp") and total.operands == (top,)):
            continue
        top_shape, bottom_shape = row.equation.operand_shapes
        summed = total.equation.params["axes"]
        rest = tuple(d for d in range(top_shape.ndim) if d not in summed)
        if tuple(spread.equation.params["broadcast_dimensions"]) == rest:
            product = dataclasses.replace(
                row.equation,
                primitive=jax.lax.mul_p,
                operand_shapes=(*row.equation.result_shapes, bottom_shape),
            )
            yield _Row(product, (*row.results, bottom), (top,))


def _made_by(rows: Iterable[_Row]) -> dict[Hashable, _Row]:
    return {key: row for row in rows for key in row.results}


def _needed(
    rows: Iterable[_Row], targets: Iterable[Hashable], stops: set[Hashable]
) -> list[_Row]:
    """The rows that `targets` are computed by, from `stops` where they meet one.

    A row stands after those that it reads. Of two rows for one key the last counts.
    """
    made_by = _made_by(rows)
    needed: dict[_Row, None] = {}
    waiting = [made_by[key] for key in targets]
    while waiting:
        row = waiting[-1]
        before = [
            made_by[key] for key in row.reads if key in made_by and key not in stops
        ]
        before = [x for x in before if x not in needed]
        if before and row not in needed:
            waiting.extend(before)
        else:
            needed.setdefault(waiting.pop())
    return list(needed)


def _reads(rows: Sequence[_Row]) -> dict[Any, None]:
    """What rows read that none of them makes, in order."""
    made = {key for row in rows for key in row.results}
    return dict.fromkeys(key for row in rows for key in row.reads if key not in made)
