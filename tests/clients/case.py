"""A client: a step in the style of what people write, and what it is called with."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

KEY = jax.random.key(0)
CLIENTS: dict[str, Callable[[], "Client"]] = {}


@dataclasses.dataclass
class Client:
    """`step(state, batch) -> (state, result)`, with its first state and its batches."""

    step: Callable[[Any, Any], Any]
    state: Any
    batches: list[Any]
    options: dict[str, Any] = dataclasses.field(
        default_factory=lambda: {"donate_argnums": 0}
    )


def client(make: Callable[[], Client]) -> Callable[[], Client]:
    """Registers what makes a client under its name."""
    CLIENTS[make.__name__] = make
    return make


def normal(*shape: int, seed: int = 0) -> jax.Array:
    """Drawn by NumPy, which compiles nothing."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)
