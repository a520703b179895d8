"""What may be paged of a step, by where its arrays lie."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator

from poet_jax.core.errors import BudgetTooSmall
from poet_jax.core.graph import Graph, Value
from poet_jax.devices.machine import paging_problem

SHARDINGS = {"in_shardings", "out_shardings"}

# XLA takes room of its own for each page that an accelerator moves.
LEAST_PAGE_BYTES = 2**18


def pageable(graph: Graph, jit_options: Iterable[str]) -> tuple[Graph, str]:
    """`graph` with the values that may be paged, and why none of them may; empty if
    some may.

    Args:
      jit_options: names of options of `jax.jit` that were given.
    """
    problem = apart(graph, jit_options) or (paging_problem() if graph.on_cpu else "")
    if problem:
        return _in_ram(graph, lambda value: True), problem
    if graph.on_cpu:
        return graph, ""
    return _in_ram(graph, lambda value: value.nbytes < LEAST_PAGE_BYTES), ""


def apart(graph: Graph, jit_options: Iterable[str]) -> str:
    """Why arrays that may lie on several devices are not paged; empty for others."""
    given = sorted(SHARDINGS.intersection(jit_options))
    if given:
        return f"A step with {' and '.join(given)} does not page."
    if graph.devices > 1 and graph.on_cpu:
        return f"A step on {graph.devices} devices of a CPU does not page."
    return ""


@contextlib.contextmanager
def noting(problem: str) -> Iterator[None]:
    """Add to a BudgetTooSmall that nothing could be paged, if there is a `problem`."""
    try:
        yield
    except BudgetTooSmall as error:
        if problem:
            error.add_note(f"No value was paged. {problem}")
        raise


def _in_ram(graph: Graph, stays: Callable[[Value], bool]) -> Graph:
    """`graph` with values that may not be paged, but for state on storage."""
    at_home = {*graph.stored, *graph.landing}
    values = (
        dataclasses.replace(
            value, pageable=value.pageable and (v in at_home or not stays(value))
        )
        for v, value in enumerate(graph.values)
    )
    return dataclasses.replace(graph, values=tuple(values))
