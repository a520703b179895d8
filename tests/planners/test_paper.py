"""The published formulation: its known optima, and its rows checked one by one."""

import functools
import json
import pathlib
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import budgeted_graphs, examples

import poet_jax
from experiments.paper import layer_graphs

INSTANCES = pathlib.Path(__file__).parents[3] / "shared" / "instances"


def optima():
    """(instance, bytes, paging, joules) of each row of the instances' table."""
    if not (INSTANCES / "README.md").is_file():
        return []
    rows = re.findall(
        r"^\| (\S+) \| ([\d,]+) \| (yes|no) \| ([\d.]+) \|$",
        (INSTANCES / "README.md").read_text(),
        re.MULTILINE,
    )
    return [
        (name, int(nbytes.replace(",", "")), paging == "yes", float(joules))
        for name, nbytes, paging, joules in rows
    ]


@functools.cache
def load(name):
    return poet_jax.load_instance(INSTANCES / f"{name}.json")


def check(graph, costs, budget, solution):
    """The published rows, on a solution; what `PaperSolution` says of itself too."""
    R, S_ram, S_storage = solution.R, solution.S_ram, solution.S_storage
    M_in, M_out = solution.M_in, solution.M_out
    T = len(graph.nodes)
    assert R.shape == S_ram.shape == S_storage.shape == M_in.shape == (T, T)
    assert R.diagonal().all() and not np.triu(R, 1).any()
    for S in (S_ram, S_storage):
        assert not np.triu(S).any()  # nothing is kept before it was computed
    for n, node in enumerate(graph.nodes):
        for v in node.reads:
            if v in graph.producer:
                u = graph.producer[v]
                assert (R[:, n] <= (R[:, u] | S_ram[:, u])).all()
        if not node.repeatable:
            assert R[:, n].sum() == 1
    assert (S_ram[1:] <= (S_ram | R | M_in)[:-1]).all()
    assert (S_storage[1:] <= (S_storage | M_out)[:-1]).all()
    assert (M_in <= S_storage).all()
    assert (M_out <= S_ram).all()

    def of_nodes(of_values):
        return np.array([sum(of_values[v] for v in n.writes) for n in graph.nodes])

    joules = (R @ costs.joules).sum() + (M_in @ of_nodes(costs.page_in_joules)).sum()
    joules += (M_out @ of_nodes(costs.page_out_joules)).sum()
    assert solution.joules == pytest.approx(joules, rel=1e-6)
    assert solution.bound <= solution.joules * (1 + 1e-6)
    if budget.seconds is not None:
        assert (R @ costs.seconds).sum() <= budget.seconds * (1 + 1e-9)
    assert memory(graph, costs, R, S_ram) <= budget.memory_bytes


def memory(graph, costs, R, S_ram):
    """The published U, by running each stage: values go once the stage and the next one
    have no more use for them."""
    T, peak = len(graph.nodes), 0
    nbytes = [sum(int(costs.nbytes[v]) for v in n.writes) for n in graph.nodes]
    fixed = sum(int(costs.nbytes[v]) for v in graph.initial)
    reads = [
        {graph.producer[v] for v in node.reads if v in graph.producer}
        for node in graph.nodes
    ]
    for t in range(T):
        used = fixed + sum(nbytes[i] for i in range(T) if S_ram[t, i])
        for k in np.flatnonzero(R[t]):
            used += nbytes[k]
            peak = max(peak, used)
            for i in reads[k]:
                later = any(R[t, j] and i in reads[j] for j in range(k + 1, T))
                if not later and not (t + 1 < T and S_ram[t + 1, i]):
                    used -= nbytes[i]
    return peak


@pytest.mark.parametrize(
    ("name", "memory_bytes", "paging", "joules"),
    optima()
    or [pytest.param("", 0, True, 0.0, marks=pytest.mark.skip("no instances"))],
)
def test_the_known_optima_are_reproduced(name, memory_bytes, paging, joules):
    graph, costs = load(name)
    budget = poet_jax.Budget(memory_bytes, seconds=4 * costs.seconds.sum())
    # CBC takes 90 s for the smallest budget, and a second or less for the others.
    solver = "HIGHS" if (memory_bytes, paging) == (3256, True) else "CBC"
    planner = poet_jax.PaperPlanner(solver, paging=paging)
    solution = planner.solve(graph, costs, budget)
    assert solution is not None
    assert solution.joules == pytest.approx(joules, rel=1e-5)
    check(graph, costs, budget, solution)


@pytest.mark.parametrize(
    ("name", "memory_bytes", "paging", "joules"),
    optima()
    or [pytest.param("", 0, True, 0.0, marks=pytest.mark.skip("no instances"))],
)
def test_the_sparse_formulation_proves_the_known_optima(
    name, memory_bytes, paging, joules
):
    """On these its rules for memory and stages make no difference."""
    graph, costs = load(name)
    budget = poet_jax.Budget(memory_bytes, seconds=4 * costs.seconds.sum())
    plan = poet_jax.MilpPlanner(paging=paging)(graph, costs, budget)
    assert plan.status is poet_jax.Status.OPTIMAL
    assert plan.objective == pytest.approx(joules, rel=1e-5)


def test_every_row_of_the_table_was_read():
    if not INSTANCES.is_dir():
        pytest.skip("no instances")
    text = (INSTANCES / "README.md").read_text()
    assert len(optima()) == text.count("| poet-") == 20


@pytest.mark.parametrize("solver", ["CBC", "HIGHS"])
@examples(40)
@given(case=budgeted_graphs(max_nodes=6), late=st.sampled_from([None, 1.2, 2.0]))
def test_a_solution_keeps_every_published_row(solver, case, late):
    graph, costs, memory_bytes = case
    seconds = late and late * float(costs.seconds.sum())
    budget = poet_jax.Budget(memory_bytes, seconds)
    solution = poet_jax.PaperPlanner(solver).solve(graph, costs, budget)
    if solution is not None:
        check(graph, costs, budget, solution)


@examples(40)
@given(case=budgeted_graphs(max_nodes=6))
def test_the_solvers_agree_on_the_published_optimum(case):
    graph, costs, memory_bytes = case
    budget = poet_jax.Budget(memory_bytes)
    cbc, highs = (
        poet_jax.PaperPlanner(solver).solve(graph, costs, budget)
        for solver in ("CBC", "HIGHS")
    )
    assert (cbc is None) == (highs is None)
    if cbc is not None:
        assert cbc.joules == pytest.approx(highs.joules, rel=1e-6)


@pytest.mark.parametrize("memory_bytes", [1, 9, 10])
def test_a_function_that_computes_nothing_is_planned_or_refused(memory_bytes):
    """f(x) = x, of 10 bytes."""
    graph = poet_jax.Graph(
        (poet_jax.core.Value("x", 10),), (), arguments=(0,), outputs=(0,)
    )
    none, one = np.zeros(0), np.zeros(1)
    costs = poet_jax.Costs(none, none, none, np.array([10]), one, one, one, one)
    budget = poet_jax.Budget(memory_bytes)
    for planner in (poet_jax.PaperPlanner(), poet_jax.MilpPlanner()):
        if memory_bytes == 10:
            assert planner(graph, costs, budget).actions == ()
            continue
        with pytest.raises(poet_jax.BudgetTooSmall) as caught:
            planner(graph, costs, budget)
        assert caught.value.smallest_bytes == 10


@pytest.mark.parametrize("network", layer_graphs.NETWORKS)
@pytest.mark.parametrize("board", layer_graphs.BOARDS)
@pytest.mark.skipif(not INSTANCES.is_dir(), reason="the instances are not here")
def test_the_layer_graphs_are_the_published_ones(network, board):
    """But for the order of layers that could run in any order."""
    name, make = f"poet-{network}-{board}", layer_graphs.NETWORKS[network]
    ours = layer_graphs.instance(name, make(), layer_graphs.BOARDS[board])
    theirs = json.loads((INSTANCES / f"{name}.json").read_text())

    def numbers(instance):
        return {
            node["name"]: {k: v for k, v in node.items() if k != "name"}
            for node in instance["nodes"]
        }

    def edges(instance):
        names = [node["name"] for node in instance["nodes"]]
        return sorted((names[a], names[b]) for a, b in instance["edges"])

    assert numbers(ours).keys() == numbers(theirs).keys()
    for layer, costs in numbers(theirs).items():
        assert numbers(ours)[layer] == pytest.approx(costs, rel=1e-12)
    assert edges(ours) == edges(theirs)
    if network != "resnet18_cifar":
        assert sorted(ours["edges"]) == sorted(theirs["edges"])


def test_the_published_example_takes_the_published_joules(tmp_path):
    """ResNet-18 on the Raspberry Pi, within 3,000,000 bytes and 7.6 times the compute.

    The published code repeats and pages for 7.89187 J (its README).
    """
    layer_graphs.write(tmp_path)
    path = tmp_path / "poet-resnet18_cifar-a72.json"
    graph, costs = poet_jax.load_instance(path)
    least = poet_jax.keep_all(graph, costs, poet_jax.Budget(2**40)).objective
    assert least == pytest.approx(7.889510, rel=1e-6)
    budget = poet_jax.Budget(3_000_000, seconds=7.6 * costs.seconds.sum())
    plan = poet_jax.MilpPlanner()(graph, costs, budget)
    assert plan.status is poet_jax.Status.OPTIMAL
    assert plan.objective <= 7.88952


def test_waiting_for_storage_is_part_of_the_program(tmp_path):
    """Within 1.02 times the compute the cheapest pages leave the transformer waiting;
    dearer ones do not, and that they are the best is proven."""
    layer_graphs.write(tmp_path)
    path = tmp_path / "poet-transformer-a72.json"
    graph, costs = poet_jax.load_instance(path)
    compute_seconds = costs.seconds.sum()
    plans = [
        poet_jax.MilpPlanner()(graph, costs, poet_jax.Budget(33_030_144, seconds))
        for seconds in (1.02 * compute_seconds, 4 * compute_seconds)
    ]
    assert all(plan.status is poet_jax.Status.OPTIMAL for plan in plans)
    timely, late = (poet_jax.simulate(poet_jax.lower(graph, x), costs) for x in plans)
    assert timely.seconds <= 1.02 * compute_seconds < late.seconds
    assert late.joules < timely.joules
