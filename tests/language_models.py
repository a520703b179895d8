"""What tests of language models share."""

import numpy as np
from flax import nnx

from experiments.language_model.models import GPT2Config, LlamaConfig, variables

TINY = LlamaConfig(64, 16, 2, 4, 2, 6, 24, positions=32, tied=True)
TINY_GPT2 = GPT2Config(64, 16, 2, 4, positions=32)


@nnx.jit
def logits_of(model, tokens):
    return model(tokens)


def arrays_of(module):
    return {path: np.asarray(x[...]) for path, x in variables(module).items()}


def assert_same(one, other):
    one, other = arrays_of(one), arrays_of(other)
    assert one.keys() == other.keys()
    for name, array in one.items():
        np.testing.assert_array_equal(array, other[name], name)
