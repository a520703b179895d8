"""Planned training steps by IREE and as C, on this machine and for others.

Command:  python -m experiments.edge.iree
Time:     half an hour, most of it IREE's compiler.
Expect:   the gradients of `jax.jit` to rounding everywhere, the same bits of C
          everywhere; C on AArch64 in at most twice IREE's time, and in less memory.

Each step is planned once in each budget. The plan becomes a C project, and StableHLO
by `Schedule.export()`, which IREE compiles. "none" is the function without a plan, as
`jax.export` has it. All runs are kept to one core, and take turns; seconds are medians
of CPU time. Those on AArch64 are emulated by QEMU, where vectors cost as much as
scalars do. So programs run here, too, built for x86-64 without extensions, whose
vectors are as wide as AArch64's. A target whose tools are missing is left out, and the
program says what to install.
"""

import dataclasses
import os
import pathlib
import statistics
from typing import Any

import jax
import numpy as np
from absl import app, flags
from jax import export

import poet_jax
from experiments.edge import cases, measure, tools
from experiments.program import program, read_rows, write_rows
from poet_jax.api.schedule import Schedule
from poet_jax.core.units import format_bytes, format_seconds

MODELS = flags.DEFINE_list("models", list(cases.NAMES), "Models.")
SHARES = flags.DEFINE_list("shares", ["100", "60"], "Budgets, percent of keep-all.")
LEVELS = flags.DEFINE_list(
    "levels", ["O1", "O3"], "Of iree-compile; the one whose steps are faster counts."
)
TARGETS = flags.DEFINE_list("targets", list(tools.TARGETS), "Targets.")
ROUNDS = flags.DEFINE_integer("rounds", 5, "Turns of all runs.", 1)
SECONDS = flags.DEFINE_float("seconds", 0.3, "Seconds of steps in a turn.")
TIME_LIMIT = flags.DEFINE_float("time_limit", 20.0, "Seconds for the planner.")
RUNTIME = flags.DEFINE_string(
    "aarch64_runtime", "outputs/edge/aarch64", "Folder of IREE's wheel for AArch64."
)
FOLDER = flags.DEFINE_string("folder", "outputs/edge", "Folder for what is built.")
ROWS = flags.DEFINE_string("rows", None, "CSV file whose rows of these models to set.")

TOLERANCE = 1e-4  # of what results may differ by, relative to what the step changes
COLUMNS = (
    "model", "share", "plan_bytes", "recomputed", "system", "target", "emulated",
    "options", "state", "seconds", "memory_bytes", "resident_bytes", "program_bytes",
    "difference_from_jax",
)  # fmt: skip


@dataclasses.dataclass
class Entry:
    """A row, what it is of, and what that measured."""

    row: dict[str, Any]
    step: measure.Step
    found: list[measure.Figures] = dataclasses.field(default_factory=list)

    @property
    def words(self) -> str:
        x = self.row
        share = x["share"] + (" %" if x["share"].isdigit() else "")
        budget = "" if share == "none" else f" in {share}"
        return f"{x['system']}{budget} for {x['target']}"


class Model:
    """All that is built of one model.

    Attributes:
      entries: a row of each.
    """

    def __init__(self, name: str, preload: str):
        self.case, self.preload = cases.make(name), preload
        self.folder = (pathlib.Path(FOLDER.value) / name).resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.leaves = [np.asarray(x) for x in jax.tree.leaves(self.case.arguments)]
        self.before = self.leaves[: len(jax.tree.leaves(self.case.arguments[0]))]
        self.entries: list[Entry] = []
        jit = measure.JitStep(self.case)
        self.expected = jit.results()
        self._add("none", None, "jax.jit", jit)

    def _add(
        self,
        share: str,
        plan: Schedule | None,
        system: str,
        step: measure.Step,
        state: str = "in_place",
    ) -> None:
        row = dict.fromkeys(COLUMNS, "")
        row |= {
            "model": self.case.name,
            "share": share,
            "system": system,
            "target": step.target.name,
            "emulated": "yes" if step.target.emulator else "",
            "state": state,
            "options": step.options,
            "program_bytes": step.program_bytes or "",
        }
        if plan is not None:
            constants = sum(x.nbytes for x in plan.graph.constants.values())
            row["plan_bytes"] = plan.usage.peak_bytes - constants
            row["recomputed"] = plan.program.recomputed
        self.entries.append(Entry(row, step))

    def planned(self, share: str) -> tuple[str, Schedule]:
        """The schedule in a share of keep-all's memory, as for a board: nothing is
        compiled here. Where that is too small it is "least"."""
        planner = poet_jax.MilpPlanner(
            paging=False, time_limit_seconds=TIME_LIMIT.value
        )

        def schedule(budget: Any) -> Schedule:
            return poet_jax.schedule(
                self.case.step,
                budget,
                device=poet_jax.devices.RASPBERRY_PI_4,
                planner=planner,
                donate_argnums=0,
            ).plan_for_board(*self.case.arguments)

        try:
            return share, schedule(f"{share}%")
        except poet_jax.BudgetTooSmall as error:
            return "least", schedule(error.smallest_bytes)

    def build_c(self, share: str, plan: Schedule) -> None:
        """The C project for every target that has a compiler."""
        folder = self.folder / f"c_{share}"
        project = poet_jax.emit.c(plan, folder, self.case.arguments)
        for target in asked_targets():
            if target.compiler and not tools.for_c(target):
                preload = "" if target.emulator else self.preload
                step = measure.CStep(project, target, self.expected, preload)
                self._add(share, plan, "C", step)

    def build_iree(self, share: str, plan: Schedule | None) -> None:
        """IREE's modules for every target, each at the level that is fastest there.

        State is written in place where IREE's results are right then, and copied
        elsewhere.
        """
        if plan is None:
            jitted = jax.jit(self.case.step, donate_argnums=0)
            sent = export.export(jitted)(*self.case.arguments)
        else:
            sent = plan.export()
        inputs = []
        for number in sent.module_kept_var_idx:
            inputs.append(self.folder / f"argument_{number}.npy")
            np.save(inputs[-1], self.leaves[number])
        text = sent.mlir_module()
        texts = {"in_place": text, "copied": measure.not_donated(text)}
        for target in asked_targets():
            if tools.for_iree(target, runtime()):
                continue
            for way, text in list(texts.items()):
                path = self.folder / f"iree_{share}_{way}.mlir"
                path.write_text(text)
                if step := self.fastest(target, path, inputs):
                    self._add(share, plan, "IREE", step, way)
                    break
                if way == "in_place":
                    del texts[way]
            else:
                print(f"  IREE has no module for {target.name}", flush=True)

    def fastest(
        self, target: tools.Target, path: pathlib.Path, inputs: list[pathlib.Path]
    ) -> measure.IreeStep | None:
        """What IREE makes of a text at the level whose steps are fastest, among those
        that compile and are right."""
        built = []
        preload = "" if target.emulator else self.preload
        for level in LEVELS.value if target.runs else LEVELS.value[:1]:
            with tools.on_all_cores():
                try:
                    step = measure.IreeStep(
                        path, target, level, inputs, len(self.expected), runtime(),
                        preload,
                    )  # fmt: skip
                except RuntimeError as error:
                    print(f"  {level} for {target.name}: {error}", flush=True)
                    continue
            if target.runs and (apart := self.apart(step.results())) > TOLERANCE:
                print(f"  {path.stem} for {target.name} is {apart:.1e} off", flush=True)
                return None
            built.append(step)
        if len(built) > 1:
            built.sort(key=lambda x: x.figures(SECONDS.value / 3).seconds)
        return built[0] if built else None

    def apart(self, found: measure.Arrays) -> float:
        return measure.apart(found, self.expected, self.before)

    def check(self) -> None:
        """Raise RuntimeError if a result differs from JAX's by more than rounding, or
        one of C from C's elsewhere."""
        first: dict[str, measure.Arrays] = {}
        for x in self.entries:
            if not x.step.target.runs:
                continue
            found = x.step.results()
            apart = self.apart(found)
            x.row["difference_from_jax"] = f"{apart:.1e}"
            if not apart <= TOLERANCE:
                raise RuntimeError(
                    f"{x.words} differs from jax.jit by {apart:.1e} of what a step "
                    f"changes, and {TOLERANCE:.0e} is rounding. "
                    f"Look at {self.folder}."
                )
            if x.row["system"] == "C":
                bits = first.setdefault(x.row["share"], found)
                if any(
                    a.tobytes() != b.tobytes() for a, b in zip(bits, found, strict=True)
                ):
                    raise RuntimeError(
                        f"{x.words} computes other bits than on the first target. "
                        f"Look at {self.folder}."
                    )

    def measure(self) -> None:
        """Let all take turns, and write what they found to the rows."""
        for _ in range(ROUNDS.value):
            for x in self.entries:
                if x.step.target.runs:
                    x.found.append(x.step.figures(SECONDS.value))
        for x in self.entries:
            if x.found:
                seconds = statistics.median(found.seconds for found in x.found)
                x.row["seconds"] = f"{seconds:.4g}"
                x.row["memory_bytes"] = x.found[0].memory_bytes
                x.row["resident_bytes"] = x.found[0].resident_bytes or ""
                print(
                    f"  {x.words}: {format_seconds(seconds)} a step, "
                    f"{format_bytes(x.found[0].memory_bytes)}",
                    flush=True,
                )


def runtime() -> pathlib.Path:
    return pathlib.Path(RUNTIME.value).resolve()


def asked_targets() -> list[tools.Target]:
    unknown = set(TARGETS.value) - tools.TARGETS.keys()
    if unknown:
        raise ValueError(
            f"The target {', '.join(unknown)} was asked for. There are "
            f"{', '.join(tools.TARGETS)}. Use for example --targets=aarch64."
        )
    return [tools.TARGETS[name] for name in TARGETS.value]


def say_what_is_missing() -> None:
    for target in asked_targets():
        for system, words in (
            ("C", tools.for_c(target) if target.compiler else ""),
            ("IREE", tools.for_iree(target, runtime())),
        ):
            if words:
                print(f"{target.name} is left out for {system}: {words}.")


def rows_of(name: str, preload: str) -> list[dict[str, Any]]:
    """Build, check and measure one model."""
    print(f"{name}, {cases.NAMES[name]}:", flush=True)
    model = Model(name, preload)
    model.build_iree("none", None)
    for share in SHARES.value:
        share, plan = model.planned(share)
        print(f"  {plan.usage}, {plan.program.recomputed} nodes run again", flush=True)
        model.build_c(share, plan)
        model.build_iree(share, plan)
    model.check()
    model.measure()
    return [x.row for x in model.entries]


@program
def main() -> None:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # before JAX has threads
    say_what_is_missing()
    pathlib.Path(FOLDER.value).mkdir(parents=True, exist_ok=True)
    preload = tools.build_preload(pathlib.Path(FOLDER.value).resolve())
    for name in MODELS.value:
        rows = rows_of(name, preload)
        if ROWS.value:
            path = pathlib.Path(ROWS.value)
            others = [row for row in read_rows(path) if row["model"] != name]
            write_rows(path, COLUMNS, [*others, *rows])


if __name__ == "__main__":
    app.run(main)
