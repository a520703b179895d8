"""Frozen scales folded into frozen kernels: `Graph -> Graph`, before `group`.

A BatchNorm with frozen statistics and scale multiplies each channel by a number. On the
gradient's way back through a frozen convolution that is `conv(dy * scale, w)`, and
`conv(dy, w * scale)` makes no second array of the gradient's size, which counts where
a residual connection keeps `dy`. After PockEngine (Zhu et al., MICRO 2023), which folds
constants when weights are frozen.

Two things are left out as they were measured to be worth nothing. In the forward pass
the mean and the bias still have to be added, and XLA scales in the same loop: ResNet-18
took as long with scaled kernels, and 35 MiB more as one executable. Frozen kernels that
are reversed or scaled could be kept from step to step, at 43 MiB there: they take 0.9 %
of a step of 16 images, 3.7 % of one of a single image.
"""

from typing import Any

import jax.numpy as jnp

from poet_jax.core.equation import Literal
from poet_jax.core.graph import Graph, Node
from poet_jax.passes.rewriter import Rewriter


def fold_scales(graph: Graph) -> Graph:
    """`graph`, of `trace`, with frozen scales in kernels instead of in what they meet.

    An array that is scaled by a frozen number for each channel, and then read by
    convolutions with frozen kernels only, is read unscaled, and the kernels are scaled.
    Frozen is what depends on nothing but constants, and arguments that the function
    returns as they are, as it does with parameters that an `update.Part` leaves alone.
    A kernel is scaled if it is no larger than the array, or made for that convolution
    anyway, as one that is reversed for the backward pass.

    Products are rounded at other places, so results differ by rounding. Integers, which
    would wrap elsewhere, and floats of less range than float32, which would overflow
    elsewhere, stay as they are. Raises ValueError for a graph whose nodes hold several
    equations.
    """
    folder = _Folder(graph)
    for number in range(len(graph.nodes)):
        folder.fold(number)
    return folder.result()


class _Folder(Rewriter):
    def __init__(self, graph: Graph):
        super().__init__(graph)
        # What lives on storage is not kept in RAM for longer.
        given = set(graph.arguments) - graph.stored.keys()
        self.frozen = set(graph.constants)
        for output in graph.outputs:
            copy = self.maker(output, "copy")
            self.frozen |= given & ({output} if copy is None else set(copy.reads))
        for node in graph.nodes:
            if node.repeatable and self.frozen.issuperset(node.reads):
                self.frozen.update(node.writes)

    def fold(self, number: int) -> None:
        """Let convolutions read what is scaled, and scale their kernels."""
        node = self.nodes.get(number)
        if node is None or node.equations[0].primitive.name != "mul":
            return
        (scaled,) = node.writes
        array, scale = self.operands(node)
        if self.is_frozen(array):
            array, scale = scale, array
        if self.is_frozen(array) or not self.is_frozen(scale):
            return
        if self.values[array].shape != self.values[scaled].shape:
            return  # a product repeats what is of size 1
        if not _is_wide(self.values[scaled].dtype):
            return
        found = [
            (self.nodes[x], self.vector(self.nodes[x], scaled, scale))
            for x in sorted(self.readers[scaled])
        ]
        if self.is_output(scaled) or any(vector is None for _, vector in found):
            return
        for reader, vector in found:
            assert vector is not None
            (equation,) = reader.equations
            _, kernel = self.operands(reader)
            _, inputs, *_ = equation.params["dimension_numbers"].rhs_spec
            shape = [1] * len(self.values[kernel].shape)
            shape[inputs] = -1
            kernel = self.add(
                lambda kernel, vector, shape=shape: kernel * vector.reshape(shape),
                [kernel, vector],
                reader,
            )
            self.replace(reader.writes[0], self.bind(equation, [array, kernel], reader))

    def is_frozen(self, operand: Any) -> bool:
        return isinstance(operand, Literal) or operand in self.frozen

    def vector(self, reader: Node, scaled: int, scale: Any) -> int | None:
        """The value of one number, or one for each channel, that scales a convolution's
        kernel as `scale` does the image; None if there is none, or it is not worth it.
        """
        (equation,) = reader.equations
        if equation.primitive.name != "conv_general_dilated":
            return None
        image, kernel = self.operands(reader)
        params = equation.params
        if image != scaled or kernel not in self.frozen:
            return None
        if params["feature_group_count"] != 1 or params["batch_group_count"] != 1:
            return None
        made = self.maker(kernel) is not None and len(self.readers[kernel]) == 1
        if not made and self.values[kernel].nbytes > self.values[scaled].nbytes:
            return None
        dims = range(len(equation.operand_shapes[0].shape))
        repeat = self.maker(scale, "broadcast_in_dim")
        if repeat is not None:
            scale, *_ = self.operands(repeat)
            dims = repeat.equations[0].params["broadcast_dimensions"]
        if isinstance(scale, Literal):
            return None
        channels = params["dimension_numbers"].lhs_spec[1]
        sizes = zip(dims, self.values[scale].shape, strict=False)
        return scale if all(n == 1 for d, n in sizes if d != channels) else None


def _is_wide(dtype: Any) -> bool:
    """Whether it has the exponents of float32, or more."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).maxexp >= 128
