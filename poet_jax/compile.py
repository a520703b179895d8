"""Ahead-of-time compiled executables of one node or several, shared by equals."""

import concurrent.futures
import dataclasses
import functools
import math
import os
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp

from poet_jax.graph import Equation, Graph, Literal, Node, unrolled
from poet_jax.progress import counted

_executables: dict[tuple, "Executable"] = {}

Pairs = tuple[tuple[int, int], ...]  # (old, new) values: one is written over the other


@dataclasses.dataclass(frozen=True)
class Unit:
    """Nodes that become one executable.

    Attributes:
      nodes: in order.
      reads: values that they need from outside.
      writes: values that come out.
      replaces: pairs (old, new) of values: `new` is written over `old`.
    """

    nodes: tuple[int, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    replaces: Pairs = ()

    @classmethod
    def of(cls, graph: Graph, number: int, replaces: Pairs = ()) -> "Unit":
        node = graph.nodes[number]
        return cls((number,), node.reads, node.writes, replaces)

    def nbytes(self, graph: Graph) -> int:
        """Of what it reads and writes."""
        written = set(self.writes).difference(new for _, new in self.replaces)
        return sum(graph.values[v].nbytes for v in (*self.reads, *written))


def signature(graph: Graph, unit: Unit) -> tuple:
    """A key equal for two units exactly when one executable serves both.

    What is of the backward pass may be compiled with other options. Jaxprs inside
    parameters (the body of a scan) count as equal only if they are one object: two that
    print alike may close over different constants.
    """
    local: dict[int, int] = {}

    def number(values: Iterable[int]) -> tuple[int, ...]:
        return tuple(local.setdefault(v, len(local)) for v in values)

    reads = number(unit.reads)
    shapes = tuple(
        (value.shape, str(value.dtype), value.weak_type)
        for value in (graph.values[v] for v in unit.reads)
    )
    nodes = tuple(
        (
            number(node.reads),
            number(node.writes),
            node.outputs,
            tuple(map(_equation_key, node.equations)),
        )
        for node in (graph.nodes[n] for n in unit.nodes)
    )
    options = compiler_options(graph.nodes[n] for n in unit.nodes)
    return (
        reads,
        shapes,
        nodes,
        number(unit.writes),
        tuple(map(number, unit.replaces)),
        options is None,
    )


def _equation_key(equation: Equation) -> tuple:
    return (
        equation.primitive.name,
        equation.lowering,
        tuple(x.key if isinstance(x, Literal) else x for x in equation.operands),
        equation.results,
        tuple((name, _key(x)) for name, x in sorted(equation.params.items())),
    )


def _key(parameter: Any) -> Any:
    if isinstance(parameter, tuple | list):
        return tuple(map(_key, parameter))
    if isinstance(parameter, jex_core.Jaxpr | jex_core.ClosedJaxpr):
        return _Identity(parameter)
    try:
        hash(parameter)
    except TypeError:
        return _Identity(parameter)
    return type(parameter), parameter


class _Identity:
    """Equal to itself only; holds its object, so that no other takes its identity."""

    def __init__(self, held: Any):
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.held is other.held

    def __hash__(self) -> int:
        return id(self.held)


Kind = tuple[tuple[int, ...], Any]  # shape and dtype

# Smaller results come from the C library's heap, where they cost nothing.
RECYCLED_BYTES = 2**20


def nbytes_of(kind: Kind) -> int:
    shape, dtype = kind
    return math.prod(shape) * dtype.itemsize


def is_plain(dtype: Any) -> bool:
    """Whether arrays of `dtype` are in memory what their shape and itemsize say.

    PRNG keys are not, nor are types of less than a byte, which XLA packs.
    """
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return False
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits >= 8
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.finfo(dtype).bits >= 8
    return True


def on_cpu() -> bool:
    """Whether arrays are in host memory: JAX's default backend is the CPU.

    An accelerator's backend allocates and frees in the order in which work is issued,
    and keeps what is freed; its results need no buffers of ours.
    """
    return jax.default_backend() == "cpu"


# XLA's CPU backend hands convolutions to YNNPACK by default, which copies the whole
# padded image first, and computes narrow images on one core. XLA's other way, Eigen's,
# takes half to two thirds of the time where a convolution reads this many channels. For
# fewer, as in depthwise ones, YNNPACK is faster.
_WIDE_CHANNELS = 8
_LIBRARIES = "xla_cpu_experimental_ynn_fusion_type"
_WITHOUT_CONVOLUTIONS: dict[str, str | bool] = {
    _LIBRARIES: "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,LIBRARY_FUSION_TYPE_REDUCE"
}


def compiler_options(nodes: Iterable[Node]) -> dict[str, str | bool] | None:
    """For `jax.jit` of `nodes`: convolutions by Eigen, on XLA's CPU backend.

    Nothing where that is the default, or slower, or where one is of the forward pass.
    That rounds as under `jax.jit`: what it makes decides where a ReLU or a maximum
    passes gradients on, and ResNet-18's first gradients were seen to differ by 3e-3
    with other rounding, as jax.jit's do from those in float64.
    """
    wide = [
        node.backward
        for node in nodes
        for equation, _ in unrolled(node.equations)
        if _is_wide_convolution(equation)
    ]
    if not wide or not all(wide) or not on_cpu() or not _prefers_ynnpack():
        return None
    return _WITHOUT_CONVOLUTIONS


def _is_wide_convolution(equation: Equation) -> bool:
    if equation.primitive.name != "conv_general_dilated":
        return False
    inputs = equation.params["dimension_numbers"].rhs_spec[1]
    return (
        equation.operand_shapes[1].shape[inputs] >= _WIDE_CHANNELS
        and equation.params["batch_group_count"] == 1
    )


@functools.cache
def _prefers_ynnpack() -> bool:
    """Whether this version of XLA does, and has the option."""
    image, kernel = jnp.ones((1, 8, 8, 32)), jnp.ones((3, 3, 32, 32))
    lowered = jax.jit(
        lambda image, kernel: jax.lax.conv_general_dilated(
            image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
    ).lower(image, kernel)
    if "ynn_fusion" not in (lowered.compile().as_text() or ""):
        return False
    try:
        lowered.compile(compiler_options=dict(_WITHOUT_CONVOLUTIONS))
    except jax.errors.JaxRuntimeError:  # no such option
        return False
    return True


def is_recycled(kind: Kind) -> bool:
    """Whether a result's memory is used again for later results."""
    return is_plain(kind[1]) and nbytes_of(kind) >= RECYCLED_BYTES and on_cpu()


class Executable:
    """A compiled unit, which writes its large results into arrays that it is given.

    Attributes:
      temp_bytes: what XLA allocates as one block while it runs, beside operands and
        results.
      workspace_bytes: that, or what a run was seen to take, if that is more.
      is_watched: whether a run was watched for that.
      seconds: of a run on this machine, once that was measured.
      replacing: the number of each result that replaces an operand, and the operand's.
      destinations: [D] shapes and dtypes of the results of `RECYCLED_BYTES` or more
        that replace no operand.
    """

    def __init__(self, graph: Graph, unit: Unit):
        place = {v: number for number, v in enumerate(unit.reads)}
        replaced = {new: place[old] for old, new in unit.replaces}
        destinations: list[Kind] = []
        # Where each donated array comes from, in the order of the results it becomes:
        # XLA pairs equal shapes in that order. An operand's number, or None for `into`.
        self._donated: list[int | None] = []
        for value in unit.writes:
            kind = graph.values[value].kind
            if value in replaced:
                self._donated.append(replaced[value])
            elif is_recycled(kind):
                destinations.append(kind)
                self._donated.append(None)
        self.destinations = tuple(destinations)
        self.replacing = {
            number: replaced[value]
            for number, value in enumerate(unit.writes)
            if value in replaced
        }
        self._kept = [n for n in place.values() if n not in replaced.values()]
        operands = [graph.values[v].aval for v in unit.reads]
        fresh = iter([jax.ShapeDtypeStruct(*kind) for kind in destinations])
        given = [next(fresh) if n is None else operands[n] for n in self._donated]
        nodes = [graph.nodes[number] for number in unit.nodes]

        def run(donated, *kept):
            local = dict(zip(self._kept, kept, strict=True))
            for number, array in zip(self._donated, donated, strict=True):
                if number is not None:
                    local[number] = array
            known = {v: local[number] for v, number in place.items()}
            for node in nodes:
                results = node(*(known[v] for v in node.reads))
                known.update(zip(node.writes, results, strict=True))
            return tuple(known[v] for v in unit.writes)

        jitted = jax.jit(run, donate_argnums=0, keep_unused=True)
        options = compiler_options(nodes)
        self._compiled = jitted.lower(
            given, *(operands[n] for n in self._kept)
        ).compile(options)
        analysis = self._compiled.memory_analysis()
        self.temp_bytes = int(analysis.temp_size_in_bytes) if analysis else 0
        self.workspace_bytes = self.temp_bytes
        self.is_watched = False
        self.seconds: float | None = None

    @property
    def scratch_bytes(self) -> int:
        """The part of the workspace that XLA does not know of."""
        return self.workspace_bytes - self.temp_bytes

    def __call__(
        self, *operands: jax.Array, into: Sequence[jax.Array] | None = None
    ) -> tuple[jax.Array, ...]:
        """[W] results of [R] operands; `into` holds [D] arrays that they replace."""
        if into is None:
            into = [jnp.empty(*x) for x in self.destinations]
        fresh = iter(into)
        donated = [next(fresh) if n is None else operands[n] for n in self._donated]
        return self._compiled(donated, *(operands[n] for n in self._kept))


def compile_units(graph: Graph, units: Sequence[Unit]) -> list[Executable]:
    """[U] executables; distinct signatures are compiled in parallel, with progress."""
    keys = [signature(graph, unit) for unit in units]
    missing = {
        key: unit
        for key, unit in zip(keys, units, strict=True)
        if key not in _executables
    }
    wide = bool(jax.config.jax_enable_x64)  # type: ignore[attr-defined]

    def compiled(unit: Unit) -> Executable:
        with jax.enable_x64(wide):  # a setting that a thread does not inherit
            return Executable(graph, unit)

    workers = os.cpu_count() or 1
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        futures = {pool.submit(compiled, unit): key for key, unit in missing.items()}
        done = concurrent.futures.as_completed(futures)
        try:
            for future in counted(done, len(futures), "compiling"):
                _executables[futures[future]] = future.result()
        finally:  # after an error or Ctrl-C, none is begun any more
            pool.shutdown(wait=False, cancel_futures=True)
    return [_executables[key] for key in keys]


def compile_nodes(graph: Graph) -> list[Executable]:
    """[N] executables, one for each node."""
    units = [Unit.of(graph, number) for number in range(len(graph.nodes))]
    return compile_units(graph, units)
