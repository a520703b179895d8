"""Products with thin matrices in the cheap order: `Graph -> Graph`, before `group`.

An adapter makes a kernel of `w + a @ b`, for thin `a` and `b`. The sum is as large as
the kernel, and so is its gradient, but `x w + (x a) b` needs neither.
"""

import dataclasses
import math
import string
from collections.abc import Callable, Iterator, Sequence

import jax.numpy as jnp

from poet_jax.core.costs import node_flops
from poet_jax.core.equation import Equation, Literal
from poet_jax.core.graph import Graph, Node
from poet_jax.passes.rewriter import Rewriter


def reassociate(graph: Graph) -> Graph:
    """`graph`, of `trace`, without matrices that thin ones stand for.

    - A matrix `w + a @ b`, with `a` and `b` of at most half its numbers, is not formed
      if only products read it: each becomes the sum of two.
    - `(x y) b` becomes `x (y b)` in the backward pass, if only such products read `x y`
      and that is at most half the work.

    Sums are taken in another order, so results differ by rounding. Raises ValueError
    for a graph whose nodes hold several equations.
    """
    associator = _Associator(graph)
    for number in range(len(graph.nodes)):
        associator.distribute(number)
    for number in range(len(graph.nodes)):
        associator.associate(number)
    return associator.result()


@dataclasses.dataclass(frozen=True)
class _Order:
    """Another way to compute a product with a product.

    Attributes:
      reader: the outer product.
      side: which of its operands the inner one is.
      flops: of computing it in that way.
      add: makes the nodes for it, and gives its value.
    """

    reader: Node
    side: int
    flops: float
    add: Callable[[], int]


class _Associator(Rewriter):
    def distribute(self, number: int) -> None:
        """Let products with `w + a @ b` be sums of products."""
        node = self.nodes.get(number)
        if node is None or node.equations[0].primitive.name != "add":
            return
        whole, thin = self.operands(node)
        if self._is_thin(whole):
            whole, thin = thin, whole
        if not self._is_thin(thin) or isinstance(whole, Literal):
            return
        if self.values[whole].shape != self.values[node.writes[0]].shape:
            return  # a sum repeats what is of size 1
        product = self.nodes[self.producer[thin]]
        orders = self._orders(product, node.writes[0], range(2))
        if not all(node.writes[0] in self.operands(x.reader) for x in orders):
            return
        for order in orders:
            operands = self.operands(order.reader)
            operands[order.side] = whole
            base = self.bind(order.reader.equations[0], operands, order.reader)
            total = self.add(jnp.add, [base, order.add()], order.reader)
            self.replace(order.reader.writes[0], total)

    def _is_thin(self, value: int) -> bool:
        """Whether it is a product of matrices with at most half as many numbers."""
        product = self.maker(value, "dot_general")
        if product is None:
            return False
        (equation,) = product.equations
        sizes = [math.prod(x.shape) for x in equation.operand_shapes]
        shape = equation.result_shapes[0].shape
        return len(shape) == 2 and 2 * sum(sizes) <= math.prod(shape)

    def associate(self, number: int) -> None:
        """Take products with a product in another order if that is half the work."""
        node = self.nodes.get(number)
        if node is None or not node.backward:
            return
        if node.equations[0].primitive.name != "dot_general":
            return
        axes = range(len(node.equations[0].result_shapes[0].shape))
        orders = self._orders(node, node.writes[0], axes)
        before = sum(map(node_flops, [node, *(order.reader for order in orders)]))
        if 2 * sum(order.flops for order in orders) <= before:
            for order in orders:
                self.replace(order.reader.writes[0], order.add())

    def _orders(self, product: Node, value: int, axes: Sequence[int]) -> list[_Order]:
        """For each reader of `value`, at times transposed, which has the axes `axes` of
        `product`; none if there is none for one of them."""
        orders: list[_Order] = []
        if self.is_output(value):
            return []
        for number in sorted(self.readers[value]):
            reader = self.nodes[number]
            (equation,) = reader.equations
            operands = self.operands(reader)
            more: list[_Order] = []
            if equation.primitive.name == "transpose":
                turned = [axes[d] for d in equation.params["permutation"]]
                more = self._orders(product, reader.writes[0], turned)
            elif equation.primitive.name == "dot_general" and operands.count(value) < 2:
                order = self._order(product, reader, operands.index(value), axes)
                more = [] if order is None else [order]
            if not more:
                return []
            orders += more
        readers = {id(order.reader) for order in orders}
        return orders if len(readers) == len(orders) else []

    def _order(
        self, product: Node, reader: Node, side: int, axes: Sequence[int]
    ) -> _Order | None:
        """`reader` with one factor of `product` first; None if that cannot be."""
        (inner,), (outer,) = product.equations, reader.equations
        factors = self.operands(product)
        extra = self.operands(reader)[1 - side]
        if any(isinstance(x, Literal) for x in (*factors, extra)):
            return None
        written = (*product.writes, *reader.writes)
        if len({self.values[v].dtype for v in (*factors, extra, *written)}) > 1:
            return None
        letters = iter(string.ascii_letters)
        left, right, made = _subscripts(inner, [None, None], letters)
        given: list[str | None] = [None, None]
        given[side] = "".join(made[d] for d in axes)
        *both, result = _subscripts(outer, given, letters)
        other = both[1 - side]
        bound = set(other) & set(made)  # what the product is contracted over
        near = 0 if bound <= set(left) else 1
        close, far = (left, right) if near == 0 else (right, left)
        if not bound <= set(close) - set(far) - set(result):
            return None
        size = dict(zip(close, self.values[factors[near]].shape, strict=True))
        size |= dict(zip(far, self.values[factors[1 - near]].shape, strict=True))
        size |= dict(zip(other, self.values[extra].shape, strict=True))
        # The larger one first, whichever it is, so that equal products are one.
        (first, a), (second, b) = sorted(
            ((close, factors[near]), (other, extra)),
            key=lambda x: -math.prod(size[letter] for letter in x[0]),
        )
        thin = "".join(x for x in first + second if x not in bound)

        def einsum(subscripts: str) -> Callable:
            def product(x, y):
                return jnp.einsum(
                    subscripts,
                    x,
                    y,
                    precision=outer.params["precision"],
                    preferred_element_type=outer.params["preferred_element_type"],
                )

            return product

        def add() -> int:
            small = self.add(einsum(f"{first},{second}->{thin}"), [a, b], reader)
            both = [small, factors[1 - near]]
            return self.add(einsum(f"{thin},{far}->{result}"), both, reader)

        flops = sum(
            2.0 * math.prod(size[letter] for letter in set(letters))
            for letters in (first + second, thin + far)
        )
        return _Order(reader, side, flops, add)


def _subscripts(
    equation: Equation, given: Sequence[str | None], letters: Iterator[str]
) -> tuple[str, str, str]:
    """(left, right, result) of a dot_general as einsum writes them; one operand's may
    be given."""
    contracted, batch = equation.params["dimension_numbers"]
    shapes = equation.operand_shapes
    names = [dict(enumerate(text or "")) for text in given]
    pairs = zip(*(x + y for x, y in zip(contracted, batch, strict=True)), strict=True)
    for left, right in pairs:
        name = names[0].get(left) or names[1].get(right) or next(letters)
        names[0][left] = names[1][right] = name
    for axes, shape in zip(names, shapes, strict=True):
        for axis in range(len(shape.shape)):
            axes[axis] = axes.get(axis) or next(letters)
    result = [names[0][d] for d in batch[0]]
    for side in (0, 1):
        bound = {*contracted[side], *batch[side]}
        result += [
            names[side][d] for d in range(len(shapes[side].shape)) if d not in bound
        ]
    left, right = (
        "".join(axes[d] for d in range(len(shape.shape)))
        for axes, shape in zip(names, shapes, strict=True)
    )
    return left, right, "".join(result)
