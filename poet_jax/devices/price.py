"""Price a graph on a device: seconds and joules of every node and every transfer."""

import math

import numpy as np

from poet_jax.core.costs import Costs, node_flops
from poet_jax.core.device import DeviceProfile
from poet_jax.core.graph import Graph, Node
from poet_jax.core.signatures import node_form
from poet_jax.devices.collectives import gathered_bytes, received_bytes
from poet_jax.devices.kernels import Kernel, kernels, workspace_bytes
from poet_jax.devices.node_costs import read_node_costs
from poet_jax.devices.timing import time_nodes
from poet_jax.passes.cpu.scratch import node_scratch


def price(graph: Graph, device: DeviceProfile, *, measure: bool = False) -> Costs:
    """Costs of `graph` on `device`; compiles and runs nothing, unless `measure`.

    Seconds of a node are modelled. With `device.rates`: the sum over its `kernels` of
    dispatch_seconds + max(work, memory traffic), at their rates. Without: a roofline,
    dispatch_seconds + max(FLOPs / flops_per_second, bytes / bytes_per_second), where
    each equation's FLOPs are multiplied by `device.slowdown`. A `while` counts one
    trip. Joules are compute power times seconds; a roofline's exclude dispatch. Nodes
    in the file `device.node_costs` cost what it says. On several devices a node's work
    is divided as the bytes that it reads and writes are, and what a product or a
    collective needs of the others' shards arrives at `device.link_bytes_per_second`,
    at paging power.

    With `measure`, each distinct node is compiled and timed on this machine, and its
    workspace is XLA's count plus `scratch.node_scratch`. Nodes with side effects, or
    whose runtime depends on their inputs, are still modelled.

    Raises ValueError if the file `device.node_costs` lacks nodes and
    `node_costs_partial` is False.
    """
    forms = [node_form(node) for node in graph.nodes]
    nodes = dict(zip(forms, graph.nodes, strict=True))  # one of each form
    if device.rates:
        seconds_of = {form: node_seconds(node, device) for form, node in nodes.items()}
        seconds = np.array([seconds_of[form] for form in forms], float)
        joules = seconds * device.compute_watts
    else:
        seconds, joules = _roofline(graph, device)
    bytes_of = {form: workspace_bytes(node) for form, node in nodes.items()}
    workspaces = np.array([bytes_of[form] for form in forms], np.int64)
    if graph.devices > 1:
        shares = np.array([_share(graph, node) for node in graph.nodes], float)
        seconds, joules = seconds * shares, joules * shares
        gathered = [gathered_bytes(graph, node) for node in graph.nodes]
        workspaces = (workspaces * shares).astype(np.int64) + gathered
        received = np.array([received_bytes(graph, node) for node in graph.nodes])
        seconds = seconds + received / device.link_bytes_per_second
        joules = joules + received / device.link_bytes_per_second * device.paging_watts
    if measure:
        for number, timed in enumerate(time_nodes(graph)):
            if timed is not None:
                seconds[number] = timed.seconds
                joules[number] = timed.seconds * device.compute_watts
                scratch = node_scratch(graph.nodes[number])
                workspaces[number] = timed.temp_bytes + scratch
    if device.node_costs is not None:
        seconds, joules = read_node_costs(graph, device, seconds, joules)
    nbytes = np.array([value.nbytes for value in graph.values], np.int64)
    page_in = np.array([device.page_in_seconds(int(n)) for n in nbytes], float)
    page_out = np.array([device.page_out_seconds(int(n)) for n in nbytes], float)
    return Costs(
        seconds=seconds,
        joules=joules,
        workspace_bytes=workspaces,
        nbytes=nbytes,
        page_in_seconds=page_in,
        page_out_seconds=page_out,
        page_in_joules=page_in * device.paging_watts,
        page_out_joules=page_out * device.paging_watts,
        static_watts=device.static_watts,
        contention=device.contention,
    )


def node_seconds(node: Node, device: DeviceProfile) -> float:
    """Seconds of one run on a device with `rates`; one launch without kernels."""
    flat = (x for kernel in kernels(node) for x in kernel.flat())
    return sum(kernel_seconds(x, device) for x in flat) or device.dispatch_seconds


def kernel_seconds(kernel: Kernel, device: DeviceProfile) -> float:
    """Seconds of all runs of a kernel without a body, on a device with `rates`."""
    working = sum(device.work_seconds(*work) for work in kernel.work)
    moved = kernel.moved_bytes
    moving = device.work_seconds("moved", None, moved, moved)
    return kernel.runs * (device.dispatch_seconds + max(working, moving))


def _share(graph: Graph, node: Node) -> float:
    """Of a node's work, what each device does; a `shard_map` says so itself."""
    if any(e.primitive.name == "shard_map" for e in node.equations):
        return 1.0
    values = [graph.values[v] for v in (*node.reads, *node.writes)]
    whole = sum(math.prod(x.shape) for x in values)
    return sum(math.prod(x.shard_shape) for x in values) / whole if whole else 1.0


def _roofline(graph: Graph, device: DeviceProfile) -> tuple[np.ndarray, np.ndarray]:
    """[N] seconds and joules of compute or memory traffic, whichever takes longer."""
    flops = np.array([node_flops(node, device) for node in graph.nodes], float)
    nbytes = [value.nbytes for value in graph.values]
    traffic = np.array(
        [sum(nbytes[v] for v in (*n.reads, *n.writes)) for n in graph.nodes], float
    )
    moving = traffic / device.bytes_per_second
    seconds = np.maximum(flops / device.flops_per_second, moving)
    joules = np.maximum(flops / device.flops_per_joule, moving * device.compute_watts)
    return device.dispatch_seconds + seconds, joules
