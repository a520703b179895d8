"""Kernels of few bits, for parameters that are read and not trained."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# The largest code of each kind; codes are symmetric around zero.
LARGEST = {"int8": 127, "int4": 7}
BLOCK = 64  # rows that share a scale, or a few less


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """A kernel [..., outputs] as small whole numbers, with a scale for each block.

    A block is about `BLOCK` rows of one column, where all axes but the last count as
    rows. A number differs from the kernel's by at most half a scale, which is 1/254 of
    the largest in its block as int8 and 1/14 as int4. Blockwise quantisation by the
    largest absolute value: Dettmers et al., ICLR 2022; for frozen kernels under
    adapters: QLoRA, Dettmers et al., NeurIPS 2023.

    It is a pytree of its two arrays, which may be `PagedArray`s.

    Attributes:
      codes: [blocks, rows, outputs] int8. Of int4 [blocks, rows / 2, outputs] uint8:
        the first half of the rows in the low bits, the second in the high ones.
      scales: [blocks, 1, outputs] float32.
      shape, dtype: of the kernel.
      kind: "int8" or "int4".
    """

    codes: Any
    scales: Any
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    dtype: np.dtype = dataclasses.field(metadata={"static": True})
    kind: str = dataclasses.field(metadata={"static": True})

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def dequantized(self) -> jax.Array:
        """The kernel, of `shape` and `dtype`."""
        codes = self.codes
        if self.kind == "int4":
            low = jnp.left_shift(codes, jnp.uint8(4))
            codes = jnp.concatenate([low, codes], 1).view(jnp.int8) >> jnp.int8(4)
        scales = jnp.asarray(self.scales)
        rows = (codes.astype(scales.dtype) * scales).astype(self.dtype)
        rows = rows.reshape(-1, self.shape[-1])
        return rows[: math.prod(self.shape[:-1])].reshape(self.shape)


def quantized(kernel: Any, kind: str, name: str = "kernel") -> Quantized:
    """A floating kernel [..., outputs], of two axes or more, as `kind`.

    Raises ValueError, with `name`, for an unknown kind and for another array.
    """
    check_kind(kind)
    if not can_quantize(kernel):
        raise ValueError(
            f"{name!r} is {kernel.dtype}{list(kernel.shape)}, and only a floating "
            "kernel [..., outputs] can be quantized. Use a pattern that matches "
            "kernels only, such as '**/kernel'."
        )
    codes, scales = _quantize(jnp.asarray(kernel), kind)
    return Quantized(codes, scales, tuple(kernel.shape), np.dtype(kernel.dtype), kind)


def can_quantize(leaf: Any) -> bool:
    return leaf.ndim >= 2 and bool(jnp.issubdtype(leaf.dtype, jnp.floating))


def dequantized(leaf: Any) -> Any:
    """The kernel that a `Quantized` stands for; any other leaf as it is."""
    return leaf.dequantized() if is_quantized(leaf) else leaf


def whole(tree: Any) -> Any:
    """`tree` with the shape and dtype of each `Quantized` kernel in its place."""
    return jax.tree.map(
        lambda leaf: (
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if is_quantized(leaf) else leaf
        ),
        tree,
        is_leaf=is_quantized,
    )


def is_quantized(leaf: Any) -> bool:
    return isinstance(leaf, Quantized)


def check_kind(kind: Any) -> None:
    """Raise ValueError unless `kind` is one that kernels can be quantized to."""
    if kind not in LARGEST:
        kinds = " or ".join(map(repr, LARGEST))
        raise ValueError(
            f"`quantize` must be {kinds}, got {kind!r}; use for example "
            'poet_jax.update.lora(8, quantize="int8").'
        )


@jax.jit(static_argnames="kind")
def _quantize(kernel: jax.Array, kind: str) -> tuple[jax.Array, jax.Array]:
    """(codes, scales) of a kernel, as `Quantized` has them."""
    rows = kernel.reshape(-1, kernel.shape[-1]).astype(jnp.float32)
    blocks = math.ceil(len(rows) / BLOCK)
    size = math.ceil(len(rows) / blocks)
    if kind == "int4":
        size += size % 2
    rows = jnp.pad(rows, ((0, blocks * size - len(rows)), (0, 0)))
    rows = rows.reshape(blocks, size, -1)
    scales = jnp.max(jnp.abs(rows), 1, keepdims=True) / LARGEST[kind]
    codes = jnp.round(rows / jnp.where(scales == 0, 1, scales)).astype(jnp.int8)
    if kind == "int4":
        low, high = jnp.split(codes, 2, 1)
        codes = (low & jnp.int8(15)) | jnp.left_shift(high, jnp.int8(4))
        codes = codes.view(jnp.uint8)
    return codes, scales
