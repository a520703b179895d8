"""One ahead-of-time compiled executable per node signature, shared by equal nodes."""

import concurrent.futures
import math
import os
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp

from poet_jax.graph import Equation, Graph, Literal, Node
from poet_jax.progress import counted

_executables: dict[tuple, "Executable"] = {}


def signature(graph: Graph, node: Node) -> tuple:
    """A key equal for two nodes exactly when one executable serves both.

    Jaxprs inside parameters (the body of a scan) count as equal only if they are one
    object: two that print alike may close over different constants.
    """
    shapes = tuple(
        (value.shape, str(value.dtype), value.weak_type)
        for value in (graph.values[v] for v in node.reads)
    )
    return shapes, node.outputs, tuple(map(_equation_key, node.equations))


def _equation_key(equation: Equation) -> tuple:
    return (
        equation.primitive.name,
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
RECYCLED_BYTES = 2**16


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


def is_recycled(kind: Kind) -> bool:
    """Whether a result's memory is used again for later results."""
    return is_plain(kind[1]) and nbytes_of(kind) >= RECYCLED_BYTES


class Executable:
    """A compiled node, which writes its large results into arrays that it is given.

    Attributes:
      workspace_bytes: what XLA allocates while it runs, beside operands and results;
        `price` raises it to what a run was seen to take.
      seconds: of a run on this machine, once `price` has measured it.
      destinations: [D] shapes and dtypes of the results of `RECYCLED_BYTES` or more.
    """

    def __init__(self, node: Node, operands: list[jax.ShapeDtypeStruct]):
        results = jax.eval_shape(node.__call__, *operands)
        self.destinations = tuple(
            (x.shape, x.dtype) for x in results if is_recycled((x.shape, x.dtype))
        )
        given = [jax.ShapeDtypeStruct(*x) for x in self.destinations]
        run = jax.jit(
            lambda given, *operands: node(*operands), donate_argnums=0, keep_unused=True
        )
        self._compiled = run.lower(given, *operands).compile()
        analysis = self._compiled.memory_analysis()
        self.workspace_bytes = int(analysis.temp_size_in_bytes) if analysis else 0
        self.seconds: float | None = None

    def __call__(
        self, *operands: jax.Array, into: list[jax.Array] | None = None
    ) -> tuple[jax.Array, ...]:
        """[W] results of [R] operands; `into` holds [D] arrays that they replace."""
        if into is None:
            into = [jnp.empty(*x) for x in self.destinations]
        return self._compiled(into, *operands)


def compile_node(graph: Graph, node: Node) -> Executable:
    """The node as an XLA executable from [R] arrays to [W] arrays, compiled once."""
    key = signature(graph, node)
    if key not in _executables:
        operands = [graph.values[v].aval for v in node.reads]
        _executables[key] = Executable(node, operands)
    return _executables[key]


def compile_nodes(graph: Graph) -> list[Executable]:
    """[N] executables; distinct signatures are compiled in parallel, with progress."""
    first: dict[tuple, Node] = {}
    for node in graph.nodes:
        key = signature(graph, node)
        if key not in _executables:
            first.setdefault(key, node)
    workers = os.cpu_count() or 1
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(compile_node, graph, node) for node in first.values()]
        done = concurrent.futures.as_completed(futures)
        for future in counted(done, len(futures), "compiling nodes"):
            future.result()
    return [compile_node(graph, node) for node in graph.nodes]
