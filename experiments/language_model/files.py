"""Files of named arrays, in the format of safetensors, and of JSON beside them."""

import contextlib
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from safetensors import SafetensorError, safe_open

Shapes = Mapping[str, tuple[int, ...]]


@contextlib.contextmanager
def opened(path: pathlib.Path) -> Iterator[Any]:
    """The file as `safetensors.safe_open` has it, which reads arrays one by one.

    Raises FileNotFoundError without the file, and ValueError for a damaged one.
    """
    _check_is_file(path)
    try:
        file = safe_open(path, framework="numpy")
    except SafetensorError as error:
        raise ValueError(
            f"{path} is damaged: {error}. A file that is cut short, as by a broken "
            "download, cannot be read. Fetch or write it again."
        ) from error
    with file:
        yield file


def check_settings(path: pathlib.Path, now: Mapping[str, Any], remedy: str) -> None:
    """Raise ValueError unless the flags in the file's metadata are those of `now`.

    Raises as `opened` too.
    """
    with opened(path) as file:
        before = json.loads((file.metadata() or {}).get("settings", "{}"))
    different = [
        f"--{name}={before.get(name)}" for name in now if before.get(name) != now[name]
    ]
    if different:
        raise ValueError(
            f"{path} is of {' '.join(different)}. It can be used only with the same "
            f"flags. {remedy}"
        )


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """What a file says.

    Raises FileNotFoundError without the file, and ValueError for a damaged one.
    """
    _check_is_file(path)
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(
            f"{path} is damaged: {error}. It must be JSON. Fetch or write it again."
        ) from error


def write_json(path: pathlib.Path, said: dict[str, Any]) -> None:
    """Write what `read_json` reads."""
    path.write_text(json.dumps(said, indent=1) + "\n")


def _check_is_file(path: pathlib.Path) -> None:
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is not a file. Public checkpoints and adapters have it. Use the "
            "folder of one that does."
        )


def shapes(file: Any) -> dict[str, tuple[int, ...]]:
    """The shapes of the arrays in an open file, by name."""
    return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}


def check(found: Shapes, expected: Shapes, path: pathlib.Path, remedy: str) -> None:
    """Raise ValueError, naming them, if arrays are missing, extra or misshapen."""
    problems = {
        "without": sorted(expected.keys() - found.keys()),
        "with the unknown": sorted(found.keys() - expected.keys()),
        "with another shape of": [
            f"{name} {list(found[name])} instead of {list(shape)}"
            for name, shape in sorted(expected.items())
            if name in found and tuple(found[name]) != tuple(shape)
        ],
    }
    said = [f"{what} {_listed(names)}" for what, names in problems.items() if names]
    if said:
        raise ValueError(
            f"{path} is {' and '.join(said)}. Names and shapes must be those of the "
            f"model. {remedy}"
        )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
