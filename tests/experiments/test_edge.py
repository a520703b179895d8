"""A planned step computes the same wherever it is sent: by JAX, by IREE, and as C."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import poet_jax
from experiments.edge import cases, measure, tools

HOST, BASELINE, AARCH64, *_ = tools.TARGETS.values()
NO_RUNTIME = pathlib.Path("nowhere")
needs_iree = pytest.mark.skipif(
    bool(tools.for_iree(HOST, NO_RUNTIME)), reason=tools.for_iree(HOST, NO_RUNTIME)
)


def step(state, inputs, rate):
    def loss(state):
        hidden = inputs
        for w in state:
            hidden = jnp.tanh(hidden @ w)
        return jnp.square(hidden).mean()

    value, gradients = jax.value_and_grad(loss)(state)
    return [w - rate * g for w, g in zip(state, gradients, strict=True)], value


def arguments():
    rng = np.random.default_rng(0)
    state = [jnp.asarray(rng.normal(0, 0.3, (8, 8)), "float32") for _ in range(6)]
    inputs = jnp.asarray(rng.normal(0, 1, (32, 8)), "float32")
    return state, inputs, jnp.float32(0.5)


@pytest.fixture(scope="module")
def schedule():
    """In so little memory that some nodes run again."""
    found = poet_jax.schedule(
        step,
        "75%",
        device=poet_jax.devices.RASPBERRY_PI_4,
        planner=poet_jax.MilpPlanner(paging=False),
        donate_argnums=0,
    ).plan_for_board(*arguments())
    assert found.program.recomputed
    return found


def bytes_of(x):
    return np.asarray(x).tobytes()


def expected():
    return [np.asarray(x) for x in jax.tree.leaves(jax.jit(step)(*arguments()))]


def apart(found):
    before = [np.asarray(x) for x in arguments()[0]]
    return measure.apart(found, expected(), before)


def test_a_plan_that_is_not_compiled_here_is_exported(schedule):
    sent = export.deserialize(schedule.export().serialize())
    found, value = sent.call(*arguments())
    assert apart([np.asarray(x) for x in (*found, value)]) < 1e-5
    text = schedule.export().mlir_module()
    assert text.count("tf.aliasing_output") == len(found)
    assert "custom_call" not in text


def test_a_plan_of_a_file_is_exported_as_the_one_that_was_saved(schedule, tmp_path):
    schedule.to_json(tmp_path / "plan.json")
    read = schedule.from_json(tmp_path / "plan.json")
    found, right = (x.export().call(*arguments()) for x in (read, schedule))
    assert jax.tree.map(bytes_of, found) == jax.tree.map(bytes_of, right)


def test_a_plan_that_writes_to_references_is_not_exported_before_it_is_compiled():
    def accumulate(total, x):
        total[...] += x
        return x.sum()

    x = jnp.ones(8)
    scheduled = poet_jax.schedule(
        accumulate,
        "1MiB",
        device=poet_jax.devices.RASPBERRY_PI_4,
        planner=poet_jax.keep_all,
    )
    with pytest.raises(poet_jax.PlanInvalid, match="references.*plan.*export"):
        scheduled.plan_for_board(jax.new_ref(x), x).export()


def test_a_plan_with_pages_is_not_exported():
    paged = poet_jax.schedule(
        step,
        "75%",
        device=poet_jax.devices.RASPBERRY_PI_4,
        planner=poet_jax.planners.paging_only,
        donate_argnums=0,
    ).plan_for_board(*arguments())
    with pytest.raises(poet_jax.PlanInvalid, match="paging=False"):
        paged.export()


@needs_iree
def test_iree_computes_a_planned_step(schedule, tmp_path):
    text = tmp_path / "step.mlir"
    text.write_text(measure.not_donated(schedule.export().mlir_module()))
    inputs = []
    for number, x in enumerate(jax.tree.leaves(arguments())):
        inputs.append(tmp_path / f"{number}.npy")
        np.save(inputs[-1], np.asarray(x))
    built = measure.IreeStep(text, HOST, "O1", inputs, len(expected()), NO_RUNTIME)
    assert apart(built.results()) < 1e-5
    # At least what goes in is there.
    given = sum(x.nbytes for x in jax.tree.leaves(arguments()))
    assert built.figures(0.01).memory_bytes >= given


@pytest.mark.parametrize("target", [BASELINE, AARCH64], ids=lambda x: x.name)
def test_c_computes_the_bits_of_this_machine_elsewhere(schedule, target, tmp_path):
    if words := tools.for_c(target) or tools.for_c(HOST):
        pytest.skip(words)
    project = poet_jax.emit.c(schedule, tmp_path, arguments())
    here, there = (
        measure.CStep(project, x, expected()).results() for x in (HOST, target)
    )
    assert apart(here) < 1e-5
    assert list(map(bytes_of, here)) == list(map(bytes_of, there))


def test_a_model_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="resnet.*mlp.*--models"):
        cases.make("resnet")
