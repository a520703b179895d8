"""Models in the files of Hugging Face: safetensors beside a config.json.

On reading one array at a time is in memory twice, and on writing those of one file.
"""

import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.language_model import files
from experiments.language_model.architectures import (
    BUFFERS,
    HEAD,
    Architecture,
    architecture_of,
    public_config,
    read_config,
)
from experiments.language_model.models import (
    IN_RAM,
    Model,
    Place,
    empty,
    variables,
)
from poet_jax import save_paged

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FILE_BYTES = 2**29  # of the arrays in a file, but for one that is larger


def load(
    where: pathlib.Path | str, dtype: Any = jnp.float32, place: Place = IN_RAM
) -> Model:
    """The model in a folder, or in a file beside its config.json, as `dtype`.

    One array at a time is in RAM, but for what `place` keeps there.

    Raises FileNotFoundError for a file that is not there. Raises ValueError for a
    damaged file, an architecture or option that our models have not, and arrays that
    are missing, unknown or misshapen.
    """
    where = pathlib.Path(where)
    folder = where.parent if where.is_file() else where
    architecture, config = read_config(folder)
    model = empty(config, dtype)
    parameters = variables(model, nnx.Param)
    paths = {architecture.public(path): path for path in parameters}
    files_of = [where] if where.is_file() else _places(folder)
    expected = {
        name: parameters[path].shape[:: -1 if architecture.turns(path) else 1]
        for name, path in paths.items()
    }
    found = {}
    for one in files_of:
        with files.opened(one) as file:
            shapes = files.shapes(file)
        names = _names(shapes, architecture, HEAD in expected)
        found |= {name: shapes[stored] for stored, name in names.items()}
    files.check(found, expected, folder, "Use the config.json of these files.")
    for one in files_of:
        with files.opened(one) as file:
            names = _names(file.keys(), architecture, HEAD in expected)
            for stored, name in names.items():
                array, path = file.get_tensor(stored), paths[name]
                array = array.T if architecture.turns(path) else array
                parameters[path].set_value(place(path, jnp.array(array, dtype)))
    return model


def _places(folder: pathlib.Path) -> list[pathlib.Path]:
    """The files in which a model's arrays are."""
    index = folder / INDEX
    if not index.is_file():
        return [folder / SINGLE]
    names = files.read_json(index).get("weight_map", {}).values()
    return [folder / name for name in sorted(set(names))]


def _names(
    stored: Iterable[str], architecture: Architecture, has_head: bool
) -> dict[str, str]:
    """The full name of each stored parameter; of some files the prefix is left out.

    A head that a model has not is a copy of its embedding.
    """
    prefix = architecture.prefix
    return {
        name: HEAD if name == HEAD else prefix + name.removeprefix(prefix)
        for name in stored
        if not name.endswith(BUFFERS) and (has_head or name != HEAD)
    }


def save(
    model: Model, folder: pathlib.Path | str, file_bytes: int = FILE_BYTES
) -> None:
    """Write the model, in several files if it has more than `file_bytes`.

    Raises ValueError for a model that is of no public architecture.
    """
    folder = pathlib.Path(folder)
    architecture = architecture_of(model.config)[1]
    folder.mkdir(parents=True, exist_ok=True)
    found = variables(model, nnx.Param)
    sizes = {path: variable[...].nbytes for path, variable in found.items()}
    groups, places = _groups(sizes, file_bytes), {}
    for number, group in enumerate(groups, 1):
        name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        arrays = {}
        for path in group:
            array = np.asarray(found[path][...])
            array = array.T if architecture.turns(path) else array
            arrays[architecture.public(path)] = array
        name = SINGLE if len(groups) == 1 else name
        save_paged(arrays, folder / name, {"format": "pt"})
        places |= dict.fromkeys(arrays, name)
    files.write_json(
        folder / "config.json",
        public_config(model.config, jnp.dtype(model.dtype).name),
    )
    _index(folder, places, sum(sizes.values()))


def _index(folder: pathlib.Path, places: Mapping[str, str], total_bytes: int) -> None:
    """Say which file each array is in, if there are several, and drop older files."""
    if set(places.values()) == {SINGLE}:
        (folder / INDEX).unlink(missing_ok=True)
        return
    said = {"metadata": {"total_size": total_bytes}, "weight_map": dict(places)}
    files.write_json(folder / INDEX, said)
    (folder / SINGLE).unlink(missing_ok=True)


def _groups(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """The names in groups of `most` bytes together, or of one that is larger."""
    groups, room = [], 0
    for name, nbytes in sizes.items():
        if not groups or nbytes > room:
            groups.append([])
            room = most
        groups[-1].append(name)
        room -= nbytes
    return groups
