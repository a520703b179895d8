"""`lower` places every Free as early as it can, and refuses what cannot run."""

import dataclasses

import pytest
from checks import assert_three_sentences
from hypothesis import given
from strategies import HEURISTICS, attempt, budgeted_graphs, examples, solvers
from toy import STAGES, W, X, gradient, schedule

import poet_jax
from poet_jax.core.plan import Compute, Free, PageIn, PageOut
from poet_jax.core.program import Program, Run, moving, walk


def diamond(**options):
    """a -> b, a -> c, (b, c) -> d; d is the output.

        a
       / \\
      b   c
       \\ /
        d
    """
    values = tuple(poet_jax.core.Value(name, 4) for name in "abcd")
    nodes = (
        poet_jax.core.Node("a", (), (0,), **options),
        poet_jax.core.Node("b", (0,), (1,)),
        poet_jax.core.Node("c", (0,), (2,)),
        poet_jax.core.Node("d", (1, 2), (3,)),
    )
    return poet_jax.Graph(values, nodes, outputs=(3,))


def plan(*actions):
    return poet_jax.Plan(actions, poet_jax.Status.HEURISTIC, 0.0, 0.0, "by hand")


def in_steps(program):
    """[(action, values freed right after it)]"""
    steps = []
    for x in program.instructions:
        if isinstance(x, Free):
            steps[-1][1].add(x.value)
        else:
            steps += [(action, set()) for action in moving([x])]
    return steps


def test_frees_come_right_after_the_last_read():
    program = poet_jax.lower(diamond(), plan(*map(Compute, range(4))))
    assert in_steps(program) == [
        (Compute(0), set()),
        (Compute(1), set()),
        (Compute(2), {0}),
        (Compute(3), {1, 2}),
    ]


def test_a_value_that_comes_back_is_freed_before():
    program = poet_jax.lower(
        diamond(),
        plan(
            Compute(0), PageOut(0), Compute(1), PageIn(0), Compute(2),
            Compute(0), Compute(1), Compute(3),
        ),
    )  # fmt: skip
    assert in_steps(program) == [
        (Compute(0), set()),
        (PageOut(0), set()),
        (Compute(1), {0, 1}),  # a is on storage, and b is computed again
        (PageIn(0), set()),
        (Compute(2), {0}),
        (Compute(0), set()),
        (Compute(1), {0}),
        (Compute(3), {1, 2}),
    ]
    assert program.recomputed == 2
    assert program.last_page_in == {0: program.instructions.index(PageIn(0))}


def test_arguments_that_the_caller_keeps_are_never_freed():
    values = tuple(poet_jax.core.Value(name, 4) for name in "xyz")
    graph = poet_jax.Graph(
        values,
        (poet_jax.core.Node("z", (0, 1), (2,)),),
        arguments=(0, 1),
        outputs=(2,),
        donated=frozenset({1}),
    )
    program = poet_jax.lower(graph, plan(Compute(0)))
    assert program.instructions == (Run((0,), (0, 1), (2,)), Free(1))


@pytest.mark.parametrize(
    ("actions", "problem"),
    [
        ([Compute(1)], "before 'a'"),
        ([Compute(0), Compute(1), Compute(2)], "every node"),
        ([PageOut(0)], "not in RAM"),
        ([Compute(0), PageOut(0), PageOut(0)], "twice"),
        ([Compute(0), PageIn(0)], "not paged out"),
        ([Compute(0), Compute(0)], "runs once"),
        ([Compute(-1), Compute(0), Compute(1), Compute(2)], "node=-1"),
        ([Compute(4)], "node=4"),
        ([*map(Compute, range(4)), PageOut(-1)], "value=-1"),
        ([*map(Compute, range(4)), Free(4)], "value=4"),
    ],
)
def test_a_plan_that_cannot_run_is_refused(actions, problem):
    with pytest.raises(poet_jax.PlanInvalid, match=problem):
        poet_jax.lower(diamond(repeatable=False), plan(*actions))


@pytest.mark.parametrize(
    "instruction", [Run((-1,), (), (3,)), PageOut(-1), PageIn(4), Free(4)]
)
def test_an_instruction_of_what_the_graph_lacks_is_refused(instruction):
    runs = poet_jax.lower(diamond(), plan(*map(Compute, range(4)))).instructions
    for instructions in ((*runs, instruction), (instruction, *runs)):
        with pytest.raises(poet_jax.PlanInvalid, match="4 nodes and 4 values"):
            list(walk(Program(diamond(), instructions)))


PLANS = {
    "no plan": (lambda plan: None, "NoneType"),
    "actions": (lambda plan: plan.actions, "tuple"),
    "a generator": ({"actions": (x for x in ())}, "`actions` is a generator"),
    "a word": ({"actions": ("x",)}, "'x'"),
    "a fraction": ({"actions": (Compute(0.5),)}, "node=0.5"),
    "a node": ({"actions": (Compute(99),)}, "node=99"),
    "a value": ({"actions": (PageOut(-1),)}, "value=-1"),
    "resident": ({"resident": frozenset({0})}, "resident {0}"),
    "status": ({"status": "OPTIMAL"}, "`status` is a str"),
    "objective": ({"objective": None}, "`objective` is a NoneType"),
}


@pytest.mark.parametrize("kind", PLANS)
def test_what_a_planner_may_not_return_is_refused_by_its_name(kind):
    change, said = PLANS[kind]

    def by_hand(graph, costs, budget):
        plan = poet_jax.keep_all(graph, costs, poet_jax.Budget(10**9))
        if isinstance(change, dict):
            return dataclasses.replace(plan, **change)
        return change(plan)

    scheduled = schedule(gradient, "60%", planner=by_hand, executor=STAGES)
    for call in (scheduled.plan, scheduled.pareto):
        with pytest.raises(poet_jax.PlanInvalid, match="by_hand returned") as caught:
            call(W, X)
        assert_three_sentences(caught.value, said, "poet_jax.greedy")


def test_a_prng_key_is_not_paged():
    graph = poet_jax.Graph(
        (poet_jax.core.Value("key", 8, pageable=False),),
        (poet_jax.core.Node("key", (), (0,)),),
    )
    with pytest.raises(poet_jax.PlanInvalid, match="'key', which may not be paged"):
        poet_jax.lower(graph, plan(Compute(0), PageOut(0)))


PLANNERS = [*HEURISTICS.values(), solvers()["HIGHS"]]


@pytest.mark.parametrize("planner", PLANNERS)
@examples(80)
@given(case=budgeted_graphs())
def test_what_is_in_ram_is_read_again_or_returned(planner, case):
    """After the frees at a point, a value in RAM is pinned, or read before it is next
    produced, or an output, or on its way to storage and freed where the plan says; and
    nothing is read that is not there."""
    graph, costs, budget = case
    made = attempt(planner, graph, costs, budget)
    if isinstance(made, poet_jax.BudgetTooSmall):
        return
    program = poet_jax.lower(graph, made)
    graph, instructions = program.graph, program.instructions
    assert moving(instructions) == moving(made.actions)

    def reads(x):
        return x.reads if isinstance(x, Run) else [x.value] * isinstance(x, PageOut)

    def brings(x):
        return x.writes if isinstance(x, Run) else [x.value] * isinstance(x, PageIn)

    needed = set(graph.returned) | graph.pinned
    needed_after = []
    for x in reversed(instructions):
        needed_after.append(set(needed))
        needed = (needed - set(brings(x))) | set(reads(x)) | graph.pinned
    needed_after.reverse()
    waits = [x.waits for x in walk(program)]
    ram = set(graph.initial)
    for row, x in enumerate(instructions):
        assert ram.issuperset(reads(x))
        if isinstance(x, Free):
            assert x.value not in graph.pinned
            ram.remove(x.value)
        elif isinstance(x, Run):
            ram -= {old for old, _ in x.over}
        ram.update(brings(x))
        following = instructions[row + 1 : row + 2]
        if not following or not isinstance(following[0], Free):
            leaving = set()
            for later in reversed(range(row + 1, len(instructions))):
                leaving -= set(brings(instructions[later]))
                if waits[later] and isinstance(instructions[later], Free):
                    leaving.add(instructions[later].value)
            assert ram <= needed_after[row] | leaving
    assert ram.issuperset(graph.returned)
