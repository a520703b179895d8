"""Pooling, and its gradient."""

import math
from collections.abc import Sequence

from poet_jax.core.equation import Equation
from poet_jax.emit.c99.buffers import Buffer, NoForm, Step
from poet_jax.emit.c99.contractions import call
from poet_jax.emit.c99.nests import Pointwise
from poet_jax.emit.c99.nodes import Lowering


def _window(equation: Equation, shape: Sequence[int], out: Sequence[int]) -> dict:
    params, rank = equation.params, len(shape)
    ones = (1,) * rank
    if rank > 8:
        raise NoForm
    return {
        "rank": rank,
        "in_size": tuple(shape),
        "out_size": tuple(out),
        "window": tuple(params["window_dimensions"]),
        "stride": tuple(params["window_strides"]),
        "low": tuple(low for low, _ in params["padding"]),
        "in_dilation": tuple(params.get("base_dilation") or ones),
        "window_dilation": tuple(params.get("window_dilation") or ones),
    }


def _filled(buffer: Buffer, lowering: Lowering) -> Step:
    """Zeros, where there is no window: kernels have one at least."""
    loop = Pointwise(buffer.shape, lowering.where.__getitem__)
    loop.store(buffer, "0.0f")
    return loop.step(lowering.run)


def reduce_window(lowering: Lowering, equation: Equation) -> None:
    (aval,), (result,) = equation.operand_shapes, equation.result_shapes
    if aval.dtype.name != "float32":
        raise NoForm
    kind = equation.primitive.name.rpartition("_")[2]
    fields = _window(equation, aval.shape, result.shape)
    operand = lowering.buffer(equation, 0)
    buffer = lowering.result(equation)
    if not buffer.size:
        lowering.push(_filled(buffer, lowering))
        return
    tables = [("poet_window", fields)]
    name = f"poet_window_{kind}"
    lowering.push(call(name, [buffer], [(operand, 0)], tables, lowering.run))


def select_and_scatter(lowering: Lowering, equation: Equation) -> None:
    source, aval = equation.operand_shapes
    if aval.dtype.name != "float32":
        raise NoForm
    kinds = {"ge": "max", "le": "min"}
    kind = kinds[equation.params["select_prim"].name]
    fields = _window(equation, aval.shape, source.shape)
    operands = [(lowering.buffer(equation, number), 0) for number in range(2)]
    buffer = lowering.result(equation)
    if not math.prod(source.shape):
        lowering.push(_filled(buffer, lowering))
        return
    tables = [("poet_window", fields)]
    name = f"poet_scatter_{kind}"
    lowering.push(call(name, [buffer], operands, tables, lowering.run))


RULES = {
    **{f"reduce_window_{kind}": reduce_window for kind in ("sum", "max", "min")},
    "select_and_scatter_add": select_and_scatter,
}
