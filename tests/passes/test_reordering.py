"""Another order of the same nodes, that frees earlier."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from strategies import examples, graphs, peak_bytes

import poet_jax


def graph_of(sizes, edges, outputs):
    """One value per node, `sizes` bytes each; `edges` are (producer, consumer)."""
    return poet_jax.Graph(
        tuple(poet_jax.core.Value(f"v{i}", size) for i, size in enumerate(sizes)),
        tuple(
            poet_jax.core.Node(f"n{i}", tuple(a for a, b in edges if b == i), (i,))
            for i in range(len(sizes))
        ),
        outputs=tuple(outputs),
    )


def names(graph):
    return [node.name for node in graph.nodes]


def test_an_update_comes_right_after_its_gradient():
    """Gradients n1, n3 are ended by updates n4, n5, which are given last.

    n0 -> n1 ------------> n4 (update)
     \\-> n2 -> n3 ---------> n5 (update)
    """
    graph = graph_of(
        [2, 8, 2, 8, 1, 1], [(0, 1), (0, 2), (2, 3), (1, 4), (3, 5)], [4, 5]
    )
    found = names(poet_jax.passes.reorder(graph))
    assert found.index("n4") == found.index("n1") + 1
    assert found.index("n4") < found.index("n3")


def test_a_producer_of_much_waits_for_its_reader():
    """n0 is large and read last: it is computed just before n3.

    n0 ----------> n3
    n1 -> n2 ----/
    """
    graph = graph_of([9, 5, 1, 1], [(1, 2), (0, 3), (2, 3)], [3])
    assert names(poet_jax.passes.reorder(graph)) == ["n1", "n2", "n0", "n3"]


@examples(300)
@given(case=graphs(min_nodes=1, max_nodes=12))
def test_the_peak_is_no_higher_and_the_nodes_are_the_same(case):
    graph, costs = case
    ordered = poet_jax.passes.reorder(graph)
    assert sorted(names(ordered)) == sorted(names(graph))
    assert dataclasses.replace(ordered, nodes=()).values == graph.values
    empty = np.zeros(len(graph.nodes), int)
    unordered = dataclasses.replace(costs, workspace_bytes=empty)
    assert peak_bytes(ordered, unordered) <= peak_bytes(graph, unordered)


@examples(150)
@given(case=graphs(min_nodes=1, max_nodes=12))
def test_effects_keep_their_order(case):
    graph, _ = case
    ordered = poet_jax.passes.reorder(graph)

    def once(graph):
        return [node.name for node in graph.nodes if not node.repeatable]

    assert once(ordered) == once(graph)


@examples(100)
@given(case=graphs(max_nodes=12))
def test_ordering_again_raises_nothing(case):
    graph, costs = case
    costs = dataclasses.replace(costs, workspace_bytes=np.zeros(len(graph.nodes), int))
    once = poet_jax.passes.reorder(graph)
    assert peak_bytes(poet_jax.passes.reorder(once), costs) <= peak_bytes(once, costs)


def descent(width: int, batch: int, layers: int = 6):
    """A step of gradient descent, coarse, in jaxpr order: all gradients wait for the
    last one."""

    def step(weights, x):
        def loss(weights):
            y = x
            for w in weights:
                y = jnp.tanh(y @ w)
            return y.sum()

        gradients = jax.grad(loss)(weights)
        return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)]

    weights = [jax.ShapeDtypeStruct((width, width), jnp.float32)] * layers
    x = jax.ShapeDtypeStruct((batch, width), jnp.float32)
    jitted = jax.jit(step, donate_argnums=0)
    return poet_jax.passes.group(poet_jax.trace(jitted, weights, x))


def updates(graph) -> list[int]:
    """The places of the nodes that write new weights."""
    return [n for n, x in enumerate(graph.nodes) if set(x.writes) & set(graph.outputs)]


@pytest.mark.parametrize("batch", [8, 2048], ids=["large weights", "small weights"])
def test_an_update_comes_with_its_gradient(batch):
    """Gradients of 4 MiB, made of two values of 32 KiB, or of 8 MiB."""
    graph = poet_jax.passes.reorder(descent(1024, batch))
    places, count = updates(graph), len(graph.nodes)
    gradients = [max(graph.producer[v] for v in graph.nodes[n].reads
                     if v in graph.producer) for n in places]  # fmt: skip
    assert [n - gradient for n, gradient in zip(places, gradients, strict=True)] == (
        [1] * len(places)
    )
    # Not one after the other at the end: the next layer's are after the first update.
    assert places[0] < count - 2 * len(places)


def test_a_training_step_needs_less():
    weights = [jnp.ones((64, 64))] * 6
    graph = descent(64, 8)
    ordered = poet_jax.passes.reorder(graph)
    none = np.zeros(len(graph.nodes), int)
    zeros = np.zeros(len(graph.values))
    nbytes = np.array([v.nbytes for v in graph.values])
    costs = poet_jax.Costs(none, none, none, nbytes, *(zeros,) * 4)
    saved = peak_bytes(graph, costs) - peak_bytes(ordered, costs)
    assert saved >= 3 * weights[0].nbytes
