"""A board trains as this machine does; an emulated one where QEMU is installed."""

import csv
import subprocess
import sys

import pytest

from experiments.microcontroller import boards
from experiments.microcontroller.perceptron import project

needs_tools = pytest.mark.skipif(
    bool(boards.missing()), reason=f"`{boards.INSTALL}` is what it needs"
)


def train(folder, *flags):
    command = [sys.executable, "-m", "experiments.microcontroller", *flags]
    done = subprocess.run(
        [*command, f"--output={folder}", "--steps=10", "--examples=64", "--trained=48"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "board", ["host", pytest.param("mps2-an386", marks=needs_tools)]
)
def test_ten_steps_with_pages_have_the_same_bits_on_all(board, tmp_path):
    text = train(tmp_path, f"--board={board}", "--budget=70%", "--planner=greedy")
    assert "on storage" in text
    assert "The weights are the same bits on all." in text
    (folder,) = tmp_path.iterdir()
    assert (folder / f"{board}_files" / "state_000.bin").exists()


# A byte that a step must not write, on a board of each kind of Memory Protection Unit.
STRAYS = {
    "mps2-an386": "(uint32_t)m + (POET_ARENA_BYTES + 31) / 32 * 32",
    "mps2-an505": "BOARD_FLASH + 64",
}


@pytest.fixture(scope="module")
def perceptron(tmp_path_factory):
    folder = tmp_path_factory.mktemp("perceptron")
    project(folder, steps=1)
    return folder


@needs_tools
@pytest.mark.parametrize("name", STRAYS)
def test_a_step_that_writes_outside_of_its_arena_ends_there(name, perceptron):
    """The Memory Protection Unit ends it; the step without that byte runs."""
    board = boards.BOARDS[name]
    head, body = (perceptron / "poet_step.c").read_text().split("int poet_step(void) {")
    byte = f"volatile uint32_t at = {STRAYS[name]};\n*(volatile uint8_t *)at = 1;"
    stray = perceptron.parent / f"{name}.c"
    stray.write_text(f"{head}int poet_step(void) {{{body.replace('(void)m;', byte, 1)}")
    built, _ = boards.build(board, perceptron, 2**20)
    assert boards.run(board, built, show=False)["checksum"]
    built, _ = boards.build(board, perceptron, 2**20, stray)
    with pytest.raises(RuntimeError, match="ended with 71: memory outside"):
        boards.run(board, built, show=False)


@needs_tools
def test_the_linker_refuses_a_board_with_too_little_ram(tmp_path):
    command = [sys.executable, "-m", "experiments.microcontroller", "--ram=16KiB"]
    flags = f"--output={tmp_path}", "--examples=64", "--trained=48", "--planner=greedy"
    done = subprocess.run(
        [*command, *flags],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode
    assert "RAM" in done.stderr and "--ram" in done.stderr


def test_boards_that_average_their_weights_learn_what_each_has_seen(tmp_path):
    command = [sys.executable, "-m", "experiments.microcontroller.averaging"]
    rows = tmp_path / "rows.csv"
    flags = ["--board=host", "--rounds=3", f"--output={tmp_path}", f"--rows={rows}"]
    subprocess.run([*command, *flags], check=True)
    _, *_, (_, _, low, high, average) = csv.reader(rows.read_text().splitlines())
    assert max(float(low), float(high)) < 60 < 80 < float(average)


@needs_tools
def test_a_generated_step_is_as_fast_as_one_by_hand_and_small(tmp_path):
    command = [sys.executable, "-m", "experiments.microcontroller.by_hand"]
    rows = tmp_path / "rows.csv"
    flags = ["--board=mps2-an386", f"--output={tmp_path}", f"--rows={rows}"]
    flags += ["--steps=2"]
    subprocess.run([*command, *flags], check=True)
    generated, by_hand = csv.DictReader(rows.read_text().splitlines())
    column = "instructions_per_step"
    assert int(generated[column]) <= 1.01 * int(by_hand[column])
    assert int(generated["code_bytes"]) <= 12 * 1024
