"""What libraries allocate behind XLA's back, which its own counts leave out.

A table of rules by primitive, for XLA's CPU backend of jax 0.10.
`experiments.benchmarks.scratch` measures each from outside; where what a library takes
varies from run to run a rule is the most that was seen. What is not in the table has
none worth mentioning.
"""

import math
from collections.abc import Callable
from typing import Any

from poet_jax.core.graph import Equation, Graph, Node
from poet_jax.core.trace import trace


def nbytes_of(array: Any) -> int:
    """Of an array of a shape and a type."""
    return math.prod(array.shape) * array.dtype.itemsize


def scratch_bytes(equation: Equation) -> int:
    """That libraries allocate while an equation runs: of a loop or of another way to
    compute it, the most of what it consists of."""
    if equation.lowering is not None:
        return max(map(node_scratch, lowered(equation).nodes), default=0)
    bodies = [scratch_bytes(e) for body, _ in equation.inner for e in body]
    rule = _RULES.get(equation.primitive.name)
    own = 0 if rule is None or not equation.operand_shapes else rule(equation)
    return max(own, *bodies, 0)


def node_scratch(node: Node) -> int:
    """The most of a node's equations: they run one after the other."""
    return max(map(scratch_bytes, node.equations), default=0)


def lowered(equation: Equation) -> Graph:
    """What the `lowering` of an equation consists of, as a graph of its operands."""
    lowering = equation.lowering
    assert lowering is not None
    return trace(lambda *xs: lowering(equation.params, *xs), *equation.operand_shapes)


def _of_convolution(equation: Equation) -> int:
    """YNNPACK copies the image, padded and dilated, for each of two blocks of 64 output
    channels, and the kernel; without padding it writes out all patches instead."""
    params, numbers = equation.params, equation.params["dimension_numbers"]
    image, kernel = equation.operand_shapes
    (result,) = equation.result_shapes
    outputs = kernel.shape[numbers.rhs_spec[0]]
    taps = math.prod(kernel.shape[d] for d in numbers.rhs_spec[2:])
    groups = params["feature_group_count"] * params["batch_group_count"]
    if not any(map(any, params["padding"])) and taps > 1 and groups == 1:
        places = result.size // max(outputs, 1)
        return places * (kernel.size // max(outputs, 1)) * image.dtype.itemsize
    sizes = [
        max((image.shape[d] - 1) * spread + 1 + low + high, 0)
        for d, spread, (low, high) in zip(
            numbers.lhs_spec[2:], params["lhs_dilation"], params["padding"], strict=True
        )
    ]
    others = math.prod(image.shape[d] for d in numbers.lhs_spec[:2])
    padded_bytes = math.prod(sizes) * others * image.dtype.itemsize
    copies = min(2, max(1, outputs // groups // _BLOCK))
    return copies * padded_bytes + nbytes_of(kernel)


_BLOCK = 64


def _of_sort(equation: Equation) -> int:
    """std::stable_sort holds 16 bytes for each element of each operand of a row."""
    first = equation.operand_shapes[0]
    length = first.shape[equation.params["dimension"]]
    return 16 * length * len(equation.operand_shapes)


def _of_matrix(factor: Callable[[int, int], float]) -> Callable[[Equation], int]:
    """LAPACK's work array, of `factor` elements for one matrix of [m, n], m >= n."""

    def rule(equation: Equation) -> int:
        matrix = equation.operand_shapes[0]
        n, m = sorted(matrix.shape[-2:])
        return int(factor(m, n)) * matrix.dtype.itemsize

    return rule


def _of_fft(equation: Equation) -> int:
    """DUCC transforms a row in a buffer of complex numbers."""
    arrays = (*equation.operand_shapes, *equation.result_shapes)
    return max(equation.params["fft_lengths"]) * max(x.dtype.itemsize for x in arrays)


# Work arrays as in the documentation of LAPACK's routines (netlib.org/lapack): xGESDD,
# xSYEVD, xGEEV; xGEQRF, xORGQR and xGETRF work in blocks of some dozen columns.
_RULES: dict[str, Callable[[Equation], int]] = {
    "conv_general_dilated": _of_convolution,
    "sort": _of_sort,
    "svd": _of_matrix(lambda m, n: 3 * n * n + 7 * n + m),
    "eigh": _of_matrix(lambda m, n: 2 * n * n + 6 * n),
    "eig": _of_matrix(lambda m, n: 6 * n * n + 34 * n),
    "schur": _of_matrix(lambda m, n: n * n + 34 * n),
    "geqrf": _of_matrix(lambda m, n: 64 * n),
    "qr": _of_matrix(lambda m, n: 64 * n),
    "householder_product": _of_matrix(lambda m, n: 64 * n),
    "fft": _of_fft,
}
