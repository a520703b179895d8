"""The inside of each `shard_map` in the graph, so that a plan decides for each of its
nodes by itself: `Graph -> Graph`.

A `shard_map` is one equation, whose body each device runs on shards. Here each node of
the body is a `shard_map` of its own. What one leaves for another is an array in the
graph whose shards are what the devices made.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from poet_jax.core.equation import Equation, Literal
from poet_jax.core.graph import Graph, Node, Value
from poet_jax.core.trace import trace_body, trace_part
from poet_jax.passes.grouping import group
from poet_jax.passes.splicing import Splicer


def open_shard_maps(graph: Graph) -> Graph:
    """`graph` with each node of a `shard_map`'s body as a `shard_map` of its own.

    Nodes are those that `group` makes of the body. A loop in a body stays one node.
    Bodies with an effect, with types that name other axes than those of the
    `shard_map`, and of operands or results that are `reduced` or `unreduced`, stay as
    they are.
    """
    if not any(map(_may_open, graph.nodes)):
        return graph
    return _Opener(graph).result()


def _may_open(node: Node) -> bool:
    if len(node.equations) != 1 or not node.repeatable:
        return False
    (equation,) = node.equations
    if equation.primitive.name != "shard_map":
        return False
    mesh, axes = equation.params["mesh"], equation.params["newly_manual_axes"]
    specs = (*equation.params["in_specs"], *equation.params["out_specs"])
    is_plain = not any(spec.reduced or spec.unreduced for spec in specs)
    return is_plain and axes.issuperset(_explicit_axes(mesh))


def _explicit_axes(mesh: Any) -> Iterator[Any]:
    """Axes that are part of the types of arrays."""
    for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True):
        if kind == AxisType.Explicit:
            yield name


@dataclasses.dataclass(frozen=True)
class _Form:
    """How shards are an array.

    Attributes:
      spec: of the array.
      is_scalar: whether its one axis is that of the devices only.
    """

    spec: P
    is_scalar: bool = False


@dataclasses.dataclass(frozen=True)
class _Manual:
    """The devices of a `shard_map`."""

    mesh: Any
    axes: frozenset[Any]
    check_vma: bool

    def form(self, varying: frozenset[Any], shape: Sequence[int]) -> _Form:
        """Of shards that differ along some axes of the mesh: one after the other."""
        if not self.check_vma:
            varying = self.axes
        along = tuple(axis for axis in self.mesh.axis_names if axis in varying)
        return _Form(P(along), not shape) if along else _Form(P())

    def aval(self, value: Value, form: _Form) -> jax.ShapeDtypeStruct:
        """Of an array in a form, which is part of its type on explicit axes."""
        if not any(_explicit_axes(self.mesh)):
            return value.aval
        mesh = getattr(self.mesh, "abstract_mesh", self.mesh)
        return value.aval.update(sharding=NamedSharding(mesh, form.spec))

    def mapped(
        self, fun: Callable, reads: Sequence[_Form], writes: Sequence[_Form]
    ) -> Callable:
        """`fun` of shards as a function of arrays in these forms."""

        def body(*operands: Any) -> tuple[Any, ...]:
            shards = (
                lax.squeeze(x, (0,)) if form.is_scalar else x
                for form, x in zip(reads, operands, strict=True)
            )
            return tuple(
                lax.expand_dims(x, (0,)) if form.is_scalar else x
                for form, x in zip(writes, fun(*shards), strict=True)
            )

        return jax.shard_map(
            body,
            mesh=self.mesh,
            in_specs=tuple(form.spec for form in reads),
            out_specs=tuple(form.spec for form in writes),
            axis_names=self.axes,
            check_vma=self.check_vma,
        )


class _Opener(Splicer):
    def visit(self, node: Node) -> None:
        if not _may_open(node):
            self.emit(node)
            return
        equation = node.equations[0].renamed(self.instead)
        params = equation.params
        manual = _Manual(
            params["mesh"], params["newly_manual_axes"], params["check_vma"]
        )
        body = group(trace_body(params["jaxpr"]))
        known: dict[int, Any] = dict(
            zip(body.arguments, equation.operands, strict=True)
        )
        for v, array in body.constants.items():
            known[v] = self.value(body.values[v], body.values[v].name)
            self.constants[known[v]] = array
        forms = self.forms(body, manual, equation)
        for part in body.nodes:
            results = self.mapped(
                manual,
                f"{node.name}/{part.name}",
                node.backward or part.backward,
                part,
                [known[v] for v in part.reads],
                [forms[v] for v in part.reads],
                [forms[v] for v in part.writes],
            )
            known.update(zip(part.writes, results, strict=True))
        taken = {*body.arguments, *body.constants}
        for v, spec, result in zip(
            body.outputs, params["out_specs"], equation.results, strict=True
        ):
            form = _Form(spec)
            if v in taken or forms[v] != form:
                (known_now,) = self.mapped(
                    manual,
                    node.name,
                    node.backward,
                    lambda x: (x,),
                    [known[v]],
                    [forms[v]],
                    [form],
                )
            else:
                known_now = known[v]
                taken.add(v)
            self.instead[result] = known_now

    def mapped(
        self,
        manual: _Manual,
        name: str,
        backward: bool,
        fun: Callable,
        operands: Sequence[Any],
        reads: Sequence[_Form],
        writes: Sequence[_Form],
    ) -> list[Any]:
        """Values of `fun` of shards."""
        avals = [
            x.value if isinstance(x, Literal) else manual.aval(self.values[x], form)
            for x, form in zip(operands, reads, strict=True)
        ]
        part = trace_part(manual.mapped(fun, reads, writes), *avals)
        return self.splice((part, {}), operands, name, backward)

    def forms(
        self, body: Graph, manual: _Manual, equation: Equation
    ) -> Mapping[int, _Form]:
        """Of each value of a body. Operands and results have their own, the others have
        shards one after the other."""
        forms = {
            v: manual.form(value.varying, value.shape)
            for v, value in enumerate(body.values)
        }
        if manual.check_vma:
            for v, spec in zip(body.outputs, equation.params["out_specs"], strict=True):
                if _axes(spec) == body.values[v].varying:
                    forms[v] = _Form(spec)
        forms.update((v, _Form(P())) for v in body.constants)
        specs = map(_Form, equation.params["in_specs"])
        forms.update(zip(body.arguments, specs, strict=True))
        return forms


def _axes(spec: P) -> frozenset[Any]:
    """Axes of the mesh that a spec names."""
    return frozenset(jax.tree.leaves(tuple(spec)))
