"""The state of a C program, saved and restored."""

import re
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from boards import compiled, normal, results, scheduled

import poet_jax

# Saves after two steps, and takes a third one; or restores a state, and takes that one,
# too. Says with what status it was refused, and whether RAM was changed.
DRIVER = """
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "poet_step.h"
extern const void *const poet_given[];
static uint8_t saved[POET_SAVE_BYTES + 1];
static int readings, most = 1000000;
static int put(uint32_t at, const void *from, uint32_t bytes) {
  memcpy(saved + at, from, bytes);
  return 0;
}
static int get(uint32_t at, void *to, uint32_t bytes) {
  memcpy(to, saved + at, bytes);
  return ++readings > most;
}
static void give(void) {
  for (int i = 0; i < POET_ARGUMENTS; ++i)
    if (poet_given[i])
      memcpy((char *)poet_arena + poet_arguments[i].offset, poet_given[i],
             poet_arguments[i].bytes);
}
static void show(void) {
  give();
  poet_step();
  for (int i = 0; i < POET_RESULTS; ++i)
    fwrite((char *)poet_arena + poet_results[i].offset, 1, poet_results[i].bytes,
           stdout);
}
static void refused(int status) {
  int same = 1;
  for (uint32_t i = 0; i < POET_ARENA_BYTES; ++i)
    same &= ((uint8_t *)poet_arena)[i] == 77;
  printf(same ? "%d " : "%d:changed ", status);
}
int main(int count, char **words) {
  FILE *file = fopen(words[2], words[1][0] == 's' ? "wb" : "rb");
  if (words[1][0] == 's') {
    poet_init();
    for (int i = 0; i < 2; ++i) give(), poet_step();
    const int status = poet_save(put);
    fwrite(saved, 1, POET_SAVE_BYTES, file);
    fclose(file);
    show();
    return -status;
  }
  const size_t bytes = fread(saved, 1, POET_SAVE_BYTES, file);
  fclose(file);
  memset(poet_arena, 77, POET_ARENA_BYTES);
  if (words[1][0] == 'f') { /* each byte in turn is another one */
    for (size_t i = 0; i < bytes; ++i) {
      saved[i] ^= 1 << i % 8;
      refused(poet_restore(get));
      saved[i] ^= 1 << i % 8;
    }
    return 0;
  }
  if (count > 3) most = atoi(words[3]);
  const int status = poet_restore(get);
  if (status) refused(status);
  else show();
  return 0;
}
"""


def program(folder, width):
    """A step of gradient descent with momentum, as a program."""
    rng = np.random.default_rng(0)
    weights, x = normal(rng, width), normal(rng, 4, width)
    arguments = (weights, np.zeros_like(weights)), x, np.int32(3)

    def step(state, x, count):
        weights, momentum = state
        momentum = 0.9 * momentum + (x @ weights) @ x
        return (weights - 0.01 * momentum, momentum), count + 1

    folder.mkdir()
    schedule = scheduled(step, *arguments, donate_argnums=(0, 2))
    poet_jax.emit.c(schedule, folder, arguments)
    (folder / "main.c").write_text(DRIVER)
    return compiled(folder)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(program, its state after two steps, results of the third one)."""
    folder = tmp_path_factory.mktemp("saved")
    built = program(folder / "one", 5)
    return built, folder / "state", run(built, "save", folder / "state")


def run(*command):
    return subprocess.run(command, check=True, capture_output=True).stdout


def test_a_restored_program_goes_on_to_the_bit(saved):
    built, state, expected = saved
    assert len(state.read_bytes()) == 20 + 5 * 4 * 2 + 4
    assert run(built, "restore", state) == expected


def test_a_state_with_any_bit_changed_is_refused_and_ram_is_as_it_was(saved):
    built, state, _ = saved
    statuses = run(built, "flip", state).split()
    assert statuses == [b"-2"] * 16 + [b"-3"] * (state.stat().st_size - 16)


def test_a_state_of_another_program_is_refused_and_ram_is_as_it_was(saved, tmp_path):
    _, state, _ = saved
    other = program(tmp_path / "two", 6)
    assert run(other, "restore", state).strip() == b"-2"


def test_a_reading_that_fails_says_whether_ram_is_as_it_was(saved):
    """The head is read, then all of it to compare, and then each array."""
    built, state, _ = saved
    found = [run(built, "restore", state, str(most)).strip() for most in range(3)]
    assert found == [b"-1", b"-1", b"-4:changed"]


@pytest.mark.parametrize(
    "function",
    [
        lambda s, x: ((s[0] + x, s[0], s[1]), s[2]),
        lambda s, x: ((s[1], s[0], s[2] * x), x),
        lambda s, x: ((x, s[0], s[1]), s[2]),
        lambda s, x: ((s[0] - x, s[0], s[2]), x),
    ],
    ids=["old beside new", "swap", "delay line", "target network"],
)
def test_old_state_may_be_a_result_in_another_place(function, tmp_path):
    rng = np.random.default_rng(0)
    args = tuple(normal(rng, 5) for _ in range(3)), normal(rng, 5)
    plan = scheduled(function, *args, donate_argnums=0)
    found = results(plan, tmp_path, args)
    for left, right in zip(found, jax.tree.leaves(function(*args)), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-6)


def after(steps, function, state, *rest, new_of):
    """Results in JAX; `new_of` takes the state for the next step from them."""
    found = None
    for _ in range(steps):
        found = jax.jit(function)(*state, *rest)
        state = new_of(found)
    return [np.asarray(x) for x in jax.tree.leaves(found)]


def descent(state, x):
    """(new state, its gradients, loss): a kernel, and a scalar like the loss."""

    def loss(state):
        return jnp.sum(jnp.square(state["w"] @ x - 1)) * 0.01 + state["scale"] ** 2

    value, gradients = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda a, g: a - 0.1 * g, state, gradients), gradients, value


def adam(parameters, moments, x):
    value, gradients = jax.value_and_grad(lambda p: descent(p, x)[2])(parameters)
    updates, moments = optax.adamw(0.01).update(gradients, moments, parameters)
    return value, optax.apply_updates(parameters, updates), moments


def momentum(state, moved, x):
    new, gradients, value = descent(state, x)
    moved = jax.tree.map(lambda m, g: 0.9 * m + g, moved, gradients)
    return value, jax.tree.map(lambda a, m: a - 0.1 * m, state, moved), moved, new


STATE = {
    "w": np.linspace(-1, 1, 256, dtype="f").reshape(16, 16),
    "scale": np.ones((), "f"),
}
ZEROS = jax.tree.map(np.zeros_like, STATE)
# (step, its state, what of the results is the next one)
RETURNED = {
    "state first": (lambda s, x: descent(s, x)[::2], [STATE], lambda r: r[:1]),
    "loss first": (lambda s, x: descent(s, x)[2::-2], [STATE], lambda r: r[1:]),
    "gradients beside": (lambda s, x: descent(s, x)[:2], [STATE], lambda r: r[:1]),
    "alone": (lambda s, x: descent(s, x)[0], [STATE], lambda r: [r]),
    "loss inside": (
        lambda s, x: descent(s, x)[0] | {"loss": descent(s, x)[2]},
        [STATE],
        lambda r: [{name: r[name] for name in STATE}],
    ),
    "deep": (
        lambda s, x: {"of": ({"new": descent(s, x)[0]},), "a": descent(s, x)[2]},
        [STATE],
        lambda r: [r["of"][0]["new"]],
    ),
    "old beside": (lambda s, x: (descent(s, x)[0], s["w"]), [STATE], lambda r: r[:1]),
    "adam": (adam, [STATE, optax.adamw(0.01).init(STATE)], lambda r: r[1:]),
    "by order": (
        lambda s, m, x: momentum(s, m, x)[:3], [STATE, ZEROS], lambda r: r[1:]
    ),
}  # fmt: skip


def numbers(graph):
    """A tree like the result's, of the numbers of its flat results."""
    return jax.tree.unflatten(graph.out_tree, range(len(graph.results)))


@pytest.mark.parametrize("limit", [None, 1000], ids=["RAM", "storage"])
@pytest.mark.parametrize("name", RETURNED)
def test_the_next_step_finds_the_new_state(name, limit, tmp_path):
    """Wherever the step returns it; on storage is the kernel, and not the scalar."""
    step, state, new_of = RETURNED[name]
    x, count = np.linspace(0, 1, 16, dtype="f"), len(state)
    store = poet_jax.HostStore()
    given = state if limit is None else poet_jax.to_storage(state, store, limit)
    donated = tuple(range(count))
    schedule = scheduled(step, *given, x, donate_argnums=donated)
    found = results(schedule, tmp_path, (*given, x), steps=3)
    expected = after(3, step, state, x, new_of=new_of)
    header = (tmp_path / "poet_step.h").read_text()
    leaves = jax.tree.leaves(list(new_of(numbers(schedule.graph))))
    assert [int(n) for n in re.findall(r"; then result (\d+) ", header)] == leaves
    for left, right in zip(found, expected, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-5)
    store.close()


@pytest.mark.parametrize(
    "function, donated, names",
    [
        (lambda w, x: {"g": w * x, "w": w - x}, 0, r"result\['g'\] or result\['w'\]"),
        (lambda w, x: (x[0], (w, w - x)), 0, r"result\[1\]\[0\] or result\[1\]\[1\]"),
        (lambda w, x: (x[0], w * x, w - x), 0, r"result\[1\] or result\[2\]"),
        (lambda x, w: (w * x, w - x), 1, r"result\[0\] or result\[1\]"),
    ],
    ids=["names", "inside", "loss first", "batch first"],
)
@pytest.mark.parametrize("limit", [None, 0], ids=["RAM", "storage"])
def test_results_that_may_both_be_the_new_state_are_refused(
    function, donated, names, limit
):
    w, store = np.ones(8, np.float32), poet_jax.HostStore()
    given = [w, w]
    if limit is not None:
        given[donated] = poet_jax.to_storage(w, store, limit)
    message = f"{names} may be the next argument {donated}.*return new state first"
    with pytest.raises(ValueError, match=message):
        scheduled(function, *given, donate_argnums=donated)
    store.close()


@pytest.mark.parametrize(
    "function",
    [
        lambda s: ([x + 1 for x in s], s[0]),
        lambda s: ([s[0] + 1] * 2, s[1]),
        lambda s: ([s[0] + 1, jnp.full(s[0].shape, 2.0)], s[1]),
        lambda s: ([s[0] + 1, s[1]], s[1]),
    ],
    ids=["old beside new", "one for two", "weakly typed", "as it was"],
)
def test_what_lies_on_storage_is_what_jax_returns(function, tmp_path):
    state = [np.arange(300, dtype="f"), np.arange(300, dtype="f") * 2]
    store = poet_jax.HostStore()
    given = poet_jax.to_storage(state, store, 1000)
    schedule = scheduled(function, given, donate_argnums=0)
    found = results(schedule, tmp_path, (given,), steps=3)
    expected = after(3, function, [state], new_of=lambda r: r[:1])
    np.testing.assert_allclose(found, expected)
    store.close()


def test_state_on_storage_that_is_read_after_it_is_replaced_is_refused(tmp_path):
    state = [np.ones(300, np.float32) for _ in range(3)]
    store = poet_jax.HostStore()
    given = poet_jax.to_storage(state, store, 1000)
    turned = lambda s: [s[1] + 1, s[2] + 1, s[0] * 0.5]  # noqa: E731
    schedule = scheduled(turned, given, donate_argnums=0)
    with pytest.raises(ValueError, match="read again.*reads state before"):
        poet_jax.emit.c(schedule, tmp_path / "project", (given,))
    assert not (tmp_path / "project").exists()
    store.close()
