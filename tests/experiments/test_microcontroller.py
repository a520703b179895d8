"""A board trains as this machine does; an emulated one where QEMU is installed."""

import csv
import subprocess
import sys

import pytest

from experiments.microcontroller import boards

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
    text = train(tmp_path, f"--board={board}", "--budget=70%")
    assert "on storage" in text
    assert "The weights are the same bits on all." in text
    (folder,) = tmp_path.iterdir()
    assert (folder / f"{board}_files" / "state_000.bin").exists()


@needs_tools
def test_the_linker_refuses_a_board_with_too_little_ram(tmp_path):
    command = [sys.executable, "-m", "experiments.microcontroller", "--ram=16KiB"]
    done = subprocess.run(
        [*command, f"--output={tmp_path}", "--examples=64", "--trained=48"],
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
def test_a_generated_step_takes_no_more_instructions_than_one_by_hand(tmp_path):
    command = [sys.executable, "-m", "experiments.microcontroller.by_hand"]
    rows = tmp_path / "rows.csv"
    flags = ["--board=mps2-an386", f"--output={tmp_path}", f"--rows={rows}"]
    subprocess.run([*command, *flags], check=True)
    generated, by_hand = csv.DictReader(rows.read_text().splitlines())
    column = "instructions_per_step"
    assert int(generated[column]) <= 1.01 * int(by_hand[column])
