"""Calibrate this machine: time small programs of one kind of work each."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from poet_jax.core.device import DeviceProfile, Rates
from poet_jax.core.graph import Graph, Node, Value
from poet_jax.core.rebuilding import body
from poet_jax.core.trace import trace
from poet_jax.devices.kernels import Kernel, kernels
from poet_jax.devices.price import kernel_seconds
from poet_jax.devices.timing import time_nodes
from poet_jax.devices.work import Work


class Probe(NamedTuple):
    """A program whose time gives one rate.

    Attributes:
      kind: of the rate, as in `work.Work`; "launch" gives dispatch_seconds.
      fun: the program.
      shapes: of its arguments.
      dtype: of the arguments and of the rate.
    """

    kind: str
    fun: Callable[..., Any]
    shapes: tuple[Any, ...]
    dtype: str = "float32"


def _looped(fun: Callable, times: int) -> Callable:
    """`fun` applied `times` in a loop, so that starting the program is negligible."""
    return lambda x: lax.scan(lambda x, _: (fun(x), None), x, length=times)[0]


def _repeated(fun: Callable, times: int) -> Callable:
    """`fun` applied `times` in one kernel, whose work then outweighs its traffic."""

    def run(x):
        for _ in range(times):
            x = fun(x)
        return x

    return run


def _random_bits(x):
    return jax.random.bits(jax.random.key(0), x.shape)


def _scaled(times: int) -> Callable:
    """Kernels that each read the same array and write one of their own."""
    return lambda x: [x * number for number in range(2, 2 + min(times, 8))]


def _convolution(image, kernel):
    return lax.conv_general_dilated(
        image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=image.shape[-1] // kernel.shape[-2],
    )  # fmt: skip


def _filter_gradient(image, kernel, slope):
    return jax.vjp(lambda kernel: _convolution(image, kernel), kernel)[1](slope)


def _scattered(x, y):
    return x.at[jnp.arange(len(x)) // 2].add(y)


def _pooled(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def _max_pool_gradient(x, slope):
    return jax.vjp(_pooled, x)[1](slope)


_LARGE = (2**18,)
_ELEMENTS = {
    "divide": lambda x: 1.5 / x,
    "exp": jnp.exp,
    "log": jnp.log,
    "tanh": jnp.tanh,
    "erf": lax.erf,
    "sine": jnp.sin,
    "power": lambda x: x**1.7,
}
# Launches first, then traffic, as later probes subtract both; sizes of a kind rise.
PROBES = (
    Probe("launch", _looped(lambda x: jnp.tanh(x) @ x, 500), ((8, 8),)),
    *(
        Probe("moved", _scaled(2 ** (23 - n) // 8 + 1), ((2**n,),))
        for n in (16, 19, 21, 23)
    ),
    Probe("cheap", _repeated(lambda x: x * 1.5 + 0.5, 64), (_LARGE,)),
    *(Probe(kind, _repeated(fun, 8), (_LARGE,)) for kind, fun in _ELEMENTS.items()),
    *(
        Probe("dot", _looped(lambda x: x @ x, 2**12 // n), ((2**14 // n**2 + 1, n, n),))
        for n in (8, 32, 128)
    ),
    *(Probe("dot", lambda x: x @ x, ((n, n),)) for n in (384, 1024)),
    Probe("convolution", _convolution, ((4, 32, 32, 64), (3, 3, 64, 3))),
    Probe("convolution", _convolution, ((4, 32, 32, 3), (3, 3, 3, 64))),
    Probe("convolution", _convolution, ((4, 32, 32, 64), (3, 3, 64, 64))),
    Probe("convolution", _convolution, ((8, 8, 8, 256), (3, 3, 256, 256))),
    *(
        Probe("filter_gradient", _filter_gradient, (image, kernel, image))
        for image, kernel in (
            ((4, 8, 8, 256), (3, 3, 256, 256)),
            ((4, 32, 32, 64), (3, 3, 64, 64)),
            ((32, 32, 32, 64), (3, 3, 64, 64)),
        )
    ),
    Probe("grouped_convolution", _convolution, ((2, 16, 16, 64), (3, 3, 1, 64))),
    Probe("grouped_convolution", _filter_gradient,
          ((2, 16, 16, 64), (3, 3, 1, 64), (2, 16, 16, 64))),
    Probe("row_sum", lambda x: x.sum(1), ((1024, 1024),)),
    Probe("column_sum", lambda x: x.sum(0), ((1024, 1024),)),
    Probe("transpose", jnp.transpose, ((1024, 1024),)),
    Probe(
        "gather",
        lambda x: x.at[jnp.arange(2**14) * 7 % 2**14].get(mode="clip"),
        ((2**14,),),
    ),
    *(
        Probe("scatter", _scattered, (shape, shape))
        for shape in ((2**12,), (2**10, 256))
    ),
    *(
        Probe("sort", lambda x: jnp.sort(jnp.sin(x)), (shape,))
        for shape in ((256, 64), (2**14,))
    ),
    Probe("random_bits", _random_bits, (_LARGE,)),
    Probe("cumulative", lambda x: lax.cumsum(x, 1), ((256, 512),)),
    Probe("window", _pooled, ((8, 32, 32, 32),)),
    Probe("select_and_scatter", _max_pool_gradient, ((2, 32, 32, 32), (2, 16, 16, 32))),
    Probe("fft", lambda x: jnp.fft.fft(x).real, ((64, 1024),)),
    Probe("factorization", lambda x: jnp.linalg.eigh(x + x.T)[1], ((96, 96),)),
    Probe("dot", _looped(lambda x: x @ x, 32), ((64, 64),), "bfloat16"),
    Probe("dot", lambda x: x @ x, ((384, 384),), "bfloat16"),
    Probe("convolution", _convolution, ((4, 32, 32, 64), (3, 3, 64, 64)), "bfloat16"),
    Probe("cheap", _repeated(lambda x: x * 1.5 + 0.5, 64), (_LARGE,), "bfloat16"),
    Probe("exp", _repeated(jnp.exp, 8), (_LARGE,), "bfloat16"),
)  # fmt: skip


def calibrated() -> tuple[float, Rates]:
    """(seconds to launch a kernel, rates) of this machine.

    A probe's own rate is its time less that of its launches, traffic and other work, at
    the rates of earlier probes. Takes about six seconds on two cores.
    """
    graph = _joined()
    device = DeviceProfile("calibrated so far", 1, 1.0, 1.0, 1.0, 1.0, 0.0)
    for probe, node, timed in zip(PROBES, graph.nodes, time_nodes(graph), strict=True):
        assert timed is not None
        steps = [x for kernel in kernels(node) for x in kernel.flat()]
        if probe.kind == "launch":
            launch = timed.seconds / sum(step.runs for step in steps)
            device = dataclasses.replace(device, dispatch_seconds=launch)
            continue
        name = "moved" if probe.kind == "moved" else f"{probe.kind}_{probe.dtype}"
        row = _row(probe.kind, steps, timed.seconds, device)
        rows = _monotonic(sorted((*device.rates.get(name, ()), row)))
        device = dataclasses.replace(device, rates={**device.rates, name: rows})
    return device.dispatch_seconds, device.rates


def described_probes() -> str:
    """Kinds, shapes and dtypes of the probes, which rates depend on."""
    kinds = [(probe.kind, probe.shapes, probe.dtype) for probe in PROBES]
    return f"medians of {kinds}"


def _row(
    kind: str, steps: Sequence[Kernel], seconds: float, device: DeviceProfile
) -> tuple[float, float]:
    """(size, seconds per unit) of the kernels' work of a kind."""
    amount = size = others_seconds = 0.0
    for step in steps:
        if kind == "moved":
            mine = [Work(kind, "float32", step.moved_bytes, step.moved_bytes)]
        else:
            mine = [work for work in step.work if work.kind == kind]
        amount += step.runs * sum(work.amount for work in mine)
        size = max([size, *(work.size for work in mine)])
        if mine:
            others = tuple(work for work in step.work if work.kind != kind)
            step = dataclasses.replace(step, work=others, moved_bytes=0.0)
        others_seconds += kernel_seconds(step, device)
    # At least a tenth, as a busy machine may have made earlier probes slow.
    return size, max(seconds - others_seconds, seconds / 10) / amount


def _monotonic(rows: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Rows in which less work never takes longer than more."""
    result = [rows[-1]]
    for size, seconds in reversed(rows[:-1]):
        larger, most = result[-1]
        result.append((size, min(seconds, most * larger / size)))
    return tuple(reversed(result))


def _joined() -> Graph:
    """One graph with a node per probe, independent of one another."""
    values: list[Value] = []
    arguments: list[int] = []
    constants: dict[int, Any] = {}
    nodes = []
    for probe in PROBES:
        shapes = [jax.ShapeDtypeStruct(shape, probe.dtype) for shape in probe.shapes]
        graph = trace(probe.fun, *shapes)
        outside = (*graph.arguments, *graph.constants, *graph.outputs)
        names = {v: len(values) + v for v in outside}
        values += graph.values
        arguments += [names[v] for v in graph.arguments]
        constants |= {names[v]: array for v, array in graph.constants.items()}
        writes = [names[v] for v in graph.outputs]
        nodes.append(Node.of(probe.kind, body(graph, names), writes))
    outputs = [v for node in nodes for v in node.writes]
    return Graph(
        tuple(values), tuple(nodes), tuple(arguments), tuple(outputs), constants
    )
