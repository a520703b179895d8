"""The search finds what no subset beats, and what it counts is what the step is."""

import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from checks import assert_three_sentences
from flax import nnx

import poet_jax
from experiments.sparse.evolution import evolve
from poet_jax.planners.planner import keep_everything
from poet_jax.update import contributions, search

DEVICE = poet_jax.devices.RASPBERRY_PI_4
BATCH = jnp.ones((64, 32)), jnp.zeros((64,), int)
GAINS = {"blocks_0/**": 4.0, "blocks_1/**": 1.0, "blocks_2/**": 2.0}
ALWAYS = {"head/**": 1.0}
EVERYTHING = {**dict.fromkeys(GAINS, 1.0), **ALWAYS}


class NnxModel(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.blocks_0, self.blocks_1, self.blocks_2 = (
            nnx.Linear(32, 32, rngs=rngs) for _ in range(3)
        )
        self.head = nnx.Linear(32, 4, rngs=rngs)

    def __call__(self, x):
        for block in (self.blocks_0, self.blocks_1, self.blocks_2):
            x = nnx.gelu(block(x))
        return self.head(x)


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool = True):
        for number in range(3):
            x = nn.gelu(nn.Dense(32, name=f"blocks_{number}")(x))
        x = nn.BatchNorm(use_running_average=not train, name="norm")(x)
        return nn.Dense(4, name="head")(x)


def step_and_args(kind, update, budget=2**40):
    options = {"update": update, "device": DEVICE, "optimizer": optax.sgd(0.1)}
    if kind == "nnx":
        return poet_jax.train_step(NnxModel(), budget, **options), (BATCH,)
    step = poet_jax.train_step(LinenModel(), budget, **options)
    return step, (jax.eval_shape(step.init, jax.random.key(0), BATCH), BATCH)


@pytest.mark.parametrize("kind", ["nnx", "linen"])
@pytest.mark.parametrize("items", [(), ("blocks_1/**",), ("blocks_0/**",)])
def test_what_is_left_out_is_as_if_it_had_never_been_there(kind, items):
    """A budget for exactly these items: they are found, and the graph is theirs."""
    update = {**dict.fromkeys(items, 1.0), **ALWAYS}
    step, args = step_and_args(kind, update)
    smaller = step.plan(*args)
    step, args = step_and_args(kind, EVERYTHING)
    gains = {item: 1.0 if item in items else -1.0 for item in GAINS}
    found = search(step, *args, gains=gains)
    assert found.items == items and dict(found.update.fractions) == update
    ours, theirs = found.schedule.graph, smaller.graph
    assert len(ours.nodes) == len(theirs.nodes)
    assert found.schedule.baseline.peak_bytes == smaller.baseline.peak_bytes
    assert found.schedule.baseline.seconds == pytest.approx(smaller.baseline.seconds)


class Nested(nn.Module):
    """Has a parameter whose path ends like that of another."""

    @nn.compact
    def __call__(self, x, train: bool = True):
        x = nn.gelu(nn.Dense(32, name="inner")(x))
        if train is not None:
            x = x + Nested(name="block")(x, train=None)
        return nn.Dense(32, name="head")(x)


@pytest.mark.parametrize("item", ["inner/**", "block/**"])
def test_a_path_that_ends_like_another_is_another_parameter(item):
    def planned(update, gains=None):
        options = {"device": DEVICE, "optimizer": optax.sgd(0.1)}
        step = poet_jax.train_step(Nested(), 2**40, update=update, **options)
        args = jax.eval_shape(step.init, jax.random.key(0), BATCH), BATCH
        return search(step, *args, gains=gains).schedule if gains else step.plan(*args)

    both = {"inner/**": 1.0, "block/**": 1.0}
    gains = {name: 1.0 if name == item else -1.0 for name in both}
    found = planned(both | ALWAYS, gains)
    alone = planned({item: 1.0} | ALWAYS)
    assert len(found.graph.nodes) == len(alone.graph.nodes)
    assert found.baseline.peak_bytes == alone.baseline.peak_bytes


def test_no_subset_that_fits_gains_more():
    @functools.cache
    def planned(items):
        step, args = step_and_args("nnx", {**dict.fromkeys(items, 1.0), **ALWAYS})
        return step.plan(*args)

    @functools.cache
    def fits(items):
        made = planned(items)
        try:
            poet_jax.MilpPlanner()(made.graph, made.costs, budget)
        except poet_jax.BudgetTooSmall:
            return False
        return True

    subsets = [
        items
        for count in range(len(GAINS) + 1)
        for items in itertools.combinations(GAINS, count)
    ]
    subsets.sort(key=lambda items: -sum(GAINS[item] for item in items))
    most = planned(subsets[0]).baseline
    budget = poet_jax.Budget(int(0.6 * most.peak_bytes), 0.8 * most.seconds)
    best = next(items for items in subsets if fits(items))
    step, args = step_and_args("nnx", EVERYTHING, budget)
    found = search(step, *args, gains=GAINS)
    assert found.gain == sum(GAINS[item] for item in best)
    assert found.bound >= found.gain
    assert fits(tuple(sorted(found.items)))
    published = evolve(step, *args, gains=GAINS, generations=5, population=8)
    assert published.gain <= found.gain and fits(tuple(sorted(published.items)))


def test_evolution_counts_memory_when_everything_is_kept():
    step, args = step_and_args("linen", EVERYTHING)
    whole = step.plan(*args).baseline
    step, args = step_and_args("linen", {"blocks_2/**": 1.0, **ALWAYS})
    part = step.plan(*args).baseline.peak_bytes
    assert part < whole.peak_bytes
    step, args = step_and_args("linen", EVERYTHING, poet_jax.Budget(part))
    found = evolve(step, *args, gains=GAINS, generations=10, population=8)
    graph, costs = found.schedule.graph, found.schedule.costs
    assert keep_everything(graph, costs).usage.peak_bytes <= part
    assert found.items == ("blocks_2/**",)


def test_an_interrupted_analysis_goes_on_where_it_was(tmp_path):
    asked = []

    def score(update):
        asked.append(update)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return 0.5 + 0.1 * len(update.fractions)

    path = tmp_path / "scores.jsonl"
    with pytest.raises(KeyboardInterrupt):
        contributions(score, {"a": 1.0, "b": 0.5}, always=ALWAYS, path=path)
    gains = contributions(score, {"a": 1.0, "b": 0.5}, always=ALWAYS, path=path)
    assert len(asked) == 4  # the two before the interruption are not asked again
    assert gains == pytest.approx({"a": 0.1, "b": 0.1})


def test_what_is_chosen_does_not_depend_on_the_unit_of_gains():
    step, args = step_and_args("nnx", EVERYTHING)
    most = step.plan(*args).baseline
    budget = poet_jax.Budget(int(0.6 * most.peak_bytes), 0.8 * most.seconds)
    step, args = step_and_args("nnx", EVERYTHING, budget)
    whole = search(step, *args, gains=GAINS)
    assert 0 < len(whole.items) < len(GAINS)
    for unit in (1e-9, 1e9):
        gains = {item: unit * gain for item, gain in GAINS.items()}
        found = search(step, *args, gains=gains)
        assert found.items == whole.items
        assert found.gain == pytest.approx(unit * whole.gain)
        assert found.bound == pytest.approx(unit * whole.bound)


@pytest.mark.parametrize(
    ("gains", "says"),
    [
        ({"head/**": float("nan")}, r"'head/\*\*' must be a finite number, got nan"),
        ({"head/**": float("inf")}, "must be a finite number, got inf"),
        ({"head/**": 10**400}, "must be a finite number, got 1000"),
        ({"head/**": "much"}, "must be a finite number, got 'much'"),
        (dict.fromkeys(EVERYTHING, 0.0), "No gain is above 0, got {'blocks_0"),
        (dict.fromkeys(EVERYTHING, -1.0), "or leave it out of `gains`"),
    ],
)
def test_gains_that_choose_nothing_are_refused(gains, says):
    step, args = step_and_args("nnx", EVERYTHING)
    with pytest.raises(ValueError, match=says) as caught:
        search(step, *args, gains=gains)
    assert_three_sentences(caught.value)


def test_nothing_fits_and_bad_gains_are_named():
    step, args = step_and_args("nnx", EVERYTHING, 1000)
    with pytest.raises(poet_jax.BudgetTooSmall):
        search(step, *args, gains=GAINS)
    with pytest.raises(ValueError, match=r"'x/\*\*', which the step does not train"):
        search(step, *args, gains={"x/**": 1.0})
    step, args = step_and_args("nnx", poet_jax.update.lora(2), 1000)
    with pytest.raises(ValueError, match="Update of fractions"):
        search(step, *args, gains=GAINS)
