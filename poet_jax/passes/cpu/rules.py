"""Operations in forms that XLA's CPU backend computes fast, or in little memory.

One pass over a table of rules. Values differ by rounding from those of XLA's own form,
where a rule does not say otherwise.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from poet_jax.core.graph import Equation, Graph, map_equations
from poet_jax.passes.cpu import convolution, depthwise, pooling


@dataclasses.dataclass(frozen=True)
class Rule:
    """Another form for some equations.

    Attributes:
      name: to choose rules by.
      applies: whether an equation is to have this form.
      lowering: computes it; `lowering(params, *operands)` is traced.
      measured: what it is worth, with JAX 0.10 on two cores.
    """

    name: str
    applies: Callable[[Equation], bool]
    lowering: Callable[..., Any]
    measured: str


RULES = (
    Rule(
        "filter_gradient",
        convolution.is_filter_gradient,
        convolution.as_matrix_product,
        "XLA computes at a few GFLOP/s what is as fast as any product here: "
        "up to ten times the convolution's own time",
    ),
    Rule(
        "pointwise",
        convolution.is_pointwise,
        convolution.as_one_product,
        "no copy of the image, and half the time for narrow images",
    ),
    Rule(
        "depthwise",
        depthwise.is_depthwise,
        depthwise.as_sum_over_taps,
        "16 x 32 x 32 x 96 with 3 x 3 taps: 1.5 ms instead of 41",
    ),
    Rule(
        "depthwise_gradient",
        depthwise.is_depthwise_gradient,
        depthwise.as_sums_over_images,
        "as for the convolution, for the filter's gradient",
    ),
    Rule(
        "large_convolution",
        convolution.is_large,
        convolution.by_images,
        "16 x 64 x 64 x 96: 3.7 MiB beside the result instead of 25.6, in the same "
        "35 ms, with the same bits",
    ),
    Rule(
        "pool_gradient",
        pooling.is_pool_gradient,
        pooling.by_comparison,
        "16 x 64 x 64 x 32 in windows of 2 x 2: 1.6 ms and 0.5 MiB instead of 8.5 ms "
        "and 44 MiB; the same bits where windows do not overlap",
    ),
    Rule(
        "short_sum",
        pooling.is_short_sum,
        pooling.by_additions,
        "the gradient of upsampling needs no copy of the image; the same bits, but for "
        "the sign of a sum of zeros",
    ),
)


def cpu_kernels(graph: Graph, rules: Sequence[Rule] = RULES) -> Graph:
    """`graph` with each equation in the form of the first rule that applies to it.

    On another backend than XLA's CPU it is `graph` as it is.
    """
    if jax.default_backend() != "cpu":
        return graph

    def lowered(equation: Equation) -> Equation:
        for rule in rules:
            if rule.applies(equation):
                return dataclasses.replace(equation, lowering=rule.lowering)
        return equation

    return map_equations(graph, lowered)
