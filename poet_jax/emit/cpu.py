"""Nodes on XLA's CPU backend, whose stages are calls."""

from collections.abc import Sequence
from typing import Any

from poet_jax.core.equation import Equation
from poet_jax.core.graph import Node
from poet_jax.passes.cpu.calls import apart, token_of
from poet_jax.passes.cpu.convolution import canonical_convolution

__all__ = ["apart", "evaluate", "token_of"]


def evaluate(node: Node, operands: Sequence[Any]) -> tuple[Any, ...]:
    """A node's equations, with convolutions as XLA computes them fast in a call."""

    def bind(equation: Equation, operands: Sequence[Any]) -> Sequence[Any]:
        name = equation.primitive.name
        if name == "conv_general_dilated" and equation.lowering is None:
            return (canonical_convolution(equation.params, *operands),)
        return equation.bind(operands)

    return node(*operands, bind=bind)
