"""Which operations are heavy, element by element, or reductions."""

from collections.abc import Callable

from jax import lax

from poet_jax.core.graph import Node

# Worth a node of their own.
HEAVY = frozenset(
    "dot_general ragged_dot_general conv_general_dilated gather scatter scatter-add "
    "scatter_add scatter-mul scatter_mul scatter-min scatter_min scatter-max "
    "scatter_max sort top_k approx_top_k argmin argmax cumsum cumprod cummax cummin "
    "cumlogsumexp reduce_window reduce_window_sum reduce_window_max reduce_window_min "
    "reduce_precision select_and_scatter select_and_scatter_add select_and_gather_add "
    "fft cholesky lu householder_product geqrf ormqr qr eig eigh svd schur "
    "triangular_solve tridiagonal_solve random_bits threefry2x32 rng_bit_generator "
    "rng_uniform pure_callback io_callback debug_callback ffi_call custom_call "
    "pallas_call custom_linear_solve custom_root".split()
)
# Equations whose parameters hold no shape, and whose results at an index depend on
# their operands at that index alone.
ELEMENTWISE = frozenset(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e "
    "bessel_i1e cbrt ceil clamp clz complex conj convert_element_type copy cos cosh "
    "digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igammac imag "
    "integer_pow is_finite le lgamma log log1p log2 logistic lt max min mul ne neg "
    "nextafter not one_minus_square or polynomial population_count pow "
    "random_gamma_grad real regularized_incomplete_beta rem round rsqrt select_n "
    "shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square "
    "stop_gradient sub tan tanh xor".split()
)
# Operations that combine reductions of pieces into the reduction of the whole.
REDUCTIONS: dict[str, Callable] = {
    "reduce_sum": lax.add,
    "reduce_prod": lax.mul,
    "reduce_max": lax.max,
    "reduce_min": lax.min,
    "reduce_and": lax.bitwise_and,
    "reduce_or": lax.bitwise_or,
}


def is_light(node: Node) -> bool:
    """Whether XLA computes a node, of any number of equations, in loops."""
    return bool(node.equations and node.repeatable) and not any(
        e.primitive.name in HEAVY or e.inner or e.lowering for e in node.equations
    )
