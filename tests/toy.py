"""Small functions and graphs, and `schedule` with a fixed device and planner."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import poet_jax

OPTIONS = {
    "planner": poet_jax.greedy,
    "device": poet_jax.devices.RASPBERRY_PI_4,
}
schedule = functools.partial(poet_jax.schedule, **OPTIONS)
# Planned in stages, also where the function would fit as it is.
STAGES = poet_jax.HostExecutor(trace=True)
W = jnp.eye(16) * 0.9 + 0.01
X = jnp.linspace(-1.0, 1.0, 64 * 16).reshape(64, 16)


def loss(w, x):
    for _ in range(4):
        x = jnp.tanh(x @ w)
    return (x**2).mean()


gradient = jax.grad(loss)


def tightest(make: Callable[[Any], Any], *args: Any) -> Any:
    """make(budget) with the smallest budget in which `args` can be planned."""
    with pytest.raises(poet_jax.BudgetTooSmall) as caught:
        make(1).plan(*args)
    return make(caught.value.smallest_bytes)


def paging(store=None, fun=gradient):
    """The function within the smallest budget at which paging alone makes it fit."""
    executor = poet_jax.HostExecutor(store) if store is not None else None
    options = OPTIONS | {"planner": poet_jax.planners.paging_only, "executor": executor}
    with pytest.raises(poet_jax.BudgetTooSmall) as caught:
        poet_jax.schedule(fun, 1, **options).plan(W, X)
    return poet_jax.schedule(fun, caught.value.smallest_bytes, **options)


def chain():
    """Three layers, forward and backward; each gradient reads its layer's input.

    x -> layer1 -> layer2 -> layer3 -> loss
    |      |         |                  |
    g1 <-- g2 <----- g3 <---------------/
    """
    sizes = {
        "x": 8, "layer1": 8, "layer2": 8, "layer3": 8, "loss": 1,
        "g3": 4, "g2": 4, "g1": 4,
    }  # fmt: skip
    values = tuple(poet_jax.core.Value(name, size) for name, size in sizes.items())
    reads = [(0,), (1,), (2,), (3,), (4, 2), (5, 1), (6, 0)]
    nodes = tuple(
        poet_jax.core.Node(values[n + 1].name, read, (n + 1,), backward=n > 3)
        for n, read in enumerate(reads)
    )
    graph = poet_jax.Graph(values, nodes, (0,), (4, 7), donated=frozenset({0}))
    one = np.ones(len(values))
    costs = poet_jax.Costs(
        seconds=np.ones(len(nodes)),
        joules=np.array([5.0, 1.0, 5.0, 1.0, 5.0, 5.0, 5.0]),
        workspace_bytes=np.zeros(len(nodes), int),
        nbytes=np.array(list(sizes.values())),
        page_in_seconds=one,
        page_out_seconds=one,
        page_in_joules=0.2 * one,
        page_out_joules=0.3 * one,
    )
    return graph, costs


def twelve_nodes():
    """Shrunk from a random graph: n1 runs again while v5 waits for n4 to run again.

    Row (9) for n1 in stage 10 must count v5, which only the later rerun of n4 uses.
    """
    nbytes = [0, 10, 6, 12, 2, 9, 9, 6, 6, 11, 3, 10, 1, 7]
    values = tuple(
        poet_jax.core.Value(f"v{i}", n, pageable=i not in (2, 7, 10))
        for i, n in enumerate(nbytes)
    )
    reads = [(0,), (1,), (3,), (2, 4), (5,), (6,), (7,), (8, 6), (9, 5), (10, 4)]
    reads += [(2, 11), (1, 12)]
    writes = [(1,), (2, 3), *((i,) for i in range(4, 14))]
    graph = poet_jax.Graph(
        values,
        tuple(
            poet_jax.core.Node(f"n{i}", r, w)
            for i, (r, w) in enumerate(zip(reads, writes, strict=True))
        ),
        arguments=(0,),
        outputs=(13, 6),
    )

    def row(*numbers):
        return np.array(numbers, float)

    return graph, poet_jax.Costs(
        seconds=row(7, 4, 8, 2, 6, 2, 4, 2, 1, 5, 6, 9),
        joules=row(1, 9, 3, 6, 1, 6, 3, 4, 5, 6, 2, 4),
        workspace_bytes=np.array([2, 4, 1, 1, 3, 3, 0, 1, 4, 0, 3, 3]),
        nbytes=np.array(nbytes),
        page_in_seconds=row(6, 0, 2, 2, 0, 5, 8, 2, 2, 5, 5, 0, 5, 5),
        page_out_seconds=row(5, 4, 1, 9, 6, 6, 2, 9, 2, 6, 2, 1, 0, 9),
        page_in_joules=row(3, 9, 6, 3, 1, 5, 0, 5, 3, 5, 1, 0, 2, 5),
        page_out_joules=row(8, 7, 6, 7, 3, 4, 9, 3, 3, 3, 3, 3, 9, 6),
    )


def long_chain(count=40):
    """(graph, costs) of a pass forward, whose values wait for the one backward."""
    values = [poet_jax.core.Value(f"v{i}", 100 + i) for i in range(2 * count)]
    nodes = [
        poet_jax.core.Node(f"f{i}", (i - 1,) if i else (), (i,)) for i in range(count)
    ] + [
        poet_jax.core.Node(f"b{i}", (count + i - 1, count - 1 - i), (count + i,))
        for i in range(count)
    ]
    graph = poet_jax.Graph(tuple(values), tuple(nodes), outputs=(2 * count - 1,))
    nbytes = np.array([value.nbytes for value in values])
    seconds = np.array([1e-6 * (1 + i % 7) for i in range(2 * count)])
    paging = 2e-8 * nbytes
    costs = poet_jax.Costs(
        seconds, seconds, 0 * nbytes, nbytes, paging, paging, paging / 10, paging / 10
    )
    return graph, costs
