"""Sparse backpropagation: schemes of what to train, and the search for a good one."""

from poet_jax.update.quantization import Quantized, quantized
from poet_jax.update.scheme import (
    Update,
    UpdateLike,
    bias_only,
    full,
    last_blocks,
    lora,
    parse_update,
)
from poet_jax.update.selection import SearchResult, contributions, search

__all__ = [
    "SearchResult",
    "Quantized",
    "Update",
    "UpdateLike",
    "bias_only",
    "contributions",
    "full",
    "last_blocks",
    "lora",
    "parse_update",
    "quantized",
    "search",
]
