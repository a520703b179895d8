"""Does every operation of JAX compute under a budget what it computes under jax.jit?

    python -m experiments.benchmarks.harnesses
    python -m experiments.benchmarks.harnesses --primitives=eig,sort
    python -m experiments.benchmarks.harnesses --every=40

JAX tests its compilers by thousands of harnesses: a primitive each, with shapes, types
and parameters that matter. Each one that the CPU can run goes through `jax.jit`,
through `schedule` with a budget that covers it, and node by node within the least
budget. A row for each primitive goes to experiments/results/harnesses/harnesses.csv:
how many harnesses there are, how many of them are equal to the bit, and how many to
rounding. Those that differ by more, or fail, are in differences.csv with what happened.
--primitives measures the rows of some, --every=N takes each N-th harness. All take
about half an hour on two cores.
"""

import dataclasses
import functools
import logging
import pathlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import app, flags

import poet_jax
from experiments.program import program, read_rows, result_flags, write_rows
from poet_jax import cli
from poet_jax.core.progress import counted

EVERY = flags.DEFINE_integer("every", 1, "Take each such harness.", 1)
PRIMITIVES = flags.DEFINE_list("primitives", None, "Of these; of all by default.")
result_flags("harnesses")
COLUMNS = ("primitive", "harnesses", "to_the_bit", "to_rounding", "different")
DIFFERENCES = ("primitive", "harness", "what")

# Results of two programs for one operation differ by rounding of sums at most.
ROUNDING = 1e-5


@dataclasses.dataclass(frozen=True)
class Answer:
    """How a harness came out: "bit", "rounding", or what happened instead."""

    harness: str
    outcome: str


def harnesses(every: int = 1) -> list[Any]:
    """Those that the CPU can run."""
    # JAX has them in its wheel, for tests of its own.
    from jax._src.internal_test_util import test_harnesses

    there = [x for x in test_harnesses.all_harnesses if x.filter("cpu")]
    return there[::every]


def check(harness: Any) -> Answer:
    """The harness under `jax.jit`, within a large budget, and node by node in the
    least."""

    def fun(*args: Any) -> Any:
        return harness.dyn_fun(*args)

    args = harness.dyn_args_maker(np.random.RandomState(0))
    answer = functools.partial(Answer, harness.fullname)
    try:
        expected = jax.jit(fun)(*args)
    except Exception as error:
        return answer(f"jax.jit fails: {type(error).__name__}")
    outcomes = []
    try:
        for step in steps(fun, args):
            outcomes.append(compared(step(*args), expected))
    except Exception as error:
        return answer(f"{type(error).__name__}: {error}".splitlines()[0][:300])
    different = [x for x in outcomes if x not in ("bit", "rounding")]
    return answer((different or sorted(outcomes, reverse=True))[0])


def steps(fun: Any, args: Any) -> Iterator[Any]:
    """Within a budget that covers the function, and node by node within the least."""
    options = {"device": poet_jax.devices.RASPBERRY_PI_4, "planner": poet_jax.greedy}
    yield poet_jax.schedule(fun, "1GiB", **options)
    options |= {"passes": (), "executor": poet_jax.HostExecutor(trace=True)}
    try:
        poet_jax.schedule(fun, 1, **options).plan(*args)
    except poet_jax.BudgetTooSmall as error:
        yield poet_jax.schedule(fun, error.smallest_bytes, **options)
    else:
        yield poet_jax.schedule(fun, 1, **options)


def compared(found: Any, expected: Any) -> str:
    """ "bit", "rounding", or how two results differ."""
    outcome = "bit"
    ours, theirs = jax.tree.leaves(found), jax.tree.leaves(expected)
    if jax.tree.structure(found) != jax.tree.structure(expected):
        return "another structure"
    for one, other in zip(ours, theirs, strict=True):
        if jax.typeof(one) != jax.typeof(other):
            return f"{jax.typeof(one)} instead of {jax.typeof(other)}"
        if jax.numpy.issubdtype(one.dtype, jax.dtypes.extended):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        a, b = np.asarray(one), np.asarray(other)
        if a.tobytes() == b.tobytes():
            continue
        if not jax.numpy.issubdtype(a.dtype, jax.numpy.inexact):
            return "other integers"
        wide = complex if jax.numpy.iscomplexobj(a) else float
        rounding = max(ROUNDING, 4 * float(jax.numpy.finfo(a.dtype).eps))
        scale = float(np.nanmax(np.abs(b.astype(wide)), initial=0.0))
        scale = scale if np.isfinite(scale) else 1.0
        if not np.allclose(
            a.astype(wide), b.astype(wide), rounding, rounding * scale, equal_nan=True
        ):
            return "other values"
        outcome = "rounding"
    return outcome


@program
def main() -> None:
    logging.getLogger("poet_jax").setLevel(logging.WARNING)
    folder = cli.output_folder()
    there: dict[str, list[Any]] = {}
    for harness in harnesses(EVERY.value):
        there.setdefault(harness.group_name, []).append(harness)
    chosen = PRIMITIVES.value or sorted(there)
    if unknown := sorted(set(chosen) - there.keys()):
        raise ValueError(
            f"--primitives has {unknown}, of which JAX has no harness. Those that it "
            f"has are {', '.join(sorted(there))}."
        )
    for primitive in counted(chosen, len(chosen), "primitives"):
        answers = [check(harness) for harness in there[primitive]]
        count = Counter(answer.outcome for answer in answers)
        same = count["bit"] + count["rounding"]
        row = {
            "primitive": primitive,
            "harnesses": len(answers),
            "to_the_bit": count["bit"],
            "to_rounding": count["rounding"],
            "different": len(answers) - same,
        }
        replace(folder / "harnesses.csv", COLUMNS, primitive, [row])
        different = [
            {"primitive": primitive, "harness": x.harness, "what": x.outcome}
            for x in answers
            if x.outcome not in ("bit", "rounding")
        ]
        replace(folder / "differences.csv", DIFFERENCES, primitive, different)
        jax.clear_caches()


def replace(
    path: pathlib.Path,
    columns: Sequence[str],
    primitive: str,
    rows: Sequence[Mapping[str, Any]],
) -> None:
    """Write the rows of a primitive in place of older ones."""
    others = [x for x in read_rows(path) if x["primitive"] != primitive]
    write_rows(path, columns, sorted([*others, *rows], key=lambda x: x["primitive"]))


if __name__ == "__main__":
    app.run(main)
