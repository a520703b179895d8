"""Sorting."""

import math

from poet_jax.core.equation import Equation
from poet_jax.emit.c99.buffers import C_TYPES, Buffer, Pointer, Step
from poet_jax.emit.c99.nodes import Lowering


def sort(lowering: Lowering, equation: Equation) -> None:
    """Lines along an axis, each put in the order of its keys, the first key last; that
    needs two integers for each element of a line."""
    params = equation.params
    shape = equation.operand_shapes[0].shape
    count, axis = shape[params["dimension"]], params["dimension"]
    outer, inner = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
    dtypes = [aval.dtype.name for aval in equation.operand_shapes]
    operands = [lowering.buffer(equation, n) for n in range(len(dtypes))]
    results = [lowering.result(equation, n) for n in range(len(dtypes))]
    order = Buffer("order", (2 * count,), "int32")

    def render(pointer: Pointer) -> list[str]:
        lines = [f"int32_t *const order = {pointer(order)};"]
        for n, (old, new) in enumerate(zip(operands, results, strict=True)):
            lines.append(f"const {old.c_type} *const p{n} = {pointer(old)};")
            lines.append(f"{new.c_type} *const q{n} = {pointer(new)};")
        lines += [
            f"for (int32_t i0 = 0; i0 < {outer}; ++i0) {{",
            f"for (int32_t i1 = 0; i1 < {inner}; ++i1) {{",
            f"const int32_t at = i0 * {count * inner} + i1;",
            f"for (int32_t i2 = 0; i2 < {count}; ++i2) order[i2] = i2;",
        ]
        for n in reversed(range(params["num_keys"])):
            rank = f"poet_rank_{C_TYPES[dtypes[n]].removesuffix('_t')}"
            lines.append(f"poet_order(order, {count}, p{n} + at, {inner}, {rank});")
        lines.append(f"for (int32_t i2 = 0; i2 < {count}; ++i2) {{")
        for n in range(len(dtypes)):
            lines.append(f"q{n}[at + i2 * {inner}] = p{n}[at + order[i2] * {inner}];")
        return [*lines, "}", "}", "}"]

    reads = tuple(dict.fromkeys(operands))
    lowering.push(Step(reads, (*results, order), render, (), lowering.run))


RULES = {"sort": sort}
