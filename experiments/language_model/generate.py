"""Text that a model continues, with a cache of keys and values."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from tokenizers import Tokenizer

from experiments.language_model.models import Model
from experiments.language_model.text import check_fits


@functools.partial(nnx.jit, donate_argnums=2)
def _forward(model, tokens, cache, start):
    """Logits [vocabulary] after `tokens` [1, length] at `start`, and the new cache."""
    hidden, cache = model.hidden(tokens, cache, start)
    return model.head(hidden[0, -1]).astype(jnp.float32), cache


def generate(
    model: Model, tokens: list[int], count: int, *, temperature: float = 0.0, seed=0
) -> list[int]:
    """`count` tokens that follow `tokens`, one or more.

    At temperature 0 each is the likeliest, else it is drawn from the softmax of the
    logits over the temperature.
    """
    cache, key = model.empty_cache(1, len(tokens) + count), jax.random.key(seed)
    new, made, start = list(tokens), [], 0
    for number in range(count):
        place = jnp.asarray(start, jnp.int32)
        logits, cache = _forward(model, jnp.asarray([new], jnp.int32), cache, place)
        start += len(new)
        if temperature:
            folded = jax.random.fold_in(key, number)
            new = [int(jax.random.categorical(folded, logits / temperature))]
        else:
            new = [int(logits.argmax())]
        made += new
    return made


def continued(
    model: Model, tokenizer: Tokenizer, prompt: str, count: int, temperature: float
) -> str:
    """The prompt with `count` tokens more.

    Raises ValueError for a prompt without tokens, and for more than the model's
    positions.
    """
    tokens = tokenizer.encode(prompt).ids
    if not tokens:
        raise ValueError(
            f"The prompt {prompt!r} has no token. A model continues at least one. Use "
            '--prompt="The".'
        )
    check_fits(tokenizer, len(tokens) + count, model.config)
    made = generate(model, tokens, count, temperature=temperature)
    return tokenizer.decode(tokens + made)
