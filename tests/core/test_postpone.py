"""What goes to storage leaves RAM when it is there, not before what computes."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import budgeted_graphs, examples

import poet_jax
from poet_jax.core.plan import Compute, PageIn, PageOut
from poet_jax.core.postpone import postpone
from poet_jax.core.program import moving, walk
from poet_jax.planners.evict import evict


@examples(200)
@given(case=budgeted_graphs(), more=st.integers(-10, 30))
def test_only_frees_move_and_neither_seconds_nor_the_peak_grow(case, more):
    graph, costs, budget = case
    program = evict(graph, costs, poet_jax.Budget(budget)).program
    before = poet_jax.simulate(program, costs)
    memory = max(1, before.peak_bytes + more)
    late = postpone(program, costs, memory)
    after = poet_jax.simulate(late, costs)
    assert after.seconds <= before.seconds
    assert after.peak_bytes <= max(before.peak_bytes, memory)
    assert after.store_bytes == before.store_bytes
    assert moving(late.instructions) == moving(program.instructions)
    assert Counter(late.instructions) == Counter(program.instructions)


def paged_out_early():
    """Three nodes of a second; the first result goes to storage for two seconds and
    comes back, at once, for the last."""
    values = tuple(poet_jax.core.Value(f"v{i}", 8) for i in range(3))
    nodes = (
        poet_jax.core.Node("n0", (), (0,)),
        poet_jax.core.Node("n1", (), (1,)),
        poet_jax.core.Node("n2", (0, 1), (2,)),
    )
    graph = poet_jax.Graph(values, nodes, (), (2,))
    one = np.ones(3)
    costs = poet_jax.Costs(one, one, 0 * one, np.full(3, 8), 0 * one, 2 * one, one, one)
    actions = (Compute(0), PageOut(0), Compute(1), PageIn(0), Compute(2))
    plan = poet_jax.Plan(actions, poet_jax.Status.HEURISTIC, 0, 0, "")
    return poet_jax.lower(graph, plan), costs


@pytest.mark.parametrize(("memory", "seconds"), [(24, 4), (16, 4), (15, 5)])
def test_a_copy_to_storage_is_waited_for_only_where_there_is_no_room(memory, seconds):
    """The copy ends at 3 s; n1 runs meanwhile if both its result and v0 fit."""
    program, costs = paged_out_early()
    assert poet_jax.simulate(program, costs).seconds == 5
    late = postpone(program, costs, memory)
    assert poet_jax.simulate(late, costs).seconds == seconds


def test_a_plan_can_say_where_to_free():
    program, costs = paged_out_early()
    late = postpone(program, costs, 24)
    actions = []
    for moment in walk(late):
        x = moment.instruction
        actions += [x] if moment.waits else moving([x])
    plan = poet_jax.Plan(tuple(actions), poet_jax.Status.HEURISTIC, 0, 0, "")
    assert poet_jax.lower(program.graph, plan).instructions == late.instructions
    twice = poet_jax.Plan(
        (*actions, poet_jax.core.Free(0)), poet_jax.Status.HEURISTIC, 0, 0, ""
    )
    assert poet_jax.lower(program.graph, twice)
    absent = poet_jax.Plan(
        (poet_jax.core.Free(0), *actions), poet_jax.Status.HEURISTIC, 0, 0, ""
    )
    with pytest.raises(poet_jax.PlanInvalid, match="frees 'v0'"):
        poet_jax.lower(program.graph, absent)
