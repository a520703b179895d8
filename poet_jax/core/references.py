"""Mutable references of JAX as the values that they hold.

A graph has no references. A write makes a new value, and every operation on a
reference is a function of the value that it holds. A reference of the caller's is an
argument or a constant. What it holds after the step is one of `Graph.outputs`.
"""

import dataclasses
from typing import Any

import jax
from jax.ref import AbstractRef, Ref, freeze, new_ref

# Of primitives. They touch nothing but references, which are values here.
OPERATIONS = frozenset(
    "accum_grad_in_ref addupdate empty_ref free_ref freeze get new_ref swap".split()
)


@dataclasses.dataclass(eq=False)
class Reference:
    """A reference while a function is traced.

    Attributes:
      held: the number of the value that it holds, or a literal.
    """

    held: Any


def is_reference(aval: Any) -> bool:
    return isinstance(aval, AbstractRef)


def held_by(x: Any) -> Any:
    """What a reference holds; anything else as it is."""
    return x[...] if isinstance(x, Ref) else x


def is_seen(effect: Any) -> bool:
    """Whether an effect is more than to make and end references of its own."""
    return type(effect).__name__ != "InternalMutableArrayEffect"


def is_whole(eqn: Any) -> bool:
    """Whether a "get" or "swap" is of all that the reference holds."""
    tree = eqn.params["tree"]
    return tree == jax.tree.structure(())


def is_written(eqn: Any, var: Any) -> bool:
    """Whether an equation may change what the reference `var` holds."""
    effects = [x for x in eqn.effects if getattr(x, "input", None) is var]
    return not effects or any(type(x).__name__ != "ReadEffect" for x in effects)


def as_function(eqn: Any) -> Any:
    """An equation on references as one on what they hold: a call.

    Operands and results are values in place of references. Results are those of `eqn`,
    and then what each reference among the operands holds.
    """

    def function(*operands: Any) -> tuple[Any, ...]:
        given = [
            new_ref(x) if is_reference(var.aval) else x
            for var, x in zip(eqn.invars, operands, strict=True)
        ]
        params = eqn.primitive.get_bind_params(eqn.params)
        with eqn.ctx.manager:
            results = eqn.primitive.bind(*given, **params)
        results = results if eqn.primitive.multiple_results else [results]
        return tuple(
            freeze(x) if isinstance(x, Ref) else x
            for x in (*results, *(x for x in given if isinstance(x, Ref)))
        )

    function.__name__ = eqn.primitive.name
    call = jax.jit(function)
    avals = (x.aval.inner_aval if is_reference(x.aval) else x.aval for x in eqn.invars)
    (called,) = jax.jit(lambda *operands: call(*operands)).trace(*avals).jaxpr.eqns
    return called
