"""Planned programs in C, compiled and run with sanitizers."""

import functools
import itertools
import pathlib
import subprocess
import tempfile

import jax
import numpy as np
from strategies import DEVICE

import poet_jax

FLAGS = (
    "-std=c99 -O1 -Wall -Wextra -Werror -ffp-contract=off "
    "-fsanitize=undefined,address -fno-sanitize-recover=all"
).split()
KERNELS = "functions.c", "kernels.c"  # are the same in all projects
# Runs some steps with the arguments of the test vector, and writes all results. The
# storage of a board is memory here, of the size that the program says that it needs.
DRIVER = """
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "poet_step.h"
#ifdef MEMCHECK /* under valgrind, the arena begins without contents */
#include <valgrind/memcheck.h>
#else
#define VALGRIND_MAKE_MEM_UNDEFINED(data, bytes) (void)(data)
#endif
extern const void *const poet_given[];
static char storage[POET_PAGE_BYTES + 1];
int poet_page_out(uint32_t at, const void *from, uint32_t bytes) {
  memcpy(storage + at, from, bytes);
  return 0;
}
int poet_page_in(uint32_t at, void *to, uint32_t bytes) {
  memcpy(to, storage + at, bytes);
  return 0;
}
int main(int count, char **words) {
  FILE *file = POET_STORED_BYTES ? fopen("poet_storage.bin", "rb") : NULL;
  if (file && fread(storage, 1, sizeof storage, file) != POET_STORED_BYTES) return 3;
  if (file) fclose(file);
  VALGRIND_MAKE_MEM_UNDEFINED(poet_arena, POET_ARENA_BYTES);
  if (poet_init()) return 2;
  for (int i = 0; i < POET_ARGUMENTS; ++i)
    if (poet_given[i])
      memcpy((char *)poet_arena + poet_arguments[i].offset, poet_given[i],
             poet_arguments[i].bytes);
  for (int steps = count > 1 ? atoi(words[1]) : 1; steps; --steps)
    if (poet_step()) return 2;
  for (int i = 0; i < POET_RESULTS; ++i) {
    const struct poet_array *x = &poet_results[i];
    fwrite(x->offset < 0 ? storage + x->storage : (char *)poet_arena + x->offset, 1,
           x->bytes, stdout);
  }
  return 0;
}
"""


def scheduled(function, *arguments, budget="100%", planner=None, **options):
    """The schedule for a board."""
    return poet_jax.schedule(
        function,
        budget,
        device=DEVICE,
        planner=planner or poet_jax.keep_all,
        **options,
    ).plan_for_board(*arguments)


def built(schedule, folder, arguments, flags=FLAGS, **options):
    """The project, compiled with sanitizers, or with other flags."""
    project = poet_jax.emit.c(schedule, folder, arguments, **options)
    (folder / "main.c").write_text(DRIVER)
    compiled(folder, flags)
    return project


def compiled(folder, flags=FLAGS):
    """The program of the C files in a folder."""
    header, program = (folder / "kernels.h").read_bytes(), folder / "program"
    files = [
        compiled_once(source.name, source.read_bytes(), header, tuple(flags))
        if source.name in KERNELS
        else source
        for source in sorted(folder.glob("*.c"))
    ]
    subprocess.run(["gcc", *flags, *files, "-o", program, "-lm"], check=True)
    return program


@functools.cache
def compiled_once(name, source, header, flags):
    """The object file of a source that reads kernels.h alone."""
    folder = pathlib.Path(objects().name, str(next(numbers)))
    folder.mkdir()
    (folder / name).write_bytes(source)
    (folder / "kernels.h").write_bytes(header)
    path = (folder / name).with_suffix(".o")
    subprocess.run(["gcc", *flags, "-c", folder / name, "-o", path], check=True)
    return path


@functools.cache
def objects():
    return tempfile.TemporaryDirectory()


numbers = itertools.count()


def results(schedule, folder, arguments, steps=1, **options):
    """What a function's results are in C after so many steps, as flat arrays."""
    built(schedule, folder, arguments, **options)
    return run(schedule, folder, steps)


def run(schedule, folder, steps=1):
    """The same of a project that is built."""
    command = [folder / "program", str(steps)]
    done = subprocess.run(command, check=True, capture_output=True, cwd=folder)
    data = done.stdout
    arrays = []
    for v in schedule.graph.results:
        x = schedule.graph.values[v]
        arrays.append(np.frombuffer(data[: x.nbytes], x.dtype).reshape(x.shape))
        data = data[x.nbytes :]
    assert not data
    return arrays


def assert_alike(cases, folder, rtol=2e-5):
    """Each of `cases`, (function, arguments), is in C what it is in JAX."""
    functions = [function for function, _ in cases]
    arguments = [arguments for _, arguments in cases]

    def everything(arguments):
        pairs = zip(functions, arguments, strict=True)
        return [function(*given) for function, given in pairs]

    schedule = scheduled(everything, arguments)
    found = results(schedule, folder, [arguments])
    expected = [np.asarray(x) for x in jax.tree.leaves(jax.jit(everything)(arguments))]
    for number, (a, b) in enumerate(zip(found, expected, strict=True)):
        scale = np.abs(b[np.isfinite(b)]).max(initial=0) if b.dtype.kind == "f" else 0
        np.testing.assert_allclose(
            a, b, rtol=rtol, atol=rtol * scale + 1e-30, err_msg=f"result {number}"
        )


def normal(rng, *shape):
    return rng.normal(size=shape).astype(np.float32)
