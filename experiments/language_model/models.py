"""Decoders of text, with the parts and names of public checkpoints.

`Llama` is the model of Llama, SmolLM, Qwen2 and Gemma; `GPT2` is that of GPT-2. Tokens
are int32 [batch, length], and logits [batch, length, vocabulary]. A path of a parameter
is its public name with another last step: "layers/0/mlp/up_proj/kernel" is what public
files call "model.layers.0.mlp.up_proj.weight".
"""

import hashlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from experiments.language_model.gpt2 import GPT2, GPT2Config
from experiments.language_model.llama import Llama, LlamaConfig
from poet_jax import to_storage
from poet_jax.stores import Store
from poet_jax.update import quantized

Model = Llama | GPT2
Config = LlamaConfig | GPT2Config
# What a model holds of a parameter, by its path and array.
Place = Callable[[str, jax.Array], Any]

SIZES: dict[str, Config] = {
    "1m": LlamaConfig(2048, 160, 2, 5, 1, 32, 448, tied=True),
    "10m": LlamaConfig(4096, 320, 8, 5, 1, 64, 896, tied=True),
    # GPT-2 small, SmolLM-135M, TinyLlama 1.1B and OpenLLaMA 3B.
    "125m": GPT2Config(),
    "135m": LlamaConfig(49_152, 576, 30, 9, 3, 64, 1536, tied=True),
    "1b": LlamaConfig(32_000, 2048, 22, 32, 4, 64, 5632),
    "3b": LlamaConfig(32_000, 3200, 26, 32, 32, 100, 8640, epsilon=1e-6),
}


def placing(quantize: str | None = None, store: Store | None = None) -> Place:
    """Kernels are quantized to "int8" or "int4", and large arrays are in a store, if
    that is given."""

    def place(path: str, array: jax.Array) -> Any:
        kept: Any = array
        if quantize is not None and path.endswith("/kernel"):
            kept = quantized(array, quantize, path)
        return kept if store is None else to_storage(kept, store)

    return place


IN_RAM = placing()


def empty(config: Config, dtype: Any = jnp.float32) -> Model:
    """A model with shapes instead of parameters."""
    kind = GPT2 if isinstance(config, GPT2Config) else Llama
    return nnx.eval_shape(lambda: kind(config, dtype=dtype, rngs=nnx.Rngs(0)))


def make(
    config: Config, seed: int = 0, dtype: Any = jnp.float32, place: Place = IN_RAM
) -> Model:
    """A model with random parameters; only one at a time is in RAM as a float.

    Matrices are normal with deviation 0.02, as in GPT-2.
    """
    model = empty(config, dtype)
    for path, variable in variables(model, nnx.Param).items():
        variable.set_value(place(path, _initial(path, variable, seed, model)))
    return model


def _initial(path: str, like: Any, seed: int, model: Model) -> jax.Array:
    if len(like.shape) > 1:
        number = hashlib.sha256(path.encode()).digest()[:4]
        key = jax.random.fold_in(jax.random.key(seed), int.from_bytes(number))
        return jax.random.normal(key, like.shape, like.dtype) * 0.02
    gemma = getattr(model.config, "gemma", False)
    is_scale = path.endswith("/scale") and not gemma
    return jnp.full(like.shape, float(is_scale), like.dtype)


def variables(module: nnx.Module, kind: Any = ...) -> dict[str, nnx.Variable]:
    """The module's own variables of a kind, such as `nnx.Param`, by path."""
    flat = nnx.to_flat_state(nnx.state(module, kind))
    return {"/".join(map(str, path)): variable for path, variable in flat}


def loss_fn(model: Any, rows: jax.Array) -> jax.Array:
    """Mean cross-entropy, in float32, of next tokens in rows [batch, length + 1]."""
    logits = model(rows[:, :-1]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:]).mean()
