"""Memory, time and energy of a graph after each pass."""

import dataclasses
from collections.abc import Callable, Sequence

from poet_jax.core.device import DeviceProfile
from poet_jax.core.graph import Graph
from poet_jax.core.representation import brief
from poet_jax.core.units import (
    format_bytes,
    format_count,
    format_joules,
    format_seconds,
)
from poet_jax.devices.price import price
from poet_jax.planners.planner import floor_bytes, keep_everything


@dataclasses.dataclass(frozen=True)
class Effect:
    """A graph after a pass and those before it, run without remat and paging.

    Attributes:
      name: of the pass; "trace" for the graph before all of them.
      nodes: their number.
      peak_bytes: peak of all that a budget counts.
      floor_bytes: lower bound on the peak of any plan.
      seconds, joules: of the step; joules are modelled.
    """

    name: str
    nodes: int
    peak_bytes: int
    floor_bytes: int
    seconds: float
    joules: float


@dataclasses.dataclass(frozen=True)
class Effects:
    """Effects of passes in turn, printed as a table; made by `effects`.

    Attributes:
      rows: the traced graph, then the graph after each pass.
      device: name of the device that prices the graph.
      calibrated: whether seconds come from the device's measured `rates`.
      remark: whether every gradient can be applied at once, or what they wait for;
        empty for a graph that applies none.
    """

    rows: tuple[Effect, ...]
    device: str
    calibrated: bool
    remark: str

    __repr__ = brief

    def __str__(self) -> str:
        shown = (str, str, format_bytes, format_bytes, format_seconds, format_joules)
        table = [["after", "nodes", "keep-all", "floor", "time", "energy"]]
        for row in self.rows:
            columns = dataclasses.astuple(row)
            table.append([show(x) for show, x in zip(shown, columns, strict=True)])
        width = max(len(row[0]) for row in table)
        lines = [
            f"{name:{width}s} {nodes:>6s}" + "".join(f" {x:>10s}" for x in rest)
            for name, nodes, *rest in table
        ]
        times = "calibrated" if self.calibrated else "modelled from FLOPs, bytes"
        lines.append(f"{self.device}: time {times}; energy modelled")
        return "\n".join([*lines, *filter(None, [self.remark])])


def effects(
    graph: Graph, passes: Sequence[Callable[[Graph], Graph]], device: DeviceProfile
) -> Effects:
    """Effects of `passes` in turn on `graph`, a result of `trace`, priced on `device`.

    Nodes count one by one, without remat and paging; nothing is compiled. A roofline
    does not see the gain of `cpu_kernels`.
    """
    remark = applied(graph)
    rows = [_effect("trace", graph, device)]
    for change in passes:
        before, graph = graph, change(graph)
        name = _name(change)
        if graph is before:
            rows.append(dataclasses.replace(rows[-1], name=name))
        else:
            rows.append(_effect(name, graph, device))
    return Effects(tuple(rows), device.name, bool(device.rates), remark)


def _name(change: Callable) -> str:
    change = getattr(change, "func", change)  # of a functools.partial
    return getattr(change, "__name__", type(change).__name__)


def _effect(name: str, graph: Graph, device: DeviceProfile) -> Effect:
    costs = price(graph, device)
    usage = keep_everything(graph, costs).usage
    return Effect(
        name,
        len(graph.nodes),
        usage.peak_bytes,
        floor_bytes(graph, costs),
        usage.seconds,
        usage.joules,
    )


def applied(graph: Graph) -> str:
    """When the gradients of a traced graph can be applied, in a sentence.

    A gradient is a value of the backward pass that other nodes read. It waits for
    others if an array of its shape, such as an update, depends on it and on others.
    Empty for a graph without gradients.
    """
    gradients = {
        v
        for node in graph.nodes
        if node.backward
        for v in node.writes
        if not all(graph.nodes[n].backward for n in graph.readers[v])
    }
    nothing: frozenset[int] = frozenset()
    origins: dict[int, frozenset[int]] = {}  # gradients behind each value
    needs: list[tuple[frozenset[int], str]] = []  # those of a node of the update
    waiting: set[int] = set()
    for node in graph.nodes:
        read = nothing.union(*(origins.get(v, nothing) for v in node.reads))
        origins |= {v: read | (gradients & {v}) for v in node.writes}
        if read and not node.backward:
            needs.append((read, node.name))
            shapes = {graph.values[v].shape for v in node.writes} - {()}
            waiting |= {
                v
                for v in read
                if graph.values[v].shape in shapes and len(read) > len(origins[v])
            }
    if not gradients:
        return ""
    count = format_count(len(gradients), "gradient")
    if not waiting:
        return f"reorder: each of {count} can be applied as soon as it exists."
    read, name = max(needs, key=lambda need: len(need[0] & waiting))
    nbytes = sum(graph.values[v].nbytes for v in waiting)
    return (
        f"reorder: {len(waiting)} of {count}, {format_bytes(nbytes)}, cannot be "
        f"applied as soon as they exist: their updates wait for {name}, which needs "
        f"{len(read & waiting)} of them. If that is clipping by global norm, use "
        "optax.clip or optax.clip_by_block_rms."
    )
