"""What an equation computes, and what XLA copies for it, by its primitive."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from poet_jax.core.equation import Equation, nbytes_of


class Work(NamedTuple):
    """Work of one kind.

    Attributes:
      kind: key of the table of rates, without the dtype.
      dtype: of the result.
      amount: number of units. A unit is a FLOP of "dot", "convolution",
        "filter_gradient", "grouped_convolution", "fft" and "factorization"; a
        comparison of "sort"; a window's element of "window" and "select_and_scatter";
        an element read of "row_sum" and "column_sum"; an update of "scatter"; else an
        element of the result.
      size: sets the seconds per unit. The cube root of a product's sides; of
        convolutions see `_convolution_work`; the row length of "sort" and "fft"; the
        smaller side of a factorized matrix; else elements.
    """

    kind: str
    dtype: str
    amount: float
    size: float


# Kinds of elementwise work; the rest is "cheap".
ELEMENTWISE_KINDS = {
    name: kind
    for kind, names in {
        "free": "broadcast_in_dim iota slice dynamic_slice concatenate pad rev split",
        "divide": "div rem sqrt rsqrt",
        "exp": "exp exp2 expm1",
        "log": "log log1p",
        "tanh": "tanh logistic sinh cosh asinh acosh atanh",
        "erf": "erf erfc erf_inv",
        "sine": "sin cos tan asin acos atan atan2",
        "power": "pow cbrt lgamma digamma igamma igammac",
        "gather": "gather",
    }.items()
    for name in names.split()
}
# FLOPs of a factorization of [m, n], m >= n (Golub and Van Loan, Matrix Computations,
# 4th edition, 2013; 8.3 and 8.6 with all vectors).
_FACTORIZATIONS = {
    "cholesky": lambda m, n: n**3 / 3,
    "lu": lambda m, n: n**2 * (m - n / 3),
    "geqrf": lambda m, n: 2 * n**2 * (m - n / 3),
    "qr": lambda m, n: 4 * n**2 * (m - n / 3),
    "householder_product": lambda m, n: 2 * n**2 * (m - n / 3),
    "triangular_solve": lambda m, n: float(m * n**2),
    "eigh": lambda m, n: 9 * n**3,
    "eig": lambda m, n: 25 * n**3,
    "schur": lambda m, n: 25 * n**3,
    "svd": lambda m, n: 4 * m**2 * n + 22 * n**3,
}
# Matrix kernels compute multiples of so many rows and columns (AVX2 and wider).
_LANES = 8


def is_reduction(equation: Equation) -> bool:
    """Whether its operands are fused into it."""
    name = equation.primitive.name
    return name.startswith(("reduce_", "arg")) and not name.startswith("reduce_w")


def equation_work(equation: Equation) -> Work:
    """Work of an equation, by its primitive."""
    name = equation.primitive.name
    operands, results = equation.operand_shapes, equation.result_shapes
    written = float(sum(x.size for x in results))
    read = float(max((x.size for x in operands), default=0))
    dtype = str((*operands, *results)[0].dtype) if operands or results else "float32"
    params = equation.params
    if name == "dot_general":
        batch, *sides = (max(x, 1) for x in _matrix_sides(equation))
        padded = [_LANES * math.ceil(x / _LANES) for x in sides]
        size = math.prod(padded) ** (1 / 3)
        return Work("dot", dtype, 2.0 * batch * math.prod(padded), size)
    if name == "conv_general_dilated":
        return _convolution_work(equation, dtype)
    if is_reduction(equation):
        axes = params.get("axes", ())
        along = operands[0].ndim - 1 in axes
        return Work("row_sum" if along else "column_sum", dtype, read, read)
    if name.startswith("cum"):
        return Work("cumulative", dtype, written, written)
    if name.startswith("reduce_window"):
        window = math.prod(params["window_dimensions"])
        return Work("window", dtype, written * window, written)
    if name.startswith("select_and"):
        window = math.prod(params["window_dimensions"])
        return Work("select_and_scatter", dtype, operands[0].size * window, written)
    if name.startswith("scatter"):
        return Work("scatter", dtype, float(operands[2].size), written)
    if name in ("sort", "top_k", "approx_top_k"):
        axis = params.get("dimension", operands[0].ndim - 1)
        length = max(operands[0].shape[axis], 2)
        return Work("sort", dtype, operands[0].size * math.log2(length), length)
    if name in ("random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform"):
        return Work("random_bits", "float32", written, written)
    if name == "fft":
        length = max(math.prod(params["fft_lengths"]), 2)
        return Work("fft", "float32", 5 * read * math.log2(length), length)
    if name in _FACTORIZATIONS:
        *_, rows, columns = operands[0].shape
        least, most = sorted((rows, columns))
        flops = _FACTORIZATIONS[name](most, least) * read / max(rows * columns, 1)
        return Work("factorization", dtype, float(flops), least)
    if name == "dynamic_update_slice":
        return Work("cheap", dtype, float(operands[1].size), float(operands[1].size))
    if name == "transpose":
        last = params["permutation"][-1]
        kind = "free" if last == operands[0].ndim - 1 else "transpose"
        return Work(kind, dtype, written, written)
    return Work(ELEMENTWISE_KINDS.get(name, "cheap"), dtype, written, written)


def _matrix_sides(product: Equation) -> tuple[int, int, int, int]:
    """(batch, rows, columns, contracted length) of a dot_general."""
    (summed, _), (batch, _) = product.params["dimension_numbers"]
    left, right = product.operand_shapes
    products = math.prod(left.shape[d] for d in batch)
    depth = math.prod(left.shape[d] for d in summed)
    rows, columns = (x.size // max(products * depth, 1) for x in (left, right))
    return products, rows, columns, depth


def _convolution_work(equation: Equation, dtype: str) -> Work:
    """FLOPs, with a size of the smaller of output channels and terms of a sum; of terms
    if grouped, and in a filter's gradient, where they are the places of all images."""
    params, numbers = equation.params, equation.params["dimension_numbers"]
    kernel = equation.operand_shapes[1]
    (result,) = equation.result_shapes
    outputs = kernel.shape[numbers.rhs_spec[0]]
    taps = kernel.size // max(outputs, 1)
    flops = 2.0 * result.size * taps
    if params["feature_group_count"] > 1 or params["batch_group_count"] > 1:
        return Work("grouped_convolution", dtype, flops, taps)
    places = math.prod(result.shape[d] for d in numbers.out_spec[2:])
    elements = math.prod(kernel.shape[d] for d in numbers.rhs_spec[2:])
    if places < elements:
        return Work("filter_gradient", dtype, flops, taps)
    return Work("convolution", dtype, flops, min(outputs, taps))


def copied_bytes(equation: Equation) -> int:
    """Bytes that XLA copies into another layout, or a wider type, for an equation."""
    arrays = (*equation.operand_shapes, *equation.result_shapes)
    if equation.primitive.name == "conv_general_dilated":
        numbers = equation.params["dimension_numbers"]
        last = arrays[0].ndim - 1
        image, kernel = (0, last, *range(1, last)), (last, last - 1, *range(last - 1))
        specs = zip(numbers, (image, kernel, image), strict=True)
        plain = [tuple(spec) == wanted for spec, wanted in specs]
    elif equation.primitive.name == "dot_general":
        summed, batch = equation.params["dimension_numbers"]
        plain = [
            _is_matrix(arrays[k].ndim, summed[k], batch[k], last=k == 0) for k in (0, 1)
        ]
    elif equation.primitive.name.startswith("scatter") and arrays[1].ndim > 2:
        return nbytes_of(arrays[2])
    elif equation.primitive.name == "select_and_scatter_add":
        return 4 * nbytes_of(arrays[1])  # indices of the selected elements
    elif equation.primitive.name in _FACTORIZATIONS:
        return 2 * nbytes_of(arrays[0])
    else:
        return 0
    nbytes = sum(
        nbytes_of(arrays[k]) for k, is_plain in enumerate(plain) if not is_plain
    )
    if arrays[0].dtype.itemsize == 2:  # computed in float32
        nbytes += 2 * sum(map(nbytes_of, arrays))
    return nbytes


def threefry_bytes(equation: Equation) -> int:
    """Bytes of Threefry's loop: two words per element, copied once. One of the four is
    the result if that has 32 bits."""
    if equation.primitive.name != "random_bits":
        return 0
    (key,), (result,) = equation.operand_shapes, equation.result_shapes
    if str(key.dtype) != "key<fry>":
        return 0
    return (12 if result.dtype.itemsize == 4 else 16) * result.size


def _is_matrix(
    ndim: int, summed: Sequence[int], batch: Sequence[int], last: bool
) -> bool:
    """Whether an operand of a dot_general is a stack of matrices as it lies in memory.

    The contracted dimensions come last in the left operand and first in the right one;
    a single one may be at the other end.
    """
    first, count = len(batch), len(summed)
    front, back = range(first, first + count), range(ndim - count, ndim)
    ends = (back, front) if last else (front, back)
    allowed = ends if count == 1 else ends[:1]
    return list(batch) == list(range(first)) and list(summed) in map(list, allowed)
