"""Profiles as files, rates by kind of work, and nodes measured on a board."""

import csv
import dataclasses
import math
import pathlib
import tempfile
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples
from toy import STAGES

import poet_jax
from poet_jax.core.costs import node_flops
from poet_jax.core.signatures import node_signature

BOARD = poet_jax.DeviceProfile(
    name='a "board"',
    ram_bytes=2**20,
    flops_per_second=1000.0,
    flops_per_joule=100.0,
    page_in_bytes_per_second=8.0,
    page_out_bytes_per_second=4.0,
    paging_watts=3.0,
    store_bytes=64,
    source={"flops_per_second": "data sheet, table 7"},
)


def graph_of(dtype=jnp.float32, size=4):
    x = jax.ShapeDtypeStruct((size, size), dtype)
    return poet_jax.passes.group(poet_jax.trace(lambda a: jnp.tanh(a @ a) @ a, x))


@pytest.mark.parametrize("name", poet_jax.devices.ALL)
@pytest.mark.parametrize("suffix", ["toml", "json"])
def test_a_profile_survives_its_file(name, suffix, tmp_path):
    device = poet_jax.devices.ALL[name]
    path = tmp_path / f"{name}.{suffix}"
    device.save(path)
    assert poet_jax.DeviceProfile.load(path) == device


@pytest.mark.parametrize("suffix", ["toml", "json"])
def test_a_profile_may_have_no_limit_and_any_name(suffix, tmp_path):
    device = poet_jax.DeviceProfile(
        name="Küche \N{ELECTRIC LIGHT BULB}",
        ram_bytes=2**30,
        flops_per_second=1e9,
        flops_per_joule=math.inf,
        page_in_bytes_per_second=math.inf,
        page_out_bytes_per_second=1e6,
        paging_watts=0.0,
    )
    device.save(tmp_path / f"device.{suffix}")
    assert poet_jax.DeviceProfile.load(tmp_path / f"device.{suffix}") == device


TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


@examples(60)
@given(
    suffix=st.sampled_from(["toml", "json"]),
    name=TEXTS,
    source=TEXTS | st.dictionaries(TEXTS, TEXTS, min_size=1),
    kind=TEXTS,
)
def test_a_profile_of_odd_names_survives_its_file(suffix, name, source, kind):
    rates = {kind: ((8.0, 1.0),)}
    device = dataclasses.replace(BOARD, name=name, source=source, rates=rates)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / f"a.{suffix}"
        device.save(path)
        assert poet_jax.DeviceProfile.load(path) == device


@pytest.mark.parametrize("kind", [str, pathlib.Path])
@pytest.mark.parametrize("suffix", ["toml", "json"])
def test_measured_costs_are_found_from_another_folder(
    suffix, kind, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    device = dataclasses.replace(BOARD, node_costs=kind("board.csv"))
    device.save(f"other/a.{suffix}")
    assert poet_jax.DeviceProfile.load(f"other/a.{suffix}").node_costs == "board.csv"
    again = poet_jax.DeviceProfile.load(tmp_path / f"other/a.{suffix}")
    assert again.node_costs == str(tmp_path / "board.csv")


@pytest.mark.parametrize("name", poet_jax.devices.ALL)
def test_every_number_of_a_named_device_has_an_origin(name):
    device = poet_jax.devices.ALL[name]
    for field in dataclasses.fields(device):
        if field.name not in ("name", "source"):
            assert device.origin(field.name) != "no origin stated", field.name
    assert 0 < device.compute_watts < 1000
    assert device.page_in_seconds(10**6) > device.page_in_seconds(10**5) > 0
    assert device.page_out_seconds(10**6) > device.page_out_seconds(10**5) > 0


RATES = {"dot_float32": ((8.0, 4e-9), (512.0, 1e-9)), "moved": ((64.0, 1e-10),)}


def test_a_calibrated_machine_prices_alike_from_its_file(tmp_path):
    device = dataclasses.replace(BOARD, rates=RATES, dispatch_seconds=1e-6)
    device.save(tmp_path / "board.toml")
    again = poet_jax.DeviceProfile.load(tmp_path / "board.toml")
    assert again == device and again.rates == RATES
    graph = graph_of()
    costs = [poet_jax.price(graph, x).seconds for x in (device, again)]
    assert list(costs[0]) == list(costs[1])


def test_a_rate_between_two_sizes_is_between_theirs():
    """Half way on a logarithmic scale, and beyond the ends as at the ends."""
    device = dataclasses.replace(BOARD, rates=RATES)
    sizes = 1, 8, 64, 512, 4096
    rates = [device.work_seconds("dot", "float32", 1.0, size) for size in sizes]
    assert rates == pytest.approx([4e-9, 4e-9, 2e-9, 1e-9, 1e-9])
    assert device.work_seconds("dot", "bfloat16", 1.0, 8) == pytest.approx(4e-9)


ROWS = [
    *((), ((8.0, 0.0),), ((8.0, 1.0), (8.0, 1.0))),
    *(3, [3], "38", ["38"], [(1, 2, 3)], [(8.0, 1.0), 3], [(8.0, None)]),
]


@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_rates_that_make_no_sense_are_refused(rows):
    with pytest.raises(ValueError, match="dot_float32.*rising sizes"):
        dataclasses.replace(BOARD, rates={"dot_float32": rows})


@pytest.mark.parametrize("rates", [3, [(8.0, 1.0)], "moved"])
def test_rates_are_of_kinds(rates):
    with pytest.raises(ValueError, match="rates must be a dict of rows by kind"):
        dataclasses.replace(BOARD, rates=rates)


def test_published_constants_are_kept_apart():
    published, used = (
        places.RASPBERRY_PI_4 for places in (poet_jax.devices.paper, poet_jax.devices)
    )
    assert published.compute_watts == pytest.approx(49.85, abs=0.01)
    assert used.compute_watts == pytest.approx(3.0, abs=0.01)  # as measured


@pytest.mark.parametrize(
    ("text", "culprit"),
    [
        ('name = "x"\n', "ram_bytes"),
        ("name = \n", "TOML"),
        ("{text}flops = 3.0\n", "unknown flops"),
        ("{text}static_watts = -1.0\n", "static_watts"),
        ('{text}static_watts = "1"\n', "static_watts"),
        ("{text}bytes_per_second = 0.0\n", "bytes_per_second"),
        ("{text}rates.moved = 3\n", "rates of moved must be rows"),
        ("{text}rates.moved = [[1, 2, 3]]\n", "rates of moved must be rows"),
        ("{text}rates = 3\n", "rates must be a dict"),
        ("x = " + "[" * 50_000, "TOML"),
        ("{text}node_costs = 5\n", "node_costs must be text"),
        ("{text}source.ram_bytes = 5\n", "source of ram_bytes must be text"),
        ("{text}contention = 1.0\n", "contention must be .* number below 1 .*got 1.0"),
    ],
)
def test_a_file_that_is_no_profile_is_refused(text, culprit, tmp_path):
    path = tmp_path / "board.toml"
    dataclasses.replace(BOARD, source="assumed").save(path)
    path.write_text(text.replace("{text}", path.read_text()))
    with pytest.raises(ValueError, match=culprit):
        poet_jax.DeviceProfile.load(path)


@pytest.mark.parametrize("data", [b"[]", b"5", b"null", b"\xff", b"[" * 50_000])
def test_json_that_is_no_profile_is_refused(data, tmp_path):
    path = tmp_path / "board.json"
    path.write_bytes(data)
    with pytest.raises(
        ValueError, match=r"board.json is no TOML, or JSON.*save\(path\)"
    ):
        poet_jax.DeviceProfile.load(path)


@pytest.mark.parametrize("wrong", [{"name": 5}, {"source": 5}, {"source": {"a": 5}}])
def test_a_name_or_source_that_is_no_text_is_refused(wrong):
    with pytest.raises(ValueError, match="must be text, got 5"):
        dataclasses.replace(BOARD, **wrong)


@pytest.mark.parametrize(
    ("backend", "counts", "found"),
    [("cpu", {"bytes_limit": 0}, None), ("gpu", {"bytes_limit": 7}, "half a fi")],
)
def test_this_machine_is_calibrated_once_and_kept(
    backend, counts, found, tmp_path, monkeypatch
):
    """Also after half a file; a memory without a limit is the system's."""
    device = types.SimpleNamespace(memory_stats=lambda: counts)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = poet_jax.devices.host_path()
    assert tmp_path in path.parents
    if found is not None:
        path.parent.mkdir()
        path.write_text(found)
    poet_jax.host.cache_clear()
    first = poet_jax.host()
    assert first.rates and (first.ram_bytes == 7) == (backend == "gpu")
    assert poet_jax.DeviceProfile.load(path) == first
    changed = path.stat().st_mtime_ns
    poet_jax.host.cache_clear()
    assert poet_jax.host() == first and path.stat().st_mtime_ns == changed
    poet_jax.host.cache_clear()


@pytest.mark.parametrize(
    ("dtype", "speedup"), [("float32", 1), ("bfloat16", 2), ("float16", 2), ("int8", 4)]
)
def test_work_of_a_kind_has_its_rate(dtype, speedup):
    """Two products of 4 x 4 are 256 FLOPs; 16 elements go through tanh, at a tenth."""
    device = dataclasses.replace(
        BOARD, elementwise_flops_per_second=100.0, bfloat16_speedup=2, int8_speedup=4
    )
    x = jax.ShapeDtypeStruct((4, 4), dtype)
    function = jnp.abs if dtype == "int8" else jnp.tanh
    graph = poet_jax.trace(lambda a: function(a @ a) @ a, x)
    work = sum(node_flops(node, device) for node in graph.nodes)
    assert work == pytest.approx((2 * 128 + 10 * 16) / speedup)
    costs = poet_jax.price(graph, device)
    assert costs.seconds.sum() == pytest.approx(work / 1000)
    assert costs.joules.sum() == pytest.approx(work / 100)


def test_power_is_drawn_while_memory_is_waited_for():
    device = dataclasses.replace(BOARD, bytes_per_second=0.5)
    costs = poet_jax.price(graph_of(), device)
    np.testing.assert_allclose(costs.joules, costs.seconds * device.compute_watts)


def test_a_plan_stays_within_the_storage_of_its_device():
    """On 24 KiB one of the layers' results, 16 KiB each, fits; without limit more do,
    and paging them costs less than to compute at 1 FLOP/J."""
    x = jnp.ones((64, 64))
    most_bytes = 3 * x.nbytes // 2

    def fun(x):
        for _ in range(5):
            x = jnp.tanh(x @ x)
        return x

    def planned(store_bytes):
        board = dataclasses.replace(
            BOARD, store_bytes=store_bytes, flops_per_joule=1.0, paging_watts=0.0
        )
        gradient = jax.grad(lambda x: fun(x).sum())
        options = {"device": board, "executor": STAGES}
        return poet_jax.schedule(gradient, "75%", **options).plan(x)

    free, limited = planned(math.inf), planned(most_bytes)
    assert planned(2**20).budget == free.budget  # nothing could fill that
    assert free.budget.store_bytes is None and free.usage.store_bytes > most_bytes
    assert limited.budget.store_bytes == most_bytes >= limited.usage.store_bytes


def measured(path, change):
    """The file that `write_node_costs` makes, with its rows changed."""
    graph = graph_of()
    poet_jax.devices.write_node_costs(path, graph, poet_jax.price(graph, BOARD))
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    rows = change(rows)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return graph, dataclasses.replace(BOARD, node_costs=str(path))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_measured_nodes_replace_the_model(encoding, tmp_path):
    def change(rows):
        return [row | {"seconds": n + 1, "joules": ""} for n, row in enumerate(rows)]

    path = tmp_path / "board.csv"
    graph, device = measured(path, change)
    path.write_text(path.read_text("utf-8"), encoding)
    costs = poet_jax.price(graph, device)
    keys = [node_signature(graph, node) for node in graph.nodes]
    expected = {key: n + 1 for n, key in enumerate(dict.fromkeys(keys))}
    assert list(costs.seconds) == [expected[key] for key in keys]
    assert list(costs.joules) == [10.0 * expected[key] for key in keys]
    device.save(tmp_path / "board.toml")
    data = (tmp_path / "board.toml").read_text()
    (tmp_path / "board.toml").write_text(data.replace(f"{tmp_path}/", ""))
    again = poet_jax.price(graph, poet_jax.DeviceProfile.load(tmp_path / "board.toml"))
    assert list(again.seconds) == list(costs.seconds)


def test_a_signature_does_not_depend_on_names_but_on_shapes():
    assert len({node_signature(graph_of(), n) for n in graph_of().nodes}) == len(
        graph_of().nodes
    )
    sizes = [{node_signature(g, n) for n in g.nodes} for g in (graph_of(), graph_of())]
    assert sizes[0] == sizes[1]
    other = graph_of(size=5)
    assert sizes[0].isdisjoint(node_signature(other, n) for n in other.nodes)


def test_nodes_that_were_not_measured_are_modelled_only_if_asked(tmp_path):
    path = tmp_path / "board.csv"
    graph, device = measured(path, lambda rows: [rows[0] | {"seconds": 7.0}])
    with pytest.raises(ValueError, match="node_costs_partial=True"):
        poet_jax.price(graph, device)
    partly = dataclasses.replace(device, node_costs_partial=True)
    modelled = poet_jax.price(graph, BOARD).seconds
    assert list(poet_jax.price(graph, partly).seconds) == [7.0, *modelled[1:]]
    other = graph_of(size=5)
    with pytest.raises(ValueError, match="signature"):
        poet_jax.price(other, partly)  # not one matches


@pytest.mark.parametrize("wrong", ["-1", "nan", "fast"])
def test_a_measured_cost_that_is_none_is_refused(wrong, tmp_path):
    def change(rows):
        return [row | {"seconds": wrong} for row in rows]

    graph, device = measured(tmp_path / "board.csv", change)
    with pytest.raises(ValueError, match=f"seconds '{wrong}'"):
        poet_jax.price(graph, device)


def test_a_file_without_the_columns_is_refused(tmp_path):
    path = tmp_path / "board.csv"
    path.write_text("node,time\na,1\n")
    with pytest.raises(ValueError, match="write_node_costs"):
        poet_jax.price(graph_of(), dataclasses.replace(BOARD, node_costs=str(path)))


def test_energy_is_what_the_formulas_say_by_hand():
    """a = x @ x, b = a @ x, c = b @ a, with a paged between b and c.

    A product of 4 x 4 takes 128 FLOPs: 0.128 s and 1.28 J at 1000 FLOP/s and 100
    FLOP/J. The page of 64 B takes 2 + 64 / 4 s out and 1 + 64 / 8 s in, at 3 W. The
    page-out starts when a is there, and b is done long before it: c waits for both.
    """
    board = dataclasses.replace(
        BOARD,
        page_in_latency_seconds=1.0,
        page_out_latency_seconds=2.0,
        static_watts=0.5,
    )

    def fun(x):
        a = x @ x
        return (a @ x) @ a

    graph = poet_jax.trace(fun, jax.ShapeDtypeStruct((4, 4), jnp.float32))
    (a,) = graph.nodes[0].writes
    actions = (
        poet_jax.core.Compute(0), poet_jax.core.PageOut(a), poet_jax.core.Compute(1),
        poet_jax.core.PageIn(a), poet_jax.core.Compute(2),
    )  # fmt: skip
    plan = poet_jax.Plan(actions, poet_jax.Status.HEURISTIC, 0.0, 0.0, "by hand")
    costs = poet_jax.price(graph, board)
    usage = poet_jax.simulate(poet_jax.lower(graph, plan), costs)
    seconds = 0.128 + (2 + 64 / 4) + (1 + 64 / 8) + 0.128
    joules = 3 * 1.28 + 3.0 * (18 + 9) + 0.5 * seconds
    assert usage.seconds == pytest.approx(seconds, rel=1e-12)
    assert usage.joules == pytest.approx(joules, rel=1e-12)
