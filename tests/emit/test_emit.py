"""A program emitted as one function computes what its graph does, in its order."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import call
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from strategies import DEVICE, attempt, budgeted_graphs, examples, programs
from toy import W, X, gradient, loss, schedule

import poet_jax
from poet_jax.core.equation import Equation
from poet_jax.core.plan import Compute, PageIn, PageOut
from poet_jax.core.program import Run, lower_actions, walk
from poet_jax.emit import compile_within, cut, emit
from poet_jax.planners.planner import keep_everything


def planned(fun, args, share, planner=poet_jax.greedy, **jit_options):
    """(graph, costs, program) of a plan within a share of the way from least to
    keep-all."""
    graph = poet_jax.trace(jax.jit(fun, **jit_options), *args)
    graph = poet_jax.passes.reorder(poet_jax.passes.group(graph))
    costs = poet_jax.price(graph, DEVICE)
    most = keep_everything(graph, costs).usage.peak_bytes
    plan = attempt(planner, graph, costs, max(1, int(share * most)))
    if isinstance(plan, poet_jax.BudgetTooSmall):
        plan = planner(graph, costs, poet_jax.Budget(plan.smallest_bytes))
    return graph, costs, poet_jax.lower(graph, plan)


@examples(20)
@given(case=programs(), share=st.floats(0, 1), stage=st.floats(0, 1.2))
def test_an_emitted_program_computes_what_its_graph_does(case, share, stage):
    fun, args = case
    graph, costs, program = planned(fun, args, share)
    most = poet_jax.simulate(program, costs).peak_bytes
    leaves = jax.tree.leaves(args)
    expected = jax.jit(lambda *x: graph(*x))(*leaves)
    emitted = emit(cut(program, costs, stage * most))
    for found, wanted in zip(call(emitted, leaves), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=1e-5)


@examples(8)
@given(case=programs(), share=st.floats(0, 1))
def test_pages_of_an_accelerator_come_back_as_they_were(case, share):
    fun, args = case
    paging = poet_jax.planners.paging_only
    graph, _, program = planned(fun, args, share, paging)
    leaves = jax.tree.leaves(args)
    expected = jax.jit(lambda *x: graph(*x))(*leaves)
    found = jax.jit(emit(program, "tpu"))(*leaves)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-5)


@examples(150)
@given(case=budgeted_graphs(), share=st.floats(0, 2))
def test_stages_hold_every_instruction_once_and_reads_come_before(case, share):
    graph, costs, budget = case
    plan = attempt(poet_jax.greedy, graph, costs, budget)
    if isinstance(plan, poet_jax.BudgetTooSmall):
        plan = poet_jax.greedy(graph, costs, poet_jax.Budget(plan.smallest_bytes))
    program = poet_jax.lower(graph, plan)
    staged = cut(program, costs, share * budget)
    assert staged.runs == program.runs
    for kind in (PageIn, PageOut):
        moved = [
            [x for x in y.instructions if isinstance(x, kind)]
            for y in (staged, program)
        ]
        assert moved[0] == moved[1]
    assert all(
        len(set(x.nodes)) == len(x.nodes)
        for x in staged.instructions
        if isinstance(x, Run)
    )
    before, after = (list(walk(x))[-1] for x in (program, staged))
    assert before.present == after.present  # nothing was read that was not there
    peaks = [poet_jax.simulate(x, costs).peak_bytes for x in (program, staged)]
    assert peaks[1] <= max(share * budget, peaks[0])


@pytest.mark.parametrize(
    "nbytes, workspace_bytes, actions",
    [
        # Paged out and freed before the second node runs.
        ((4, 4), (0, 0), (Compute(0), PageOut(0), Compute(1))),
        # The first node works in what the second one makes.
        ((1, 4), (4, 0), (Compute(0), Compute(1))),
    ],
)
def test_stages_need_no_more_than_they_are_given(nbytes, workspace_bytes, actions):
    values = tuple(poet_jax.core.Value("v", n << 20) for n in nbytes)
    nodes = tuple(poet_jax.core.Node("n", (), (n,)) for n in range(2))
    outputs = (1,) if PageOut(0) in actions else (0, 1)
    graph = poet_jax.Graph(values, nodes, outputs=outputs)
    works = np.array(workspace_bytes) << 20
    ones = np.ones(2)
    costs = poet_jax.Costs(ones, ones, works, np.array(nbytes) << 20, *[ones] * 4)
    program = lower_actions(graph, actions)
    peak = poet_jax.simulate(program, costs).peak_bytes
    assert poet_jax.simulate(cut(program, costs, peak), costs).peak_bytes == peak


@examples(150)
@given(seed=st.integers(0, 2**32 - 1), share=st.floats(0, 1), stage=st.floats(0, 2))
def test_a_stage_returns_no_value_that_it_writes_over(seed, share, stage):
    """Whatever is made again."""
    rng = np.random.default_rng(seed)
    nodes, values = [], [poet_jax.core.Value("v", 4, (4,), np.dtype(np.uint8))] * 12
    for n in range(len(values)):
        reads = tuple(rng.permutation(n)[:2].tolist())
        is_update = n and rng.integers(2)
        kind = jax.lax.dynamic_update_slice_p if is_update else jax.lax.add_p
        equation = Equation(kind, {}, reads, (n,), (), ())
        nodes.append(poet_jax.core.Node("n", reads, (n,), (equation,)))
    graph = poet_jax.Graph(tuple(values), tuple(nodes), outputs=(len(nodes) - 1,))
    ones = np.ones(len(nodes))
    costs = poet_jax.Costs(ones, ones, 4 * ones, 2**20 * ones, *[ones] * 4)
    most = keep_everything(graph, costs).usage.peak_bytes
    plan = attempt(poet_jax.greedy, graph, costs, max(1, int(share * most)))
    if isinstance(plan, poet_jax.BudgetTooSmall):
        plan = poet_jax.greedy(graph, costs, poet_jax.Budget(plan.smallest_bytes))
    program = poet_jax.lower(graph, plan)
    staged = cut(program, costs, stage * most)
    for x in staged.instructions:
        if isinstance(x, Run):
            assert {old for old, _ in x.over}.isdisjoint(x.writes)
    assert list(walk(staged))[-1].present == list(walk(program))[-1].present


def test_what_is_freed_and_made_again_is_there_in_stages():
    """As in a stage that begins between the two."""
    values = tuple(poet_jax.core.Value(name, 4) for name in "abc")
    nodes = (
        poet_jax.core.Node("a", (), (0,)),
        poet_jax.core.Node("b", (0,), (1,)),
        poet_jax.core.Node("c", (0, 1), (2,)),
    )
    graph = poet_jax.Graph(values, nodes, outputs=(2,))
    actions = (Compute(0), PageOut(0), Compute(1), Compute(0), Compute(2))
    ones = np.ones(3)
    costs = poet_jax.Costs(ones, ones, 0 * ones, 4 * ones, *[ones] * 4)
    program = lower_actions(graph, actions)
    staged = cut(program, costs, float("inf"))
    assert staged.runs == program.runs
    assert list(walk(staged))[-1].present >= {2}


@pytest.mark.parametrize("nbytes, stages", [(2**10, 2), (2**22, 16)])
def test_small_pages_are_moved_together_before_or_after_a_stage(nbytes, stages):
    """Larger ones each as soon as they may."""
    values = [poet_jax.core.Value("value", nbytes) for _ in range(16)]
    nodes = [poet_jax.core.Node("out", (), (v,)) for v in range(8)]
    nodes += [poet_jax.core.Node("in", (v,), (8 + v,)) for v in range(8)]
    graph = poet_jax.Graph(tuple(values), tuple(nodes), outputs=())
    moves = [(Compute(n), PageOut(n)) for n in range(8)]
    moves += [(PageIn(n), Compute(8 + n)) for n in range(8)]
    ones = np.ones(16)
    costs = poet_jax.Costs(1e-6 * ones, ones, 0 * ones, nbytes * ones, *[ones] * 4)
    program = lower_actions(graph, [action for pair in moves for action in pair])
    staged = cut(program, costs, float("inf"))
    assert len([x for x in staged.instructions if isinstance(x, Run)]) == stages
    assert list(walk(staged))[-1].present == list(walk(program))[-1].present


@examples(60)
@given(case=budgeted_graphs())
def test_without_memory_each_node_is_a_stage_and_with_all_of_it_few_are(case):
    graph, costs, _ = case
    program = keep_everything(graph, costs).program

    def stages(memory_bytes):
        staged = cut(program, costs, memory_bytes)
        return [x for x in staged.instructions if isinstance(x, Run)]

    assert all(len(x.nodes) == 1 for x in stages(0))
    assert len(stages(float("inf"))) <= len(stages(0))


def test_what_is_computed_again_is_not_merged():
    """The compiler's room for a chain falls with the plan's, as it does not for
    `jax.checkpoint` on a CPU."""
    x = jnp.ones((4096, 16))
    step = jax.grad(lambda w, x: (jnp.sin(loss(w, x) + x) ** 2).mean())
    temps = {}
    for share in (1.0, 0.3):
        graph, costs, program = planned(
            step, (W, x), share, poet_jax.MilpPlanner(paging=False)
        )
        emitted = emit(program)
        compiled = jax.jit(emitted).lower(W, x).compile()
        temps[share] = compiled.memory_analysis().temp_size_in_bytes
        peak = poet_jax.simulate(program, costs).peak_bytes
        assert temps[share] <= 1.1 * peak
    assert temps[0.3] < 0.8 * temps[1.0]


def test_an_emitted_program_can_be_exported_and_sharded():
    _, costs, program = planned(gradient, (W, X), 0.7, poet_jax.planners.sqrt)
    emitted = emit(cut(program, costs, 2**14))
    wanted = jax.jit(gradient)(W, X)
    exported = jax.export.export(jax.jit(emitted))(W, X)
    (found,) = exported.call(W, X)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    mesh = Mesh(np.array(jax.devices()[:1]), "batch")
    rows = NamedSharding(mesh, PartitionSpec("batch"))
    whole = NamedSharding(mesh, PartitionSpec())
    (found,) = jax.jit(emitted, in_shardings=(whole, rows))(W, X)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", ["gpu", "tpu"])
def test_stages_for_accelerators_stand_between_barriers(backend):
    _, costs, program = planned(gradient, (W, X), 0.5)
    text = str(jax.make_jaxpr(emit(program, backend))(W, X))
    stages = [x for x in program.instructions if isinstance(x, Run)]
    moves = [x for x in program.instructions if isinstance(x, PageIn | PageOut)]
    assert text.count("optimization_barrier") == len(stages) - 1 + len(moves)
    assert "cond" not in text and "ffi_call" not in text
    kinds = {program.graph.values[x.value].kind for x in moves}
    assert text.count("device_put") == len(moves) + len(kinds)  # room for each kind


def test_what_has_effects_runs_once_and_in_order():
    seen = []

    def step(x):
        for number in range(4):
            x = jnp.sin(x @ x)
            jax.debug.callback(lambda n: seen.append(int(n)), number, ordered=True)
        return x.sum()

    _, costs, program = planned(jax.value_and_grad(step), (jnp.eye(32),), 1.0)
    emitted = emit(program)
    jax.block_until_ready(jax.jit(emitted)(jnp.eye(32)))
    jax.effects_barrier()
    assert seen == [0, 1, 2, 3]


@pytest.mark.parametrize("shape", [(8, 3, 9, 9), (8, 9, 9, 3)])
def test_convolutions_in_stages_are_those_of_jax(shape):
    numbers = ("NCHW", "OIHW", "NCHW") if shape[1] == 3 else ("NHWC", "HWIO", "NHWC")
    image = jax.random.normal(jax.random.key(0), shape)
    kernel_shape = (4, 3, 3, 3) if shape[1] == 3 else (3, 3, 3, 4)
    kernel = jax.random.normal(jax.random.key(1), kernel_shape)

    def step(kernel, image):
        result = jax.lax.conv_general_dilated(
            image,
            kernel,
            (2, 1),
            "SAME",
            rhs_dilation=(1, 2),
            dimension_numbers=numbers,
        )
        return (result**2).sum()

    both = jax.grad(step, argnums=(0, 1))
    _, costs, program = planned(both, (kernel, image), 1.0)
    found = jax.jit(emit(program))(kernel, image)
    for a, b in zip(found, jax.jit(both)(kernel, image), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_keys_and_integers_leave_stages():
    def step(key, x):
        first, second = jax.random.split(key)
        bits = jax.random.bits(first, (16,))
        return second, jnp.where(bits % 2 == 0, jnp.tanh(x), 0.0), bits

    args = jax.random.key(7), jnp.ones(16)
    _, costs, program = planned(step, args, 1.0)
    key, y, bits = jax.jit(emit(program))(*args)
    other, z, others = jax.jit(step)(*args)
    assert (jax.random.key_data(key) == jax.random.key_data(other)).all()
    assert (bits == others).all() and (y == z).all()


def test_a_backend_that_is_none_is_refused():
    _, _, program = planned(gradient, (W, X), 1.0)
    with pytest.raises(ValueError, match="'cpu', 'gpu' and 'tpu'"):
        emit(program, "fpga")


def test_an_instance_is_refused():
    graph = poet_jax.Graph(
        (poet_jax.core.Value("a", 8),), (poet_jax.core.Node("n", (), (0,)),)
    )
    plan = poet_jax.Plan((Compute(0),), poet_jax.Status.HEURISTIC, 0, 0, "by hand")
    program = poet_jax.lower(graph, plan)
    with pytest.raises(ValueError, match="trace"):
        emit(program)


def test_the_leanest_plan_runs_if_the_planner_does_not_find_it_again():
    """As one does not whose time is up."""

    def forgetful(graph, costs, budget):
        try:
            return poet_jax.greedy(graph, costs, poet_jax.Budget(1))
        except poet_jax.BudgetTooSmall as error:
            raise error.but(smallest_bytes=budget.memory_bytes + 1) from None

    w, x = jnp.eye(128), jnp.ones((2048, 128))
    with pytest.raises(poet_jax.BudgetTooSmall) as caught:
        schedule(gradient, 1).plan(w, x)
    scheduled = schedule(gradient, caught.value.smallest_bytes, planner=forgetful)
    assert scheduled.plan(w, x).compiled_bytes <= caught.value.smallest_bytes
    np.testing.assert_allclose(scheduled(w, x), gradient(w, x), rtol=1e-4, atol=1e-8)


def test_stages_that_need_too_much_are_narrowed_before_the_plan_is_made_leaner():
    """By a compiler that takes 1.4 of the budget for fewer than four stages."""

    def fun(x):
        for _ in range(16):
            x = jnp.tanh(x @ x)
        return x

    graph = poet_jax.passes.group(poet_jax.trace(jax.grad(lambda x: fun(x).sum()), W))
    costs = poet_jax.price(graph, DEVICE)
    budget = 2 * keep_everything(graph, costs).usage.peak_bytes

    def build(program):
        stages = sum(isinstance(x, Run) for x in program.instructions)
        return types.SimpleNamespace(nbytes=7 * budget // 5 if stages < 4 else budget)

    scratch = [0] * len(graph.nodes)
    within = poet_jax.Budget(budget)
    fitted = compile_within(
        graph, costs, poet_jax.greedy, within, build, scratch, None, set()
    )
    assert fitted.compilations > 1
    assert fitted.plan.actions == tuple(map(Compute, range(len(graph.nodes))))


def test_a_plan_that_is_compiled_a_little_too_large_is_made_leaner():
    """Near the least, before the leanest one is taken. By a compiler that takes a few
    bytes more than the simulator."""
    x, w = jnp.ones((8, 128)), jnp.ones((128, 128))

    def fun(w, x):
        for _ in range(60):
            x = jnp.tanh(x @ w)
        return x.sum()

    graph = poet_jax.passes.group(poet_jax.trace(jax.grad(fun), w, x))
    costs = poet_jax.price(graph, DEVICE)

    def fitted(budget):
        def build(program):
            nbytes = poet_jax.simulate(program, costs).peak_bytes
            return types.SimpleNamespace(nbytes=nbytes + w.nbytes + 500)

        parts = graph, costs, poet_jax.greedy, poet_jax.Budget(budget), build
        return compile_within(*parts, [0] * len(graph.nodes), None, set())

    with pytest.raises(poet_jax.BudgetTooSmall) as caught:
        fitted(1)
    least = caught.value.planned_bytes
    assert fitted(int(1.01 * least)).allowed > least
