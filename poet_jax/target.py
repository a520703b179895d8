"""The step that a file of the user's makes, as `path/to/file.py:function` names it."""

import contextlib
import importlib.util
import inspect
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

HOW_TO_RETURN = (
    "Such a function returns a step with its arguments, arrays or "
    "jax.ShapeDtypeStructs. A step is a function of arrays, or made by "
    "poet_jax.schedule, poet_jax.train_step or poet_jax.nnx.schedule. Use for example "
    "`return step, state, batch`."
)


def loaded(target: str) -> tuple[Any, ...]:
    """The step and its arguments that `target` names, as path/to/file.py:function.

    Raises ValueError for a target that names none, FileNotFoundError, and RuntimeError
    from any error of the file's own.
    """
    file, _, name = target.rpartition(":")
    path = pathlib.Path(file)
    if path.suffix != ".py" or not name.isidentifier():
        raise ValueError(
            f"{target!r} names neither a step, by a file and a function in it, nor an "
            "instance, a file of JSON. Use for example train.py:make_step, or "
            "instance.json."
        )
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: there is no such file. Paths are relative to "
            f"{pathlib.Path.cwd()}. Use the path of a file that exists."
        )
    with _errors_of(target):
        module = _imported(path)
    make = getattr(module, name, None)
    if not inspect.isfunction(make) or inspect.signature(make).parameters:
        raise ValueError(
            f"{path} has no function {name} without arguments. "
            f"Its functions are {_signatures(module)}. {HOW_TO_RETURN}"
        )
    with _errors_of(target):
        made = make()
    if not (isinstance(made, tuple) and len(made) > 1 and callable(made[0])):
        raise ValueError(
            f"{target} must return a step with its arguments, returned {_kind(made)}. "
            f"{HOW_TO_RETURN}"
        )
    return made


def _imported(path: pathlib.Path) -> Any:
    """The module in a file, which may import what is beside it."""
    sys.path.insert(0, str(path.parent.resolve()))
    spec = importlib.util.spec_from_file_location(f"{path.stem}_of_a_step", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for themselves
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _errors_of(target: str) -> Iterator[None]:
    """Tell errors of the caller's own code, which need their traceback, from ours."""
    try:
        yield
    except Exception as error:
        raise RuntimeError(f"{target} was run, and failed as shown above.") from error


def _signatures(module: Any) -> str:
    """The functions that a module defines, with their arguments."""
    own = [
        f"{name}{inspect.signature(value)}"
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    return ", ".join(own) or "none"


def _kind(made: Any) -> str:
    """What a value is, in words: for a tuple what it holds."""
    if isinstance(made, tuple):
        return f"a tuple of {[type(x).__name__ for x in made]}"
    return f"one {type(made).__name__}"
