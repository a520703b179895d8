"""Matrix products and convolutions."""

import math
from collections.abc import Sequence

from poet_jax.core.equation import Equation
from poet_jax.emit.c99 import loops
from poet_jax.emit.c99.buffers import C_TYPES, Buffer, NoForm, Pointer, Step, strides
from poet_jax.emit.c99.index import counters, linear
from poet_jax.emit.c99.nests import Reduction
from poet_jax.emit.c99.nodes import Lowering, View

LOOPS = 4  # most loops of a product beside those over rows, columns and terms


def table(kind: str, name: str, fields: dict[str, int | Sequence[int]]) -> str:
    """A constant struct of C."""

    def shown(value: int | Sequence[int]) -> str:
        if isinstance(value, int):
            return str(value)
        return "{" + ", ".join(map(str, value)) + "}"

    inner = ", ".join(f".{key} = {shown(x)}" for key, x in fields.items() if x != ())
    return f"static const struct {kind} {name} = {{{inner}}};"


def call(
    name: str,
    writes: Sequence[Buffer],
    reads: Sequence[tuple[Buffer, int]],
    tables: Sequence[tuple[str, dict[str, int | Sequence[int]]]],
    run: int,
    over: Sequence[tuple[Buffer, Buffer]] = (),
) -> Step:
    """A step that calls a kernel: results, operands at offsets, and tables."""

    def render(pointer: Pointer) -> list[str]:
        lines = [
            table(kind, f"k{number}", fields)
            for number, (kind, fields) in enumerate(tables)
        ]
        arguments = [pointer(x) for x in writes]
        arguments += [pointer(x) + (f" + {at}" if at else "") for x, at in reads]
        arguments += [f"&k{number}" for number in range(len(tables))]
        return [*lines, f"{name}({', '.join(arguments)});"]

    buffers = tuple(dict.fromkeys(x for x, _ in reads))
    return Step(buffers, tuple(writes), render, tuple(over), run)


def dot_general(lowering: Lowering, equation: Equation) -> None:
    (contract_a, contract_b), (batch_a, batch_b) = equation.params["dimension_numbers"]
    left, right = (x.shape for x in equation.operand_shapes)
    free_a = [x for x in range(len(left)) if x not in (*contract_a, *batch_a)]
    free_b = [x for x in range(len(right)) if x not in (*contract_b, *batch_b)]
    groups = [
        [left[x] for x in batch_a],
        [left[x] for x in free_a],
        [right[x] for x in free_b],
        [left[x] for x in contract_a],
    ]
    starts = [sum(map(len, groups[:n])) for n in range(5)]
    axes_a = _loops(len(left), (batch_a, starts[0]), (free_a, starts[1]),
                    (contract_a, starts[3]))  # fmt: skip
    axes_b = _loops(len(right), (batch_b, starts[0]), (free_b, starts[2]),
                    (contract_b, starts[3]))  # fmt: skip
    dtypes = {x.dtype.name for x in (*equation.operand_shapes, *equation.result_shapes)}
    if not dtypes <= C_TYPES.keys():
        raise NoForm
    views = [lowering.view(equation, 0), lowering.view(equation, 1)]
    if dtypes == {"float32"} and all(size for group in groups for size in group):
        for number, view in enumerate(views):
            if view is None and _is_read_often(equation, number):
                buffer = lowering.buffer(equation, number)
                steps = strides(equation.operand_shapes[number].shape)
                views[number] = View(buffer, steps, 0)
        a, b = views
        if a is not None and b is not None:
            fields = _fields(groups, starts, (a, axes_a), (b, axes_b))
            if fields is not None:
                is_swapped, fields = fields
                operands = [(a.buffer, a.offset), (b.buffer, b.offset)]
                step = call(
                    "poet_dot",
                    [lowering.result(equation)],
                    operands[::-1] if is_swapped else operands,
                    [("poet_dot", fields)],
                    lowering.run,
                )
                lowering.push(step)
                return
    _dot_loops(lowering, equation, groups, axes_a, axes_b)


def _is_read_often(equation: Equation, number: int) -> bool:
    """Whether an operand is read more than a few times an element, so that it pays to
    compute it once; but for those of less than four bytes, which grow by that."""
    size = math.prod(equation.operand_shapes[number].shape)
    result = math.prod(equation.result_shapes[0].shape)
    terms = [
        equation.operand_shapes[0].shape[x]
        for x in equation.params["dimension_numbers"][0][0]
    ]
    return result * math.prod(terms) > 2 * size


def _loops(rank: int, *groups: tuple[Sequence[int], int]) -> list[int]:
    """The loop of each axis of an operand, given axes in groups and their loops."""
    found = [0] * rank
    for axes, start in groups:
        for number, axis in enumerate(axes):
            found[axis] = start + number
    return found


def _fields(groups, starts, *operands: tuple[View, list[int]]):
    """(whether operands change places, the table of `poet_dot`); None where it has too
    few loops."""
    dims = [size for group in groups for size in group]
    forms = counters(dims)
    accesses = [
        linear(len(dims), [forms[x] for x in axes], view.strides)
        for view, axes in operands
    ]
    out = strides(dims[: starts[3]])
    accesses.append(linear(len(dims), forms[: starts[3]], out))
    nest = loops.merged(dims, accesses, starts[1:4])
    parts: list[list[tuple[int, ...]]] = [[], [], [], []]
    for count, group in zip(nest.counts, nest.groups, strict=True):
        part = max(n for n in range(4) if starts[n] <= group[0])
        a, b, o = (f.coefs[group[-1]] for f in accesses)
        parts[part].append((count, o, a, b))
    batch, rows, columns, terms = parts
    one = (1, 0, 0, 0)
    is_swapped = _elements(columns) < 4 and _elements(rows) > _elements(columns)
    if is_swapped:
        rows, columns = columns, rows
        batch, rows, columns, terms = (
            [(n, o, b, a) for n, o, a, b in part]
            for part in (batch, rows, columns, terms)
        )
    others = [*batch, *rows[:-1], *columns[:-1], *terms[:-1]]
    others = [x for x in others if x[0] != 1]
    if len(others) > LOOPS:
        return None
    row, column, term = ((part or [one])[-1] for part in (rows, columns, terms))
    return is_swapped, {
        "rows": row[0],
        "columns": column[0],
        "terms": term[0],
        "out_row": row[1],
        "out_column": column[1],
        "a_row": row[2],
        "a_term": term[2],
        "b_term": term[3],
        "b_column": column[3],
        "adds": int(len(terms) > 1),
        "size": dims and math.prod(dims[: starts[3]]) or 1,
        "loops": len(others),
        "count": tuple(x[0] for x in others),
        "out_step": tuple(x[1] for x in others),
        "a_step": tuple(x[2] for x in others),
        "b_step": tuple(x[3] for x in others),
    }


def _elements(part: Sequence[tuple[int, ...]]) -> int:
    return math.prod(x[0] for x in part)


def _dot_loops(lowering: Lowering, equation: Equation, groups, axes_a, axes_b) -> None:
    """A product as loops, whose operands may be computed where they are read."""
    batch, rows, columns, terms = groups
    where = lowering.where.__getitem__
    loop = Reduction([*batch, *rows, *columns], terms, where)
    result = equation.result_shapes[0].dtype.name
    factors = []
    for operand, aval, axes in zip(
        equation.operands, equation.operand_shapes, (axes_a, axes_b), strict=True
    ):
        element = loop.body.at(operand, aval.shape, loop.index(axes))
        factors.append(f"({C_TYPES[result]}){element}")
    loop.first.append(f"{C_TYPES[result]} s = 0;")
    x, y = factors
    if result == "bool":
        loop.body.lines.append(f"s |= {x} & {y};")
    elif result == "float32":
        loop.body.lines.append(f"s += {x} * {y};")
    else:  # integers wrap around, which C has for those without a sign
        total = f"(uint32_t)s + (uint32_t){x} * (uint32_t){y}"
        loop.body.lines.append(f"s = ({C_TYPES[result]})({total});")
    loop.store(lowering.result(equation), "s")
    lowering.push(loop.step(lowering.run))


def convolution(lowering: Lowering, equation: Equation) -> None:
    params = equation.params
    numbers = params["dimension_numbers"]
    left, right = equation.operand_shapes
    (result,) = equation.result_shapes
    dtypes = {x.dtype.name for x in (left, right, result)}
    spatial = len(left.shape) - 2
    if dtypes != {"float32"} or spatial > 2:
        raise NoForm
    views = []
    for number in range(2):
        view = lowering.view(equation, number)
        if view is None:
            shape = equation.operand_shapes[number].shape
            view = View(lowering.buffer(equation, number), strides(shape), 0)
        views.append(view)
    image, kernel = views
    out = strides(result.shape)
    groups = max(params["feature_group_count"], params["batch_group_count"])
    is_batch = params["batch_group_count"] > 1
    batch, features = (left.shape[x] for x in numbers.lhs_spec[:2])
    terms = right.shape[numbers.rhs_spec[1]]
    outs = right.shape[numbers.rhs_spec[0]] // groups
    step = image.strides[numbers.lhs_spec[0 if is_batch else 1]]
    each = batch // groups if is_batch else features // groups

    def two(values: Sequence[int], fill: int) -> tuple[int, ...]:
        """Of two axes, where a convolution over less has more of one element."""
        return (*(fill for _ in range(2 - spatial)), *(int(x) for x in values))

    def of(shape: Sequence[int], spec: Sequence[int]) -> list[int]:
        return [shape[x] for x in spec[2:]]

    fields = {
        "batch": batch // groups if is_batch else batch,
        "groups": groups,
        "outs": outs,
        "terms": terms,
        "in_size": two(of(left.shape, numbers.lhs_spec), 1),
        "window": two(of(right.shape, numbers.rhs_spec), 1),
        "out_size": two(of(result.shape, numbers.out_spec), 1),
        "stride": two(params["window_strides"], 1),
        "low": two([low for low, _ in params["padding"]], 0),
        "in_dilation": two(params["lhs_dilation"], 1),
        "window_dilation": two(params["rhs_dilation"], 1),
        "in_batch": image.strides[numbers.lhs_spec[0]],
        "in_group": step * each,
        "in_term": image.strides[numbers.lhs_spec[1]],
        "in_step": two(of(image.strides, numbers.lhs_spec), 0),
        "w_out": kernel.strides[numbers.rhs_spec[0]],
        "w_term": kernel.strides[numbers.rhs_spec[1]],
        "w_step": two(of(kernel.strides, numbers.rhs_spec), 0),
        "out_batch": out[numbers.out_spec[0]],
        "out_feature": out[numbers.out_spec[1]],
        "out_step": two(of(out, numbers.out_spec), 0),
    }
    apart, wide = fields["in_dilation"], fields["window_dilation"]
    every = tuple(a // math.gcd(a, b) for a, b in zip(apart, wide, strict=True))
    fields["every"] = every
    fields["in_next"] = tuple(
        n * b // a * step
        for n, a, b, step in zip(every, apart, wide, fields["in_step"], strict=True)
    )
    step = call(
        "poet_convolution",
        [lowering.result(equation)],
        [(image.buffer, image.offset), (kernel.buffer, kernel.offset)],
        [("poet_convolution", fields)],
        lowering.run,
    )
    lowering.push(step)


RULES = {"dot_general": dot_general, "conv_general_dilated": convolution}
