"""Planned steps by C, by IREE and by `jax.jit`: built, checked and timed.

Seconds are CPU time of the one core that a process is kept to.
"""

import dataclasses
import json
import math
import pathlib
import re
import time
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np

from experiments.edge import tools
from experiments.edge.cases import Case
from experiments.edge.tools import Target, done

Arrays = list[np.ndarray]
C_OPTIONS = (
    "-std=c99",
    "-O2",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fno-math-errno",
    "-ffunction-sections",
    "-fdata-sections",
    "-Wl,--gc-sections",
)
IREE_OPTIONS = (
    "--iree-input-type=stablehlo",
    "--iree-hal-target-device=local",
    "--iree-hal-local-target-device-backends=llvm-cpu",
    # For one thread.
    "--iree-stream-partitioning-favor=min-peak-memory",
    # The gradient of max-pooling reads its window's first element from nowhere.
    "--iree-global-opt-enable-warn-on-uninitialized-values=false",
)


def not_donated(text: str) -> str:
    """StableHLO whose arguments are not donated.

    IREE writes a donated argument's result over it, also where the old value is read
    after that.
    """
    return re.sub(r" \{tf\.aliasing_output = \d+ : i32\}", "", text)


@dataclasses.dataclass
class Figures:
    """What a run says of a step.

    Attributes:
      seconds: of a step.
      memory_bytes: what the system itself counts; see the class that measures.
      resident_bytes: the most that the process had in RAM; None if it was emulated.
    """

    seconds: float
    memory_bytes: int
    resident_bytes: int | None = None


class Step(Protocol):
    """A step that is built.

    Attributes:
      options: of the compiler, in a word.
    """

    target: Target
    program_bytes: int
    options: str

    def results(self) -> Arrays:
        """Of the first step."""
        ...

    def figures(self, seconds: float) -> Figures:
        """Of as many steps as take about so many seconds."""
        ...


class CStep:
    """A C project, built for a target. Its memory is the arena.

    Raises RuntimeError if it cannot be built.
    """

    options = "-O2"

    def __init__(
        self, project: Any, target: Target, expected: Arrays, preload: str = ""
    ):
        self.target, self.expected, self.preload = target, expected, preload
        self.arena_bytes = project.arena_bytes
        self.program = project.folder / target.name
        sources = [x for x in project.folder.glob("*.c") if x.name != "main.c"]
        done([
            target.compiler, *C_OPTIONS, *target.flags, f"-I{project.folder}",
            *sources, tools.FOLDER / "loop.c", "-lm", "-o", self.program,
        ])  # fmt: skip
        self.program_bytes = self.program.stat().st_size

    def _run(self, steps: int, repetitions: int) -> tuple[list[float], str]:
        command = [*self.target.emulator, self.program, self._file, steps, repetitions]
        out, error = done(command, LD_PRELOAD=self.preload)
        return [float(x) for x in out.split()], error

    @property
    def _file(self) -> pathlib.Path:
        return self.program.with_suffix(".results")

    def results(self) -> Arrays:
        self._run(0, 0)
        data, found, at = self._file.read_bytes(), [], 0
        for x in self.expected:
            part = np.frombuffer(data, x.dtype, x.size, at)
            found.append(part.reshape(x.shape))
            at += x.nbytes
        return found

    def figures(self, seconds: float) -> Figures:
        (first,), _ = self._run(1, 1)
        (found,), error = self._run(max(1, math.ceil(seconds / first)), 1)
        return Figures(found, self.arena_bytes, resident(error))


class IreeStep:
    """StableHLO compiled by IREE for a target. Its memory is what the runtime's
    allocators had at most, by --print_statistics: arguments, results and transients.

    Raises RuntimeError if it cannot be compiled.
    """

    def __init__(
        self,
        text: pathlib.Path,
        target: Target,
        level: str,
        inputs: Sequence[pathlib.Path],
        results: int,
        runtime: pathlib.Path,
        preload: str = "",
    ):
        self.target, self.options, self.inputs = target, level, inputs
        self.count, self.runtime, self.preload = results, runtime, preload
        self.module = text.with_suffix(f".{target.name}.{level}.vmfb")
        files, linking = [self.module], []
        if not target.links:
            files.append(self.module.with_suffix(".o"))
            linking = [
                "--iree-llvmcpu-link-embedded=false",
                "--iree-llvmcpu-link-static",
                f"--iree-llvmcpu-static-library-output-path={files[-1]}",
            ]
        done([
            str(tools.path_of("iree-compile")), *IREE_OPTIONS, *target.iree, *linking,
            f"--iree-opt-level={level}", text, "-o", self.module,
        ])  # fmt: skip
        self.program_bytes = sum(x.stat().st_size for x in files)

    def _run(self, tool: str, *flags: str) -> tuple[str, str]:
        command = [
            *tools.runtime_tool(tool, self.target, self.runtime),
            f"--module={self.module}",
            "--device=local-sync",
            "--function=main",
            *(f"--input=@{x}" for x in self.inputs),
            *flags,
        ]
        return done(command, LD_PRELOAD=self.preload)

    def results(self) -> Arrays:
        files = [self.module.with_suffix(f".{n}.npy") for n in range(self.count)]
        self._run("iree-run-module", *(f"--output=@{x}" for x in files))
        return [np.load(x) for x in files]

    def figures(self, seconds: float) -> Figures:
        out, error = self._run(
            "iree-benchmark-module",
            "--print_statistics",
            "--benchmark_format=json",
            f"--benchmark_min_time={seconds}s",
        )
        (found,) = json.loads(out[: out.rindex("}") + 1])["benchmarks"]
        assert found["time_unit"] == "ms"
        peaks = re.findall(r"LOCAL: +(\d+)B peak", error)
        nbytes = sum(map(int, peaks))
        return Figures(found["cpu_time"] / 1e3, nbytes, resident(error))


class JitStep:
    """`jax.jit` on this machine. Its memory is XLA's count of arguments, results that
    replace none of them, and its own room."""

    target, program_bytes, options = tools.TARGETS[tools.HOST], 0, ""

    def __init__(self, case: Case):
        self.case = case
        jitted = jax.jit(case.step, donate_argnums=0)
        self.compiled = jitted.lower(*case.arguments).compile()
        x = self.compiled.memory_analysis()
        assert x is not None, "XLA says what a step needs on a CPU"
        new_bytes = x.output_size_in_bytes - x.alias_size_in_bytes
        self.memory_bytes = x.argument_size_in_bytes + new_bytes + x.temp_size_in_bytes

    def _step(self, state: Any) -> tuple[Any, ...]:
        return self.compiled(state, *self.case.arguments[1:])

    def _state(self) -> Any:
        return jax.tree.map(lambda x: x.copy(), self.case.arguments[0])

    def results(self) -> Arrays:
        return [np.asarray(x) for x in jax.tree.leaves(self._step(self._state()))]

    def figures(self, seconds: float) -> Figures:
        state, steps = self._state(), 0
        start = time.process_time()
        while time.process_time() - start < seconds:
            state, *_ = jax.block_until_ready(self._step(state))
            steps += 1
        return Figures((time.process_time() - start) / steps, self.memory_bytes)


def resident(text: str) -> int | None:
    """What `resident.c` has written."""
    found = re.search(r"^resident (\d+)", text, re.M)
    return int(found[1]) if found else None


def apart(found: Arrays, expected: Arrays, before: Arrays) -> float:
    """The larger of two relative errors, by norms: of the new state, and of the rest.

    The error of the state is relative to its change from `before`. State comes first
    among results.
    """

    def relative(numbers: range) -> float:
        error = change = 0.0
        for n in numbers:
            right = expected[n].astype(float)
            error += float(np.square(found[n] - right).sum())
            old = before[n] if n < len(before) else 0
            change += float(np.square(right - old).sum())
        return (error / change) ** 0.5

    assert len(found) == len(expected)
    count = len(before)
    return max(relative(range(count)), relative(range(count, len(expected))))
