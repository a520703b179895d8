"""Element-wise operations as expressions of C.

Integers wrap around as in XLA: they are added, subtracted and multiplied unsigned.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from poet_jax.core.equation import Equation
from poet_jax.emit.c99.buffers import C_TYPES, NoForm

Rule = Callable[[dict[str, Any], Sequence[str], Sequence[str]], str]


def constant(value: Any) -> str:
    """A number, as C has it."""
    array = np.asarray(value)
    if array.dtype.kind == "f":
        array = np.float32(value)
        if np.isnan(array):
            return "poet_nan()"
        if np.isinf(array):
            return "poet_infinity()" if array > 0 else "(-poet_infinity())"
        plain = np.format_float_positional(array, unique=True, trim="0")
        scientific = np.format_float_scientific(array, unique=True, trim="0")
        text = min(plain, scientific, key=len)
        return f"({text}f)" if text.startswith("-") else f"{text}f"
    number = int(array)
    if array.dtype.kind == "u" or number >= 2**31:
        return f"{number}u"
    if number == -(2**31):
        return "INT32_MIN"
    return f"({number})" if number < 0 else str(number)


def is_float(dtype: str) -> bool:
    return dtype == "float32"


def _wrapping(sign: str) -> Rule:
    def rule(params: dict[str, Any], args: Sequence[str], dtypes: Sequence[str]) -> str:
        if is_float(dtypes[0]):
            return f"{args[0]} {sign} {args[1]}"
        c_type = C_TYPES[dtypes[0]]
        first, second = (f"(uint32_t){x}" for x in args)
        return f"({c_type})({first} {sign} {second})"

    return rule


def _infix(sign: str) -> Rule:
    return lambda params, args, dtypes: f"{args[0]} {sign} {args[1]}"


# Of numbers that are not the widest of their kind, or have no sign: compilers warn of a
# comparison that types decide.
_NARROW_ORDERS = {
    "<": "{2}({0}, {1})",
    ">": "{2}({1}, {0})",
    "<=": "!{2}({1}, {0})",
    ">=": "!{2}({0}, {1})",
}


def _order(sign: str) -> Rule:
    def rule(params: dict[str, Any], args: Sequence[str], dtypes: Sequence[str]) -> str:
        if dtypes[0] in ("float32", "int32"):
            return f"{args[0]} {sign} {args[1]}"
        less = "poet_less_i" if dtypes[0].startswith("i") else "poet_less_u"
        return _NARROW_ORDERS[sign].format(*args, less)

    return rule


def _call(of_floats: str, of_integers: str | None = None) -> Rule:
    """A call of a function of C, another one for integers."""

    def rule(params: dict[str, Any], args: Sequence[str], dtypes: Sequence[str]) -> str:
        name = of_floats if is_float(dtypes[0]) else of_integers
        if name is None:
            raise NoForm
        suffix = "_u" if dtypes[0] == "uint32" and name in _UNSIGNED else ""
        return f"{name}{suffix}({', '.join(args)})"

    return rule


_UNSIGNED = {f"poet_{name}_i" for name in ("divide", "remainder", "max", "min", "sign")}


def _negated(params: dict[str, Any], args: Sequence[str], dtypes: Sequence[str]) -> str:
    if is_float(dtypes[0]):
        return f"-{args[0]}"
    return f"({C_TYPES[dtypes[0]]})(0u - (uint32_t){args[0]})"


def _not(params: dict[str, Any], args: Sequence[str], dtypes: Sequence[str]) -> str:
    if dtypes[0] == "bool":
        return f"!{args[0]}"
    return f"({C_TYPES[dtypes[0]]})~{args[0]}"


def _selected(
    params: dict[str, Any], args: Sequence[str], dtypes: Sequence[str]
) -> str:
    which, *cases = args
    if dtypes[0] == "bool":
        return f"{which} ? {cases[1]} : {cases[0]}"
    text = cases[-1]
    for number, case in reversed(list(enumerate(cases[:-1]))):
        text = f"{which} <= {number} ? {case} : ({text})"
    return text


def _clamped(params: dict[str, Any], args: Sequence[str], dtypes: Sequence[str]) -> str:
    low, x, high = args
    if is_float(dtypes[1]):
        return f"poet_min(poet_max({x}, {low}), {high})"
    suffix = "_u" if dtypes[1] == "uint32" else ""
    return f"poet_min_i{suffix}(poet_max_i{suffix}({x}, {low}), {high})"


def _power(params: dict[str, Any], args: Sequence[str], dtypes: Sequence[str]) -> str:
    exponent = params["y"]
    if not is_float(dtypes[0]):
        if exponent < 0:
            raise NoForm
        return f"({C_TYPES[dtypes[0]]})poet_power_u((uint32_t){args[0]}, {exponent}u)"
    x = args[0]
    match exponent:
        case 0:
            return f"((void){args[0]}, 1.0f)"
        case 1:
            return x
        case 2:
            return f"{x} * {x}"
        case 3:
            return f"{x} * {x} * {x}"
        case -1:
            return f"1.0f / {x}"
    return f"poet_power_i({x}, {exponent})"


def _pow(params: dict[str, Any], args: Sequence[str], dtypes: Sequence[str]) -> str:
    if not is_float(dtypes[0]):
        raise NoForm
    if is_float(dtypes[1]):
        return f"poet_power({args[0]}, {args[1]})"
    suffix = "n" if dtypes[1] == "uint32" else "i"
    return f"poet_power_{suffix}({args[0]}, {args[1]})"


def _shifted(text: str) -> Rule:
    """A shift: no bit is left after one of as many bits as there are."""

    def rule(params: dict[str, Any], args: Sequence[str], dtypes: Sequence[str]) -> str:
        bits = 8 * np.dtype(dtypes[0]).itemsize
        unsigned = f"uint{bits}_t"
        x, y = args
        c_type = C_TYPES[dtypes[0]]
        if text == "arithmetic":
            at_most = f"(uint32_t){y} < {bits}u ? (uint32_t){y} : {bits - 1}u"
            return f"({c_type})poet_shift_right((int{bits}_t){x}, {at_most})"
        moved = f"(uint32_t)({unsigned}){x} {text} ((uint32_t){y} & 31u)"
        return f"({c_type})((uint32_t){y} < {bits}u ? {moved} : 0u)"

    return rule


def _converted(
    params: dict[str, Any], args: Sequence[str], dtypes: Sequence[str]
) -> str:
    return converted(args[0], dtypes[0], np.dtype(params["new_dtype"]).name)


def converted(x: str, old: str, new: str) -> str:
    """`x` of dtype `old` as one of dtype `new`."""
    if old == new:
        return x
    if new == "bool":
        return f"{x} != 0"
    if is_float(old):
        lows = {"int8": -128, "int16": -32768}
        highs = {"int8": 127, "int16": 32767, "uint8": 255, "uint16": 65535}
        match new:
            case "int32":
                return f"poet_integer({x})"
            case "uint32":
                return f"poet_unsigned({x})"
        low, high = lows.get(new, 0), highs[new]
        return f"({C_TYPES[new]})poet_integer_within({x}, {low}, {high})"
    return f"({C_TYPES[new]}){x}"


def _same_bits(
    params: dict[str, Any], args: Sequence[str], dtypes: Sequence[str]
) -> str:
    old, new = dtypes[0], np.dtype(params["new_dtype"]).name
    if np.dtype(old).itemsize != np.dtype(new).itemsize:
        raise NoForm
    if is_float(old) == is_float(new):
        return f"({C_TYPES[new]}){args[0]}"
    if is_float(new):
        return f"poet_of_bits((uint32_t){args[0]})"
    return f"({C_TYPES[new]})poet_bits({args[0]})"


def _reduced(params: dict[str, Any], args: Sequence[str], dtypes: Sequence[str]) -> str:
    if (params["exponent_bits"], params["mantissa_bits"]) != (8, 23):
        raise NoForm
    return args[0]


def _rounded(params: dict[str, Any], args: Sequence[str], dtypes: Sequence[str]) -> str:
    to_even = int(params["rounding_method"]) == 1
    return f"{'rintf' if to_even else 'roundf'}({args[0]})"


def _same(params: dict[str, Any], args: Sequence[str], dtypes: Sequence[str]) -> str:
    return args[0]


RULES: dict[str, Rule] = {
    "add": _wrapping("+"),
    "add_any": _wrapping("+"),
    "sub": _wrapping("-"),
    "mul": _wrapping("*"),
    "div": lambda p, a, d: (
        f"{a[0]} / {a[1]}" if is_float(d[0]) else _call("", "poet_divide_i")(p, a, d)
    ),
    "rem": _call("fmodf", "poet_remainder_i"),
    "neg": _negated,
    "max": _call("poet_max", "poet_max_i"),
    "min": _call("poet_min", "poet_min_i"),
    "abs": _call("fabsf", "poet_abs_i"),
    "sign": _call("poet_sign", "poet_sign_i"),
    "square": lambda p, a, d: _wrapping("*")(p, [a[0], a[0]], d),
    "integer_pow": _power,
    "pow": _pow,
    "sqrt": _call("sqrtf"),
    "rsqrt": lambda p, a, d: f"1.0f / sqrtf({a[0]})",
    "floor": _call("floorf"),
    "ceil": _call("ceilf"),
    "round": _rounded,
    "is_finite": _call("poet_is_finite"),
    "exp": _call("poet_exp"),
    "exp2": lambda p, a, d: f"poet_exp({a[0]} * 0.693147182f)",
    "log": _call("poet_log"),
    "expm1": _call("poet_expm1"),
    "log1p": _call("poet_log1p"),
    "tanh": _call("poet_tanh"),
    "logistic": _call("poet_logistic"),
    "erf": _call("poet_erf"),
    "erfc": _call("poet_erfc"),
    "erf_inv": _call("poet_erf_inv"),
    "sin": _call("poet_sin"),
    "cos": _call("poet_cos"),
    "eq": _infix("=="),
    "ne": _infix("!="),
    "lt": _order("<"),
    "le": _order("<="),
    "gt": _order(">"),
    "ge": _order(">="),
    "and": _infix("&"),
    "or": _infix("|"),
    "xor": _infix("^"),
    "not": _not,
    "shift_left": _shifted("<<"),
    "shift_right_logical": _shifted(">>"),
    "shift_right_arithmetic": _shifted("arithmetic"),
    "select_n": _selected,
    "clamp": _clamped,
    "convert_element_type": _converted,
    "bitcast_convert_type": _same_bits,
    "reduce_precision": _reduced,
    "stop_gradient": _same,
    "copy": _same,
    "copy_p": _same,
    "name": _same,
}

# Weights of operations, in those of an addition; others weigh 1.
_WEIGHTS = dict.fromkeys(
    "exp exp2 log expm1 log1p tanh logistic erf erfc erf_inv pow sin cos".split(), 20.0
) | dict.fromkeys("div rem sqrt rsqrt".split(), 8.0)


def weight(equation: Equation) -> float:
    """What an element costs, in additions."""
    return _WEIGHTS.get(equation.primitive.name, 1.0)


def text_of(equation: Equation, args: Sequence[str], dtypes: Sequence[str]) -> str:
    """The expression of an element; raises NoForm without a kernel."""
    name = equation.primitive.name
    if any(dtype not in C_TYPES for dtype in dtypes):
        raise NoForm
    return RULES[name](equation.params, args, dtypes)
