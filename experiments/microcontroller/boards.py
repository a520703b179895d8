"""Emulated boards: how a program is built for one, and run under QEMU."""

import dataclasses
import pathlib
import shutil
import subprocess
import zlib

FIRMWARE = pathlib.Path(__file__).parent / "firmware"
STACK_BYTES = 2048
# Of data and stack, which may be written during a step: a power of two. A step that is
# not generated has arrays of its own.
OWN_LOG2, OTHER_LOG2 = 12, 15
WARNINGS = ("-std=c99", "-Wall", "-Wextra", "-Werror")
# No product and sum becomes one operation, so that all boards compute the same bits.
OPTIONS = (
    "-O2",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fno-math-errno",
    "-ffunction-sections",
    "-fdata-sections",
)
INSTALL = "apt-get install gcc-arm-none-eabi libnewlib-arm-none-eabi qemu-system-arm"


@dataclasses.dataclass(frozen=True)
class Board:
    """A board that QEMU emulates.

    Attributes:
      machine: its name for QEMU; it is the host for "".
      processor: of its core, for tables.
      flags: of the compiler.
      flash, ram: where they begin.
      large_ram: where more RAM than `RAM_BYTES` begins.
      timer: address of its 25 MHz timer.
      armv8: whether its Memory Protection Unit is that of ARMv8-M.
    """

    machine: str
    processor: str
    flags: tuple[str, ...] = ()
    flash: int = 0
    ram: int = 0x20000000
    large_ram: int = 0x21000000
    timer: int = 0x40000000
    armv8: bool = False


def _core(name: str, fpu: str = "") -> tuple[str, ...]:
    floats = (f"-mfpu={fpu}", "-mfloat-abi=hard") if fpu else ("-mfloat-abi=soft",)
    return f"-mcpu=cortex-{name}", "-mthumb", *floats, *(["-DBOARD_FPU"] if fpu else [])


BOARDS = {
    "host": Board("", "this machine"),
    "mps2-an385": Board("mps2-an385", "Cortex-M3", _core("m3")),
    "mps2-an386": Board("mps2-an386", "Cortex-M4F", _core("m4", "fpv4-sp-d16")),
    "mps2-an500": Board(
        "mps2-an500", "Cortex-M7", _core("m7", "fpv5-sp-d16"), large_ram=0x60000000
    ),
    "mps2-an505": Board(
        "mps2-an505",
        "Cortex-M33",
        _core("m33", "fpv5-sp-d16"),
        flash=0x10000000,
        ram=0x38000000,
        large_ram=0x80000000,
        timer=0x50000000,
        armv8=True,
    ),
}
FLASH_BYTES = RAM_BYTES = 4 * 2**20  # of each board


def missing() -> list[str]:
    """The tools that are not installed."""
    tools = "arm-none-eabi-gcc", "qemu-system-arm"
    return [tool for tool in tools if shutil.which(tool) is None]


def build(
    board: Board, folder: pathlib.Path, ram_bytes: int, step: pathlib.Path | None = None
) -> tuple[pathlib.Path, int]:
    """(program, bytes of its code without constants) of a project with its examples,
    and with another file in place of `poet_step.c` if `step` is one.

    Raises ValueError with the linker's words if flash or RAM do not suffice.
    """
    left_out = ["main.c", "poet_vector.c", *(["poet_step.c"] if step else [])]
    sources = [x for x in sorted(folder.glob("*.c")) if x.name not in left_out]
    sources += [FIRMWARE / "train.c", *([step] if step else [])]
    program = folder / (board.machine or "host")
    flags = [*WARNINGS, *OPTIONS, f"-I{folder}", f"-I{FIRMWARE}", *board.flags]
    if not board.machine:
        command = ["gcc", *flags, *sources, FIRMWARE / "host.c", "-lm"]
    else:
        own = OTHER_LOG2 if step else OWN_LOG2
        linking = ["-nostartfiles", "-Wl,--gc-sections", "-lm"]
        script = f"-T{_script(board, folder, ram_bytes, 2**own)}"
        sources += [FIRMWARE / "arm.c", FIRMWARE / "mpu.c"]
        flags += [f"-D{name}={x}u" for name, x in _macros(board, own).items()]
        command = ["arm-none-eabi-gcc", *flags, *sources, script, *linking]
    done = subprocess.run(
        [*command, "-o", program], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ValueError(
            f"The program for {board.machine or 'the host'} cannot be built: "
            f"{done.stderr[-500:]} Use a larger --ram, or a smaller --budget."
        )
    return program, code_bytes(program)


def _macros(board: Board, own_log2: int) -> dict[str, int]:
    """What the firmware has to know of a board."""
    return {
        "BOARD_TIMER": board.timer,
        "BOARD_FLASH": board.flash,
        "BOARD_FLASH_BYTES": FLASH_BYTES,
        "BOARD_OWN_LOG2": own_log2,
        "BOARD_ARMV8": int(board.armv8),
    }


def _script(
    board: Board, folder: pathlib.Path, ram_bytes: int, own_bytes: int
) -> pathlib.Path:
    """A linker script that is written for a board."""
    path = folder / f"{board.machine}.ld"
    ram = board.ram if ram_bytes <= RAM_BYTES else board.large_ram
    path.write_text(
        f"MEMORY {{\n  FLASH (rx) : ORIGIN = {board.flash:#x}, LENGTH = "
        f"{FLASH_BYTES}\n  RAM (rwx) : ORIGIN = {ram:#x}, LENGTH = "
        f"{ram_bytes}\n}}\nSTACK_BYTES = {STACK_BYTES};\nOWN_BYTES = {own_bytes};\n"
        f'INCLUDE "{FIRMWARE / "board.ld"}"\n'
        f'INCLUDE "{folder / "poet_memory.ld"}"\n'
    )
    return path


def code_bytes(program: pathlib.Path) -> int:
    """Bytes of functions of a program, as its symbols have them. One function may have
    several."""
    nm = "nm" if program.name == "host" else "arm-none-eabi-nm"
    done = subprocess.run(
        [nm, "-n", "-S", program], capture_output=True, text=True, check=True
    )
    rows = [line.split() for line in done.stdout.splitlines()]
    total = last = 0
    for start, size, kind, _ in (row for row in rows if len(row) == 4):
        if kind in "tTwW":
            stop = int(start, 16) + int(size, 16)
            total += max(0, stop - max(last, int(start, 16)))
            last = max(last, stop)
    return total


def run(board: Board, program: pathlib.Path, show: bool = True) -> dict[str, int]:
    """The last line that a program writes, as numbers; others are shown as they come.

    Its files are written beside it. A file of its storage is there before, and state
    there counts in the checksum, too. Raises RuntimeError if it fails.
    """
    command = [str(program)]
    if board.machine:
        command = ["qemu-system-arm", "-M", board.machine, "-nographic",
                   "-semihosting-config", "enable=on,target=native",
                   "-icount", "shift=0", "-kernel", str(program)]  # fmt: skip
    folder = program.parent / f"{program.name}_files"
    folder.mkdir(exist_ok=True)
    state = program.parent / "poet_storage.bin"
    if state.exists():
        shutil.copy(state, folder / "storage.bin")
    line = ""
    with subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if show:
                print(f"  {line.rstrip()}", flush=True)
    if process.returncode:
        raise RuntimeError(
            f"{program.name} ended with {process.returncode}: {line.strip()}. Exit "
            "codes are 2 for a page that failed, 3 for a file, 4 for a state that was "
            "refused, 70 for a fault, 71 for memory outside of the arena."
        )
    found = {key: int(x) for key, x in (word.split("=") for word in line.split())}
    if state.exists():
        with (folder / "storage.bin").open("rb") as file:
            found["checksum"] ^= zlib.crc32(file.read(state.stat().st_size))
    return found
