"""FLOPs by rule, rooflines, workspaces and instances."""

import csv
import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import poet_jax
from poet_jax.core.costs import node_flops
from poet_jax.core.instances import write_instance
from poet_jax.devices.kernels import workspace_bytes
from poet_jax.passes.cpu.scratch import node_scratch

DEVICE = poet_jax.DeviceProfile(
    name="round numbers",
    ram_bytes=2**30,
    flops_per_second=1000.0,
    flops_per_joule=100.0,
    bytes_per_second=4000.0,
    page_in_latency_seconds=1.0,
    page_in_bytes_per_second=8.0,
    page_out_latency_seconds=2.0,
    page_out_bytes_per_second=4.0,
    paging_watts=3.0,
    static_watts=0.5,
    dispatch_seconds=0.25,
)


def flops(fun, *args):
    return sum(map(node_flops, poet_jax.trace(fun, *args).nodes))


def ones(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@pytest.mark.parametrize(
    ("fun", "args", "expected"),
    [
        (lambda a, b: a @ b, (ones(3, 5), ones(5, 7)), 2 * 3 * 5 * 7),
        (
            lambda a, b: jnp.einsum("bij,bjk->bik", a, b),
            (ones(4, 3, 5), ones(4, 5, 7)),
            2 * 4 * 3 * 5 * 7,
        ),
        (
            lambda x, w: jax.lax.conv(x, w, (1, 1), "VALID"),
            (ones(2, 3, 8, 8), ones(5, 3, 3, 3)),
            2 * (2 * 5 * 6 * 6) * (3 * 3 * 3),
        ),
        (
            lambda x, w: jax.lax.conv_general_dilated(
                x, w, (1, 1), "VALID", feature_group_count=3
            ),
            (ones(1, 3, 8, 8), ones(6, 1, 3, 3)),
            2 * (6 * 6 * 6) * (3 * 3),
        ),
        (lambda x: jnp.sin(x), (ones(3, 5),), 15),
        (lambda x: x.sum(axis=0), (ones(3, 5),), 15),
        (lambda x: jnp.cumsum(x, axis=0), (ones(3, 5),), 15),
        (lambda x: x.T.reshape(5, 3), (ones(3, 5),), 0),
        (
            lambda x: jax.lax.scan(lambda c, r: (c + r, None), x[0] * 0, x)[0],
            (ones(6, 5),),
            5 + 6 * 5,
        ),
        (
            lambda x: jax.lax.cond(True, lambda x: x + x, lambda x: x * x * x, x),
            (ones(5),),
            10,
        ),
        (lambda x: jax.lax.fori_loop(0, 9, lambda _, c: c * 2, x), (ones(5),), 45),
    ],
)
def test_flops(fun, args, expected):
    assert flops(fun, *args) == pytest.approx(expected, abs=30 if len(args) < 2 else 0)


@pytest.mark.parametrize(("size", "seconds"), [(10, 2.0), (2, 0.016)])
def test_a_node_takes_its_compute_or_its_traffic_whichever_is_longer(size, seconds):
    """10 x 10 @ 10 x 10 is 2,000 FLOPs and 1,200 B; 2 x 2 is 16 FLOPs and 48 B."""
    graph = poet_jax.trace(lambda a: a @ a.T.copy(), ones(size, size))
    product = [n for n, x in enumerate(graph.nodes) if "dot_general" in x.name]
    costs = poet_jax.price(graph, DEVICE)
    traffic = 3 * size**2 * 4 / 4000
    assert costs.seconds[product[0]] == 0.25 + max(seconds, traffic)
    assert costs.joules[product[0]] == 2 * size**3 / 100


def test_paging_takes_latency_and_bytes_and_its_power():
    graph = poet_jax.trace(lambda a: jnp.sin(a), ones(4))
    costs = poet_jax.price(graph, DEVICE)
    assert list(costs.nbytes) == [16, 16]
    assert list(costs.page_in_seconds) == [1 + 2] * 2
    assert list(costs.page_out_seconds) == [2 + 4] * 2
    assert list(costs.page_in_joules) == [9] * 2
    assert list(costs.page_out_joules) == [18] * 2
    assert costs.static_watts == 0.5
    assert "0.5 W" in str(costs)


RATES = {
    "dot_float32": ((8.0, 1e-9), (512.0, 1e-10)),
    "convolution_float32": ((8.0, 1e-9),),
    "cheap_float32": ((1.0, 1e-10),),
    "exp_float32": ((1.0, 1e-8),),
    "moved": ((64.0, 1e-10),),
}
CALIBRATED = dataclasses.replace(DEVICE, rates=RATES, dispatch_seconds=1e-6)


def conv(x, k):
    return jax.lax.conv_general_dilated(
        x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def workspaces(fun, *args):
    graph = poet_jax.passes.group(poet_jax.trace(fun, *args))
    return poet_jax.price(graph, DEVICE).workspace_bytes


@pytest.mark.parametrize("device", [DEVICE, CALIBRATED])
def test_pricing_compiles_nothing(device):
    compiled = []

    def listen(name, *_, **__):
        if "compile" in name:
            compiled.append(name)

    graph = poet_jax.passes.group(
        poet_jax.trace(lambda x, k: jnp.sort(conv(x, k)).sum(), *images(2, 8, 3, 4))
    )
    graph = poet_jax.passes.cpu_kernels(graph)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        poet_jax.price(graph, device)
        assert not compiled
        jax.jit(lambda x: x + 1).lower(ones(3)).compile()
        assert compiled  # or nothing would be known of the above
    finally:
        jax.monitoring.clear_event_listeners()


def images(batch, size, channels, outputs):
    return ones(batch, size, size, channels), ones(3, 3, channels, outputs)


@pytest.mark.parametrize(
    ("fun", "smaller", "larger"),
    [
        (jnp.matmul, (ones(8, 8), ones(8, 8)), (ones(8, 8), ones(8, 9))),
        (jnp.matmul, (ones(64, 64),) * 2, (ones(512, 512),) * 2),
        (conv, images(2, 8, 3, 4), images(2, 8, 3, 5)),
        (conv, images(2, 8, 64, 4), images(3, 8, 64, 4)),
        (jnp.exp, (ones(100),), (ones(101),)),
    ],
)
def test_more_work_never_costs_less(fun, smaller, larger):
    times = [
        poet_jax.price(poet_jax.trace(fun, *args), CALIBRATED).seconds.sum()
        for args in (smaller, larger)
    ]
    assert times[0] <= times[1]


def test_a_kernel_takes_its_work_or_its_traffic_and_a_loop_its_body_often():
    """1024 exponentials are 10.24 us at 10 ns; 1 us starts a kernel."""
    once = poet_jax.price(poet_jax.trace(jnp.exp, ones(1024)), CALIBRATED)
    assert once.seconds.sum() == pytest.approx(11.24e-6)
    moved = poet_jax.price(poet_jax.trace(lambda x: x + 1, ones(1024)), CALIBRATED)
    assert moved.seconds.sum() == pytest.approx(1e-6 + 8192e-10)

    def often(x):
        return jax.lax.scan(lambda c, _: (jnp.exp(c), None), x, length=7)[0]

    loop = poet_jax.price(poet_jax.trace(often, ones(1024)), CALIBRATED)
    assert loop.seconds.sum() == pytest.approx(7 * 11.24e-6)


@pytest.mark.parametrize(
    ("fun", "args"),
    [
        (lambda x: [(y := jnp.tanh(x)).sum(0), y.sum(1)], (ones(512, 512),)),
        (lambda x: jnp.tanh(x).T @ x, (ones(512, 512),)),
        (lambda x: x - jnp.log(jnp.exp(x).sum(0)), (ones(512, 512),)),
        (
            lambda q, k: jnp.einsum("bthd,bshd->bhts", q, k),
            (ones(4, 64, 4, 32), ones(4, 64, 4, 32)),
        ),
        (
            lambda x, g: jax.vjp(lambda k: conv(x, k), jnp.zeros((3, 3, 16, 16)))[1](g),
            (ones(4, 16, 16, 16), ones(4, 16, 16, 16)),
        ),
    ],
)
def test_a_workspace_is_about_what_xla_allocates(fun, args):
    """As one node; scratch that XLA does not report is left out here."""
    graph = poet_jax.trace(fun, *args)
    equations = [e for node in graph.nodes for e in node.equations]
    node = poet_jax.core.Node.of("all", equations, graph.outputs)
    analysis = jax.jit(fun).lower(*args).compile().memory_analysis()
    known = workspace_bytes(node) - node_scratch(node)
    assert analysis.temp_size_in_bytes - 2**14 <= known
    assert known <= 1.25 * analysis.temp_size_in_bytes + 2**14


@pytest.mark.parametrize(
    "fun",
    [
        jnp.sort,
        lambda x: jax.lax.scan(lambda c, _: (jnp.sort(c), None), x, length=3)[0],
        lambda x: jnp.fft.fft(x).real,
    ],
)
def test_scratch_of_twice_as_long_rows_is_twice_as_much(fun):
    def scratch(length):
        return sum(map(node_scratch, poet_jax.trace(fun, ones(2, length)).nodes))

    assert scratch(2048) == 2 * scratch(1024) > 0


def test_scratch_of_twice_as_many_images_is_twice_as_much_but_for_the_kernel():
    def scratch(batch):
        args = images(batch, 16, 4, 128)
        return sum(map(node_scratch, poet_jax.trace(conv, *args).nodes))

    kernel_bytes = 9 * 4 * 128 * 4
    assert scratch(4) - kernel_bytes == 2 * (scratch(2) - kernel_bytes) > 0


def test_measured_nodes_cause_no_effects_and_leave_nothing_behind():
    seen = []

    def fun(key, x):
        io_callback(lambda a: seen.append(a), None, x[0, 0])
        return jax.random.normal(key, x.shape) @ x, x.astype(jnp.bfloat16) * 2

    args = jax.random.key(0), ones(64, 64)
    graph = poet_jax.trace(fun, *args)
    modelled = poet_jax.price(graph, CALIBRATED)
    measured = poet_jax.price(graph, CALIBRATED, measure=True)
    jax.effects_barrier()
    assert not seen
    for number, node in enumerate(graph.nodes):
        same = measured.seconds[number] == modelled.seconds[number]
        assert same != node.repeatable and measured.seconds[number] > 0
    np.testing.assert_allclose(measured.joules, measured.seconds * DEVICE.compute_watts)
    again = poet_jax.price(graph, CALIBRATED)
    assert list(again.seconds) == list(modelled.seconds)


def doubled(x):
    """Until it is large, or was doubled very often, as zeros are."""

    def goes_on(carry):
        return (carry[0][0, 0] < 4) & (carry[1] < 10_000)

    return jax.lax.while_loop(goes_on, lambda c: (2 * c[0], c[1] + 1), (x, 0))[0]


def called(x):
    def check(x):
        assert (np.asarray(x) > 0).all(), "the host saw made-up data"
        return np.asarray(x)

    return jax.pure_callback(check, x, x)


@pytest.mark.parametrize("function", [doubled, called])
def test_what_needs_data_is_not_run_on_zeros(function):
    def fun(x):
        y = function(x)
        return jnp.sin(y) @ y, y

    graph = poet_jax.passes.group(poet_jax.trace(fun, ones(64, 64)))
    measured = poet_jax.price(graph, DEVICE, measure=True)
    modelled = poet_jax.price(graph, DEVICE)
    (node,) = [n for n, node in enumerate(graph.nodes) if node.needs_data]
    assert measured.seconds[node] == modelled.seconds[node] > 0
    assert measured.joules[node] == modelled.joules[node] > 0


def test_the_seconds_of_a_callback_are_those_that_the_user_states(tmp_path):
    def fun(x):
        return jnp.sin(called(x)) @ x

    graph = poet_jax.passes.group(poet_jax.trace(fun, ones(64, 64)))
    path = tmp_path / "nodes.csv"
    poet_jax.devices.write_node_costs(path, graph, poet_jax.price(graph, DEVICE))
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    (row,) = [row for row in rows if "pure_callback" in row["name"]]
    row |= {"seconds": "2.5", "joules": ""}
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        writer.writeheader()
        writer.writerows(rows)
    device = dataclasses.replace(DEVICE, node_costs=str(path))
    # Traced anew, as in a later process.
    graph = poet_jax.passes.group(poet_jax.trace(lambda x: fun(x), ones(64, 64)))
    costs = poet_jax.price(graph, device)
    (node,) = [n for n, node in enumerate(graph.nodes) if node.needs_data]
    assert costs.seconds[node] == 2.5
    assert costs.joules[node] == 2.5 * DEVICE.compute_watts


def test_rbg_keys_can_be_timed():
    graph = poet_jax.trace(
        lambda key: jax.random.bits(key, (4,)), jax.random.key(0, impl="rbg")
    )
    costs = poet_jax.price(graph, DEVICE, measure=True)
    assert (costs.seconds > 0).all()


@pytest.mark.parametrize(
    "name", ["MKR1000", "NRF52840", "RASPBERRY_PI_4", "JETSON_TX2"]
)
def test_named_devices_are_complete(name):
    device = getattr(poet_jax.devices, name)
    assert device.source
    assert 0 < device.compute_watts < 100
    assert device.page_in_seconds(10**6) > device.page_in_seconds(10**5) > 0
    assert device.page_out_seconds(10**6) > device.page_out_seconds(10**5) > 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"flops_per_second": 0.0},
        {"flops_per_joule": -1.0},
        {"paging_watts": math.nan},
        {"ram_bytes": 0},
        {"page_in_latency_seconds": -1e-3},
    ],
)
def test_a_profile_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        dataclasses.replace(DEVICE, **wrong)


def instance(path, seconds=1.0):
    values = tuple(poet_jax.core.Value(f"n{i}", 4 + i) for i in range(3))
    nodes = tuple(
        poet_jax.core.Node(f"n{i}", tuple(range(i)), (i,), backward=i == 2)
        for i in range(3)
    )
    row = {
        "seconds": seconds, "joules": 2.0, "page_in_seconds": 3.0,
        "page_out_seconds": 4.0, "page_in_joules": 5.0, "page_out_joules": 6.0,
    }  # fmt: skip
    write_instance(path, poet_jax.Graph(values, nodes), [row] * 3)


def test_an_instance_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "instance.json"
    instance(path)
    graph, costs = poet_jax.load_instance(path)
    assert [node.reads for node in graph.nodes] == [(), (0,), (0, 1)]
    assert [node.backward for node in graph.nodes] == [False, False, True]
    assert list(costs.nbytes) == [4, 5, 6]
    assert list(costs.seconds) == [1.0] * 3
    assert list(costs.page_out_joules) == [6.0] * 3
    assert not graph.outputs and not graph.arguments
    plan = poet_jax.keep_all(graph, costs, poet_jax.Budget(15))
    with pytest.raises(ValueError, match="instance"):
        poet_jax.emit.emit(poet_jax.lower(graph, plan))


@pytest.mark.parametrize("seconds", [-1.0, math.nan])
def test_an_instance_with_a_cost_that_is_none_is_refused(tmp_path, seconds):
    path = tmp_path / "instance.json"
    instance(path, seconds)
    with pytest.raises(ValueError, match="seconds"):
        poet_jax.load_instance(path)


@pytest.mark.parametrize("edge", [[1, 0], [1, 1], [0, 9]])
def test_an_instance_with_an_edge_backwards_is_refused(tmp_path, edge):
    path = tmp_path / "instance.json"
    instance(path)
    data = json.loads(path.read_text())
    data["edges"].append(edge)
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match="edge"):
        poet_jax.load_instance(path)
