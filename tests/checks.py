"""What tests of several folders ask of a message or a program."""

import dataclasses
import re

import jax
import numpy as np

import poet_jax
from poet_jax.core.plan import Compute


def assert_three_sentences(error, *facts):
    """At most three, and each of the facts somewhere in them."""
    message = str(error)
    assert len(re.findall(r"[.?!](?=\s|$)", message)) <= 3, message
    for fact in facts:
        assert str(fact) in message, (fact, message)


def renumbered(plan, numbers):
    """The plan for a graph in which node n is called `numbers[n]`."""
    actions = (
        Compute(numbers[x.node]) if isinstance(x, Compute) else x for x in plan.actions
    )
    return dataclasses.replace(plan, actions=tuple(actions))


def call(emitted, leaves):
    """The flat outputs for flat arguments, with pages in a store of host memory."""
    if not emitted.pages:
        return jax.jit(emitted)(*leaves)
    store = poet_jax.HostStore()
    graph = emitted.program.graph
    places = []
    for value in emitted.pages:
        offset = store.allocate(graph.values[value].nbytes, "page")
        places.append((store.descriptor(), offset // 4096, 0, 0))
    results = jax.jit(emitted)(*leaves, np.array(places, np.uint32))
    return jax.block_until_ready(results)[: len(graph.outputs)]
