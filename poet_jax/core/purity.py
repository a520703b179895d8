"""Operations that are functions of their operands, and so may run twice.

That JAX tracks no effect of an operation says little: a random generator with state of
its own, a callback and a foreign function have none. What is not listed here runs once,
unless `allow_repeats` says otherwise.
"""

import dataclasses
from collections.abc import Iterable

from jax.extend.core import Primitive

from poet_jax.core import references
from poet_jax.core.graph import Graph, Node

Operations = str | Primitive | Iterable[str | Primitive]

PURE = frozenset(
    # Element by element.
    "abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e "
    "cbrt ceil clamp clz complex conj cos cosh digamma div eq eq_to erf erf_inv erfc "
    "exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag integer_pow "
    "is_finite le le_to lgamma log log1p logistic lt lt_to max min mul mulhi ne neg "
    "nextafter not or polygamma population_count pow real reciprocal reduce_precision "
    "regularized_incomplete_beta rem round rsqrt select_n shift_left "
    "shift_right_arithmetic shift_right_logical sign sin sinh sqrt square sub tan tanh "
    "xor zeta "
    # Types, shapes and places.
    "bitcast_convert_type broadcast broadcast_in_dim concatenate convert_element_type "
    "copy copy_p device_put dimension_size dynamic_slice dynamic_update_slice empty "
    "empty2 expand_dims from_edtype gather iota layout_constraint name "
    "optimization_barrier pad reshape reshard rev sharding_constraint slice split "
    "squeeze stack stop_gradient tie tile to_edtype transpose unstack "
    "with_memory_space_constraint zeros_like "
    # Sums, windows, products, transforms, orders.
    "approx_top_k argmax argmin conv_general_dilated cumlogsumexp cummax cummin "
    "cumprod cumsum dot_general fft ragged_dot_general reduce reduce_and reduce_max "
    "reduce_min reduce_or reduce_prod reduce_sum reduce_window reduce_window_max "
    "reduce_window_min reduce_window_sum reduce_xor scaled_dot scatter scatter-add "
    "scatter-max scatter-min scatter-mul scatter-sub scatter_add scatter_max "
    "scatter_min scatter_mul scatter_sub select_and_gather_add select_and_scatter "
    "select_and_scatter_add sort top_k "
    # Linear algebra.
    "cholesky cholesky_update eig eigh geqp3 geqrf hessenberg householder_product lu "
    "lu_pivots_to_permutation ormqr qr schur svd symmetric_product triangular_solve "
    "tridiagonal tridiagonal_solve "
    # Random numbers of a key that is an operand.
    "iota_2x32_shape philox2x32 philox4x32 random_bits random_clone random_fold_in "
    "random_gamma random_seed random_split random_unwrap random_wrap "
    "rng_bit_generator threefry2x32 threefry4x32 "
    # Sparse arrays.
    "bcoo_dot_general bcoo_dot_general_sampled bcoo_extract bcoo_fromdense "
    "bcoo_sort_indices bcoo_spdot_general bcoo_sum_duplicates bcoo_todense "
    "bcoo_transpose bcsr_dot_general bcsr_extract bcsr_fromdense bcsr_todense "
    "coo_fromdense coo_matvec coo_matmat coo_spmm coo_spmv coo_todense csr_fromdense "
    "csr_matmat csr_matvec csr_spmm csr_spmv csr_todense "
    # Collectives: all devices run one program.
    "all_gather all_gather_invariant all_gather_reduced all_to_all axis_index "
    "pbroadcast pmax pmin ppermute preduced psum psum_invariant pvary "
    "ragged_all_to_all reduce_scatter unreduced_psum unreduced_reduce_scatter".split()
)
PURE |= references.OPERATIONS  # their effects are tracked

# What runs jaxprs that are among its parameters, and is as pure as they are.
STRUCTURED = frozenset(
    "call closed_call composite cond core_call custom_jvp_call custom_lin "
    "custom_linear_solve custom_vjp_call custom_vmap_call checkpoint jit linear_call "
    "pjit platform_index remat2 run_state scan shard_map while".split()
)


def names_of(operations: Operations) -> frozenset[str]:
    """The names of operations: primitives, or names of them or of foreign functions.

    Raises TypeError for anything else.
    """
    single = isinstance(operations, str | Primitive)
    given = [operations] if single else list(operations)
    for x in given:
        if not isinstance(x, str | Primitive):
            raise TypeError(
                "`repeatable` must be names of primitives, or of the targets of "
                f"jax.ffi.ffi_call, got {x!r}. Use for example "
                'repeatable="pure_callback".'
            )
    return frozenset(x if isinstance(x, str) else x.name for x in given)


def allow_repeats(graph: Graph, operations: Operations) -> Graph:
    """`graph`, of `trace`, in which these operations count as functions of their
    operands.

    What has an effect that JAX tracks runs once all the same.
    """
    names = names_of(operations)

    def allowed(node: Node) -> Node:
        equations = [
            dataclasses.replace(e, unknown=e.unknown - names) for e in node.equations
        ]
        return Node.of(node.name, equations, node.writes, node.backward)

    if not names:
        return graph
    return dataclasses.replace(graph, nodes=tuple(map(allowed, graph.nodes)))
