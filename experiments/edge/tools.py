"""What compiles, builds and runs planned steps, where it is installed."""

import contextlib
import dataclasses
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

FOLDER = pathlib.Path(__file__).parent
SYSROOT = "/usr/aarch64-linux-gnu"
INSTALL = {
    "iree-compile": 'pip install "poet_jax[edge]"',
    "iree-run-module": 'pip install "poet_jax[edge]"',
    "gcc": "apt-get install gcc",
    "aarch64-linux-gnu-gcc": "apt-get install gcc-aarch64-linux-gnu "
    "libc6-dev-arm64-cross",
    "qemu-aarch64-static": "apt-get install qemu-user-static libstdc++6-arm64-cross",
}
RUNTIME = (
    "pip download --no-deps --only-binary=:all: --platform=manylinux_2_28_aarch64 "
    "--dest=outputs/edge iree-base-runtime && python -m zipfile -e "
    "outputs/edge/iree_base_runtime-*aarch64.whl outputs/edge/aarch64"
)


@dataclasses.dataclass(frozen=True)
class Target:
    """What a step is compiled for.

    Attributes:
      name: for rows.
      iree: flags of iree-compile.
      compiler, flags: of C; no compiler if C is not built for it.
      emulator: of user programs; none where they run as they are.
      runs: whether programs for it are run.
      links: whether IREE links its modules; functions of libm are left to the linker of
        a program otherwise, as for a processor without an instruction for them.
    """

    name: str
    iree: tuple[str, ...]
    compiler: str = ""
    flags: tuple[str, ...] = ()
    emulator: tuple[str, ...] = ()
    runs: bool = True
    links: bool = True


TARGETS = {
    x.name: x
    for x in (
        Target(
            platform.machine(),
            ("--iree-llvmcpu-target-cpu=host",),
            "gcc",
            ("-march=native",),
        ),
        # Vectors of 128 bits on x86-64, as those of AArch64.
        Target(
            f"{platform.machine()}_baseline",
            ("--iree-llvmcpu-target-cpu=generic",),
            "gcc",
        ),
        Target(
            "aarch64",
            (
                "--iree-llvmcpu-target-triple=aarch64-linux-gnu",
                "--iree-llvmcpu-target-cpu=generic",
            ),
            "aarch64-linux-gnu-gcc",
            emulator=("qemu-aarch64-static", "-L", SYSROOT),
        ),
        Target(
            "riscv64",
            (
                "--iree-llvmcpu-target-triple=riscv64-linux-gnu",
                "--iree-llvmcpu-target-cpu=generic-rv64",
                "--iree-llvmcpu-target-abi=lp64d",
                "--iree-llvmcpu-target-cpu-features=+m,+a,+f,+d,+c",
            ),
            runs=False,
        ),
        Target(
            "armv7",
            (
                "--iree-llvmcpu-target-triple=armv7a-linux-gnueabihf",
                "--iree-llvmcpu-target-cpu=generic",
                "--iree-llvmcpu-target-cpu-features=+neon",
                "--iree-llvmcpu-target-float-abi=hard",
            ),
            runs=False,
            links=False,
        ),
    )
}
HOST, BASELINE, *_ = TARGETS


def path_of(tool: str) -> str | None:
    """Where a tool is: beside this Python, or in PATH."""
    folders = os.path.dirname(sys.executable), os.environ.get("PATH", "")
    return shutil.which(tool, path=os.pathsep.join(folders))


def missing(tools: Sequence[str]) -> str:
    """What to install for tools that are not there, in words; none if all are."""
    absent = [tool for tool in tools if path_of(tool) is None]
    return "; ".join(f"{tool} is missing: {INSTALL[tool]}" for tool in absent)


def for_c(target: Target) -> str:
    """What to install to run C on a target, in words."""
    return missing([target.compiler, *target.emulator[:1]])


def for_iree(target: Target, runtime: pathlib.Path) -> str:
    """What to install to run IREE's programs on a target, in words. `runtime` is a
    folder with the AArch64 runtime."""
    if not target.emulator:
        return missing(["iree-compile", "iree-run-module"])
    words = missing(["iree-compile", *target.emulator[:1]])
    if not words and not (runtime / "iree").is_dir():
        words = f"{runtime} has no AArch64 runtime: {RUNTIME}"
    return words


def runtime_tool(name: str, target: Target, runtime: pathlib.Path) -> list[str]:
    """The command of a tool of IREE's runtime on a target."""
    if target.emulator:
        return [*target.emulator, str(runtime / "iree" / "_runtime_libs" / name)]
    return [str(path_of(name))]


def build_preload(folder: pathlib.Path) -> str:
    """`resident.c` as a library in a folder; "" without a compiler."""
    if path_of("gcc") is None:
        return ""
    library = str(folder / "resident.so")
    done(["gcc", "-O2", "-shared", "-fPIC", FOLDER / "resident.c", "-o", library])
    return library


@contextlib.contextmanager
def on_all_cores() -> Iterator[None]:
    """Let children run on all cores, such as compilers."""
    kept = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    try:
        yield
    finally:
        os.sched_setaffinity(0, kept)


def done(command: Sequence[Any], **environment: str) -> tuple[str, str]:
    """What a command writes to standard output, and to standard error.

    Raises RuntimeError if it fails.
    """
    ran = subprocess.run(
        list(map(str, command)),
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode:
        found = re.search(r"error: .*", ran.stderr)
        words = found[0] if found else ran.stderr[-500:] or ran.stdout[-500:]
        raise RuntimeError(
            f"{pathlib.Path(command[0]).name} ended with {ran.returncode}: "
            f"{words[:500].strip()}"
        )
    return ran.stdout, ran.stderr
