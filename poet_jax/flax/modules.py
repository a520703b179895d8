"""nnx modules as arrays, and arrays as the same modules again.

A step runs on copies of modules. What it has changed in them is written to the modules
by `nnx.update_context`, which knows of each object which one it is a copy of: objects
stay the same ones where a step shares, moves or replaces them.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx

from poet_jax.core.errors import CannotTrace

_TAG = "poet_jax"


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Structure:
    """What a step has made of modules, but for arrays.

    Attributes:
      graphdef: it says of each object which one it was before the step.
      unchanged: paths of arrays, outside of variables, that are those of before.
    """

    graphdef: Any
    unchanged: tuple[tuple[Any, ...], ...]


def split(args: Any, kwargs: Any) -> tuple[Any, Any, Any, list[Any]]:
    """(structure, variables, all other arrays, modules) of a call's arguments."""
    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=nnx.graph.is_graph_node)
    is_module = tuple(map(nnx.graph.is_graph_node, leaves))
    modules = list(itertools.compress(leaves, is_module))
    others = [x for x in leaves if not nnx.graph.is_graph_node(x)]
    graphdef, variables, arrays = nnx.split(modules, nnx.Variable, ...)
    return (tree, is_module, graphdef), variables, (arrays, others), modules


def call(step: Any, structure: Any, variables: Any, rest: Any) -> Any:
    """Call `step` on copies of the modules that `split` found.

    Returns their variables afterwards, the result of `step`, a `Structure`, and the
    arrays that have changed.

    Raises CannotTrace for an attribute that is neither an array of the module nor a
    constant.
    """
    tree, is_module, graphdef = structure
    arrays, others = rest
    with copies(nnx.merge(graphdef, variables, arrays)) as modules:
        module, other = iter(modules), iter(others)
        leaves = [next(module if is_one else other) for is_one in is_module]
        args, kwargs = jax.tree.unflatten(tree, leaves)
        result = step(*args, **kwargs)
        graphdef, variables, after = split_copies(modules, nnx.Variable, ...)
    try:
        hash(graphdef)
    except TypeError as error:
        raise CannotTrace(
            "A plain attribute of a module must be a constant, and the step sets one "
            f"to another value ({error}). Assign nnx.data(array), or an nnx.Variable."
        ) from error
    known = dict(nnx.to_flat_state(arrays))
    same, changed = [], []
    for path, x in nnx.to_flat_state(after):
        if path in known and known[path] is x:
            same.append(path)
        else:
            changed.append((path, x))
    return (
        variables,
        result,
        Structure(graphdef, tuple(same)),
        nnx.from_flat_state(changed),
    )


def is_same(structure: Any, after: Structure) -> bool:
    """Whether a step has changed arrays and values of variables alone."""
    return after.graphdef == structure[-1].with_same_outer_index()


def restructure(
    modules: Any, after: Structure, variables: Any, before: Any, changed: Any
) -> None:
    """Write what `call` returns to `modules`, whose arrays were `before`."""
    known = dict(nnx.to_flat_state(before))
    same = nnx.from_flat_state((path, known[path]) for path in after.unchanged)
    write_back(modules, after.graphdef, variables, same, changed)


@contextlib.contextmanager
def copies(modules: Any) -> Iterator[Any]:
    """Copies of modules, for `split_copies` in the same context."""
    with nnx.update_context(_TAG):
        with nnx.split_context(_TAG) as context:
            parts = context.split(modules)
        with nnx.merge_context(_TAG, inner=True) as context:
            copied = context.merge(*parts)
        yield copied


def split_copies(modules: Any, *filters: Any) -> tuple[Any, ...]:
    """As `nnx.split`, with a graph for `write_back`."""
    with nnx.split_context(_TAG) as context:
        return context.split(modules, *filters)


def write_back(modules: Any, graphdef: Any, *states: Any) -> None:
    """Give `modules` the state and the structure that their copies have."""
    with nnx.update_context(_TAG):
        with nnx.split_context(_TAG) as context:
            context.split(modules)
        with nnx.merge_context(_TAG, inner=False) as context:
            context.merge(graphdef, *states)
