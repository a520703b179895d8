"""The referee's arithmetic: by hand, and by other means on random programs."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from strategies import HEURISTICS, attempt, budgeted_graphs, examples, solvers

import poet_jax
from poet_jax.core.in_place import replaceable
from poet_jax.core.plan import Compute, Free, PageIn, PageOut
from poet_jax.core.program import Run
from poet_jax.core.simulate import alive_at_peak


def case(seconds=(2, 3, 1), out=4, back=5, **options):
    """a -> b -> c, and c reads a too, which is paged while b runs.

    a --> b --> c       bytes: a 8, b 4, c 2; workspace of b: 3
     \\_________/
    """
    graph = poet_jax.Graph(
        tuple(
            poet_jax.core.Value(n, size) for n, size in (("a", 8), ("b", 4), ("c", 2))
        ),
        (
            poet_jax.core.Node("a", (), (0,)),
            poet_jax.core.Node("b", (0,), (1,)),
            poet_jax.core.Node("c", (0, 1), (2,)),
        ),
        outputs=(2,),
    )
    costs = poet_jax.Costs(
        seconds=np.array(seconds, float),
        joules=np.array([10.0, 20.0, 40.0]),
        workspace_bytes=np.array([0, 3, 0]),
        nbytes=np.array([8, 4, 2]),
        page_in_seconds=np.array([back, 0, 0], float),
        page_out_seconds=np.array([out, 0, 0], float),
        page_in_joules=np.array([1.0, 0, 0]),
        page_out_joules=np.array([2.0, 0, 0]),
        **options,
    )
    return graph, costs


def run(graph, costs, *actions):
    plan = poet_jax.Plan(actions, poet_jax.Status.HEURISTIC, 0.0, 0.0, "by hand")
    return poet_jax.simulate(poet_jax.lower(graph, plan), costs)


PAGED = Compute(0), PageOut(0), Compute(1), PageIn(0), Compute(2)


def test_bytes_of_a_paged_program():
    usage = run(*case(), *PAGED)
    #                a  out  b   free a  in a  c   free a, b in either order
    assert list(usage.live_bytes[:6]) == [8, 8, 15, 12, 12, 14]
    assert usage.peak_bytes == 15
    assert usage.store_bytes == usage.bytes_paged_in == usage.bytes_paged_out == 8


def test_a_free_waits_for_the_page_out_and_a_compute_for_the_page_in():
    """Compute a 0-2, b 2-5; out 2-6, so a goes at 6; in 6-11; c 11-12."""
    usage = run(*case(), *PAGED)
    assert list(usage.start_seconds[:6]) == [0, 2, 2, 5, 6, 11]
    assert list(usage.stop_seconds[:6]) == [2, 6, 5, 6, 11, 12]
    assert usage.seconds == 12
    assert usage.compute_seconds == 6


def test_compute_is_slower_while_a_transfer_lasts():
    """Out 2-6, when b has done 2 of its 3 seconds; in 7-12."""
    usage = run(*case(contention=0.5), *PAGED)
    assert list(usage.start_seconds[:6]) == [0, 2, 2, 7, 7, 12]
    assert list(usage.stop_seconds[:6]) == [2, 6, 7, 7, 12, 13]
    assert usage.compute_seconds == 6


def test_a_page_in_issued_earlier_overlaps_compute():
    """a comes back in 4-9 while m runs 4-13, so that c need not wait.

    a --> b --> m --> c
     \\_______________/
    """
    graph, costs = case()
    graph = dataclasses.replace(
        graph,
        values=(*graph.values, poet_jax.core.Value("m", 1)),
        nodes=(
            *graph.nodes[:2],
            poet_jax.core.Node("m", (1,), (3,)),
            poet_jax.core.Node("c", (0, 3), (2,)),
        ),
    )
    costs = dataclasses.replace(
        costs,
        seconds=np.array([2.0, 1.0, 9.0, 1.0]),
        joules=np.ones(4),
        workspace_bytes=np.zeros(4, int),
        nbytes=np.array([8, 4, 2, 1]),
        **{
            name: np.array([seconds, 0.0, 0.0, 0.0])
            for name, seconds in (
                ("page_out_seconds", 2.0),
                ("page_in_seconds", 5.0),
                ("page_out_joules", 0.0),
                ("page_in_joules", 0.0),
            )
        },
    )
    early = Compute(0), PageOut(0), Compute(1), PageIn(0), Compute(2), Compute(3)
    late = Compute(0), PageOut(0), Compute(1), Compute(2), PageIn(0), Compute(3)
    assert run(graph, costs, *early).seconds == 14
    assert run(graph, costs, *late).seconds == 19


def test_joules_are_compute_paging_and_static_power_for_the_whole_time():
    usage = run(*case(static_watts=0.5), *PAGED)
    assert usage.joules == 10 + 20 + 40 + 1 + 2 + 0.5 * 12


def test_a_copy_still_being_written_at_the_end_counts():
    usage = run(*case(), Compute(0), Compute(1), PageOut(0), Compute(2))
    assert usage.seconds == 9
    assert usage.store_bytes == 8


def test_rerunning_costs_the_node_again():
    usage = run(*case(), Compute(0), Compute(1), Compute(0), Compute(2))
    assert usage.joules == 10 + 20 + 10 + 40
    assert usage.seconds == 2 + 3 + 2 + 1
    assert usage.peak_bytes == 15


def test_every_argument_and_output_is_alive_throughout():
    graph = poet_jax.Graph(
        tuple(
            poet_jax.core.Value(n, size) for n, size in (("x", 5), ("y", 7), ("z", 1))
        ),
        (poet_jax.core.Node("z", (0,), (2,)),),
        arguments=(0, 1),
        outputs=(2, 2),
        donated=frozenset({1}),
    )
    costs = poet_jax.Costs(
        *(np.zeros(1),) * 2, np.zeros(1, int), np.array([5, 7, 1]), *(np.zeros(3),) * 4
    )
    usage = run(graph, costs, Compute(0))
    assert usage.peak_bytes == 12  # before the unread donated y goes
    assert list(usage.live_bytes) == [12, 6]


def run_of(number):
    node = case()[0].nodes[number]
    return Run((number,), node.reads, node.writes)


@pytest.mark.parametrize(
    "instructions",
    [
        (run_of(1),),
        (run_of(0), PageIn(0)),
        (PageOut(0),),
        (Free(0),),
        (run_of(0), Free(0), run_of(1)),
        (run_of(0), run_of(1), run_of(2), Free(2)),
    ],
)
def test_a_program_that_reads_what_is_not_there_is_refused(instructions):
    graph, costs = case()
    with pytest.raises(poet_jax.PlanInvalid):
        poet_jax.simulate(poet_jax.Program(graph, instructions), costs)


def test_the_peak_is_explained():
    graph, costs = case()
    plan = poet_jax.keep_all(graph, costs, poet_jax.Budget(100))
    program = poet_jax.lower(graph, plan)
    node, alive = alive_at_peak(program, costs, poet_jax.simulate(program, costs))
    assert node is not None and (node.name, alive) == ("b", [0, 1])


@examples(150)
@given(case=budgeted_graphs())
def test_usage_adds_up(case):
    """Bytes from sets, joules from counts, times within bounds."""
    graph, costs, budget = case
    for planner in (*HEURISTICS.values(), solvers()["HIGHS"]):
        plan = attempt(planner, graph, costs, budget)
        if isinstance(plan, poet_jax.BudgetTooSmall):
            continue
        program = poet_jax.lower(graph, plan)
        usage = poet_jax.simulate(program, costs)
        graph = program.graph
        ram, expected, seen = set(graph.initial), [], set()
        for x in program.instructions:
            workspace = 0
            if isinstance(x, Run):
                (number,) = x.nodes
                workspace = costs.workspace_bytes[number]
                assert set(x.over) <= set(replaceable(graph)[number])
                assert number not in seen or not x.over
                seen.add(number)
                ram -= {old for old, _ in x.over}
                ram |= set(graph.nodes[number].writes)
            elif isinstance(x, PageIn):
                ram.add(x.value)
            expected.append(sum(costs.nbytes[v] for v in ram) + workspace)
            if isinstance(x, Free):
                ram.discard(x.value)
        start = sum(costs.nbytes[v] for v in graph.initial)
        assert list(usage.live_bytes) == expected
        assert usage.peak_bytes == max([start, *expected])

        runs = [x.node for x in plan.actions if isinstance(x, Compute)]
        ins = [x.value for x in plan.actions if isinstance(x, PageIn)]
        outs = [x.value for x in plan.actions if isinstance(x, PageOut)]
        compute = costs.seconds[runs].sum()
        storage = costs.page_in_seconds[ins].sum() + costs.page_out_seconds[outs].sum()
        assert usage.compute_seconds == pytest.approx(compute)
        slowed = compute + costs.contention * storage
        assert max(slowed, storage) <= usage.seconds * (1 + 1e-9)
        slowest = compute / (1 - costs.contention) + storage
        assert usage.seconds <= slowest * (1 + 1e-9)
        joules = costs.joules[runs].sum() + costs.page_in_joules[ins].sum()
        joules += costs.page_out_joules[outs].sum()
        joules += costs.static_watts * usage.seconds
        assert usage.joules == pytest.approx(joules, rel=1e-9)
        assert usage.bytes_paged_in == costs.nbytes[ins].sum()
        assert usage.bytes_paged_out == costs.nbytes[outs].sum()
        most = usage.bytes_paged_out + graph.stored_bytes
        assert graph.stored_bytes <= usage.store_bytes <= most


def test_workspace_lasts_only_while_its_node_runs():
    graph, costs = case()
    more = dataclasses.replace(costs, workspace_bytes=np.array([0, 1000, 0]))
    actions = [Compute(n) for n in range(3)]
    before, after = run(graph, costs, *actions), run(graph, more, *actions)
    assert list(after.live_bytes - before.live_bytes) == [0, 997, 0, 0, 0]
