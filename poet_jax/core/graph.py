"""The dependency graph of a computation: values, and the nodes that read and write
them."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from poet_jax.core.equation import Equation, Literal, Name, need_data
from poet_jax.core.references import held_by
from poet_jax.core.representation import brief
from poet_jax.core.stack import Stack
from poet_jax.core.units import format_bytes


@dataclasses.dataclass(frozen=True)
class Value:
    """An array that a node writes, or an argument or constant of the whole computation.

    Attributes:
      name: readable and unique within its graph.
      nbytes: size in bytes; of the largest shard, if it lies on several devices.
      shape, dtype: as of the `jax.Array`; `()` and None in a graph that was not traced.
      weak_type: whether JAX may promote the dtype away, as for a Python scalar.
      pageable: whether it may be written to storage; typed PRNG keys, what is weakly
        typed, and what is in the host's memory already, may not.
      on_host: whether it is in the host's memory where others are in the device's, as
        after `jax.device_put(x, jax.memory.Space.Host)`.
      sharding: how it lies on several devices; None on one.
      varying: in the body of a `shard_map`, axes of the mesh along which devices have
        values of their own.
    """

    name: str
    nbytes: int
    shape: tuple[int, ...] = ()
    dtype: Any = None
    weak_type: bool = False
    pageable: bool = True
    on_host: bool = False
    sharding: Any = None
    varying: frozenset[Any] = frozenset()

    @property
    def aval(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, self.dtype, weak_type=self.weak_type)

    @property
    def kind(self) -> tuple[tuple[int, ...], Any]:
        """Its shape and dtype, as of a page."""
        return self.shape, self.dtype

    @property
    def room(self) -> Any:
        """Equal for values that can take each other's place in memory."""
        return self.kind, self.shard_shape, self.on_host

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """Of the largest shard."""
        if self.sharding is None:
            return self.shape
        return self.sharding.shard_shape(self.shape)

    def __str__(self) -> str:
        kind = f" {self.dtype}{list(self.shape)}" if self.dtype is not None else ""
        return f"{self.name}{kind} ({format_bytes(self.nbytes)})"


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """A group of equations computed together: the unit of scheduling, pricing and
    compiling.

    Attributes:
      name: readable; not necessarily unique.
      reads, writes: value numbers, each at most once.
      equations: each after those whose results it reads. Empty in a graph that was not
        traced.
      backward: whether it belongs to the backward pass.
      repeatable: False for a node that runs once: it has an effect, or an operation
        that is not known to be a function of its operands.
    """

    name: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    equations: tuple[Equation, ...] = ()
    backward: bool = False
    repeatable: bool = True

    __repr__ = brief

    @classmethod
    def of(
        cls,
        name: str,
        equations: Iterable[Equation],
        writes: Iterable[int],
        backward: bool = False,
    ) -> "Node":
        """The node of some equations, of which others need `writes`."""
        equations = tuple(equations)
        reads: dict[Any, None] = {}
        made: set[Name] = set()
        for equation in equations:
            reads.update((x, None) for x in equation.reads if x not in made)
            made.update(equation.results)
        repeatable = all(equation.repeatable for equation in equations)
        return cls(name, tuple(reads), tuple(writes), equations, backward, repeatable)

    def renamed(self, names: Mapping[Any, Any]) -> "Node":
        """The node with `names` instead of what it reads and writes that they hold."""
        if names.keys().isdisjoint((*self.reads, *self.writes)):
            return self
        equations = [e.renamed(names) for e in self.equations]
        writes = [names.get(v, v) for v in self.writes]
        return Node.of(self.name, equations, writes, self.backward)

    @property
    def needs_data(self) -> bool:
        """Whether it is not to run on made-up data: a `while` may never end with that,
        and a function of the host's may raise."""
        return need_data(self.equations)

    def __call__(
        self,
        *operands: Any,
        bind: Callable[["Equation", list[Any]], Sequence[Any]] = Equation.bind,
    ) -> tuple[Any, ...]:
        """Evaluate the equations; [R] arrays or tracers to [W] arrays or tracers.

        `bind` evaluates one equation for its operands.
        """
        known: dict[Name, Any] = dict(zip(self.reads, operands, strict=True))
        for equation in self.equations:
            results = bind(
                equation,
                [
                    x.value if isinstance(x, Literal) else known[x]
                    for x in equation.operands
                ],
            )
            known.update(zip(equation.results, results, strict=True))
        return tuple(known[v] for v in self.writes)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where on storage a value lives: in an argument or an output of the function.

    Attributes:
      leaf: number of the flat argument or output.
      block: which of its row blocks; None for all of it.
      replaces: of an output, the flat argument whose home it takes, if any.
    """

    leaf: int
    block: int | None = None
    replaces: int | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
    """Values and nodes in execution order.

    Attributes:
      values: [V].
      nodes: [N], every value written before it is read.
      arguments: numbers of the values that the caller supplies, in flat argument order.
      outputs: numbers of the values returned, in flat output order; repeats are
        allowed. The last ones are what `references` are to hold.
      constants: arrays that the function closes over, by value number.
      donated: the arguments that may be freed after their last read.
      in_tree, out_tree: pytree structures of `((*args), {**kwargs})` and of the result.
      stored: values that are on storage, and not in RAM, when the step begins.
      landing: values that the step leaves on storage, and not in RAM.
      resident: of `stored`, those that are in RAM, too, when the step begins, as their
        `successors` are when it ends. A plan decides that.
      waiting: those of `stored` that may be resident; None for all.
      rewritten: whether a pass put in other equations that compute the same. A budget
        that covers `jax.jit` then runs them all the same.
      stacks: arguments, and outputs that take the memory of one, whose pieces are the
        values that nodes read and write, where they lie. They are not values in RAM
        themselves.
      references: arguments and constants that are mutable references of JAX's, and are
        written to; they count among `donated`.
      devices: how many a step of it runs on; bytes are those of each.
      platform: of these, "cpu", "gpu" or "tpu"; None for JAX's default.
    """

    values: tuple[Value, ...]
    nodes: tuple[Node, ...]
    arguments: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    constants: dict[int, Any] = dataclasses.field(default_factory=dict)
    donated: frozenset[int] = frozenset()
    in_tree: Any = None
    out_tree: Any = None
    stored: dict[int, Place] = dataclasses.field(default_factory=dict)
    landing: dict[int, Place] = dataclasses.field(default_factory=dict)
    resident: frozenset[int] = frozenset()
    waiting: frozenset[int] | None = None
    stacks: dict[int, Stack] = dataclasses.field(default_factory=dict)
    references: tuple[int, ...] = ()
    rewritten: bool = False
    devices: int = 1
    platform: str | None = None

    __repr__ = brief

    def __post_init__(self):
        """Raise ValueError unless every value is written once, and before it is
        read."""
        known = {*self.initial, *self.stored}
        for node in self.nodes:
            for value in node.reads:
                if value not in known:
                    name = (
                        self.values[value].name if value < len(self.values) else value
                    )
                    raise ValueError(
                        f"Node {node.name!r} reads {name!r}, which nothing before it "
                        "writes. In a graph every value is an argument, a constant or "
                        "written by an earlier node. List the nodes in execution order."
                    )
            if not known.isdisjoint(node.writes):
                raise ValueError(
                    f"Node {node.name!r} writes a value that exists already. Every "
                    "value of a graph is written once. Give the second one a number of "
                    "its own."
                )
            known.update(node.writes)

    @functools.cached_property
    def producer(self) -> dict[int, int]:
        """Node number that writes each value; arguments and constants are absent."""
        return {v: n for n, node in enumerate(self.nodes) for v in node.writes}

    @functools.cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """[V] numbers of the nodes that read each value, ascending."""
        readers: list[list[int]] = [[] for _ in self.values]
        for number, node in enumerate(self.nodes):
            for value in node.reads:
                readers[value].append(number)
        return tuple(map(tuple, readers))

    @functools.cached_property
    def pinned(self) -> frozenset[int]:
        """Values alive throughout: constants, and arguments that the caller keeps in
        RAM."""
        return frozenset(self.initial) - self.donated - self.stored.keys()

    @functools.cached_property
    def initial(self) -> tuple[int, ...]:
        """Values in RAM before the first node: arguments and constants, each once."""
        both = dict.fromkeys((*self.arguments, *self.constants))
        here = (x for v in both if v not in self.stored for x in self.pieces(v))
        return (*here, *sorted(self.resident))

    def pieces(self, value: int) -> tuple[int, ...]:
        """The values in RAM that an argument or an output is: itself, if not pieces."""
        return self.stacks[value].values if value in self.stacks else (value,)

    @functools.cached_property
    def leaving(self) -> frozenset[int]:
        """Values that are outputs, or pieces of one."""
        return frozenset(x for v in self.outputs for x in self.pieces(v))

    @functools.cached_property
    def seats(self) -> dict[int, tuple[int, int]]:
        """Of pieces of arguments, and of what is written over them: which argument,
        and which of its pieces."""
        return {
            value: (whole if stack.over is None else stack.over, number)
            for whole, stack in self.stacks.items()
            for number, value in enumerate(stack.values)
        }

    @property
    def results(self) -> tuple[int, ...]:
        """Of `outputs`, those that the caller gets, in flat output order."""
        return self.outputs[: len(self.outputs) - len(self.references)]

    @functools.cached_property
    def returned(self) -> tuple[int, ...]:
        """Values in RAM after the last node: outputs, each once."""
        landed = {place.leaf for place in self.landing.values()}
        here = [
            x
            for leaf, v in enumerate(self.outputs)
            if leaf not in landed and v not in self.stored
            for x in self.pieces(v)
        ]
        here += [self.successors[v] for v in sorted(self.resident)]
        return tuple(dict.fromkeys(here))

    @functools.cached_property
    def successors(self) -> dict[int, int]:
        """By value on storage that some node reads, what the next step finds in its
        place: the value that lands there, or itself if it is not donated.

        That one may wait for the next step in RAM, which then need not page it in.
        """
        landing = {
            (place.replaces, place.block): v for v, place in self.landing.items()
        }
        found = {}
        for v, place in self.stored.items():
            if (place.leaf, place.block) in landing:
                successor = landing[place.leaf, place.block]
            elif self.arguments[place.leaf] not in self.donated:
                successor = v
            else:
                continue
            may_wait = self.waiting is None or v in self.waiting
            if self.readers[v] and self.values[v].nbytes and may_wait:
                found[v] = successor
        return found

    def with_resident(self, values: Iterable[int]) -> "Graph":
        """The graph with these of `successors` in RAM between steps."""
        values = frozenset(values)
        if values == self.resident:
            return self
        return dataclasses.replace(self, resident=values)

    @functools.cached_property
    def stored_bytes(self) -> int:
        """Of the arguments that are on storage."""
        whole = {v for v, place in self.stored.items() if place.block is None}
        return sum(self.values[v].nbytes for v in whole)

    @property
    def on_cpu(self) -> bool:
        """Whether a step of it runs on a CPU."""
        return (self.platform or jax.default_backend()) == "cpu"

    @property
    def is_lowered(self) -> bool:
        """Whether an equation is computed in another way than by its primitive."""
        return any(e.lowering for node in self.nodes for e in node.equations)

    @property
    def equation_count(self) -> int:
        return sum(len(node.equations) for node in self.nodes)

    def __call__(
        self, *leaves: Any, see: Callable[[int, Any], None] | None = None
    ) -> list[Any]:
        """Evaluate the nodes in order: flat arguments to flat results, arrays or
        tracers.

        `see` is called with each value and its array.
        """
        given = dict(self.constants) | dict(zip(self.arguments, leaves, strict=True))
        known = {v: held_by(x) for v, x in given.items()}
        for v, stack in self.stacks.items():
            if v in known:
                for number, piece in enumerate(stack.values):
                    known[piece] = stack.cut.piece(known[v], number)
        for node in self.nodes:
            results = node(*(known[v] for v in node.reads))
            known.update(zip(node.writes, results, strict=True))
        if see is not None:
            for v, array in known.items():
                see(v, array)
        for v, stack in self.stacks.items():
            if stack.over is not None:
                known[v] = stack.cut.join([known[piece] for piece in stack.values])
        self.write_references(given, known)
        return [known[v] for v in self.results]

    def write_references(
        self, given: Mapping[int, Any], known: Mapping[int, Any]
    ) -> None:
        """Write to the references among `given` what they are to hold."""
        held = self.outputs[len(self.results) :]
        for v, new in zip(self.references, held, strict=True):
            given[v][...] = known[new]

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of all that a plan depends on: structure, sizes and operations.

        Names are left out, as they may hold line numbers of the user's source.
        """
        parts = [
            [(v.nbytes, v.shape, str(v.dtype), v.pageable) for v in self.values],
            self.devices,
            [
                (n.reads, n.writes, n.repeatable, [e.operation for e in n.equations])
                for n in self.nodes
            ],
            [
                self.arguments,
                self.outputs,
                sorted(self.constants),
                sorted(self.donated),
                self.references,
            ],
            [
                sorted((v, *dataclasses.astuple(x)) for v, x in places.items())
                for places in (self.stored, self.landing)
            ],
            None if self.waiting is None else sorted(self.waiting),
            sorted((v, *dataclasses.astuple(x)) for v, x in self.stacks.items()),
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        lines = [
            f"graph of {len(self.nodes)} nodes and {len(self.values)} values, "
            f"{format_bytes(sum(v.nbytes for v in self.values))} in all"
        ]
        names = [value.name for value in self.values]
        for title, numbers in (
            ("arguments", self.arguments),
            ("outputs", self.outputs),
        ):
            lines.append(f"  {title}: {' '.join(names[v] for v in numbers) or 'none'}")
        for number, node in enumerate(self.nodes):
            writes = ", ".join(str(self.values[v]) for v in node.writes)
            reads = " ".join(names[v] for v in node.reads)
            mark = " [backward]" if node.backward else ""
            mark += "" if node.repeatable else " [runs once]"
            lines.append(f"  {number:4d} {node.name}{mark}: {writes} <- {reads}")
        return "\n".join(lines)
