"""What XLA makes of a node's equations: kernels, and what each of them does.

XLA fuses light equations into the kernel that needs them, and computes them again in
each such kernel. A value is written to memory where a kernel ends: if it is a result of
the node, goes into or comes out of a heavy equation, or is expensive and read twice.
So a node takes the sum over its kernels of what is longer, computing or moving what the
kernel reads and writes; and its workspace is what lies between its kernels.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from poet_jax.core.graph import Equation, Literal, Name, Node, body
from poet_jax.passes.cpu.scratch import lowered, nbytes_of, scratch_bytes
from poet_jax.passes.grouping import HEAVY


class Work(NamedTuple):
    """Work of one kind.

    Attributes:
      kind: a row of the table of rates, without the type.
      dtype: of what is computed.
      amount: how often a unit of it is done. The unit is a FLOP of "dot",
        "convolution", "filter_gradient", "grouped_convolution", "fft" and
        "factorization"; a comparison of "sort"; an element of a window of "window" and
        "select_and_scatter"; an element read of "row_sum" and "column_sum"; an update
        of "scatter"; else an element of the result.
      size: what the seconds of a unit depend on: the cube root of a product's sides, of
        convolutions the smaller of output channels and terms of a sum (or what
        `_of_convolution` says), the length of a row of "sort" and "fft", the side of a
        matrix, else elements.
    """

    kind: str
    dtype: str
    amount: float
    size: float


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What runs at once.

    Attributes:
      work: of the equations fused in it.
      moved_bytes: that it reads and writes.
      copied_bytes: of operands and results in another layout, allocated meanwhile.
      scratch_bytes: allocated by a library, or for a random generator, meanwhile.
      reads, writes: numbers of values in memory, local to the node.
      in_place: whether a result can be over an operand that nothing else reads.
      runs: how often.
      body: kernels of a loop's body, or of another way to compute it, instead of work.
    """

    work: tuple[Work, ...]
    moved_bytes: float
    reads: frozenset[Name]
    writes: tuple[Name, ...]
    copied_bytes: int = 0
    scratch_bytes: int = 0
    in_place: bool = False
    runs: int = 1
    body: tuple["Kernel", ...] = ()

    def flat(self) -> Iterator["Kernel"]:
        """Without bodies."""
        if not self.body:
            yield self
        for kernel in self.body:
            for x in kernel.flat():
                yield dataclasses.replace(x, runs=x.runs * self.runs)


_CONVOLUTION = "conv_general_dilated"
# Names of one array.
_ALIASES = frozenset(
    "reshape squeeze expand_dims stop_gradient bitcast_convert_type random_wrap "
    "random_unwrap optimization_barrier".split()
)
# Where an array is read in parts.
_PARTS = frozenset("slice dynamic_slice gather split".split())
# What YNNPACK does not compute on its way to a sum.
_NO_ARITHMETIC = frozenset(
    "select_n iota gather slice dynamic_slice split pad rev transpose clamp".split()
)
# Elements of their results depend on others than at their place.
_MOVING = frozenset("transpose rev gather slice dynamic_slice split pad".split())
# Kinds of what is done to each element; the rest is "cheap".
_ELEMENTWISE = {
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
# XLA repeats code in kernels, up to so much (FusionNodeIndexingEvaluation's limit).
_MOST_TERMS = 15
_EXPENSIVE = frozenset("exp log tanh erf sine power gather".split())
# FLOPs of a factorization of [m, n], m >= n, as Golub and Van Loan count them
# (Matrix Computations, 4th edition, 2013; 8.3 and 8.6 with all vectors).
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


def is_root(equation: Equation) -> bool:
    """Whether a kernel ends with it: its results are in memory."""
    name = equation.primitive.name
    return (
        name in HEAVY.difference(("gather", "reduce_precision"))
        or name == "concatenate"
        or name.startswith(("reduce_", "arg", "cum", "dynamic_update", "scatter"))
        and name != "reduce_precision"
        or is_control_flow(equation)
    )


def is_alias(equation: Equation) -> bool:
    """Whether its result is its operand, under another shape at most."""
    before, after = equation.operand_shapes[0], equation.result_shapes[0]
    name = equation.primitive.name
    return name in _ALIASES or (
        name in ("slice", "concatenate", "broadcast_in_dim")
        and before.size == after.size
        or name == "pad"
        and not any(map(any, equation.params["padding_config"]))
    )


def is_control_flow(equation: Equation) -> bool:
    """Whether it runs bodies; a scatter's is what it does with two elements."""
    name = equation.primitive.name
    return bool(equation.inner) and not name.startswith(("scatter", "reduce", "select"))


def is_reduction(equation: Equation) -> bool:
    """Whether what it reads is fused into it."""
    name = equation.primitive.name
    return name.startswith(("reduce_", "arg")) and not name.startswith("reduce_w")


def kernels(node: Node) -> tuple[Kernel, ...]:
    """In order; none for a node without equations."""
    return _Partition(node.equations, node.writes).kernels()


class _Partition:
    """Equations cut into kernels."""

    def __init__(self, equations: Sequence[Equation], outputs: Iterable[Name]):
        self.shapes: dict[Name, jax.ShapeDtypeStruct] = {}
        self.maker: dict[Name, Equation] = {}
        self.alias: dict[Name, Name] = {}
        self.readers: dict[Name, list[Equation]] = defaultdict(list)
        self.equations = []
        for equation in inlined(equations):
            self.shapes |= {
                x: shape
                for x, shape in zip(
                    equation.operands, equation.operand_shapes, strict=True
                )
                if not isinstance(x, Literal)
            }
            self.shapes |= dict(
                zip(equation.results, equation.result_shapes, strict=True)
            )
            operands = self.operands(equation)
            if operands and equation.results and is_alias(equation):
                self.alias |= dict.fromkeys(equation.results, operands[0])
                continue
            self.equations.append(equation)
            self.maker |= dict.fromkeys(equation.results, equation)
            for x in set(operands):
                self.readers[x].append(equation)
        self.outputs = {self.root(v) for v in outputs}
        self.written: set[Name] = set()
        self.aside: set[Name] = set()  # written for a sum, and computed again elsewhere
        self.repeated: dict[tuple[Name, tuple[int, ...]], int] = {}  # bytes
        terms: dict[Name, int] = {}  # equations of which each value is computed
        for value in self.maker:
            operands = self.operands(self.maker[value])
            terms[value] = 1 + sum(terms.get(x, 0) for x in operands)
            if self.is_written(value, terms[value]):
                self.written.add(value)
                terms[value] = 0
        for equation in self.equations:
            if is_reduction(equation) and not equation.primitive.name.startswith("arg"):
                unfused = set(self.unfused(equation))
                self.aside |= unfused - self.written
                self.written |= unfused
        self.aside = {v for v in self.aside if self.is_short(v)}

    def root(self, value: Name) -> Name:
        return self.alias.get(value, value)

    def operands(self, equation: Equation) -> list[Name]:
        return [self.root(x) for x in equation.operands if not isinstance(x, Literal)]

    def is_written(self, value: Name, terms: int) -> bool:
        """Whether it is in memory at some time."""
        maker, readers = self.maker[value], self.readers[value]
        if value in self.outputs or is_root(maker):
            return True
        if any(is_root(e) and not is_reduction(e) for e in readers):
            return True
        again = len(readers) > 1 or any(
            e.result_shapes[0].size > self.shapes[value].size for e in readers
        )
        expensive = _ELEMENTWISE.get(maker.primitive.name) in _EXPENSIVE
        return again and (expensive or terms > _MOST_TERMS)

    def is_short(self, value: Name) -> bool:
        """Whether it is made of values in memory at once."""
        made = [x for x in self.operands(self.maker[value]) if x in self.maker]
        return self.written.issuperset(made)

    def unfused(self, reduction: Equation) -> Iterator[Name]:
        """What XLA writes before a sum that a library computes (YNNPACK): what others
        read, too, and what is no arithmetic of floats."""
        for value in self.operands(reduction):
            maker = self.maker.get(value)
            if maker is None or value in self.written:
                continue
            is_float = jnp.issubdtype(self.shapes[value].dtype, jnp.floating)
            others = maker.primitive.name in _NO_ARITHMETIC
            if len(self.readers[value]) > 1 or others or not is_float:
                yield value
            else:
                self.repeat(maker)
                yield from self.unfused(maker)

    def repeat(self, maker: Equation) -> None:
        """Note operands whose elements XLA repeats in memory, as others do so, too."""
        shape = maker.result_shapes[0]
        for x in self.operands(maker):
            sizes = [r.shape for e in self.readers[x] for r in e.result_shapes]
            same = [size for size in sizes if size == shape.shape]
            if 1 < self.shapes[x].size < shape.size and len(same) > 1:
                self.repeated[x, shape.shape] = nbytes_of(shape)

    def kernels(self) -> tuple[Kernel, ...]:
        return tuple(
            self.rooted(e) if is_root(e) else self.fused(e, writes)
            for e in self.equations
            if (writes := tuple(x for x in e.results if x in self.written))
        )

    def fused(self, equation: Equation, writes: tuple[Name, ...]) -> Kernel:
        """A kernel that ends with `equation`, and all that is computed on its way."""
        inside: dict[int, Equation] = {}
        in_sum = is_reduction(equation)
        read_bytes: dict[Name, float] = defaultdict(float)

        def add(equation: Equation) -> None:
            if id(equation) in inside:
                return
            inside[id(equation)] = equation
            in_parts = equation.primitive.name in _PARTS
            for x in self.operands(equation):
                again = x not in self.written or (x in self.aside and not in_sum)
                if x in self.maker and again:
                    add(self.maker[x])
                    continue
                part = equation.result_shapes[0] if in_parts else self.shapes[x]
                read_bytes[x] = max(read_bytes[x], nbytes_of(part))

        add(equation)
        moved = sum(read_bytes.values()) + sum(
            nbytes_of(self.shapes[v]) for v in writes
        )
        work = [w for e in inside.values() for w in equation_work(e)]
        in_place = not any(e.primitive.name in _MOVING for e in inside.values())
        return Kernel(
            tuple(work),
            moved,
            frozenset(read_bytes),
            writes,
            in_place=in_place and not in_sum and self.aside.isdisjoint(writes),
        )

    def rooted(self, equation: Equation) -> Kernel:
        """A kernel of a heavy equation, or of a reduction and what it reads."""
        writes = tuple(equation.results)
        if is_reduction(equation):
            return self.fused(equation, writes)
        reads = frozenset(self.operands(equation))
        scratch = scratch_bytes(equation)
        if is_control_flow(equation):
            parts = [(_of_body(body), runs) for body, runs in equation.inner]
            own = max(x.workspace_bytes() + x.results_bytes for x, _ in parts)
            own += sum(x.sliced_bytes(equation) for x, _ in parts)
            body = tuple(
                dataclasses.replace(kernel, runs=kernel.runs * runs)
                for part, runs in parts
                for kernel in part.kernels()
            )
            return Kernel((), 0.0, reads, writes, own, scratch, body=body)
        moved = sum(map(nbytes_of, (*equation.operand_shapes, *equation.result_shapes)))
        copied = copied_bytes(equation)
        scratch += _threefry_bytes(equation)
        work = tuple(equation_work(equation))
        in_place = equation.primitive.name.startswith(("scatter", "dynamic_update"))
        return Kernel(
            work, moved + 2 * copied, reads, writes, copied, scratch, in_place
        )

    @property
    def results_bytes(self) -> int:
        made = (self.shapes[v] for v in self.outputs if v in self.maker)
        return sum(map(nbytes_of, made))

    def sliced_bytes(self, loop: Equation) -> int:
        """Of what a `scan` takes out of its operands for a convolution."""
        params = loop.params
        if loop.primitive.name != "scan":
            return 0
        first = params["num_consts"] + params["num_carry"]
        return sum(
            nbytes_of(self.shapes[v])
            for v in range(first, len(loop.operands))
            if any(e.primitive.name == _CONVOLUTION for e in self.readers.get(v, ()))
        )

    def workspace_bytes(self) -> int:
        """What is in memory at once between the kernels, beside operands and results.

        As XLA does, results that are not written yet lend their room.
        """
        steps = self.kernels()
        last = {v: n for n, kernel in enumerate(steps) for v in kernel.reads}
        alive: dict[Name, None] = {}  # in order
        most = 0
        for number, kernel in enumerate(steps):
            if kernel.in_place:
                free = [v for v in alive if last.get(v) == number]
                for value in kernel.writes:
                    nbytes = nbytes_of(self.shapes[value])
                    old = [v for v in free if nbytes_of(self.shapes[v]) == nbytes]
                    if old and old[0] not in self.outputs:
                        del alive[old[0]]
                        free.remove(old[0])
            alive.update(dict.fromkeys(kernel.writes))
            here = kernel.copied_bytes + sum(self.repeated.values())
            here += sum(nbytes_of(self.shapes[v]) for v in alive)
            lent = max(here - self.results_bytes, 0)
            most = max(most, lent + kernel.scratch_bytes)
            alive = {
                v: None for v in alive if v in self.outputs or last.get(v, -1) > number
            }
        return most


def workspace_bytes(node: Node) -> int:
    """That a node allocates while it runs, beside operands and results."""
    return _Partition(node.equations, node.writes).workspace_bytes()


def _of_body(equations: Sequence[Equation]) -> "_Partition":
    """Of a loop's body, which is asked for whatever it does not read itself."""
    read = {x for e in equations for x in e.operands if not isinstance(x, Literal)}
    return _Partition(equations, {x for e in equations for x in e.results} - read)


def inlined(equations: Sequence[Equation]) -> Iterator[Equation]:
    """Equations with what their lowerings consist of in their place."""
    for equation in equations:
        if equation.lowering is None:
            yield equation
            continue
        graph = lowered(equation)
        names: dict[int, Any] = dict(
            zip(graph.arguments, equation.operands, strict=True)
        )
        names |= dict(zip(graph.outputs, equation.results, strict=True))
        yield from body(graph, names)


def equation_work(equation: Equation) -> Iterator[Work]:
    """What an equation computes, by the rule of its primitive."""
    name = equation.primitive.name
    operands, results = equation.operand_shapes, equation.result_shapes
    written = float(sum(x.size for x in results))
    read = float(max((x.size for x in operands), default=0))
    dtype = str((*operands, *results)[0].dtype) if operands or results else "float32"
    params = equation.params
    if name == "dot_general":
        batch, *sides = (max(x, 1) for x in matrix_sides(equation))
        padded = [_LANES * math.ceil(x / _LANES) for x in sides]
        size = math.prod(padded) ** (1 / 3)
        yield Work("dot", dtype, 2.0 * batch * math.prod(padded), size)
    elif name == _CONVOLUTION:
        yield _of_convolution(equation, dtype)
    elif is_reduction(equation):
        axes = params.get("axes", ())
        along = operands[0].ndim - 1 in axes
        yield Work("row_sum" if along else "column_sum", dtype, read, read)
    elif name.startswith("cum"):
        yield Work("cumulative", dtype, written, written)
    elif name.startswith("reduce_window"):
        window = math.prod(params["window_dimensions"])
        yield Work("window", dtype, written * window, written)
    elif name.startswith("select_and"):
        window = math.prod(params["window_dimensions"])
        yield Work("select_and_scatter", dtype, operands[0].size * window, written)
    elif name.startswith("scatter"):
        yield Work("scatter", dtype, float(operands[2].size), written)
    elif name in ("sort", "top_k", "approx_top_k"):
        axis = params.get("dimension", operands[0].ndim - 1)
        length = max(operands[0].shape[axis], 2)
        yield Work("sort", dtype, operands[0].size * math.log2(length), length)
    elif name in ("random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform"):
        yield Work("random_bits", "float32", written, written)
    elif name == "fft":
        length = max(math.prod(params["fft_lengths"]), 2)
        yield Work("fft", "float32", 5 * read * math.log2(length), length)
    elif name in _FACTORIZATIONS:
        *_, rows, columns = operands[0].shape
        least, most = sorted((rows, columns))
        flops = _FACTORIZATIONS[name](most, least) * read / max(rows * columns, 1)
        yield Work("factorization", dtype, float(flops), least)
    elif name == "dynamic_update_slice":
        yield Work("cheap", dtype, float(operands[1].size), float(operands[1].size))
    elif name == "transpose":
        last = params["permutation"][-1]
        kind = "free" if last == operands[0].ndim - 1 else "transpose"
        yield Work(kind, dtype, written, written)
    else:
        yield Work(_ELEMENTWISE.get(name, "cheap"), dtype, written, written)


# Sides of matrices are multiples of so many elements in registers (AVX2 and wider).
_LANES = 8


def matrix_sides(product: Equation) -> tuple[int, int, int, int]:
    """Of a dot_general: products, rows, columns, and what is summed over."""
    (summed, _), (batch, _) = product.params["dimension_numbers"]
    left, right = product.operand_shapes
    products = math.prod(left.shape[d] for d in batch)
    depth = math.prod(left.shape[d] for d in summed)
    return (
        products,
        left.size // max(products * depth, 1),
        right.size // max(products * depth, 1),
        depth,
    )


def _of_convolution(equation: Equation, dtype: str) -> Work:
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
        return Work("filter_gradient", dtype, flops, outputs)
    return Work("convolution", dtype, flops, min(outputs, taps))


def copied_bytes(equation: Equation) -> int:
    """Of what XLA copies into another layout, or a wider type, for an equation."""
    arrays = (*equation.operand_shapes, *equation.result_shapes)
    if equation.primitive.name == _CONVOLUTION:
        numbers = equation.params["dimension_numbers"]
        last = arrays[0].ndim - 1
        image, kernel = (0, last, *range(1, last)), (last, last - 1, *range(last - 1))
        specs = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
        copied = [
            array
            for array, spec, wanted in zip(
                arrays, specs, (image, kernel, image), strict=True
            )
            if tuple(spec) != wanted
        ]
    elif equation.primitive.name == "dot_general":
        summed, batch = equation.params["dimension_numbers"]
        copied = [
            array
            for array, s, b, last in zip(
                arrays[:2], summed, batch, (True, False), strict=True
            )
            if not _is_matrix(array.ndim, s, b, last)
        ]
    elif equation.primitive.name.startswith("scatter") and arrays[1].ndim > 2:
        return nbytes_of(arrays[2])
    elif equation.primitive.name == "select_and_scatter_add":
        return 4 * nbytes_of(arrays[1])  # indices of what each window selects
    elif equation.primitive.name in _FACTORIZATIONS:
        return 2 * nbytes_of(arrays[0])
    else:
        return 0
    nbytes = sum(map(nbytes_of, copied))
    if arrays[0].dtype.itemsize == 2:  # computed in float32
        nbytes += 2 * sum(map(nbytes_of, arrays))
    return nbytes


def _threefry_bytes(equation: Equation) -> int:
    """Threefry draws two words for each element, and XLA copies what its loop takes; of
    these four words the result is one, if it has 32 bits."""
    if equation.primitive.name != "random_bits":
        return 0
    (key,), (result,) = equation.operand_shapes, equation.result_shapes
    if str(key.dtype) != "key<fry>":
        return 0
    return (12 if result.dtype.itemsize == 4 else 16) * result.size


def _is_matrix(
    ndim: int, summed: Sequence[int], batch: Sequence[int], last: bool
) -> bool:
    """Whether an operand is a stack of matrices as it lies in memory.

    What is summed over comes last in the left one and first in the right one; one
    dimension, of matrices, may be at the other end.
    """
    first, count = len(batch), len(summed)
    front, back = range(first, first + count), range(ndim - count, ndim)
    ends = (back, front) if last else (front, back)
    allowed = ends if count == 1 else ends[:1]
    return list(batch) == list(range(first)) and list(summed) in map(list, allowed)
