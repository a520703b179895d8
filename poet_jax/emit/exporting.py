"""A program that is not compiled here, for compilers elsewhere."""

from typing import Any

import jax
from jax import export

from poet_jax.core.costs import Costs
from poet_jax.core.errors import PlanInvalid
from poet_jax.core.plan import PageIn, PageOut
from poet_jax.core.program import Program
from poet_jax.emit.program import emit
from poet_jax.emit.stages import cut


def exported(
    program: Program, costs: Costs, memory_bytes: float = 0
) -> export.Exported:
    """The program as `jax.export.export` gives it, in stages of `memory_bytes`.

    It takes and returns what the traced function does. Arguments whose arrays are all
    donated are donated. A compiler that inlines calls runs stages in order, too: each
    waits for the one before.

    Raises PlanInvalid for a program that pages, writes to mutable references of the
    caller's, or runs on several devices, and ValueError for one of an instance.
    """
    _refuse(program)
    graph = program.graph
    emitted = emit(cut(program, costs, memory_bytes))

    def step(*args: Any, **kwargs: Any) -> Any:
        leaves = jax.tree.leaves((args, kwargs))
        return jax.tree.unflatten(graph.out_tree, emitted(*leaves))

    args, kwargs = jax.tree.unflatten(graph.in_tree, graph.arguments)

    def is_donated(numbers: Any) -> bool:
        values = jax.tree.leaves(numbers)
        return bool(values) and graph.donated.issuperset(values)

    jitted = jax.jit(
        step,
        donate_argnums=[n for n, x in enumerate(args) if is_donated(x)],
        donate_argnames=[name for name, x in kwargs.items() if is_donated(x)],
    )

    def shape(value: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(*graph.values[value].kind)

    shapes, named = jax.tree.map(shape, (args, kwargs))
    return export.export(jitted)(*shapes, **named)


def _refuse(program: Program) -> None:
    graph = program.graph
    moves = any(isinstance(x, PageIn | PageOut) for x in program.instructions)
    if graph.stored or graph.landing or moves:
        raise PlanInvalid(
            "The step moves pages through a store of this process, and cannot be "
            "exported. Use planner=poet_jax.MilpPlanner(paging=False), and "
            "arguments in RAM."
        )
    if graph.references or graph.devices > 1:
        kind = "writes to references" if graph.references else "has several devices"
        raise PlanInvalid(
            f"The step {kind}, so it cannot be exported before it is compiled here. "
            "Use Scheduled.plan(*args).export()."
        )
