"""Costs of nodes and transfers, and the FLOPs of a node."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from poet_jax.core.device import DeviceProfile
from poet_jax.core.equation import Equation, unrolled
from poet_jax.core.graph import Node
from poet_jax.core.representation import brief
from poet_jax.core.units import format_joules, format_seconds

_OF_NODES = ("seconds", "joules", "workspace_bytes")


@dataclasses.dataclass(frozen=True, eq=False)
class Costs:
    """Costs of N nodes and V values.

    Attributes:
      seconds, joules: [N] of one run of a node; joules over idle.
      workspace_bytes: [N] allocated during a run, besides operands and results.
      nbytes: [V] of a value in RAM and on storage.
      page_in_seconds, page_out_seconds, page_in_joules, page_out_joules: [V].
      static_watts: of idle, drawn throughout the step.
      contention: share of compute speed that a transfer costs.

    Raises ValueError for a cost that is negative, infinite or NaN, and for a contention
    of 1 or more.
    """

    seconds: np.ndarray
    joules: np.ndarray
    workspace_bytes: np.ndarray
    nbytes: np.ndarray
    page_in_seconds: np.ndarray
    page_out_seconds: np.ndarray
    page_in_joules: np.ndarray
    page_out_joules: np.ndarray
    static_watts: float = 0.0
    contention: float = 0.0

    __repr__ = brief

    def __post_init__(self):
        if self.contention >= 1:
            raise ValueError(
                f"Costs: contention must be at least 0 and below 1, got "
                f"{self.contention}; 1 leaves no compute during a transfer."
            )
        for name, costs in vars(self).items():
            wrong = np.flatnonzero(~((np.asarray(costs) >= 0) & np.isfinite(costs)))
            if wrong.size:
                number = int(wrong[0])
                kind = "node" if name in _OF_NODES else "value"
                where = f"{kind} {number}" if np.ndim(costs) else "the step"
                raise ValueError(
                    f"Costs: {name} of {where} must be a finite, non-negative number "
                    f"in SI units, got {np.ravel(costs)[number]}."
                )

    def check_fit(self, nodes: int, values: int) -> None:
        """Raise ValueError unless these are costs of so many nodes and values."""
        for name, costs in vars(self).items():
            count = nodes if name in _OF_NODES else values
            shape = () if name in ("static_watts", "contention") else (count,)
            if np.shape(costs) != shape:
                raise ValueError(
                    f"Costs: {name} has the shape {np.shape(costs)}, and the graph "
                    f"needs {shape}"
                )

    def of(self, nodes: Sequence[int], values: Sequence[int]) -> "Costs":
        """Costs of some nodes and values, in this order."""
        parts = {
            name: np.asarray(costs)[list(nodes if name in _OF_NODES else values)]
            for name, costs in vars(self).items()
            if np.ndim(costs)
        }
        return dataclasses.replace(self, **parts)

    def __str__(self) -> str:
        return (
            f"costs of {len(self.seconds)} nodes, each run once: "
            f"{format_seconds(self.seconds.sum())}, "
            f"{format_joules(self.joules.sum())} and {self.static_watts:g} W throughout"
        )


def costs_to_dict(costs: Costs) -> dict[str, Any]:
    """`costs` as JSON types, for `costs_from_dict`."""
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in vars(costs).items()
    }


def costs_from_dict(data: dict[str, Any]) -> Costs:
    """Costs from the result of `costs_to_dict`."""
    columns: dict[str, Any] = {
        name: np.array(value) if isinstance(value, list) else value
        for name, value in data.items()
    }
    return Costs(**columns)


def node_flops(node: Node, device: DeviceProfile | None = None) -> float:
    """FLOPs of one run of a node, by its equations.

    With a device, the number of float32 matrix FLOPs that take equally long.
    """
    return sum(
        runs * _equation_flops(equation) * _slowdown(equation, device)
        for equation, runs in unrolled(node.equations)
    )


def _slowdown(equation: Equation, device: DeviceProfile | None) -> float:
    if device is None:
        return 1.0
    matrix = equation.primitive.name in ("dot_general", "conv_general_dilated")
    arrays = (*equation.operand_shapes, *equation.result_shapes)
    return device.slowdown(matrix, arrays[0].dtype) if arrays else 1.0


def _equation_flops(equation: Equation) -> float:
    """2 per multiply-add of a contraction; 1 per element that a reduction reads or
    another equation writes."""
    written = sum(x.size for x in equation.result_shapes)
    name = equation.primitive.name
    if name == "dot_general":
        (contracting, _), _ = equation.params["dimension_numbers"]
        left = equation.operand_shapes[0].shape
        return 2.0 * written * np.prod([left[d] for d in contracting], initial=1.0)
    if name == "conv_general_dilated":
        kernel = equation.operand_shapes[1].shape
        out_channel = equation.params["dimension_numbers"].rhs_spec[0]
        return 2.0 * written * np.prod(kernel) / max(kernel[out_channel], 1)
    if name.startswith(("reduce", "arg", "cum", "select_and")):
        return float(sum(x.size for x in equation.operand_shapes))
    if name in _MOVES_ONLY:
        return 0.0
    return float(written)


_MOVES_ONLY = frozenset(
    "reshape broadcast_in_dim transpose squeeze expand_dims slice dynamic_slice rev "
    "dynamic_update_slice concatenate pad gather copy iota convert_element_type "
    "bitcast_convert_type stop_gradient random_wrap random_unwrap".split()
)
