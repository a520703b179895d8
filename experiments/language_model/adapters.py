"""Adapters in the public files of PEFT: LoRA matrices beside an adapter_config.json.

A file has `lora_A` [rank, inputs] and `lora_B` [outputs, rank] of each matrix; the
layer computes with the matrix and `lora_alpha / r` times their product
(huggingface.co/docs/peft).
"""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.language_model import files
from experiments.language_model.architectures import architecture_of
from experiments.language_model.models import Model, Place, variables
from poet_jax import save_paged
from poet_jax.update.part import Adapter, Part

ARRAYS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
DEFAULT = 8  # of r and of lora_alpha
# Options of adapter_config.json that change the result, and the values supported.
OPTIONS = {
    "use_dora": False,
    "use_rslora": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "bias": "none",
}


def _kernels(model: Model) -> dict[str, nnx.Variable]:
    """The model's matrices, by path."""
    found = variables(model, nnx.Param).items()
    return {path: variable for path, variable in found if path.endswith("/kernel")}


def _module(model: Model, path: str) -> str:
    """The public name of the layer with a matrix, such as "model.layers.0.mlp.c_fc"."""
    architecture = architecture_of(model.config)[1]
    return architecture.public(path).removesuffix(".weight")


def save(part: Part, model: Model, folder: pathlib.Path | str) -> None:
    """Write the adapters of a part of the model's parameters.

    Raises ValueError for a part without adapters, and for adapters of several ranks.
    """
    ranks = sorted({adapter.a.shape[1] for adapter in part.adapters.values()})
    if len(ranks) != 1:
        raise ValueError(
            f"The adapters have the ranks {ranks}. A file holds adapters of one rank. "
            "Use update=poet_jax.update.lora(8)."
        )
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {}
    for path, adapter in part.adapters.items():
        name = f"base_model.model.{_module(model, path)}"
        arrays[f"{name}.lora_A.weight"] = np.asarray(adapter.a).T
        arrays[f"{name}.lora_B.weight"] = np.asarray(adapter.b).T
    save_paged(arrays, folder / ARRAYS, {"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": ranks[0],
        "lora_alpha": ranks[0],
        "lora_dropout": 0.0,
        "target_modules": _targets(part, model),
        "fan_in_fan_out": not architecture_of(model.config)[1].turned,
        "inference_mode": True,
        **OPTIONS,
    }
    files.write_json(folder / CONFIG, config)


def _targets(part: Part, model: Model) -> list[str]:
    """Last steps of the adapted layers' names, or whole names if these mean more."""
    last = {path.split("/")[-2] for path in part.adapters}
    meant = {path for path in _kernels(model) if path.split("/")[-2] in last}
    if meant == part.adapters.keys():
        return sorted(last)
    return sorted(_module(model, path) for path in part.adapters)


def load(folder: pathlib.Path | str, model: Model) -> Part:
    """The adapters in a folder, as a part of the model's parameters.

    Raises FileNotFoundError for a file that is not there. Raises ValueError for
    adapters of another kind, a damaged file, and arrays that are missing, unknown or
    misshapen.
    """
    folder = pathlib.Path(folder)
    scale = _scale(folder / CONFIG)
    kernels = {
        f"base_model.model.{_module(model, path)}": (path, variable)
        for path, variable in _kernels(model).items()
    }
    adapters = {}
    with files.opened(folder / ARRAYS) as file:
        shapes = files.shapes(file)
        found = {name.rpartition(".lora_")[0] for name in shapes} & kernels.keys()
        expected = {}
        for name in found:
            inputs, outputs = kernels[name][1].shape
            rank = (shapes.get(f"{name}.lora_A.weight") or (1,))[0]
            expected[f"{name}.lora_A.weight"] = (rank, inputs)
            expected[f"{name}.lora_B.weight"] = (outputs, rank)
        remedy = "Use the adapters of this model."
        files.check(shapes, expected, folder / ARRAYS, remedy)
        for name in sorted(found):
            path, variable = kernels[name]
            a, b = (file.get_tensor(f"{name}.lora_{x}.weight").T for x in "AB")
            b = b * np.asarray(scale, b.dtype)
            adapters[path] = Adapter(*(jnp.array(x, variable.dtype) for x in (a, b)))
    return Part(adapters=adapters, trained=())


def _scale(path: pathlib.Path) -> float:
    """What adapter_config.json has the product of two matrices multiplied by."""
    given = files.read_json(path)
    for option, value in {"peft_type": "LORA", **OPTIONS}.items():
        if given.get(option, value) not in (value, None):
            raise ValueError(
                f"{path} has {option}={given[option]!r}. Adapters can be read with "
                f"{option}={value!r} only. Use adapters of plain LoRA."
            )
    return given.get("lora_alpha", DEFAULT) / given.get("r", DEFAULT)


@jax.jit
def _sum(kernel: jax.Array, adapter: Adapter) -> jax.Array:
    return kernel + adapter.a @ adapter.b


def added(part: Part, place: Place) -> Place:
    """As `place`, of matrices with their adapters added."""

    def place_sum(path: str, array: jax.Array) -> Any:
        if path in part.adapters:
            array = _sum(array, part.adapters[path])
        return place(path, array)

    return place_sum
