"""Memory that library kernels allocate themselves, which XLA does not count.

Rules by primitive, for XLA's CPU backend of jax 0.10; other primitives have none worth
counting. `experiments.benchmarks.scratch` measures them from outside: where a library's
need varies, a rule is the most measured.
"""

import math
from collections.abc import Callable
from typing import Any

from poet_jax.core.equation import Equation, nbytes_of
from poet_jax.core.graph import Graph, Node
from poet_jax.core.trace import trace


def scratch_bytes(equation: Equation) -> int:
    """Bytes that libraries allocate while an equation runs: the most of its bodies or
    its lowering."""
    if equation.lowering is not None:
        return max(map(node_scratch, lowered(equation).nodes), default=0)
    bodies = [scratch_bytes(e) for body, _ in equation.inner for e in body]
    rule = _RULES.get(equation.primitive.name)
    own = 0 if rule is None or not equation.operand_shapes else rule(equation)
    return max(own, *bodies, 0)


def node_scratch(node: Node) -> int:
    """Scratch of a node: the most of its equations, which run in turn."""
    return max(map(scratch_bytes, node.equations), default=0)


def lowered(equation: Equation) -> Graph:
    """The graph of an equation's `lowering`, with its operands as arguments."""
    lowering = equation.lowering
    assert lowering is not None
    return trace(lambda *xs: lowering(equation.params, *xs), *equation.operand_shapes)


def copied_images(params: dict[str, Any], image: Any, kernel: Any, result: Any) -> int:
    """Bytes of a convolution's images that YNNPACK copies: padded, for each of at most
    two blocks of 64 output channels; without padding it writes all patches instead."""
    numbers, groups = params["dimension_numbers"], _groups(params)
    outputs = kernel.shape[numbers.rhs_spec[0]]
    if _writes_patches(params, kernel):
        places = result.size // max(outputs, 1)
        return places * (kernel.size // max(outputs, 1)) * image.dtype.itemsize
    sizes = [
        max((image.shape[d] - 1) * spread + 1 + low + high, 0)
        for d, spread, (low, high) in zip(
            numbers.lhs_spec[2:], params["lhs_dilation"], params["padding"], strict=True
        )
    ]
    others = math.prod(image.shape[d] for d in numbers.lhs_spec[:2])
    copies = min(2, max(1, outputs // groups // _BLOCK))
    return copies * math.prod(sizes) * others * image.dtype.itemsize


def _of_convolution(equation: Equation) -> int:
    """YNNPACK copies the kernel, too, unless it writes patches."""
    params, (image, kernel) = equation.params, equation.operand_shapes
    own_bytes = 0 if _writes_patches(params, kernel) else nbytes_of(kernel)
    return own_bytes + copied_images(params, image, kernel, *equation.result_shapes)


def _writes_patches(params: dict[str, Any], kernel: Any) -> bool:
    numbers = params["dimension_numbers"]
    taps = math.prod(kernel.shape[d] for d in numbers.rhs_spec[2:])
    is_padded = any(map(any, params["padding"]))
    return not is_padded and taps > 1 and _groups(params) == 1


def _groups(params: dict[str, Any]) -> int:
    return params["feature_group_count"] * params["batch_group_count"]


_BLOCK = 64


def _of_sort(equation: Equation) -> int:
    """std::stable_sort takes 16 bytes per element of a row, for each operand."""
    first = equation.operand_shapes[0]
    length = first.shape[equation.params["dimension"]]
    return 16 * length * len(equation.operand_shapes)


def _of_matrix(factor: Callable[[int, int], float]) -> Callable[[Equation], int]:
    """LAPACK's work array: `factor(m, n)` elements for a matrix [m, n], m >= n."""

    def rule(equation: Equation) -> int:
        matrix = equation.operand_shapes[0]
        n, m = sorted(matrix.shape[-2:])
        return int(factor(m, n)) * matrix.dtype.itemsize

    return rule


def _of_fft(equation: Equation) -> int:
    """DUCC transforms a row in a complex buffer."""
    arrays = (*equation.operand_shapes, *equation.result_shapes)
    return max(equation.params["fft_lengths"]) * max(x.dtype.itemsize for x in arrays)


# Work arrays as documented by LAPACK (netlib.org/lapack): xGESDD, xSYEVD, xGEEV;
# xGEQRF, xORGQR and xGETRF work in blocks of a few dozen columns.
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
