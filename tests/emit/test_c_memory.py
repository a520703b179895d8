"""Programs of C read what they have written, and nothing else: under valgrind."""

import shutil
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from boards import built, normal, scheduled
from jax import lax

import poet_jax

VALGRIND = ["valgrind", "--error-exitcode=9", "--leak-check=full", "--quiet"]


def loss(weights, images, labels):
    kernel, dense = weights
    x = lax.conv_general_dilated(
        images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    x = lax.reduce_window(
        jax.nn.relu(x), -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"
    )
    scores = jax.nn.log_softmax(x.reshape(len(x), -1) @ dense)
    return -jnp.mean(jnp.take_along_axis(scores, labels[:, None], 1))


def step(weights, images, labels):
    gradients = jax.grad(loss)(weights, images, labels)
    return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)]


@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not here")
@pytest.mark.parametrize("budget", ["100%", "75%"])
def test_valgrind_finds_nothing_in_two_steps(budget, tmp_path):
    """What the arena held before counts as undefined."""
    rng = np.random.default_rng(0)
    weights = [normal(rng, 3, 3, 2, 4), normal(rng, 64, 5)]
    arguments = weights, normal(rng, 2, 8, 8, 2), np.array([1, 4], np.int32)
    schedule = scheduled(
        step, *arguments, budget=budget, planner=poet_jax.greedy, donate_argnums=0
    )
    flags = ["-std=c99", "-O1", "-g", "-ffp-contract=off", "-DMEMCHECK"]
    built(schedule, tmp_path, arguments, flags=flags)
    subprocess.run([*VALGRIND, tmp_path / "program", "2"], check=True, cwd=tmp_path)
