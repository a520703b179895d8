"""Sorting."""

import math
from collections.abc import Sequence

from poet_jax.core.equation import Equation
from poet_jax.emit.c99.buffers import C_TYPES, Buffer, Pointer, Step
from poet_jax.emit.c99.nodes import Lowering


def sort(lowering: Lowering, equation: Equation) -> None:
    """Lines along an axis, each put in the order of its keys, the first key last."""
    keys = range(equation.params["num_keys"])
    ranks = [(n, _rank(equation, n)) for n in reversed(keys)]
    each = range(len(equation.operands))
    moves = [f"q{n}[to] = p{n}[from];" for n in each]
    _order(lowering, equation, equation.params["dimension"], ranks, moves)


def top_k(lowering: Lowering, equation: Equation) -> None:
    """The largest of each line along an axis, and their places; of equal ones the first
    come first, which are the last of a line that is sorted backwards."""
    rank = _rank(equation, 0).replace("float", "total")
    moves = ["q0[to] = p0[from];", "q1[to] = place;"]
    axis = equation.params["axis"]
    _order(lowering, equation, axis, [(0, rank)], moves, backwards=True)


def _rank(equation: Equation, operand: int) -> str:
    dtype = equation.operand_shapes[operand].dtype.name
    return f"poet_rank_{C_TYPES[dtype].removesuffix('_t')}"


def _order(
    lowering: Lowering,
    equation: Equation,
    axis: int,
    ranks: Sequence[tuple[int, str]],
    moves: Sequence[str],
    backwards: bool = False,
) -> None:
    """For each line of the operands, `moves` of each element of the results, `to` it
    `from` its `place` in an order, by ranks of operands. That needs two integers for
    each element of a line."""
    shape, wanted = equation.operand_shapes[0].shape, equation.result_shapes[0].shape
    count, kept = shape[axis], wanted[axis]
    outer, inner = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
    operands = [lowering.buffer(equation, n) for n in range(len(equation.operands))]
    results = [lowering.result(equation, n) for n in range(len(equation.results))]
    order = Buffer("order", (2 * count,), "int32")
    last = f"{count - 1} - i2" if backwards else "i2"

    def render(pointer: Pointer) -> list[str]:
        pointers = [
            *(f"const {x.c_type} *const p{n} = {pointer(x)};"
              for n, x in enumerate(operands)),
            *(f"{x.c_type} *const q{n} = {pointer(x)};"
              for n, x in enumerate(results)),
        ]  # fmt: skip
        ordered = [
            f"poet_order(order, {count}, p{n} + at, {inner}, {rank});"
            for n, rank in ranks
        ]
        return [
            f"int32_t *const order = {pointer(order)};",
            *pointers,
            f"for (int32_t i0 = 0; i0 < {outer}; ++i0) {{",
            f"for (int32_t i1 = 0; i1 < {inner}; ++i1) {{",
            f"const int32_t at = i0 * {count * inner} + i1;",
            f"for (int32_t i2 = 0; i2 < {count}; ++i2) order[i2] = {last};",
            *ordered,
            f"for (int32_t i2 = 0; i2 < {kept}; ++i2) {{",
            f"const int32_t place = order[{last}];",
            f"const int32_t from = at + place * {inner};",
            f"const int32_t to = (i0 * {kept} + i2) * {inner} + i1;",
            *moves,
            *["}"] * 3,
        ]

    reads = tuple(dict.fromkeys(operands))
    lowering.push(Step(reads, (*results, order), render, (), lowering.run))


RULES = {"sort": sort, "top_k": top_k}
