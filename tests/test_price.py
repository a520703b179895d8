"""FLOPs by rule, rooflines, workspaces and instances."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import poet_jax
from poet_jax.graph import write_instance
from poet_jax.price import node_flops

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


def test_a_workspace_is_what_xla_says():
    graph = poet_jax.trace(lambda a: jnp.sort(a, axis=0), ones(64, 64))
    costs = poet_jax.price(graph, DEVICE)
    compiled = jax.jit(lambda a: jnp.sort(a, axis=0)).lower(ones(64, 64)).compile()
    expected = compiled.memory_analysis().temp_size_in_bytes
    assert costs.workspace_bytes.max() == expected


def test_a_measured_device_times_nodes_and_causes_no_effects():
    seen = []

    def fun(key, x):
        io_callback(lambda a: seen.append(a), None, x[0, 0])
        return jax.random.normal(key, x.shape) @ x, x.astype(jnp.bfloat16) * 2

    args = jax.random.key(0), ones(64, 64)
    graph = poet_jax.trace(fun, *args)
    device = dataclasses.replace(DEVICE, measured=True)
    costs = poet_jax.price(graph, device)
    jax.effects_barrier()
    assert not seen
    for node, seconds in zip(graph.nodes, costs.seconds, strict=True):
        assert (seconds > 0) == node.repeatable
    np.testing.assert_allclose(costs.joules, costs.seconds * device.compute_watts)


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

    graph = poet_jax.coarsen(poet_jax.trace(fun, ones(64, 64)))
    measured = poet_jax.price(graph, dataclasses.replace(DEVICE, measured=True))
    modelled = poet_jax.price(graph, DEVICE)
    (node,) = [n for n, node in enumerate(graph.nodes) if node.needs_data]
    assert measured.seconds[node] == modelled.seconds[node] > 0
    assert measured.joules[node] == modelled.joules[node] > 0
    everything = poet_jax.keep_all(graph, measured, poet_jax.Budget(2**30))
    fused = poet_jax.fuse(poet_jax.lower(graph, everything), measured, 2**30)
    (run,) = [x for x in fused.instructions if isinstance(x, poet_jax.Fused)]
    assert run.seconds is None


def test_rbg_keys_can_be_timed():
    graph = poet_jax.trace(
        lambda key: jax.random.bits(key, (4,)), jax.random.key(0, impl="rbg")
    )
    costs = poet_jax.price(graph, dataclasses.replace(DEVICE, measured=True))
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
    values = tuple(poet_jax.Value(f"n{i}", 4 + i) for i in range(3))
    nodes = tuple(
        poet_jax.Node(f"n{i}", tuple(range(i)), (i,), backward=i == 2) for i in range(3)
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
    with pytest.raises(poet_jax.PlanInvalid, match="instance"):
        poet_jax.HostExecutor()(poet_jax.lower(graph, plan))


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
