"""The state of a C program, saved and restored."""

import subprocess

import jax
import numpy as np
import pytest
from boards import FLAGS, normal, results, scheduled

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
    command = ["gcc", *FLAGS, *folder.glob("*.c"), "-o", folder / "program", "-lm"]
    subprocess.run(command, check=True)
    return folder / "program"


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
