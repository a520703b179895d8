"""Arrays that a step can do without: `Graph -> Graph`, before `group`.

XLA drops most of them itself, but only within a stage. A plan counts what crosses
stages. A table that embeds words and also makes logits is transposed for these. Its
gradient is a product, transposed twice, and a scatter of rows into zeros that is added
to it: five arrays of the table's size, where one is enough.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from poet_jax.core.equation import Literal
from poet_jax.core.graph import Graph, Node
from poet_jax.passes.operations import HEAVY
from poet_jax.passes.rewriter import Rewriter

# A scatter into zeros sums small numbers first, which types of fewer bits need.
DTYPES = (jnp.dtype("float32"), jnp.dtype("float64"))


def simplify(graph: Graph) -> Graph:
    """`graph`, of `trace`, with fewer arrays between its operations.

    - A transpose of a transpose is one, or none.
    - A product of which only the transpose is read gets its factors swapped: the
      gradient of a kernel needs no transpose.
    - A product reads a matrix as it is instead of its transpose.
    - What is scattered into zeros and then added to an array is scattered into that
      array. Sums are then taken in another order, so results differ by rounding.

    On several devices products are turned, and all else stays as it is. Raises
    ValueError for a graph whose nodes hold several equations.
    """
    simplifier = _Simplifier(graph)
    for number in range(len(graph.nodes)):
        simplifier.simplify(number)
    return simplifier.result(rewritten=False)


class _Simplifier(Rewriter):
    def simplify(self, number: int) -> None:
        node = self.nodes.get(number)
        if node is None:
            return
        name = node.equations[0].primitive.name
        if name == "transpose" and self.turn_product(node):
            return
        if self.graph.devices > 1:
            return
        match name:
            case "transpose":
                self.transpose_once(node)
            case "dot_general":
                self.read_untransposed(node)
            case "add" | "add_any":
                self.scatter_into_sum(node)

    def turn_product(self, node: Node) -> bool:
        """Let the transpose of a product that nothing else reads be a product of the
        factors in the other order; whether it is."""
        (value,) = self.operands(node)
        product = self.maker(value, "dot_general")
        if product is None or self.is_output(value) or len(self.readers[value]) > 1:
            return False
        (transpose,), (equation,) = node.equations, product.equations
        contracted, stacked = equation.params["dimension_numbers"]
        left, right = (len(x.shape) for x in equation.operand_shapes)
        first, middle = len(stacked[0]), left - len(contracted[0])
        end = middle + right - len(contracted[1]) - first
        order = (*range(first), *range(middle, end), *range(first, middle))
        sharding = equation.params.get("out_sharding")
        is_cut = sharding is not None and any(sharding.spec)
        if is_cut or transpose.params["permutation"] != order:
            return False
        changed = {"dimension_numbers": (contracted[::-1], stacked[::-1])}
        if isinstance(equation.params["precision"], tuple):
            changed["precision"] = equation.params["precision"][::-1]
        turned = dataclasses.replace(
            equation,
            params=equation.params | changed,
            operands=tuple(self.operands(product)[::-1]),
            operand_shapes=equation.operand_shapes[::-1],
            results=transpose.results,
            result_shapes=transpose.result_shapes,
        )
        self.rewrite(node, turned, product.name)
        return True

    def transpose_once(self, node: Node) -> None:
        """Let the transpose of a transpose be one of its operand, or that operand."""
        (operand,) = self.operands(node)
        inner = self.maker(operand, "transpose")
        if inner is None:
            return
        (operand,) = self.operands(inner)
        before, after = (x.equations[0].params["permutation"] for x in (inner, node))
        order = tuple(before[axis] for axis in after)
        if order != tuple(range(len(order))):
            operand = self.add(lambda x: lax.transpose(x, order), [operand], node)
        elif self.is_output(node.writes[0]) and operand not in self.producer:
            return  # the caller gets an array of its own
        self.replace(node.writes[0], operand)

    def read_untransposed(self, node: Node) -> None:
        """Let a product read a matrix as it is, where it reads the transpose."""
        (equation,) = node.equations
        contracted, stacked = equation.params["dimension_numbers"]
        operands, axes = self.operands(node), list(contracted)
        if any(stacked) or not contracted[0]:
            return  # of an outer product, both axes are in the result
        for side, operand in enumerate(operands):
            inner = self.maker(operand, "transpose")
            if inner is not None and len(self.values[operand].shape) == 2:
                (operands[side],) = self.operands(inner)
                axes[side] = tuple(1 - axis for axis in axes[side])
        if operands == self.operands(node):
            return
        numbers = tuple(axes), stacked
        changed = equation.params | {"dimension_numbers": numbers}
        product = dataclasses.replace(equation, params=changed)
        self.replace(node.writes[0], self.bind(product, operands, node))

    def scatter_into_sum(self, node: Node) -> None:
        """Let a sum be a scatter into one of its operands."""
        (total,) = node.writes
        for array, scattered in (self.operands(node), self.operands(node)[::-1]):
            scatter = self.maker(scattered, "scatter-add")
            if isinstance(array, Literal) or scatter is None or array == scattered:
                continue
            if self.is_of_stored(array):
                continue
            if self.is_for_sum(scatter) and self.are_alike((array, scattered, total)):
                _, *others = self.operands(scatter)
                (equation,) = scatter.equations
                self.replace(total, self.bind(equation, [array, *others], node))
                return

    def is_of_stored(self, array: int) -> bool:
        """Whether light operations make it of state on storage, which `stream_state`
        would have go from block to block, with the scatter."""
        todo, seen = [array], {array}
        while todo:
            value = todo.pop()
            if value in self.graph.stored:
                return True
            node = self.maker(value)
            if node is None or node.equations[0].primitive.name in HEAVY:
                continue
            reads = {x for x in self.operands(node) if not isinstance(x, Literal)}
            todo.extend(reads - seen)
            seen |= reads
        return False

    def is_for_sum(self, scatter: Node) -> bool:
        """Whether it goes into zeros, and one node reads it."""
        (scattered,), (into, *_) = scatter.writes, self.operands(scatter)
        is_read_once = len(self.readers[scattered]) == 1
        return is_read_once and not self.is_output(scattered) and self.is_zero(into)

    def is_zero(self, value: Any) -> bool:
        node = self.maker(value, "broadcast_in_dim")
        filled = None if node is None else self.operands(node)[0]
        return isinstance(filled, Literal) and not np.any(filled.value)

    def are_alike(self, values: Iterable[int]) -> bool:
        """Whether they are of one shape, and of one type that may be summed so."""
        kinds = {(self.values[v].shape, self.values[v].dtype) for v in values}
        return len(kinds) == 1 and kinds.pop()[1] in DTYPES
