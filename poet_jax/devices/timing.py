"""Time nodes on this machine, each distinct one compiled by itself."""

import concurrent.futures
import os
import statistics
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from poet_jax.core.graph import Graph, Node
from poet_jax.core.progress import counted
from poet_jax.core.signatures import node_signature

# At least 5 timed runs, up to 30 within 20 ms; the median counts.
_RUNS, _MOST_RUNS, _RUNS_SECONDS = 5, 30, 0.02


class Timed(NamedTuple):
    """A node on this machine.

    Attributes:
      seconds: of one run, without JAX's overhead to start an executable.
      temp_bytes: XLA's workspace, besides operands and results.
    """

    seconds: float
    temp_bytes: int


def time_nodes(graph: Graph) -> list[Timed | None]:
    """[N] times of nodes on zeros; equal nodes are timed once.

    Nodes with side effects, or whose runtime depends on their inputs, are not timed
    (None). Compiles on all cores, and shows progress.
    """
    keys = [node_signature(graph, node) for node in graph.nodes]
    distinct = {
        key: node
        for key, node in zip(keys, graph.nodes, strict=True)
        if node.repeatable and not node.needs_data
    }
    wide = bool(jax.config.jax_enable_x64)  # type: ignore[attr-defined]

    def compiled(node: Node) -> Any:
        with jax.enable_x64(wide):  # threads do not inherit it
            return _compile(graph, node)

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        futures = {pool.submit(compiled, node): key for key, node in distinct.items()}
        try:
            done = concurrent.futures.as_completed(futures)
            executables = {
                futures[future]: future.result()
                for future in counted(done, len(futures), "compiling nodes")
            }
        finally:  # after an error or Ctrl-C, start no more
            pool.shutdown(wait=False, cancel_futures=True)
    start = jax.jit(jnp.negative).lower(jnp.float32(0)).compile()
    start_seconds = median_seconds(lambda: start(jnp.float32(0)))
    timed = {
        key: _time(graph, node, executables[key], start_seconds)
        for key, node in counted(distinct.items(), len(distinct), "timing nodes")
    }
    return [timed.get(key) for key in keys]


def _compile(graph: Graph, node: Node) -> Any:
    """Compile a node that writes its results over donated arrays, as in an arena: the
    page faults of fresh memory can cost more than a node."""

    def run(old, *operands):
        return node(*operands)

    old = tuple(graph.values[v].aval for v in node.writes)
    operands = (graph.values[v].aval for v in node.reads)
    jitted = jax.jit(run, donate_argnums=0, keep_unused=True)
    return jitted.lower(old, *operands).compile()


def _time(graph: Graph, node: Node, executable: Any, start_seconds: float) -> Timed:
    operands, results = (
        tuple(jnp.zeros(*graph.values[v].kind) for v in values)
        for values in (node.reads, node.writes)
    )

    def run():
        nonlocal results
        results = executable(results, *operands)
        return results

    # A NaN made of these zeros is no error.
    with jax.debug_nans(False), jax.debug_infs(False):
        seconds = median_seconds(run)
    analysis = executable.memory_analysis()
    temp_bytes = int(analysis.temp_size_in_bytes) if analysis else 0
    return Timed(max(seconds - start_seconds, seconds / 20), temp_bytes)


def median_seconds(run) -> float:
    """Median of several runs after a warm-up; `run` returns JAX arrays."""
    jax.block_until_ready(run())
    times: list[float] = []
    while len(times) < _RUNS or len(times) < _MOST_RUNS and sum(times) < _RUNS_SECONDS:
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return statistics.median(times)
