"""A base in a file of its own, which a step reads where it needs it.

The file is in the format of safetensors, with the paths of our parameters as names. A
quantized kernel is there as its codes and its scales.
"""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx

from experiments.language_model import files
from experiments.language_model.models import Config, Model, empty, variables
from poet_jax import load_paged, save_paged
from poet_jax.update.quantization import Quantized, is_quantized

PARTS = ("codes", "scales")  # of a quantized kernel


def save(path: pathlib.Path, model: Model, settings: Mapping[str, Any]) -> None:
    """Write the parameters of a model, and the settings that they depend on."""
    arrays = {}
    for name, variable in variables(model, nnx.Param).items():
        leaf = variable.get_value()
        if is_quantized(leaf):
            arrays |= {f"{name}/{part}": getattr(leaf, part) for part in PARTS}
        else:
            arrays[name] = leaf
    save_paged(arrays, path, {"settings": json.dumps(dict(settings))})


def load(
    path: pathlib.Path, config: Config, dtype: Any, settings: Mapping[str, Any]
) -> Model:
    """The model that `save` wrote, whose large arrays stay in the file.

    Raises ValueError for a file of other settings, and as `poet_jax.load_paged`.
    """
    files.check_settings(path, settings, "Use these, or another --base.")
    model, arrays = empty(config, dtype), load_paged(path)
    for name, variable in variables(model, nnx.Param).items():
        if name in arrays:
            variable.set_value(arrays[name])
        else:
            parts = (arrays[f"{name}/{part}"] for part in PARTS)
            kind = jnp.dtype(dtype), settings["quantize"]
            variable.set_value(Quantized(*parts, tuple(variable.shape), *kind))
    return model
