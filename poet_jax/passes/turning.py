"""Products taken the other way around, for `group`."""

import dataclasses

from poet_jax.core.equation import Equation


def can_turn(equation: Equation) -> bool:
    """Whether it is a product of matrices, or of stacks of them, for `turned`."""
    if equation.primitive.name != "dot_general" or equation.lowering is not None:
        return False
    dimension_numbers = equation.params["dimension_numbers"]
    shapes = (x.shape for x in equation.operand_shapes)
    of_matrices = all(
        len(shape) == len(axes) + len(stacked) + 1
        for shape, axes, stacked in zip(shapes, *dimension_numbers, strict=True)
    )
    sharding = equation.params.get("out_sharding")
    is_cut = sharding is not None and any(sharding.spec)
    return of_matrices and not is_cut


def turns(product: Equation) -> tuple[int, ...]:
    """The permutation that transposes each matrix of a product."""
    _, (stacked, _) = product.params["dimension_numbers"]
    first = len(stacked)
    return *range(first), first + 1, first


def turned(product: Equation, transpose: Equation) -> Equation:
    """The transpose of a product, as the product of its factors in the other order."""
    (contracted, stacked), precision = (
        product.params[name] for name in ("dimension_numbers", "precision")
    )
    if isinstance(precision, tuple):
        precision = precision[::-1]
    numbers = contracted[::-1], stacked[::-1]
    changed = {"dimension_numbers": numbers, "precision": precision}
    return dataclasses.replace(
        product,
        params=product.params | changed,
        operands=product.operands[::-1],
        operand_shapes=product.operand_shapes[::-1],
        results=transpose.results,
        result_shapes=transpose.result_shapes,
    )
