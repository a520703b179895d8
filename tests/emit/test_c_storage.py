"""State of a C program on the board's storage, beside JAX."""

import dataclasses
import subprocess
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from boards import FLAGS, normal, results, scheduled
from jax import lax
from strategies import DEVICE

import poet_jax
from poet_jax.core.plan import Free, PageIn, PageOut


@pytest.fixture
def store(tmp_path):
    store = poet_jax.FileStore(tmp_path)
    yield store
    store.close()


def loss(weights, x, frozen):
    for w, b in weights:
        x = jnp.tanh(x @ w + b) @ frozen
    return jnp.mean(x * x)


def step(weights, x, frozen):
    value, gradients = jax.value_and_grad(loss)(weights, x, frozen)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value


def after(steps, weights, *rest):
    value = None
    for _ in range(steps):
        weights, value = jax.jit(step)(weights, *rest)
    return [np.asarray(x) for x in jax.tree.leaves((weights, value))]


def test_each_step_reads_the_state_that_the_last_one_has_written(store, tmp_path):
    """Kernels are on storage, biases in RAM; a frozen matrix is on storage, too."""
    rng = np.random.default_rng(0)
    weights = [(normal(rng, 12, 12), normal(rng, 12)) for _ in range(3)]
    rest = normal(rng, 4, 12), normal(rng, 12, 12) / 4
    paged, frozen = poet_jax.to_storage((weights, rest[1]), store, 500)
    arguments = paged, rest[0], frozen
    schedule = scheduled(
        step, *arguments, budget="60%", planner=poet_jax.greedy, donate_argnums=0
    )
    folder = tmp_path / "project"
    found = results(schedule, folder, arguments, steps=3)
    for a, b in zip(found, after(3, weights, *rest), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert (folder / "poet_storage.bin").stat().st_size == 4 * 1024


def embedded(state, words):
    table, kernel = state

    def loss(table, kernel):
        return jnp.mean(jnp.square(table[words] @ kernel - 1))

    gradients = jax.grad(loss, (0, 1))(table, kernel)
    return tuple(x - 30 * g for x, g in zip(state, gradients, strict=True))


def test_large_state_goes_block_by_block_and_main_compares_it(store, tmp_path):
    """A table of which rows are gathered, and a kernel whose gradient is whole."""
    rng = np.random.default_rng(0)
    state = normal(rng, 2000, 64), normal(rng, 64, 1200)
    words = rng.integers(0, 2000, 9).astype(np.int32)
    arguments = poet_jax.to_storage(state, store), words
    schedule = scheduled(embedded, *arguments, budget=700_000,
                         planner=poet_jax.greedy, donate_argnums=0)  # fmt: skip
    folder = tmp_path / "project"
    project = poet_jax.emit.c(schedule, folder, arguments)
    assert project.arena_bytes < 735_000 < min(2 * 2000 * 64 * 4, 3 * 64 * 1200 * 4)
    sources = sorted(folder.glob("*.c"))
    command = ["gcc", *FLAGS, *sources, "-o", folder / "program", "-lm"]
    subprocess.run(command, check=True)
    subprocess.run([folder / "program", folder], check=True)
    (folder / "poet_storage.bin").write_bytes(bytes(project.page_bytes))
    done = subprocess.run([folder / "program", folder], check=False)
    assert done.returncode == 1, "other state has other results"


def test_state_that_is_read_after_its_successor_is_refused(store, tmp_path):
    rng = np.random.default_rng(0)
    weights, x = normal(rng, 8, 8), normal(rng, 8, 8)

    def step(weights, x):
        new = weights - 0.1 * x
        return new, (new @ x + 1) @ (x @ weights)

    arguments = poet_jax.to_storage(weights, store, 0), x
    schedule = scheduled(step, *arguments, donate_argnums=0)
    program = schedule.program
    rows = list(program.instructions)
    (out,) = (n for n, x in enumerate(rows) if isinstance(x, PageOut))
    (old,) = program.graph.stored
    rows[out + 1 : out + 1] = [Free(old), PageIn(old)]
    again = dataclasses.replace(program, instructions=tuple(rows))
    changed = types.SimpleNamespace(program=again, usage=schedule.usage, step=None)
    with pytest.raises(ValueError, match="one place for both"):
        poet_jax.emit.c(changed, tmp_path / "project", arguments)


def test_a_kernel_that_is_read_reversed_is_no_second_array(tmp_path):
    """As the gradient of a convolution with respect to its input reads it."""
    rng = np.random.default_rng(0)
    kernel, x = normal(rng, 3, 3, 16, 16), normal(rng, 1, 4, 4, 16)

    def convolved(x, kernel):
        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=numbers
        )

    def step(kernel, x):
        return jax.grad(lambda x: jnp.sum(jnp.square(convolved(x, kernel))))(x)

    schedule = scheduled(step, kernel, x)
    assert schedule.usage.peak_bytes < 1.5 * kernel.nbytes
    (found,) = results(schedule, tmp_path, (kernel, x))
    np.testing.assert_allclose(found, jax.jit(step)(kernel, x), rtol=1e-4, atol=1e-4)


def test_state_on_storage_is_planned_for_a_board(store, tmp_path):
    """For this machine, small arrays beside it would be no state."""
    weights = poet_jax.to_storage([np.ones((64, 64), "f")], store, 1)
    step = poet_jax.schedule(
        lambda w: [w[0] * 2],
        "1GiB",
        donate_argnums=0,
        planner=poet_jax.greedy,
        device=DEVICE,
        executor=poet_jax.HostExecutor(store),
    )
    with pytest.raises(ValueError, match="Use Scheduled.plan_for_board"):
        poet_jax.emit.c(step.plan(weights), tmp_path / "project", (weights,))
