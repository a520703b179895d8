"""Turn a function and example arguments into a Graph of single equations.

This is the only file that knows the shape of a jaxpr.
"""

import itertools
import os
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util
from jax.ref import Ref

from poet_jax.core.equation import Equation, Literal, nbytes_of
from poet_jax.core.errors import CannotTrace, ClosesOverTracer
from poet_jax.core.graph import Graph, Node, Value
from poet_jax.core.purity import PURE, STRUCTURED
from poet_jax.core.rebuilding import without_dead_code
from poet_jax.core.references import (
    Reference,
    as_function,
    is_reference,
    is_seen,
    is_whole,
    is_written,
)

# Call-like primitives that mean "evaluate this jaxpr here", and the parameter with it.
_INLINED = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
}


def trace(fun: Callable, *args: Any, **kwargs: Any) -> Graph:
    """Trace `fun` to a graph with one equation per node, without dead code.

    `fun` may be a `jax.jit` result; its static and donated arguments are honoured.
    Arguments are pytrees of arrays or `jax.ShapeDtypeStruct`s; nothing is computed.
    Raises CannotTrace from JAX's error, with the place in the caller's code, and the
    package's own ValueErrors as they are.
    """
    jitted = fun if hasattr(fun, "trace") else jax.jit(fun)
    try:
        traced = jitted.trace(*args, **kwargs)
    except CannotTrace:
        raise  # is more specific than the error below
    except Exception as error:
        if isinstance(error, ValueError) and _is_own(error):
            raise
        name = getattr(fun, "__name__", type(fun).__name__)
        lines = [x for x in map(str.strip, str(error).splitlines()) if x]
        lines = lines or [type(error).__name__]
        # Where the first line only announces the reason, that comes next.
        reason = " ".join(lines[: 2 if lines[0].endswith(":") else 1])
        reason = reason.rstrip(".").replace(". ", "; ")
        raise CannotTrace(
            f"{name!r} cannot be traced{_place(error)}: {reason}. Make "
            f"jax.jit({name}).trace(...) work on the same arguments first."
        ) from error
    if len(traced.jaxpr.jaxpr.invars) != traced.in_tree.num_leaves:
        raise ClosesOverTracer(
            "The function closes over a value that another JAX transformation is "
            "tracing. Pass that value as an argument."
        )
    return _Builder(traced.jaxpr.consts).build(traced)


def trace_part(fun: Callable, *args: Any) -> Graph:
    """As `trace`, for nodes that are to be part of another graph: results of `fun` may
    be its arguments, or one value twice."""
    traced = jax.jit(fun).trace(*args)
    return _Builder(traced.jaxpr.consts).build(traced, shared=True)


def trace_body(jaxpr: Any) -> Graph:
    """The graph of a body among an equation's parameters, of its operands."""
    return _Builder(()).body(jaxpr)


_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
# Frames that are not the caller's: Python's, installed packages' and this package's.
_INSTALLED = (
    *(
        os.path.join(sysconfig.get_path(name), "")
        for name in ("stdlib", "purelib", "platlib")
    ),
    _PACKAGE,
)


def _place(error: BaseException) -> str:
    """ " at file:line in function", the innermost frame of the caller's own code."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not os.path.abspath(frame.filename).startswith(_INSTALLED):
            file = os.path.basename(frame.filename)
            return f" at {file}:{frame.lineno} in {frame.name}"
    return ""


def _is_own(error: BaseException) -> bool:
    """Whether the package itself raised it, and so says what to write instead."""
    *_, frame = traceback.extract_tb(error.__traceback__)
    return os.path.abspath(frame.filename).startswith(_PACKAGE)


class _Builder:
    """Collects values and nodes while walking a jaxpr and the jaxprs it calls."""

    def __init__(self, consts):
        self.values: list[Value] = []
        self.nodes: list[Node] = []
        self.constants: dict[int, Any] = {}
        self.references: dict[int, Reference] = {}  # that the caller holds
        self.consts = consts

    def build(self, traced, shared: bool = False) -> Graph:
        """The graph. With `shared`, an output may be an argument, or another output."""
        jaxpr = traced.jaxpr.jaxpr
        leaves = jax.tree_util.tree_leaves_with_path(traced.args_info)
        env: dict[Any, Any] = {}
        arguments = []
        for var, (path, _) in zip(jaxpr.invars, leaves, strict=True):
            arguments.append(self.value(var.aval, _argument_name(path)))
            self.let(env, var, arguments[-1])
        for number, (var, const) in enumerate(
            zip(jaxpr.constvars, self.consts, strict=True)
        ):
            self.let(env, var, self.constant(const, var.aval, f"constant{number}"))
        self.walk(jaxpr, env, prefix="", backward=False)
        given = dict(zip(arguments, leaves, strict=True))
        donated = {v for v, (_, x) in given.items() if x.donated}
        kept = {*given, *self.constants} - donated
        outputs: list[int] = []
        references = {v: x for v, x in self.references.items() if x.held != v}
        for number, (operand, aval) in enumerate(
            [
                *((self.read(var, env), var.aval) for var in jaxpr.outvars),
                *((x.held, self.values[v].aval) for v, x in references.items()),
            ]
        ):
            if isinstance(operand, Literal):
                operand = self.constant(operand.value, aval, f"literal{number}")
                kept.add(operand)
            # The caller may delete or donate an output, so it shares no array.
            if not shared and (operand in kept or operand in outputs):
                operand = self.copy(operand)
            outputs.append(operand)
        graph = Graph(
            tuple(self.values),
            tuple(self.nodes),
            tuple(arguments),
            tuple(outputs),
            self.constants,
            frozenset(donated.union(references)),
            traced.in_tree,
            traced.out_tree,
            references=tuple(references),
        )
        return without_dead_code(graph)

    def body(self, jaxpr) -> Graph:
        """The graph of an equation's body; an output may be an argument, or another
        output."""
        inner, consts = _open(jaxpr)
        arguments = [self.value(var.aval, "operand") for var in inner.invars]
        env: dict[Any, Any] = dict(zip(inner.invars, arguments, strict=True))
        for var, const in zip(inner.constvars, consts, strict=True):
            env[var] = self.constant(const, var.aval, "constant")
        self.walk(inner, env, prefix="", backward=False)
        outputs = []
        for var in inner.outvars:
            operand = self.read(var, env)
            if isinstance(operand, Literal):
                operand = self.constant(operand.value, var.aval, "literal")
            outputs.append(operand)
        return without_dead_code(
            Graph(
                tuple(self.values),
                tuple(self.nodes),
                tuple(arguments),
                tuple(outputs),
                self.constants,
            )
        )

    def let(self, env, var, value: int) -> None:
        """Let a variable of the whole function be `value`, or a reference to it."""
        if is_reference(var.aval):
            env[var] = self.references[value] = Reference(value)
        else:
            env[var] = value

    def value(self, aval, name: str) -> int:
        is_key = jnp.issubdtype(aval.dtype, jax.dtypes.extended)
        weak_type = bool(getattr(aval, "weak_type", False))
        on_host = getattr(aval, "memory_space", None) == jax.memory.Space.Host
        manual = getattr(aval, "manual_axis_type", None)
        self.values.append(
            Value(
                name,
                nbytes_of(aval),
                tuple(aval.shape),
                aval.dtype,
                weak_type,
                # A page is read back without a weak type.
                pageable=not (is_key or weak_type or on_host),
                on_host=on_host,
                varying=getattr(manual, "varying", frozenset()),
            )
        )
        return len(self.values) - 1

    def constant(self, array, aval, name: str) -> int:
        number = self.value(aval, name)
        if not isinstance(array, jax.Array | Ref):
            weak = getattr(aval, "weak_type", False)
            # Only a Python number makes a weakly typed array.
            python = np.asarray(array).item() if weak else array
            # A copy, as in jax.jit: a NumPy array may change.
            array = jnp.array(python, None if weak else aval.dtype)
        self.constants[number] = array
        return number

    def copy(self, value: int) -> int:
        """A copy of `value`, made by a node of its own."""
        jaxpr = jax.jit(jnp.copy).trace(self.values[value].aval).jaxpr.jaxpr
        env: dict[Any, int | Literal] = {jaxpr.invars[0]: value}
        self.walk(jaxpr, env, prefix="output", backward=False)
        copied = self.read(jaxpr.outvars[0], env)
        assert not isinstance(copied, Literal)
        return copied

    def read(self, var, env) -> Any:
        """A value's number, a literal or a reference."""
        if isinstance(var, jex_core.Literal):
            return Literal(var.val)
        return env[var]

    def walk(self, jaxpr, env, prefix: str, backward: bool) -> None:
        for eqn in jaxpr.eqns:
            stack = "/".join(filter(None, (prefix, str(eqn.source_info.name_stack))))
            is_backward = backward or "transpose(" in stack
            parameter = _INLINED.get(eqn.primitive.name)
            if parameter is None:
                self.append(eqn, env, stack, is_backward)
                continue
            inner, consts = _open(eqn.params[parameter])
            operands = [self.read(var, env) for var in eqn.invars]
            inner_env: dict[Any, Any] = dict(zip(inner.invars, operands, strict=True))
            for var, const in zip(inner.constvars, consts, strict=True):
                inner_env[var] = self.constant(
                    const, var.aval, f"constant{len(self.values)}"
                )
            self.walk(inner, inner_env, stack, is_backward)
            for var, result in zip(eqn.outvars, inner.outvars, strict=True):
                env[var] = self.read(result, inner_env)

    def append(self, eqn, env, stack: str, backward: bool) -> None:
        operands = [self.read(var, env) for var in eqn.invars]
        name = _node_name(eqn, stack)
        variables = (*eqn.invars, *eqn.outvars)
        if any(is_reference(var.aval) for var in variables):
            self.refer(eqn, operands, env, name, backward)
            return
        writes = self.results(eqn.outvars, env, name)
        equation = _equation(eqn, operands, writes)
        self.nodes.append(Node.of(name, [equation], writes, backward))

    def results(self, variables, env, name: str) -> list[int]:
        """Values that an equation writes to `variables`."""
        for var in variables:
            env[var] = self.value(var.aval, f"{name}.{len(self.values)}")
        return [env[var] for var in variables]

    def refer(self, eqn, operands, env, name: str, backward: bool) -> None:
        """An equation with references among its operands or results."""
        match eqn.primitive.name, operands:
            case "new_ref", [value]:
                env[eqn.outvars[0]] = Reference(value)
            case "freeze", [reference]:
                env[eqn.outvars[0]] = reference.held
            case "free_ref", _:
                pass
            case "get", [reference] if is_whole(eqn):
                env[eqn.outvars[0]] = reference.held
            case "swap", [reference, value] if is_whole(eqn):
                env[eqn.outvars[0]], reference.held = reference.held, value
            case _:
                self.call(eqn, operands, env, name, backward)

    def call(self, eqn, operands, env, name: str, backward: bool) -> None:
        """A node of an equation with references, as a function of what they hold."""
        called = as_function(eqn)
        writes = self.results(called.outvars, {}, name)
        given = [x.held if isinstance(x, Reference) else x for x in operands]
        equation = _equation(called, given, writes)
        self.nodes.append(Node.of(name, [equation], writes, backward))
        results = iter(writes)
        for var, value in zip(eqn.outvars, results, strict=False):
            env[var] = Reference(value) if is_reference(var.aval) else value
        for var, operand in zip(eqn.invars, operands, strict=True):
            if isinstance(operand, Reference):
                held = next(results)
                operand.held = held if is_written(eqn, var) else operand.held


def _equation(eqn, operands, results) -> Equation:
    def shapes(variables):
        return tuple(
            jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in variables
        )

    return Equation(
        eqn.primitive,
        eqn.params,
        tuple(operands),
        tuple(results),
        shapes(eqn.invars),
        shapes(eqn.outvars),
        tuple(_bodies(eqn)),
        has_effect=any(map(is_seen, eqn.effects)),
        unknown=frozenset(_unknown(eqn)),
        context=eqn.ctx,
    )


def _unknown(eqn) -> Iterator[str]:
    """Names of the operations of an equation that are not known to be functions of
    their operands."""
    name = eqn.primitive.name
    if name in STRUCTURED:
        for inner in jax.tree.leaves(eqn.params, is_leaf=_is_jaxpr):
            if _is_jaxpr(inner):
                for eqn in _open(inner)[0].eqns:
                    yield from _unknown(eqn)
    elif name not in PURE:
        yield eqn.params.get("target_name", name)


def _is_jaxpr(x: Any) -> bool:
    return isinstance(x, jex_core.Jaxpr | jex_core.ClosedJaxpr)


def _bodies(eqn):
    """(equations, runs) of each body of a control-flow equation, for pricing.

    A `while` counts one trip, as their number is unknown; a `cond` its longest branch.
    """
    if eqn.primitive.name == "cond":
        branches = [_inner_equations(branch) for branch in eqn.params["branches"]]
        yield max(branches, key=len), 1
        return
    runs = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
    for inner in jex_core.jaxprs_in_params(eqn.params):
        yield _inner_equations(inner), runs


def _inner_equations(jaxpr) -> tuple[Equation, ...]:
    """Equations of a body and what it calls, numbered on their own: operands first."""
    equations: list[Equation] = []
    count = itertools.count()

    def walk(jaxpr, env) -> list["int | Literal"]:
        def read(var) -> "int | Literal":
            return Literal(var.val) if isinstance(var, jex_core.Literal) else env[var]

        env |= {var: next(count) for var in jaxpr.constvars}
        for eqn in jaxpr.eqns:
            operands = [read(var) for var in eqn.invars]
            if parameter := _INLINED.get(eqn.primitive.name):
                body, _ = _open(eqn.params[parameter])
                results = walk(body, dict(zip(body.invars, operands, strict=True)))
            else:
                results = [next(count) for _ in eqn.outvars]
                equations.append(_equation(eqn, operands, results))
            env |= dict(zip(eqn.outvars, results, strict=True))
        return [read(var) for var in jaxpr.outvars]

    inner, _ = _open(jaxpr)
    walk(inner, {var: next(count) for var in inner.invars})
    return tuple(equations)


def _open(jaxpr):
    """(jaxpr, constants) of a closed or an open jaxpr."""
    if isinstance(jaxpr, jex_core.ClosedJaxpr):
        return jaxpr.jaxpr, jaxpr.consts
    return jaxpr, ()


def _argument_name(path) -> str:
    (positional, argument, *rest) = path
    root = "" if positional.idx else "arg"
    name = f"{root}{argument.key if hasattr(argument, 'key') else argument.idx}"
    return "/".join(filter(None, (name, path_name(rest))))


def path_name(path: Iterable[Any]) -> str:
    """The path of a pytree's leaf, its steps joined by "/".

    The value of an nnx variable has the variable's path.
    """
    own = (k for k in path if getattr(k, "name", None) != "value")
    steps = (getattr(k, "key", getattr(k, "name", getattr(k, "idx", k))) for k in own)
    return "/".join(map(str, steps))


def _node_name(eqn, stack: str) -> str:
    """The last two scopes of the name stack, else file:line; then the primitive."""
    scopes = [
        scope.strip("()")
        for scope in stack.replace("transpose(", "").replace("jvp(", "").split("/")
    ]
    scopes = [scope for scope in scopes if scope and "(" not in scope]
    if not scopes:
        where = source_info_util.summarize(eqn.source_info).split(" ")[0]
        scopes = [":".join(where.rsplit("/", 1)[-1].split(":")[:2])]
    return "/".join((*filter(None, scopes[-2:]), eqn.primitive.name))
