"""Random graphs, costs and programs, the planners, and the brute-force search that
planners are held against."""

import dataclasses
import heapq
import itertools
import math

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

import poet_jax
from poet_jax.core.equation import Equation
from poet_jax.core.graph import Place
from poet_jax.core.in_place import replaceable
from poet_jax.planners.planner import floor_bytes, keep_everything

DEVICE = poet_jax.devices.RASPBERRY_PI_4
EXAMPLES = 35  # of a law that does not say how many
GATE = 0.25  # the share of them that the gate tries


def examples(count):
    """Settings of so many examples, in proportion to those of the profile."""
    profile = hypothesis.settings.default.max_examples
    return hypothesis.settings(max_examples=math.ceil(count * profile / EXAMPLES))


def solvers(**options):
    """The two solvers, at a gap below any difference between two plans' costs."""
    return {
        name: poet_jax.MilpPlanner(name, gap=1e-7, time_limit_seconds=20, **options)
        for name in ("CBC", "HIGHS")
    }


HEURISTICS = {
    "keep_all": poet_jax.keep_all,
    "sqrt": poet_jax.planners.sqrt,
    "greedy": poet_jax.greedy,
    "paging_only": poet_jax.planners.paging_only,
}
PLANNERS = HEURISTICS | solvers()


def peak_bytes(graph, costs) -> int:
    """Keep-all's peak."""
    return keep_everything(graph, costs).usage.peak_bytes


def attempt(planner, graph, costs, budget):
    """The plan, or the BudgetTooSmall that was raised."""
    if not isinstance(budget, poet_jax.Budget):
        budget = poet_jax.Budget(budget)
    try:
        return planner(graph, costs, budget)
    except poet_jax.BudgetTooSmall as error:
        return error


@st.composite
def graphs(draw, min_nodes=4, max_nodes=9, static_watts=(0.0, 0.5), stored=True):
    """(graph, costs) that cannot run: small whole numbers, of MiB for bytes, so that
    two plans cost either the same or visibly different amounts."""
    count = draw(st.integers(min_nodes, max_nodes))
    kind = draw(st.sampled_from([training_graph, random_graph]))
    # Numbers of hypothesis's own are mostly zero; those of a seed are spread out.
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    graph = kind(rng, count)
    if stored and rng.random() < 0.4:
        graph = partly_at_home(rng, graph)
    graph = succeeded(rng, written_in_place(rng, graph))
    size = len(graph.values)
    return graph, poet_jax.Costs(
        seconds=rng.integers(1, 10, count).astype(float),
        joules=rng.integers(1, 10, count).astype(float),
        workspace_bytes=rng.integers(0, 5, count) * 2**20,
        nbytes=np.array([v.nbytes for v in graph.values], np.int64),
        page_in_seconds=rng.integers(0, 10, size).astype(float),
        page_out_seconds=rng.integers(0, 10, size).astype(float),
        page_in_joules=rng.integers(0, 10, size).astype(float),
        page_out_joules=rng.integers(0, 10, size).astype(float),
        static_watts=draw(st.sampled_from(static_watts)),
        contention=draw(st.sampled_from((0.0, 0.0, 0.5))),
    )


def random_value(rng, name):
    """At times without bytes; at times, like a typed PRNG key, never paged."""
    nbytes = 0 if rng.random() < 0.08 else int(rng.integers(1, 13)) * 2**20
    return poet_jax.core.Value(name, nbytes, pageable=rng.random() > 0.12)


def training_graph(rng, count):
    """A forward chain, and a backward one that reads it in reverse.

    x -> n0 -> n1 -> n2 ...
          |     |     |
         n5 <- n4 <- n3          each nK at times writes twice, at times has effects
    """
    forward = (count + 1) // 2
    values, nodes = [random_value(rng, "x")], []
    for number in range(count):
        mirror = count - 1 - number
        reads = {nodes[-1].writes[-1] if nodes else 0}
        if number >= forward:
            reads.add(nodes[mirror].writes[0])
        elif number > 1 and rng.random() < 0.3:
            reads.add(nodes[number - 2].writes[0])
        writes = []
        for letter in "ab"[: 1 + (rng.random() < 0.2)]:
            writes.append(len(values))
            values.append(random_value(rng, f"v{number}{letter}"))
        nodes.append(
            poet_jax.core.Node(
                f"n{number}",
                tuple(reads),
                tuple(writes),
                backward=number >= forward,
                repeatable=rng.random() > 0.07,
            )
        )
    outputs = [nodes[-1].writes[0]]
    if rng.random() < 0.3:
        outputs.append(int(rng.integers(len(values))))
    donated = frozenset({0} if rng.random() < 0.5 else ())
    return poet_jax.Graph(
        tuple(values), tuple(nodes), (0,), tuple(outputs), donated=donated
    )


def random_graph(rng, count):
    """Any order-respecting reads, up to two arguments, up to two writes per node."""
    arguments = tuple(range(rng.integers(0, 3)))
    values = [random_value(rng, f"arg{i}") for i in arguments]
    nodes = []
    for number in range(count):
        reads = rng.integers(0, max(len(values), 1), rng.integers(0, 4))
        repeatable = rng.random() > 0.12
        writes = []
        # Only a node with effects may write nothing.
        for letter in "ab"[: rng.choice([repeatable, 1, 1, 2])]:
            writes.append(letter)
        numbers = tuple(range(len(values), len(values) + len(writes)))
        nodes.append(
            poet_jax.core.Node(
                f"n{number}",
                tuple(dict.fromkeys(int(v) for v in reads)) if values else (),
                numbers,
                backward=bool(2 * number >= count),
                repeatable=bool(repeatable),
            )
        )
        values += [random_value(rng, f"v{number}{letter}") for letter in writes]
    outputs = rng.integers(0, len(values), rng.integers(0, 4)) if values else ()
    return poet_jax.Graph(
        tuple(values),
        tuple(nodes),
        arguments,
        tuple(int(v) for v in outputs),
        donated=frozenset(v for v in arguments if rng.random() < 0.5),
    )


def written_in_place(rng, graph):
    """`graph` with an equation for each node, and most results that may replace an
    argument as large as that."""
    values = list(graph.values)
    for v in graph.arguments:
        if graph.readers[v] and rng.random() < 0.7:
            for new in graph.nodes[graph.readers[v][-1]].writes:
                values[new] = dataclasses.replace(values[new], nbytes=values[v].nbytes)
    values = [
        dataclasses.replace(v, shape=(v.nbytes,), dtype=np.dtype(np.uint8))
        for v in values
    ]
    nodes = []
    for node in graph.nodes:
        equation = Equation(jax.lax.add_p, {}, node.reads, node.writes, (), ())
        nodes.append(dataclasses.replace(node, equations=(equation,)))
    return dataclasses.replace(graph, values=tuple(values), nodes=tuple(nodes))


def partly_at_home(rng, graph):
    """`graph` with some arguments on storage, and some results that land there."""
    pageable = [v for v, value in enumerate(graph.values) if value.pageable]
    stored = {
        v: Place(leaf)
        for leaf, v in enumerate(graph.arguments)
        if v in pageable and rng.random() < 0.7
    }
    landing = {
        v: Place(leaf)
        for leaf, v in enumerate(graph.outputs)
        if v in pageable and v in graph.producer and rng.random() < 0.5
    }
    return dataclasses.replace(graph, stored=stored, landing=landing)


def succeeded(rng, graph):
    """`graph` with most donated arguments on storage as large as a result that lands
    there, which takes their home."""
    values, landing = list(graph.values), dict(graph.landing)
    free = [v for v, place in landing.items() if graph.outputs.count(v) == 1]
    for v, place in graph.stored.items():
        if v in graph.donated and v not in graph.outputs and free:
            if rng.random() < 0.8:
                new = free.pop(rng.integers(len(free)))
                landing[new] = dataclasses.replace(landing[new], replaces=place.leaf)
                values[v] = dataclasses.replace(values[new], name=values[v].name)
    return dataclasses.replace(graph, values=tuple(values), landing=landing)


@st.composite
def budgeted_graphs(draw, **options):
    """(graph, costs, bytes) between what no plan can do without and keep-all's peak."""
    graph, costs = draw(graphs(**options))
    floor = max(floor_bytes(graph, costs), 1)
    peak = max(peak_bytes(graph, costs), 1)
    share = draw(st.sampled_from([0.0, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9, 1.0]))
    return graph, costs, floor + int(share * max(peak - floor, 0))


OPERATIONS = (
    lambda x, w: jnp.sin(x) * w,
    lambda x, w: x @ w,
    lambda x, w: jnp.tanh(x + w),
    lambda x, w: x.T @ x / 64 + w,
    lambda x, w: jax.nn.softmax(x, axis=-1) - w,
    lambda x, w: jnp.where(x > 0, x, w * 0.5),
    lambda x, w: jax.nn.relu(x) + x.mean(0),
    lambda x, w: jnp.concatenate([x[32:], w[:32]]),
    lambda x, w: jnp.cumsum(x, axis=0) / 64 + jnp.sort(w, axis=-1),
)


@st.composite
def programs(draw, max_operations=6, operations=OPERATIONS):
    """(function, arguments): one step of gradient descent on a random expression."""
    steps = draw(
        st.lists(
            st.tuples(st.sampled_from(operations), st.integers(0, 2), st.booleans()),
            min_size=2,
            max_size=max_operations,
        )
    )

    def loss(weights, x):
        earlier = x
        for operation, weight, skip in steps:
            new = operation(x, weights[weight])
            x, earlier = (new + earlier, x) if skip else (new, earlier)
        return jnp.mean(jnp.tanh(x) ** 2)

    def step(weights, x):
        value, gradients = jax.value_and_grad(loss)(weights, x)
        updated = [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)]
        return updated, value

    keys = jax.random.split(jax.random.key(draw(st.integers(0, 3))), 4)
    *weights, x = (jax.random.normal(key, (64, 64)) for key in keys)
    return step, (weights, x)


def brute_force(graph, costs, memory_bytes):
    """The fewest joules of any sequence of moves within `memory_bytes`, or None,
    whatever is in RAM between steps."""
    successors = list(graph.successors)
    found = [
        _fewest_joules(graph.with_resident(resident), costs, memory_bytes)
        for size in range(len(successors) + 1)
        for resident in itertools.combinations(successors, size)
    ]
    return min((joules for joules in found if joules is not None), default=None)


def _fewest_joules(graph, costs, memory_bytes):
    """Dijkstra's search over (stage, last node run again in it, RAM, storage), sets as
    bit masks. It knows nothing of touches, gaps or `lower`, and takes static_watts for
    0."""
    count, everything = len(graph.nodes), range(len(graph.values))
    nbytes = [int(n) for n in costs.nbytes]

    def mask(values):
        return sum(1 << v for v in set(values))

    def size(ram):
        return sum(nbytes[v] for v in everything if ram >> v & 1)

    reads = [mask(node.reads) for node in graph.nodes]
    writes = [mask(node.writes) for node in graph.nodes]
    pinned, wanted = mask(graph.pinned), mask(graph.returned)
    landing = mask(graph.landing)
    # What each node may write over, when it runs first: any of what it could.
    over = [
        [mask(old) for k in range(len(x) + 1) for old in itertools.combinations(x, k)]
        for x in ([old for old, _ in pairs] for pairs in replaceable(graph))
    ]

    def moves(stage, last, ram, stored):
        for v in everything:
            bit, pageable = 1 << v, graph.values[v].pageable
            if ram & bit:
                if not pinned & bit:
                    yield 0.0, (stage, last, ram & ~bit, stored)
                if pageable and not stored & bit:
                    yield costs.page_out_joules[v], (stage, last, ram, stored | bit)
            elif stored & bit and size(ram | bit) <= memory_bytes:
                yield costs.page_in_joules[v], (stage, last, ram | bit, stored)
        for n in range(last + 1, min(stage + 1, count)):
            after = ram | writes[n]
            if reads[n] & ~ram or (n < stage and not graph.nodes[n].repeatable):
                continue
            state = (stage + 1, -1) if n == stage else (stage, n)
            for old in over[n] if n == stage else [0]:
                if size(after & ~old) + int(costs.workspace_bytes[n]) <= memory_bytes:
                    yield costs.joules[n], (*state, after & ~old, stored)

    start = (0, -1, mask(graph.initial), mask(graph.stored))
    if size(start[2]) > memory_bytes:
        return None
    tie = itertools.count()
    heap, best = [(0.0, next(tie), start)], {start: 0.0}
    while heap:
        joules, _, state = heapq.heappop(heap)
        if joules > best[state]:
            continue
        if state[0] == count and not (wanted & ~state[2] or landing & ~state[3]):
            return joules
        for cost, following in moves(*state):
            total = joules + float(cost)
            if total < best.get(following, np.inf):
                best[following] = total
                heapq.heappush(heap, (total, next(tie), following))
    return None
