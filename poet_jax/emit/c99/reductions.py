"""Reductions, positions of extremes, and cumulative sums, fused with what they read."""

from typing import Any

import numpy as np

from poet_jax.core.equation import Equation
from poet_jax.emit.c99.buffers import C_TYPES, NoForm
from poet_jax.emit.c99.nests import Reduction
from poet_jax.emit.c99.nodes import Lowering
from poet_jax.emit.c99.scalars import constant, is_float

# What combines elements of a reduction, as an element-wise operation.
_COMBINES = {
    "sum": "add",
    "prod": "mul",
    "max": "max",
    "min": "min",
    "and": "and",
    "or": "or",
    "xor": "xor",
}


def neutral(kind: str, dtype: str) -> str:
    """What changes nothing when it is combined."""
    if kind in ("max", "min"):
        if is_float(dtype):
            return constant(np.float32(-np.inf if kind == "max" else np.inf))
        if dtype == "bool":
            return "0" if kind == "max" else "1"
        info = np.iinfo(dtype)
        return constant(np.array(info.min if kind == "max" else info.max, dtype))
    if dtype == "bool":
        return "1" if kind in ("and", "prod") else "0"
    if kind == "and":
        return f"({C_TYPES[dtype]})~0u"
    number = 1 if kind == "prod" else 0
    return constant(np.array(number, dtype))


def combined(kind: str, dtype: str, first: str, second: str) -> str:
    """One element of two."""
    c_type = C_TYPES[dtype]
    sign = {"sum": "+", "prod": "*", "and": "&", "or": "|", "xor": "^"}
    if kind in sign:
        if is_float(dtype) or kind in ("and", "or", "xor"):
            return f"{first} {sign[kind]} {second}"
        return f"({c_type})((uint32_t){first} {sign[kind]} (uint32_t){second})"
    suffix = "" if is_float(dtype) else "_i" + "_u" * (dtype == "uint32")
    return f"poet_{kind}{suffix}({first}, {second})"


def _axes(equation: Equation) -> tuple[list[int], list[int]]:
    """(axes that are kept, axes that are reduced)."""
    rank = len(equation.operand_shapes[0].shape)
    reduced = sorted(axis % rank for axis in equation.params["axes"])
    return [axis for axis in range(rank) if axis not in reduced], reduced


def _nest(lowering: Lowering, equation: Equation) -> tuple[Reduction, Any]:
    """The loops of a reduction, and the variable with the element that they are at."""
    aval = equation.operand_shapes[0]
    kept, reduced = _axes(equation)
    loop = Reduction(
        [aval.shape[axis] for axis in kept],
        [aval.shape[axis] for axis in reduced],
        lowering.where.__getitem__,
    )
    order = [*kept, *reduced]
    index = loop.index([order.index(axis) for axis in range(len(order))])
    return loop, loop.body.at(equation.operands[0], aval.shape, index)


def reduce(lowering: Lowering, equation: Equation) -> None:
    kind = equation.primitive.name.removeprefix("reduce_")
    loop, element = _nest(lowering, equation)
    dtype = equation.operand_shapes[0].dtype.name
    if dtype not in C_TYPES:
        raise NoForm
    loop.first.append(f"{C_TYPES[dtype]} s = {neutral(kind, dtype)};")
    loop.body.lines.append(f"s = {combined(kind, dtype, 's', element)};")
    loop.store(lowering.result(equation), "s")
    lowering.push(loop.step(lowering.run))


def arg_extreme(lowering: Lowering, equation: Equation) -> None:
    """The first place of the largest or smallest element; NaN counts as such."""
    loop, element = _nest(lowering, equation)
    kept, reduced = _axes(equation)
    dtype = equation.operand_shapes[0].dtype.name
    sign = ">" if equation.primitive.name == "argmax" else "<"
    token = loop.body.access(loop.index([len(kept)]).forms[0])  # type: ignore[index]
    result = equation.result_shapes[0].dtype.name
    loop.first += [
        f"{C_TYPES[dtype]} best = 0;",
        f"{C_TYPES[result]} s = 0;",
    ]
    # A comparison that NaN fails, and one that it alone passes.
    better = f"{element} {sign} best"
    if is_float(dtype):
        better += f" || ({element} != {element} && best == best)"
    place = f"({C_TYPES[result]})({token})"
    loop.body.lines.append(f"if (({token}) == 0 || {better}) {{")
    loop.body.lines.append(f"best = {element}; s = {place}; }}")
    loop.store(lowering.result(equation), "s")
    lowering.push(loop.step(lowering.run))


def cumulate(lowering: Lowering, equation: Equation) -> None:
    """A sum, or a maximum and so on, of an element and those before it."""
    kind = equation.primitive.name.removeprefix("cum")
    aval = equation.operand_shapes[0]
    dtype, axis = aval.dtype.name, equation.params["axis"]
    kept = [a for a in range(len(aval.shape)) if a != axis]
    loop = Reduction(
        [aval.shape[a] for a in kept], [aval.shape[axis]], lowering.where.__getitem__
    )
    order = [*kept, axis]
    index = loop.index([order.index(a) for a in range(len(order))])
    assert index.forms is not None
    if equation.params["reverse"]:
        forms = list(index.forms)
        forms[axis] = (forms[axis] * -1).plus(aval.shape[axis] - 1)
        index = type(index)(index.rank, tuple(forms))
    element = loop.body.at(equation.operands[0], aval.shape, index)
    buffer = lowering.result(equation)
    loop.first.append(f"{C_TYPES[dtype]} s = {neutral(kind, dtype)};")
    loop.body.lines.append(f"s = {combined(kind, dtype, 's', element)};")
    place = loop.body.access(index.linear(aval.shape))
    loop.body.lines.append(f"{{{id(buffer)}}}[{place}] = s;")
    loop.writes.append(buffer)
    lowering.push(loop.step(lowering.run))


RULES = {
    **{f"reduce_{kind}": reduce for kind in _COMBINES},
    "argmax": arg_extreme,
    "argmin": arg_extreme,
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin"), cumulate),
}
