"""Operations as others that have kernels, and PRNG keys as what they hold."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.extend.random import threefry_prng_impl as threefry

from poet_jax.core.equation import Equation, Inner, Name
from poet_jax.core.graph import Value
from poet_jax.core.program import Program
from poet_jax.core.rebuilding import body
from poet_jax.core.trace import trace_part

KEY_WORDS = 2  # of a key of threefry


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """A body of control flow.

    Attributes:
      arguments: their names inside.
      equations: with names of their own.
      results: names; they may be arguments or constants, or one name twice.
      constants: arrays, by their names.
    """

    arguments: tuple[Name, ...]
    equations: tuple[Equation, ...]
    results: tuple[Name, ...]
    constants: dict[Name, np.ndarray]


def parts(equation: Equation) -> tuple[Part, ...]:
    """The bodies of an equation of an expanded program: of a `while` what says whether
    it goes on, and then what it repeats."""
    return equation.params["parts"] if equation.primitive.name in _BODIES else ()


def is_key(dtype: Any) -> bool:
    """Whether a dtype is that of threefry keys, JAX's default."""
    return jnp.issubdtype(dtype, jax.dtypes.prng_key) and "fry" in str(dtype)


def expanded(program: Program) -> Program:
    """`program` with other equations inside its nodes, where these have no kernel.

    Keys are uint32 [..., 2].
    """
    graph = program.graph
    nodes = tuple(
        dataclasses.replace(node, equations=tuple(_expanded(node.equations)))
        for node in graph.nodes
    )
    values = tuple(map(_with_words, graph.values))
    graph = dataclasses.replace(graph, nodes=nodes, values=values)
    return dataclasses.replace(program, graph=graph)


def _with_words(value: Value) -> Value:
    if not is_key(value.dtype):
        return value
    shape = (*value.shape, KEY_WORDS)
    return dataclasses.replace(value, shape=shape, dtype=jnp.dtype(jnp.uint32))


def as_words(aval: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """What keys are in C."""
    if not is_key(aval.dtype):
        return aval
    return jax.ShapeDtypeStruct((*aval.shape, KEY_WORDS), jnp.uint32)


def _expanded(equations: Iterable[Equation]) -> Iterator[Equation]:
    for equation in equations:
        avals = (*equation.operand_shapes, *equation.result_shapes)
        name = equation.primitive.name
        if name == "while" and equation.params["cond_jaxpr"].out_avals[0].shape:
            yield from _by(_one_condition, equation, equation.operand_shapes)
        elif name in _BODIES:
            yield _with_parts(equation)
        elif any(is_key(aval.dtype) for aval in avals):
            yield from _of_words(equation)
        elif name in _PARTS:
            yield from _by(_PARTS[name], equation, equation.operand_shapes)
        elif name == "reshape" and equation.params["dimensions"]:
            yield from _turned(equation)
        else:
            yield equation


def _with_parts(equation: Equation) -> Equation:
    """Control flow with its bodies as `Part`s among its parameters."""
    bodies = _BODIES[equation.primitive.name](equation.params)
    return dataclasses.replace(
        equation,
        params={**equation.params, "parts": tuple(map(_part, bodies))},
        operand_shapes=tuple(map(as_words, equation.operand_shapes)),
        result_shapes=tuple(map(as_words, equation.result_shapes)),
    )


def _part(jaxpr: Any) -> Part:
    avals = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in jaxpr.in_avals]
    graph = trace_part(jaxpr_as_fun(jaxpr), *avals)
    names: dict[int, Any] = {
        v: Inner() for v in (*graph.arguments, *graph.outputs, *graph.constants)
    }
    return Part(
        tuple(names[v] for v in graph.arguments),
        tuple(_expanded(body(graph, names))),
        tuple(names[v] for v in graph.outputs),
        {names[v]: np.asarray(words(x)) for v, x in graph.constants.items()},
    )


def words(x: Any) -> Any:
    """An array, or what keys hold."""
    if isinstance(x, jax.Array) and is_key(x.dtype):
        return jax.random.key_data(x)
    return x


def _turned(equation: Equation) -> Iterator[Equation]:
    """A reshape of axes in another order, with a transpose of its own."""
    order = tuple(equation.params["dimensions"])
    (aval,), moved = equation.operand_shapes, Inner()
    turned = jax.ShapeDtypeStruct(tuple(aval.shape[x] for x in order), aval.dtype)
    yield dataclasses.replace(
        equation,
        primitive=lax.transpose_p,
        params={"permutation": order},
        results=(moved,),
        result_shapes=(turned,),
    )
    yield dataclasses.replace(
        equation,
        params={**equation.params, "dimensions": None},
        operands=(moved,),
        operand_shapes=(turned,),
    )


def _of_words(equation: Equation) -> Iterator[Equation]:
    """An equation on keys as some on their words."""
    operands = tuple(map(as_words, equation.operand_shapes))
    name = equation.primitive.name
    if name in ("random_wrap", "random_unwrap", "random_clone", "copy"):
        yield dataclasses.replace(
            equation,
            primitive=lax.copy_p,
            params={},
            operand_shapes=operands,
            result_shapes=operands,
        )
        return
    single = all(x.shape == () for x in equation.operand_shapes)
    function = _FUNCTIONS.get(name) or _PARTS.get(name)
    if function is None or (name.startswith("random_") and not single):
        yield equation  # it will be refused by its name
        return
    yield from _by(function, equation, operands)


def _by(
    function: Callable[..., Any],
    equation: Equation,
    operands: Sequence[jax.ShapeDtypeStruct],
) -> Iterator[Equation]:
    """The equations of `function(params, *operands)` in place of one."""
    graph = trace_part(lambda *words: function(equation.params, *words), *operands)
    names = dict(zip(graph.arguments, equation.operands, strict=True))
    names |= dict(zip(graph.outputs, equation.results, strict=True))
    yield from _expanded(body(graph, names))


def _one_condition(params: dict[str, Any], *operands: jax.Array) -> list[jax.Array]:
    """A batched `while`, as `vmap` makes it, with one condition.

    The loop runs while any element goes on; elements that have ended keep their values.
    """
    second = params["cond_nconsts"]
    third = second + params["body_nconsts"]
    test, body = (jaxpr_as_fun(params[x]) for x in ("cond_jaxpr", "body_jaxpr"))

    def goes_on(carry: tuple) -> jax.Array:
        return test(*operands[:second], *carry)[0]

    def step(carry: tuple) -> tuple:
        on = goes_on(carry)
        return tuple(
            lax.select(lax.broadcast_in_dim(on, x.shape, tuple(range(on.ndim))), x, old)
            for x, old in zip(body(*operands[second:third], *carry), carry, strict=True)
        )

    return list(lax.while_loop(lambda c: goes_on(c).any(), step, operands[third:]))


def _split(params: dict[str, Any], x: jax.Array) -> list[jax.Array]:
    axis, sizes = params["axis"], [int(size) for size in params["sizes"]]
    ends = itertools.accumulate(sizes)
    return [
        lax.slice_in_dim(x, end - size, end, axis=axis)
        for end, size in zip(ends, sizes, strict=True)
    ]


def _unstacked(params: dict[str, Any], x: jax.Array) -> list[jax.Array]:
    axis = params["axis"]
    return [
        lax.index_in_dim(x, number, axis, keepdims=False)
        for number in range(x.shape[axis])
    ]


def _stacked(params: dict[str, Any], *parts: jax.Array) -> jax.Array:
    axis = params["axis"]
    return lax.concatenate([lax.expand_dims(x, (axis,)) for x in parts], axis)


def _tiled(params: dict[str, Any], x: jax.Array) -> jax.Array:
    pairs = list(zip(params["reps"], x.shape, strict=True))
    axes = tuple(range(1, 2 * x.ndim, 2))
    repeated = lax.broadcast_in_dim(x, tuple(itertools.chain(*pairs)), axes)
    return repeated.reshape([count * size for count, size in pairs])


_BODIES: dict[str, Callable[[dict[str, Any]], Sequence[Any]]] = {
    "scan": lambda p: [p["jaxpr"]],
    "while": lambda p: [p["cond_jaxpr"], p["body_jaxpr"]],
    "cond": lambda p: p["branches"],
}
_PARTS: dict[str, Callable[..., Any]] = {
    "split": _split,
    "stack": _stacked,
    "tile": _tiled,
    "unstack": _unstacked,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "random_bits": lambda p, key: threefry.random_bits(
        key, p["bit_width"], tuple(p["shape"])
    ),
    "random_fold_in": lambda p, key, data: threefry.fold_in(key, data),
    "random_split": lambda p, key: threefry.split(key, tuple(p["shape"])),
    "random_seed": lambda p, seed: threefry.seed(seed),
    "squeeze": lambda p, key: lax.squeeze(key, p["dimensions"]),
    "reshape": lambda p, key: key.reshape(*p["new_sizes"], KEY_WORDS),
    "slice": lambda p, key: lax.slice(
        key,
        (*p["start_indices"], 0),
        (*p["limit_indices"], KEY_WORDS),
        (*(p["strides"] or (1,) * (key.ndim - 1)), 1),
    ),
    "broadcast_in_dim": lambda p, key: lax.broadcast_in_dim(
        key, (*p["shape"], KEY_WORDS), (*p["broadcast_dimensions"], len(p["shape"]))
    ),
}
