"""Decoders of text, with the parts and names of public checkpoints.

`Llama` is the model of Llama, SmolLM, Qwen2 and Gemma; `GPT2` is that of GPT-2. Tokens
are int32 [batch, length], and logits [batch, length, vocabulary]. A path of a parameter
is its public name with another last step: "layers/0/mlp/up_proj/kernel" is what public
files call "model.layers.0.mlp.up_proj.weight".
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from experiments.language_model.gpt2 import GPT2, GPT2Config
from experiments.language_model.llama import Llama, LlamaConfig

Model = Llama | GPT2
Config = LlamaConfig | GPT2Config

SIZES: dict[str, Config] = {
    "1m": LlamaConfig(2048, 160, 2, 5, 1, 32, 448, tied=True),
    "10m": LlamaConfig(4096, 320, 8, 5, 1, 64, 896, tied=True),
    # GPT-2 small, SmolLM-135M, TinyLlama 1.1B and OpenLLaMA 3B.
    "125m": GPT2Config(),
    "135m": LlamaConfig(49_152, 576, 30, 9, 3, 64, 1536, tied=True),
    "1b": LlamaConfig(32_000, 2048, 22, 32, 4, 64, 5632),
    "3b": LlamaConfig(32_000, 3200, 26, 32, 32, 100, 8640, epsilon=1e-6),
}


def make(config: Config, seed: int = 0, dtype: Any = jnp.float32) -> Model:
    """A model with random parameters; under `nnx.eval_shape` it allocates nothing."""
    rngs = nnx.Rngs(seed)
    if isinstance(config, GPT2Config):
        return GPT2(config, dtype=dtype, rngs=rngs)
    return Llama(config, dtype=dtype, rngs=rngs)


def variables(module: nnx.Module, kind: Any = ...) -> dict[str, nnx.Variable]:
    """The module's own variables of a kind, such as `nnx.Param`, by path."""
    flat = nnx.to_flat_state(nnx.state(module, kind))
    return {"/".join(map(str, path)): variable for path, variable in flat}


def loss_fn(model: Any, rows: jax.Array) -> jax.Array:
    """Mean cross-entropy, in float32, of next tokens in rows [batch, length + 1]."""
    logits = model(rows[:, :-1]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:]).mean()
