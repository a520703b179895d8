"""Operations as others that have kernels."""

import dataclasses
from collections.abc import Iterable, Iterator

import jax
from jax import lax

from poet_jax.core.equation import Equation, Inner
from poet_jax.core.program import Program


def expanded(program: Program) -> Program:
    """`program` with other equations inside its nodes, where these have no kernel."""
    graph = program.graph
    nodes = tuple(
        dataclasses.replace(node, equations=tuple(_expanded(node.equations)))
        for node in graph.nodes
    )
    graph = dataclasses.replace(graph, nodes=nodes)
    return dataclasses.replace(program, graph=graph)


def _expanded(equations: Iterable[Equation]) -> Iterator[Equation]:
    """Equations with a transpose of its own for each reshape that has one in it."""
    for equation in equations:
        order = equation.params.get("dimensions")
        if equation.primitive.name != "reshape" or order is None:
            yield equation
            continue
        (aval,), moved = equation.operand_shapes, Inner()
        turned = jax.ShapeDtypeStruct(tuple(aval.shape[x] for x in order), aval.dtype)
        yield dataclasses.replace(
            equation,
            primitive=lax.transpose_p,
            params={"permutation": tuple(order)},
            results=(moved,),
            result_shapes=(turned,),
        )
        yield dataclasses.replace(
            equation,
            params={**equation.params, "dimensions": None},
            operands=(moved,),
            operand_shapes=(turned,),
        )
