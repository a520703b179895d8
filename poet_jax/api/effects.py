"""What each pass makes of a graph: memory, time and energy after it."""

import dataclasses
from collections.abc import Callable, Sequence

from poet_jax.core.device import DeviceProfile
from poet_jax.core.graph import Graph
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
    """A graph after a pass and those before it, node by node with everything kept.

    Attributes:
      name: of the pass; "trace" for the graph before all of them.
      nodes: how many.
      peak_bytes: of all that a budget counts.
      floor_bytes: no plan of this graph needs less.
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
    """The effects of passes, one after the other; made by `effects`, prints as a table.

    Attributes:
      rows: the traced graph, then the graph after each pass.
      device: whose costs these are.
      calibrated: whether seconds are of the device's measured `rates`.
      remark: whether each gradient can be applied as soon as it exists, and if not,
        where they wait for one another; empty for a graph that applies none.
    """

    rows: tuple[Effect, ...]
    device: str
    calibrated: bool
    remark: str

    def __str__(self) -> str:
        table = [("after", "nodes", "keep-all", "floor", "time", "energy")]
        for row in self.rows:
            table.append(
                (
                    row.name,
                    str(row.nodes),
                    format_bytes(row.peak_bytes),
                    format_bytes(row.floor_bytes),
                    format_seconds(row.seconds),
                    format_joules(row.joules),
                )
            )
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
    """What each of `passes` in turn makes of `graph`, which `trace` made, on `device`.

    All is as if nodes ran one by one and everything were kept. Nothing is compiled.
    Seconds of a roofline do not know of lowerings.
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
    """When the gradients of a graph of `trace` can be applied, in a sentence.

    A gradient, which the backward pass makes and something else reads, waits for others
    if an array of its shape, such as an update, is made from it and from others. Empty
    for a graph without gradients that are read.
    """
    gradients = {
        v
        for node in graph.nodes
        if node.backward
        for v in node.writes
        if not all(graph.nodes[n].backward for n in graph.readers[v])
    }
    nothing: frozenset[int] = frozenset()
    origins: dict[int, frozenset[int]] = {}  # the gradients that a value is made from
    needs: list[tuple[frozenset[int], str]] = []  # and a node of the update
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
        f"{len(read & waiting)} of them. Clipping by global norm is such a thing; "
        "optax.clip and optax.clip_by_block_rms take each by itself."
    )
