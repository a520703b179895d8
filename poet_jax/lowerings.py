"""Several ways to compute the same convolution or product: the fastest here is taken.

After PockEngine (Zhu et al., MICRO 2023, section 3.3), which switches the backend of
each operator. Here the backend is XLA's, and what is switched is the mathematics that
it is given.
"""

import dataclasses
import functools
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from poet_jax.convolution import (
    CACHED_BYTES,
    PATCHES_BYTES,
    as_matrix_product,
    by_images,
    divisor,
    is_filter_gradient,
    is_large,
    padded,
    result_sizes,
    shifted,
)
from poet_jax.depthwise import (
    as_sum_over_taps,
    as_sums_over_images,
    is_depthwise,
    is_depthwise_gradient,
)
from poet_jax.graph import Equation, Graph, Node, equation_signature
from poet_jax.machine import host_path
from poet_jax.plan import BudgetLike, parse_budget
from poet_jax.pooling import (
    by_additions,
    by_comparison,
    is_pool_gradient,
    is_short_sum,
)
from poet_jax.progress import counted
from poet_jax.scratch import scratch_bytes
from poet_jax.timing import best_seconds

Lowering = Callable[..., Any]

# Faster by less than this, or leaner by less than that, is not worth another program,
# and may be noise. A leaner way is at most so much slower than XLA's own.
GAIN = 0.95
SLOWER = 1.02
LEANER_BYTES = 2**20
TURNS = 4
# What takes less is not worth its measurement, at 50 GFLOP/s a tenth of a millisecond.
LEAST_FLOPS = 5e6


def fastest(
    graph: Graph, approximate: bool = False, budget: BudgetLike | None = None
) -> Graph:
    """`graph` with convolutions, products and pooling as is fastest on this machine.

    Each distinct one is compiled and measured in every way that fits it, once: what was
    measured is kept in a file beside `host_path()`, by signature. Of ways that are
    about as fast the one with the smallest workspace is taken. Left out is what cannot
    fit `budget`, as bytes or a size: a node needs its workspace, what it reads and
    writes, and arguments that no plan may free; where nothing fits the leanest is
    taken. Without a budget, what would allocate more than XLA's own way and 8 MiB is
    left out. Sums are taken in another order, so results differ by rounding;
    `approximate` allows what differs by more: Winograd's convolution, whose error is
    some ten times rounding's, and products of operands rounded to bfloat16, summed in
    float32. Raises ValueError for a percentage, as this runs before nodes are priced.
    """
    memory_bytes = None if budget is None else _memory_bytes(budget)
    found = {
        _key(e, approximate): dataclasses.replace(node, equations=(e,))
        for node in graph.nodes
        for e in node.equations
        if any(others(e, approximate))
    }
    path = host_path().with_suffix(".lowerings.json")
    known = _read(path)
    missing = [key for key in found if key not in known]
    for key in counted(missing, len(missing), "timing lowerings"):
        known[key] = measure(found[key], approximate)
    if missing:
        _write(path, known)

    def lowered(node: Node, equation: Equation) -> Equation:
        key = _key(equation, approximate)
        if key not in found:
            return equation
        most_bytes = None
        if memory_bytes is not None:
            there = {*graph.pinned, *node.reads, *node.writes}
            most_bytes = memory_bytes - sum(graph.values[v].nbytes for v in there)
        choices = {x.__name__: x for x in others(equation, approximate)}
        chosen = choice(known[key], most_bytes)
        return dataclasses.replace(equation, lowering=choices.get(chosen))

    nodes = tuple(
        dataclasses.replace(
            node, equations=tuple(lowered(node, e) for e in node.equations)
        )
        for node in graph.nodes
    )
    return dataclasses.replace(graph, nodes=nodes)


def _memory_bytes(budget: BudgetLike) -> int:
    if isinstance(budget, str) and budget.strip().endswith("%"):
        raise ValueError(
            f"The fastest ways were asked for within {budget}. What keep-all needs is "
            "known only after they are chosen, so it takes bytes or a size. Type for "
            'example budget="64MiB".'
        )
    return parse_budget(budget).memory_bytes


class Measured(NamedTuple):
    """A lowering on this machine.

    Attributes:
      seconds: of the fastest of `TURNS` runs.
      workspace_bytes: what it allocates beside its result, with what libraries do.
    """

    seconds: float
    workspace_bytes: int


def measure(node: Node, approximate: bool = False) -> dict[str, Measured]:
    """What each lowering of a node's one equation takes, by name, XLA's own first and
    as "xla".
    """
    (equation,) = node.equations
    operands = [jnp.ones(x.shape, x.dtype) for x in equation.operand_shapes]
    runs: dict[str, Callable[[], Any]] = {}
    workspaces: dict[str, int] = {}
    ways: dict[str, Lowering | None] = {"xla": None}
    ways |= {x.__name__: x for x in others(equation, approximate)}
    for name, lowering in ways.items():
        changed = dataclasses.replace(equation, lowering=lowering)
        jitted = jax.jit(lambda *x, e=changed: e.bind(x))
        compiled = jitted.lower(*operands).compile()
        runs[name] = run = functools.partial(_run, compiled, operands)
        run()
        analysis = compiled.memory_analysis()
        temp_bytes = int(analysis.temp_size_in_bytes) if analysis else 0
        workspaces[name] = temp_bytes + scratch_bytes(changed)
    seconds = dict.fromkeys(runs, math.inf)
    for _ in range(TURNS):  # in turns, as something else may take the processor
        for name, run in runs.items():
            seconds[name] = min(seconds[name], best_seconds(run, 1))
    return {name: Measured(seconds[name], workspaces[name]) for name in runs}


def _run(compiled: Callable[..., Any], operands: Sequence[jax.Array]) -> Any:
    return jax.block_until_ready(compiled(*operands))


def choice(measured: dict[str, Measured], most_bytes: int | None = None) -> str:
    """The leanest of those about as fast as the fastest, the first if several are.

    None is slower than the first, XLA's own, by more than `SLOWER`, if that one fits.

    What has a workspace of more than `most_bytes` is left out, by default what takes
    far more memory than the first; if that is everything, the leanest is taken.
    """
    if most_bytes is None:
        most_bytes = next(iter(measured.values())).workspace_bytes + PATCHES_BYTES
    least_bytes = min(x.workspace_bytes for x in measured.values())
    most_bytes = max(most_bytes, least_bytes)
    fitting = {k: x for k, x in measured.items() if x.workspace_bytes <= most_bytes}
    least = min(x.seconds for x in fitting.values())
    own = next(iter(measured.values())).seconds
    seconds = max(least, min(least / GAIN, SLOWER * own))
    fast = [name for name, x in fitting.items() if x.seconds <= seconds]
    return min(fast, key=lambda name: fitting[name].workspace_bytes // LEANER_BYTES)


def _key(equation: Equation, approximate: bool) -> str:
    data = equation_signature(equation), approximate
    return hashlib.sha256(repr(data).encode()).hexdigest()[:16]


def _read(path) -> dict[str, dict[str, Measured]]:
    try:
        known = json.loads(path.read_text())
        return {
            key: {name: Measured(*x) for name, x in ways.items()}
            for key, ways in known.items()
            if ways
        }
    except (OSError, ValueError, TypeError, AttributeError):  # not there, or not ours
        return {}


def _write(path, known: dict[str, dict[str, Measured]]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(known, indent=1))
        part.replace(path)
    except OSError:  # measured again at the next start
        pass


_BY_RULE = (
    (is_pool_gradient, by_comparison),
    (is_short_sum, by_additions),
    (is_depthwise, as_sum_over_taps),
    (is_depthwise_gradient, as_sums_over_images),
    (is_large, by_images),
)


def others(equation: Equation, approximate: bool) -> Iterator[Lowering]:
    """Ways to compute an equation other than XLA's own."""
    name, params = equation.primitive.name, equation.params
    floating = [jnp.issubdtype(x.dtype, jnp.floating) for x in equation.operand_shapes]
    if not floating or not all(floating):
        return
    for applies, lowering in _BY_RULE:
        if applies(equation):
            yield lowering
    dtypes = {x.dtype for x in (*equation.operand_shapes, *equation.result_shapes)}
    written = math.prod(equation.result_shapes[0].shape)
    if name == "dot_general":
        ((left, _), _), shape = params["dimension_numbers"], equation.operand_shapes[0]
        work = 2 * written * math.prod(shape.shape[d] for d in left)
        if approximate and dtypes == {jnp.dtype("float32")} and work > LEAST_FLOPS:
            yield bfloat16_product
    if name != "conv_general_dilated" or len(dtypes) != 1:
        return
    kernel = equation.operand_shapes[1].shape
    outputs = kernel[params["dimension_numbers"].rhs_spec[0]]
    if 2 * written * math.prod(kernel) / outputs <= LEAST_FLOPS:
        return
    if params["feature_group_count"] != 1 or params["batch_group_count"] != 1:
        return
    if is_filter_gradient(equation):
        yield as_matrix_product
        return
    yield im2col
    yield channels_first
    ones = all(
        n == 1
        for name in ("window_strides", "lhs_dilation", "rhs_dilation")
        for n in params[name]
    )
    taps = [kernel[d] for d in params["dimension_numbers"].rhs_spec[2:]]
    if approximate and ones and taps == [3, 3]:
        yield winograd


@dataclasses.dataclass(frozen=True)
class _Canonical:
    """A convolution's operands as [batch, ..., inputs] and [..., inputs, outputs].

    Attributes:
      sizes: of the result in space.
    """

    image: jax.Array
    kernel: jax.Array
    sizes: tuple[int, ...]
    params: dict[str, Any]

    @classmethod
    def of(cls, params: dict[str, Any], image, kernel) -> "_Canonical":
        numbers = params["dimension_numbers"]
        batch, features, *space = numbers.lhs_spec
        image = jnp.transpose(image, (batch, *space, features))
        outputs, inputs, *taps = numbers.rhs_spec
        kernel = jnp.transpose(kernel, (*taps, inputs, outputs))
        sizes = result_sizes(params, image.shape[1:-1], kernel.shape[:-2])
        return cls(image, kernel, sizes, params)

    def shifted(self, image: jax.Array, sizes: tuple[int, ...]) -> Iterator[jax.Array]:
        """[batch, *sizes, inputs] that each tap of the kernel meets."""
        taps, apart = self.kernel.shape[:-2], self.params["rhs_dilation"]
        return shifted(image, taps, apart, sizes, self.params["window_strides"])

    def product(self, image: jax.Array, kernel: jax.Array) -> jax.Array:
        """[..., outputs] of [..., n] and [n, outputs]."""
        return lax.dot_general(
            image,
            kernel,
            (((image.ndim - 1,), (0,)), ((), ())),
            precision=self.params["precision"],
            preferred_element_type=self.params["preferred_element_type"],
        )

    def result(self, array: jax.Array) -> jax.Array:
        """[batch, ..., outputs] in the layout that was asked for."""
        spec = self.params["dimension_numbers"].out_spec
        order = [0, array.ndim - 1, *range(1, array.ndim - 1)]
        return jnp.transpose(array, [order[spec.index(d)] for d in range(array.ndim)])


def im2col(params: dict[str, Any], image: jax.Array, kernel: jax.Array) -> jax.Array:
    """Products of the kernel with all that it meets side by side, for as many images,
    or rows of one, as a processor's caches hold."""
    conv = _Canonical.of(params, image, kernel)
    *taps, _, outputs = conv.kernel.shape
    flat = conv.kernel.reshape(-1, outputs)
    is_moved = (
        conv.sizes != conv.image.shape[1:-1]
        or any(map(any, params["padding"]))
        or set(params["lhs_dilation"]) - {1}
    )
    if not is_moved and set(taps) <= {1}:
        return conv.result(conv.product(conv.image, flat))
    batch, (height, *across) = conv.image.shape[0], conv.sizes
    row_bytes = flat.shape[0] * math.prod(across) * image.dtype.itemsize
    rows = divisor(height, CACHED_BYTES // row_bytes)
    images = divisor(batch, CACHED_BYTES // (row_bytes * height))
    step, spread = params["window_strides"][0], params["rhs_dilation"][0]
    reach = (rows - 1) * step + (taps[0] - 1) * spread + 1

    def tile(number):
        first, part = number // (height // rows), number % (height // rows)
        part_of = lax.dynamic_slice_in_dim(conv.image, first * images, images)
        image = padded(params, part_of)
        if rows < height:
            image = lax.dynamic_slice_in_dim(image, part * rows * step, reach, axis=1)
        patches = jnp.concatenate([*conv.shifted(image, (rows, *across))], axis=-1)
        return conv.product(patches, flat)

    tiles = lax.map(tile, jnp.arange(batch // images * (height // rows)))
    return conv.result(tiles.reshape(batch, *conv.sizes, outputs))


def channels_first(
    params: dict[str, Any], image: jax.Array, kernel: jax.Array
) -> jax.Array:
    """XLA's convolution on transposed operands, with channels before space."""
    numbers = params["dimension_numbers"]
    image = jnp.transpose(image, numbers.lhs_spec)
    kernel = jnp.transpose(kernel, numbers.rhs_spec)
    plain = tuple(range(image.ndim))
    result = lax.conv_general_dilated(
        image,
        kernel,
        params["window_strides"],
        params["padding"],
        params["lhs_dilation"],
        params["rhs_dilation"],
        lax.ConvDimensionNumbers(plain, plain, plain),
        precision=params["precision"],
        preferred_element_type=params["preferred_element_type"],
    )
    return jnp.transpose(result, [numbers.out_spec.index(d) for d in plain])


def winograd(params: dict[str, Any], image: jax.Array, kernel: jax.Array) -> jax.Array:
    """F(2x2, 3x3) of Lavin and Gray (CVPR 2016, arXiv 1509.09308): 16 products for four
    results where the plain way takes 36."""
    conv = _Canonical.of(params, image, kernel)
    height, width = conv.sizes
    rows, columns = -(-height // 2), -(-width // 2)
    padding = [(0, 0, 0), (0, 2 * rows - height, 0), (0, 2 * columns - width, 0)]
    image = lax.pad(
        padded(params, conv.image), jnp.zeros((), image.dtype), [*padding, (0, 0, 0)]
    )

    def every_second(array: jax.Array, start: int, count: int, axis: int) -> jax.Array:
        return lax.slice_in_dim(array, start, start + 2 * count - 1, 2, axis)

    def spread(d: Sequence[jax.Array]) -> list[jax.Array]:  # B^T d
        return [d[0] - d[2], d[1] + d[2], d[2] - d[1], d[1] - d[3]]

    def gather(m: Sequence[jax.Array]) -> list[jax.Array]:  # A^T m
        return [m[0] + m[1] + m[2], m[1] - m[2] - m[3]]

    def filters(g: Sequence[jax.Array]) -> list[jax.Array]:  # G g
        return [g[0], (g[0] + g[1] + g[2]) / 2, (g[0] - g[1] + g[2]) / 2, g[2]]

    lines = spread([every_second(image, i, rows, 1) for i in range(4)])
    tiles = [spread([every_second(x, j, columns, 2) for j in range(4)]) for x in lines]
    kernels = [filters([g[j] for j in range(3)]) for g in filters(list(conv.kernel))]
    products = [
        [conv.product(tiles[i][j], kernels[i][j]) for j in range(4)] for i in range(4)
    ]
    across = [gather(row) for row in products]  # [4][2], over columns
    corners = [gather([across[i][j] for i in range(4)]) for j in range(2)]
    # [batch, rows, 2, columns, 2, outputs]
    result = jnp.stack([jnp.stack(column, axis=2) for column in corners], axis=4)
    batch, outputs = result.shape[0], result.shape[-1]
    result = result.reshape(batch, 2 * rows, 2 * columns, outputs)
    return conv.result(result[:, :height, :width])


def bfloat16_product(
    params: dict[str, Any], left: jax.Array, right: jax.Array
) -> jax.Array:
    """Operands rounded to bfloat16, products summed in float32."""
    return lax.dot_general(
        left.astype(jnp.bfloat16),
        right.astype(jnp.bfloat16),
        params["dimension_numbers"],
        preferred_element_type=jnp.float32,
    )
