"""What would lower the memory that a function needs, each with its bytes."""

import functools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from poet_jax.core.equation import nbytes_of
from poet_jax.core.graph import Graph, Node, Value
from poet_jax.core.units import format_bytes
from poet_jax.passes.blocks import BLOCKS

LEAST_BYTES = 2**18  # of a need; in less, XLA's padding outweighs what cutting saves
LEAST_SHARE = 0.02  # of the need; less is not worth a word
LARGE_SHARE = 0.2  # of the need, of what is worth cutting
FEW = 8  # equations of a node, which a plan does without cutting
MOST_PARTS = {"max_pieces": 256, "blocks": 128}  # with more, plans take minutes


def remedies(
    graph: Graph, need_bytes: int, node: Node | None, alive: Sequence[int]
) -> list[str]:
    """What to use for less memory, what saves most first, with about how much that
    is. The need is greatest at `node`, where the values `alive` are alive."""
    found = {
        "donate_argnums for the state that the step replaces": _replaceable(graph),
    }
    for part in _largest(graph, need_bytes, node, alive):
        found[part.advice] = part.saved_bytes
    if graph.devices == 1:
        found["poet_jax.to_storage for the state"] = _movable(graph)
    worth = {name: n for name, n in found.items() if n > LEAST_SHARE * need_bytes}
    return [
        f"{name} ({format_bytes(worth[name])})"
        for name in sorted(worth, key=lambda name: -worth[name])
    ]


def pass_of(remedy: str) -> str | None:
    """Name of the pass that a remedy gives an option."""
    found = _OPTION.search(remedy)
    return found and found.group(1)


def is_taken(remedy: str, passes: Iterable[Any]) -> bool:
    """Whether one of `passes` has the option that a remedy names, or cuts finer."""
    if (found := _OPTION.search(remedy)) is None:
        return False
    of, name, number = found.groups()
    is_less = name in ("large_bytes", "max_equations")
    given = [
        x.keywords.get(name) or (math.inf if is_less else 0)
        for x in passes
        if isinstance(x, functools.partial) and getattr(x.func, "__name__", "") == of
    ]
    return any(n <= int(number) if is_less else n >= int(number) for n in given)


def _nbytes(value: Value) -> int:
    """Of an array, whoever has room for it."""
    if value.dtype is None:
        return value.nbytes
    return value.dtype.itemsize * math.prod(value.shard_shape)


def _replaceable(graph: Graph) -> int:
    """Bytes of results that could take the place of arguments that are not donated."""
    kept: Counter[Any] = Counter(
        graph.values[v].room
        for v in graph.arguments
        if v not in graph.donated and v not in graph.stored
    )
    saved = 0
    for v in graph.returned:
        room = graph.values[v].room
        if v in graph.producer and kept[room] and graph.values[v].dtype is not None:
            kept[room] -= 1
            saved += _nbytes(graph.values[v])
    return saved


def _movable(graph: Graph) -> int:
    """Bytes of donated state in RAM, but for the largest array, which is read."""
    state = [
        _nbytes(graph.values[v])
        for v in graph.arguments
        if v in graph.donated and v not in graph.stored
    ]
    return sum(state) - max(state, default=0)


def held_bytes(graph: Graph) -> int:
    """Of the arguments or of the results, whichever are more: no plan needs less."""
    held = (graph.initial, graph.returned)
    return max(sum(graph.values[v].nbytes for v in values) for values in held)


def finer(
    graph: Graph,
    need_bytes: int,
    node: Node | None,
    alive: Sequence[int],
    budget_bytes: float,
) -> dict[str, dict[str, int]]:
    """Options of passes that might bring the need to the budget; none if what the step
    holds throughout is more. `node` and `alive` are as for `remedies`."""
    if need_bytes < LEAST_BYTES or held_bytes(graph) >= budget_bytes:
        return {}
    return {
        part.of: part.option
        for part in _largest(graph, need_bytes, node, alive)
        if part.of and part.saved_bytes > LEAST_SHARE * need_bytes
        if all(n <= MOST_PARTS.get(x, math.inf) for x, n in part.option.items())
    }


def _largest(
    graph: Graph, need_bytes: int, node: Node | None, alive: Sequence[int]
) -> Iterator["_Part"]:
    """The parts of loops, of products and of groups that are worth making smaller;
    where there are none, or one value inside a node takes much, other large values."""
    product = _largest_product(graph, need_bytes, alive)
    group = _large_group(graph, need_bytes, node, alive)
    parts = [x for x in (_largest_loop(graph), product, group) if x]
    yield from parts
    inside_bytes = 0 if node is None else _largest_inside(node)
    if inside_bytes < LARGE_SHARE * need_bytes and any(x.of for x in parts):
        return
    if part := _of_small(graph, need_bytes, node, alive):
        yield part


def _largest_inside(node: Node) -> int:
    """Bytes of the largest value that no other node reads."""
    return max(
        (
            nbytes_of(shape)
            for equation in node.equations
            for x, shape in zip(equation.results, equation.result_shapes, strict=False)
            if x not in node.writes
        ),
        default=0,
    )


class _Part(NamedTuple):
    """What is largest, and how to make it smaller.

    Attributes:
      of: the pass that cuts it; empty if none does.
      option: of that pass.
      what: is cut, or what to use instead of a pass.
      saved_bytes: about how much less is needed.
    """

    of: str
    option: dict[str, int]
    what: str
    saved_bytes: int

    @property
    def advice(self) -> str:
        if not self.of:
            return self.what
        option = ", ".join(f"{name}={number}" for name, number in self.option.items())
        finer = f"functools.partial(poet_jax.passes.{self.of}, {option})"
        return f"{finer} in passes=, {self.what}"


# The rows of a block, or the iterations of a piece, in its name.
_BOUNDS = re.compile(r"\[(\d+)-(\d+)\]$")
# An option in the advice.
_OPTION = re.compile(r"poet_jax\.passes\.(\w+), (\w+)=(\d+)[,)]")


def _largest_product(
    graph: Graph, need_bytes: int, alive: Sequence[int]
) -> _Part | None:
    """Blocks of the largest product, or more blocks; None where the values with as many
    numbers that are alive take little of the need."""
    products = [
        (_nbytes(graph.values[v]), node.name, math.prod(graph.values[v].shape))
        for node in graph.nodes
        if any(e.primitive.name == "dot_general" for e in node.equations)
        for v in node.writes
    ]
    nbytes, name, count = max(products, default=(0, "", 0))
    made = [
        graph.values[v] for v in alive if v in graph.producer and v not in graph.leaving
    ]
    saved = sum(_nbytes(value) for value in made if math.prod(value.shape) == count)
    saved = max(nbytes, saved)
    if saved < max(1, LARGE_SHARE * need_bytes) or graph.devices > 1:
        return None
    if not name.endswith("]"):
        what = f"for blocks of {name}, if its rows allow"
        return _Part("blockwise", {"large_bytes": nbytes}, what, saved)
    whole, blocks = _parts(name, (name for _, name, _ in products))
    what = f"for smaller blocks of {whole}"
    # What is in blocks may be less than what the pass takes for large by itself.
    option = {"blocks": 2 * blocks, "large_bytes": nbytes}
    return _Part("blockwise", option, what, saved)


def _of_small(
    graph: Graph, need_bytes: int, node: Node | None, alive: Sequence[int]
) -> _Part | None:
    """Blocks of values that are made of small ones, or more blocks, where values of
    one size take much of the need, or one inside `node`."""
    made = [
        v
        for v in alive
        if v in graph.producer
        and v not in graph.leaving
        and not _is_loop(graph.nodes[graph.producer[v]])
    ]
    sizes = Counter(_nbytes(graph.values[v]) for v in made)
    if node is not None and not _is_loop(node):
        sizes[_largest_inside(node)] += 1
    nbytes = max(sizes, key=lambda n: n * sizes[n], default=0)
    saved = nbytes * sizes[nbytes]
    if saved < max(1, LARGE_SHARE * need_bytes) or graph.devices > 1:
        return None
    names = {v: graph.values[v].name.rpartition(".")[0] for v in graph.producer}
    found = [names[v] for v in made if _nbytes(graph.values[v]) == nbytes]
    if node is not None:
        found.append(re.sub(r"\+\d+$", "", node.name))
    name = found[0]
    if bounds := _BOUNDS.search(name):
        # Of some blocks no value is left outside nodes: their bounds tell how many.
        whole, rows = name[: bounds.start()], int(bounds[2]) - int(bounds[1])
        parts = (_BOUNDS.search(x) for x in names.values() if x.startswith(f"{whole}["))
        stop = max((int(x[2]) for x in parts if x), default=int(bounds[2]))
        blocks = math.ceil(stop / rows)
        # A block has at most twice as many rows as another one.
        option = {"blocks": 2 * blocks, "large_bytes": nbytes * blocks // 2}
        return _Part("blockwise", option, f"for smaller blocks of {whole}", saved)
    if not any(
        nbytes
        in (_largest_inside(node), *(_nbytes(graph.values[v]) for v in node.writes))
        and all(BLOCKS * _nbytes(graph.values[v]) < nbytes for v in node.reads)
        for node in graph.nodes
    ):
        return None
    what = f"for blocks of {name}, if its rows allow"
    return _Part("blockwise", {"large_bytes": nbytes}, what, saved)


def _large_group(
    graph: Graph, need_bytes: int, node: Node | None, alive: Sequence[int]
) -> _Part | None:
    """Smaller groups than a node of many equations that takes much of the need."""
    if node is None:
        return None
    count = len(node.equations)
    own = [v for v in {*node.reads, *node.writes} if v in graph.producer]
    inside_bytes = max(0, need_bytes - sum(_nbytes(graph.values[v]) for v in alive))
    nbytes = inside_bytes + sum(_nbytes(graph.values[v]) for v in own)
    if count <= 2 * FEW or nbytes < LARGE_SHARE * need_bytes:
        return None
    option = {"max_equations": max(FEW, count // 4)}
    return _Part("group", option, f"for nodes smaller than {node.name}", nbytes // 2)


def _parts(name: str, names: Iterable[str]) -> tuple[str, int]:
    """What a part is of, and how many there are: their names end in its bounds."""
    whole, _, _ = name.rpartition("[")
    return whole, len({x for x in names if x.startswith(f"{whole}[")})


def _is_loop(node: Node) -> bool:
    return any(e.primitive.name in ("scan", "while") for e in node.equations)


def _largest_loop(graph: Graph) -> _Part | None:
    """More pieces of the loop that keeps most for another one."""
    loops = {n: node.name for n, node in enumerate(graph.nodes) if _is_loop(node)}
    returned = set(graph.returned)
    kept = [
        (
            sum(
                _nbytes(graph.values[v])
                for v in graph.nodes[n].writes
                if v not in returned and not loops.keys().isdisjoint(graph.readers[v])
            ),
            n,
        )
        for n in loops
    ]
    nbytes, number = max(kept, default=(0, -1))
    if not nbytes:
        return None
    name = loops[number]
    if not name.endswith("]"):
        what = f"jax.checkpoint in the body of {name}"
        nbytes -= _carried_bytes(graph.nodes[number])
        return _Part("", {}, what, nbytes) if nbytes > 0 else None
    whole, pieces = _parts(name, loops.values())
    what = f"for shorter pieces of {whole}"
    return _Part("unroll", {"max_pieces": 2 * pieces}, what, nbytes // 2)


def _carried_bytes(loop: Node) -> int:
    """What iterations of a scan hand on, kept for all of them."""
    return sum(
        e.params["length"] * nbytes_of(x)
        for e in loop.equations
        if e.primitive.name == "scan"
        for x in e.result_shapes[: e.params["num_carry"]]
    )
