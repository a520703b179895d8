"""Prefetching hides transfers and changes nothing else."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from strategies import budgeted_graphs, examples

import poet_jax
from poet_jax.core.graph import Place
from poet_jax.core.program import moving
from poet_jax.planners.evict import evict
from poet_jax.planners.planner import keep_everything, prefetch


@examples(150)
@given(case=budgeted_graphs(), more=st.integers(0, 10))
def test_prefetching_is_never_later_and_never_over_the_budget(case, more):
    graph, costs, budget = case
    judged = evict(graph, costs, poet_jax.Budget(budget))
    room = poet_jax.Budget(max(budget, judged.usage.peak_bytes) + more)
    moved = prefetch(costs, judged, room)
    assert moved.usage.seconds <= judged.usage.seconds
    assert moved.usage.peak_bytes <= room.memory_bytes
    assert Counter(moving(moved.actions)) == Counter(moving(judged.actions))
    once = prefetch(costs, moved, room)
    assert once.usage.seconds <= moved.usage.seconds


def test_transfers_behind_one_another_all_start_early_enough():
    """Three weights, read at once after three seconds, take a second each."""
    values = [poet_jax.core.Value(f"w{i}", 1) for i in range(3)]
    values += [poet_jax.core.Value(f"v{i}", 1) for i in range(4)]
    nodes = [
        poet_jax.core.Node(f"n{i}", (2 + i,) if i else (), (3 + i,)) for i in range(3)
    ]
    nodes.append(poet_jax.core.Node("n3", (0, 1, 2, 5), (6,)))
    stored = {v: Place(v) for v in range(3)}
    graph = poet_jax.Graph(tuple(values), tuple(nodes), (0, 1, 2), (6,), stored=stored)
    one, ones = np.ones(4), np.ones(7)
    costs = poet_jax.Costs(
        one, one, 0 * one, np.ones(7, np.int64), ones, ones, ones, ones
    )
    judged = keep_everything(graph, costs)
    assert judged.usage.seconds == 7
    assert prefetch(costs, judged, poet_jax.Budget(9)).usage.seconds == 4
    # With room for one of them beside the two values of a node.
    tight = poet_jax.Budget(judged.usage.peak_bytes)
    late = prefetch(costs, judged, tight).usage
    assert late.peak_bytes == judged.usage.peak_bytes and late.seconds <= 7
