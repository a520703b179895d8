"""Loops in pieces, so that a plan decides for each piece by itself: `Graph -> Graph`.

A `scan` is one equation. What its iterations save for the backward pass lies in stacked
arrays, which are there as a whole or not at all. In pieces each has arrays of its own,
and what reads a stacked array element by element reads these.
"""

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jax import lax

from poet_jax.core.equation import Equation, Literal, nbytes_of, unrolled
from poet_jax.core.graph import Graph, Node
from poet_jax.core.rebuilding import without_dead_code
from poet_jax.core.stack import Cut, Stack
from poet_jax.core.trace import trace_part
from poet_jax.passes.grouping import TINY_BYTES
from poet_jax.passes.operations import ELEMENTWISE, REDUCTIONS
from poet_jax.passes.rewriter import require_single_equations
from poet_jax.passes.splicing import Cutter

# Loops with more equations in all iterations, or more than twice as many iterations as
# pieces, are cut into pieces that are loops. More pieces need less memory, but what a
# planner finds in some seconds is worse then.
MOST_EQUATIONS = 10_000
MOST_PIECES = 32

# Loops that touch a smaller share of all bytes, or a tiny value in each iteration, have
# nothing to plan for.
LEAST_SHARE = 1 / 64


def unroll(
    graph: Graph,
    *,
    max_equations: int = MOST_EQUATIONS,
    max_pieces: int | None = None,
) -> Graph:
    """`graph` with each `scan` of many bytes as a chain of pieces.

    A piece is one iteration, evaluated in the graph, where there are few enough of them
    and of their equations; else it is a loop over a part of the iterations.
    Stacked arrays that loops make become arrays of their pieces; elementwise operations
    and reductions of these, as of an optimizer, go from piece to piece. Anything else
    reads the arrays joined. Loops with an effect stay as they are.

    Sums over all iterations are rounded as the sum of the sums over pieces.

    Args:
      max_equations: in all iterations of the loops of one length.
      max_pieces: of a loop of more than twice as many iterations. With more pieces a
        step needs less memory, and takes longer to plan and to compile. By default as
        many as need the least memory if each is computed twice, up to 32.
    """
    pieces: set[int] = set()
    while cuts := _cuts(graph, max_equations - len(graph.nodes), max_pieces, pieces):
        require_single_equations(graph)
        unroller = _Unroller(graph, cuts, pieces)
        graph = unroller.result()  # with loops that were in iterations
    return graph


class _Loop:
    """A `scan`.

    Attributes:
      consts, carry, rows: its operands: what each iteration reads, what the first one
        is given by the one before, and what is read row by row.
      final, stacked: its results: what the last iteration leaves, and what is written
        row by row.
    """

    def __init__(self, equation: Equation):
        self.equation, params = equation, equation.params
        first, carries = params["num_consts"], params["num_carry"]
        second = first + carries
        self.length: int = params["length"]
        self.consts = equation.operands[:first]
        self.carry = equation.operands[first:second]
        self.rows = equation.operands[second:]
        self.final = equation.results[:carries]
        self.stacked = equation.results[carries:]

    @classmethod
    def of(cls, node: Node, pieces: Collection[int]) -> "_Loop | None":
        """The loop that a node is, if it is one that may be cut, and no piece of one.

        Of `pieces` these are the identities of their parameters.
        """
        if len(node.equations) != 1 or not node.repeatable:
            return None
        (equation,) = node.equations
        if equation.primitive.name != "scan" or id(equation.params) in pieces:
            return None
        return cls(equation)

    def size(self, max_pieces: int) -> int:
        """Equations of an iteration, with loops inside that are cut in turn."""
        ((equations, _),) = self.equation.inner
        return sum(min(runs, max_pieces) for _, runs in unrolled(equations))

    @property
    def carry_bytes(self) -> int:
        """Of what one iteration gives the next."""
        return sum(map(nbytes_of, self.equation.result_shapes[: len(self.final)]))

    @property
    def row_bytes(self) -> int:
        """Of all rows that are written."""
        return sum(map(nbytes_of, self.equation.result_shapes[len(self.final) :]))

    @property
    def nbytes(self) -> int:
        """Of all rows, and of what an iteration makes."""
        ((equations, _),) = self.equation.inner
        made = [x for equation in equations for x in equation.result_shapes]
        first = len(self.consts) + len(self.carry)
        read = self.equation.operand_shapes[first:]
        return sum(map(nbytes_of, [*read, *made])) + self.row_bytes

    def piece(self, rows: int | None) -> Graph:
        """An iteration, or a loop over `rows` of them: of constants, carry and rows,
        carry and rows."""
        jaxpr, params = self.equation.params["jaxpr"], self.equation.params
        body = jex_core.jaxpr_as_fun(jaxpr)
        avals = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type)
            for x in jaxpr.in_avals
        ]
        if rows is None:
            return trace_part(body, *avals)
        first, carries = len(self.consts), len(self.carry)
        second = first + carries

        def loop(*operands: jax.Array) -> list[jax.Array]:
            def iteration(carry: Any, row: Any) -> tuple[Any, Any]:
                results = body(*operands[:first], *carry, *row)
                return results[:carries], results[carries:]

            final, stacked = lax.scan(
                iteration,
                list(operands[first:second]),
                list(operands[second:]),
                length=rows,
                reverse=params["reverse"],
                # As many copies of the body in all pieces as in the whole.
                unroll=max(1, params["unroll"] * rows // self.length),
            )
            return [*final, *stacked]

        avals[second:] = [
            jax.ShapeDtypeStruct((rows, *x.shape), x.dtype) for x in avals[second:]
        ]
        return trace_part(loop, *avals)


def _cuts(
    graph: Graph, max_equations: int, max_pieces: int | None, pieces: Collection[int]
) -> dict[int, Cut]:
    """How loops are cut, by their length."""
    limit = max_pieces or MOST_PIECES
    least_bytes = LEAST_SHARE * sum(value.nbytes for value in graph.values)
    loops = defaultdict(list)
    for node in graph.nodes:
        if (loop := _Loop.of(node, pieces)) is not None:
            loops[loop.length].append(loop)
    cuts = {}
    for length, each in loops.items():
        nbytes = sum(loop.nbytes for loop in each)
        if length < 2 or nbytes < max(least_bytes, TINY_BYTES * length):
            continue
        equations = length * sum(loop.size(limit) for loop in each)
        is_short = length <= 2 * limit and equations <= max_equations
        few = min(length, limit)
        if max_pieces is None:
            few = min(few, _square_root(each))
        cuts[length] = Cut.of(length, length if is_short else few)
    return cuts


def _square_root(loops: Sequence[_Loop]) -> int:
    """Pieces that take the least memory if only what one piece hands to the next is
    kept: a piece of the rows and all that is handed over (Chen et al., 2016,
    arXiv 1604.06174)."""
    rows = max(loop.row_bytes for loop in loops)
    carry = min(loop.carry_bytes for loop in loops)
    return max(2, round(math.sqrt(rows / max(1, carry))))


class _Unroller(Cutter):
    def __init__(self, graph: Graph, cuts: dict[int, Cut], loops: set[int]):
        super().__init__(graph)
        self.cuts = cuts
        self.loops = loops  # pieces that are loops, by the identity of parameters
        self.slices: dict[int, dict[int, int]] = {}  # pieces of what is whole
        self.needed: set[int] = set()  # of what is whole, that which is read so
        self.may_be_pieces = {
            v
            for v in set(graph.arguments)
            - {*graph.stored, *graph.references, *graph.stacks}
            if graph.values[v].shape[:1] and graph.values[v].shape[0] in cuts
        }

    def result(self) -> Graph:
        graph = self.graph
        for node in graph.nodes:
            self.visit(node)
        stacks = self.stacks()
        lying = {x for stack in stacks.values() for x in stack.values}
        taken = {*graph.arguments, *self.constants}

        def own(value: int) -> int:
            """What an output is now, in memory of its own unless it never had any."""
            now = self.whole(value)
            is_copied = now in lying or (now != value and now in taken)
            if isinstance(now, Literal) or is_copied:
                (now,) = self.add(graph.values[value].name, False, jnp.copy, [now])
            taken.add(now)
            return now

        for value, stack in graph.stacks.items():
            if stack.over is not None:
                stack = dataclasses.replace(stack, values=tuple(map(own, stack.values)))
            stacks[value] = stack
        outputs = tuple(v if v in stacks else own(v) for v in graph.outputs)
        landing = {self.whole(v): x for v, x in graph.landing.items()}
        nodes = (*self.sliced(stacks), *self.nodes)
        pieces = (x for v in graph.donated & stacks.keys() for x in stacks[v].values)
        return without_dead_code(
            dataclasses.replace(
                graph,
                values=tuple(self.values),
                nodes=nodes,
                outputs=outputs,
                constants=self.constants,
                donated=graph.donated.union(pieces),
                landing=landing,
                stacks=stacks,
            )
        )

    def stacks(self) -> dict[int, Stack]:
        """Arguments that are read in pieces only, and outputs that are made in pieces
        and take the memory of such an argument, as `jax.jit` chooses it."""
        graph, stacks = self.graph, {}
        for value in (*graph.leaving, *graph.landing):
            if value not in self.split:
                self.whole(value)
        for value in sorted(self.may_be_pieces & self.slices.keys() - self.needed):
            cut = self.cuts[self.values[value].shape[0]]
            pieces = (self.piece(value, number) for number in range(len(cut)))
            stacks[value] = Stack(cut, tuple(pieces))
        taken = {x for stack in stacks.values() for x in stack.values}
        donated = defaultdict(list)
        for value in graph.arguments:
            if value in graph.donated:
                donated[self.values[value].kind].append(value)
        for value in graph.outputs:
            olds = donated[self.values[value].kind]
            old = olds.pop(0) if olds else None
            pieces = self.split.get(value, ())
            own = {x for x in pieces if not isinstance(x, Literal)} - taken
            if old in stacks and len(own) == len(stacks[old].values):
                stacks[value] = Stack(stacks[old].cut, tuple(pieces), old)
                taken |= own
        return stacks

    def sliced(self, stacks: dict[int, Stack]) -> list[Node]:
        """Nodes that make the pieces of arguments that are needed as a whole, too."""
        before, self.nodes = self.nodes, []
        for value in sorted(self.may_be_pieces & self.slices.keys() - stacks.keys()):
            cut = self.cuts[self.values[value].shape[0]]
            for number, piece in self.slices[value].items():
                name = self.values[piece].name
                (made,) = self.add(
                    name, False, functools.partial(cut.piece, number=number), [value]
                )
                self.nodes.append(self.nodes.pop().renamed({made: piece}))
        slices, self.nodes = self.nodes, before
        return slices

    def visit(self, node: Node) -> None:
        (equation,) = node.equations
        loop = _Loop.of(node, self.loops)
        is_reduction = equation.primitive.name in REDUCTIONS
        if loop is not None and loop.length in self.cuts:
            self.unroll(node, loop)
        elif self.goes_by_pieces(equation):
            (result,) = equation.results
            self.postponed[result] = node
            if any(x in self.split for x in equation.reads):
                self.cut(result)
        elif is_reduction and equation.operands[0] in self.split:
            self.reduce(node, equation)
        else:
            self.emit(node)

    def goes_by_pieces(self, equation: Equation) -> bool:
        """Whether a piece of the result needs a piece of each operand only."""
        if len(equation.result_shapes) != 1:
            return False
        shape = equation.result_shapes[0].shape
        if not shape or shape[0] not in self.cuts:
            return False
        operands = [x.shape for x in equation.operand_shapes]
        if equation.primitive.name == "broadcast_in_dim":
            return operands == [()]
        is_elementwise = equation.primitive.name in ELEMENTWISE
        return is_elementwise and all(x in ((), shape) for x in operands)

    def joined(self, value: Any, pieces: Sequence[jax.Array]) -> jax.Array:
        return self.cuts[self.values[value].shape[0]].join(pieces)

    def whole(self, value: Any) -> Any:
        now = super().whole(value)
        self.needed.add(now)
        return now

    def unroll(self, node: Node, loop: _Loop) -> None:
        """A loop as a chain of pieces."""
        cut, reverse = self.cuts[loop.length], loop.equation.params["reverse"]
        consts = [self.whole(x) for x in loop.consts]
        carry = [self.whole(x) for x in loop.carry]
        made: dict[int, list[Any]] = {}
        for number in reversed(range(len(cut))) if reverse else range(len(cut)):
            rows = [self.piece(x, number) for x in loop.rows]
            count = None if cut.is_rows else cut.rows(number)
            key = (loop.equation, count)
            if key not in self.parts:
                part = loop.piece(count)
                self.parts[key] = part, {}
                if count is not None:
                    self.loops.update(
                        id(e.params) for x in part.nodes for e in x.equations
                    )
            name = f"{node.name}[{'-'.join(map(str, cut.bounds[number]))}]"
            results = self.splice(
                self.parts[key],
                [*consts, *carry, *rows],
                name,
                node.backward,
                is_opened=count is None,
            )
            carry, made[number] = results[: len(carry)], results[len(carry) :]
        for value, final in zip(loop.final, carry, strict=True):
            self.instead[value] = final
        for place, value in enumerate(loop.stacked):
            self.split[value] = [made[number][place] for number in range(len(cut))]

    def piece(self, value: Any, number: int) -> Any:
        """A piece of a value."""
        if value in self.postponed:
            self.cut(value)
        if value in self.split:
            return self.split[value][number]
        now = self.instead.get(value, value)
        slices = self.slices.setdefault(now, {})
        if number not in slices:
            slices[number] = self.slice(now, number)
        return slices[number]

    def slice(self, value: int, number: int) -> int:
        """A piece of a value that is whole, or of an argument, where it lies."""
        about, cut = self.values[value], self.cuts[self.values[value].shape[0]]
        name = f"{about.name}[{number}]"
        if value in self.may_be_pieces:
            shape = cut.shape(number, about.shape[1:])
            nbytes = about.nbytes // about.shape[0] * cut.rows(number)
            piece = dataclasses.replace(about, shape=shape, nbytes=nbytes)
            return self.value(dataclasses.replace(piece, pageable=False), name)
        operands = [self.whole(value)]
        (piece,) = self.add(name, False, lambda x: cut.piece(x, number), operands)
        return piece

    def cut(self, value: Any) -> None:
        """Make a value that is postponed in pieces."""
        node = self.postponed.pop(value)
        (equation,) = node.equations
        cut = self.cuts[self.values[value].shape[0]]

        def compute(number: int) -> Callable:
            if equation.primitive.name == "broadcast_in_dim":
                dimensions = equation.params["broadcast_dimensions"]
                shape = cut.shape(number, self.values[value].shape[1:])
                dimensions = [x - cut.is_rows for x in dimensions]
                return lambda x: lax.broadcast_in_dim(x, shape, dimensions)
            return lambda *operands: equation.bind(operands)[0]

        self.split[value] = []
        for number in range(len(cut)):
            operands = [
                self.piece(x, number) if shape.shape else self.whole(x)
                for x, shape in zip(
                    equation.operands, equation.operand_shapes, strict=True
                )
            ]
            self.split[value] += self.add(
                f"{node.name}[{number}]",
                node.backward,
                compute(number),
                operands,
                key=(equation, cut.rows(number)),
            )

    def reduce(self, node: Node, equation: Equation) -> None:
        """A reduction of what is in pieces."""
        operand: Any = equation.operands[0]
        (result,) = equation.results
        cut = self.cuts[self.values[operand].shape[0]]
        axes = equation.params["axes"]
        own = tuple(x - cut.is_rows for x in axes if x or not cut.is_rows)
        params = {**equation.params, "axes": own}
        partial = dataclasses.replace(equation, params=params)
        pieces = [
            self.add(
                f"{node.name}[{number}]",
                node.backward,
                lambda x: partial.bind([x])[0] if own else x,
                [piece],
                key=(equation, cut.rows(number)),
            )[0]
            for number, piece in enumerate(self.split[operand])
        ]
        if 0 not in axes:
            self.split[result] = pieces
            return
        combine = REDUCTIONS[equation.primitive.name]
        total, *others = pieces
        for piece in others:
            (total,) = self.add(
                node.name, node.backward, combine, [total, piece], key=(equation,)
            )
        self.instead[result] = total
