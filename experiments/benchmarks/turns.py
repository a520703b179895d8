"""Processes of a benchmark whose steps take turns, as the machine's speed varies.

A child prints a line when it is ready to train, which may be after planning and
compiling; then it takes a step for every line that it is sent, and prints the step's
seconds; then it prints one line of JSON.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tqdm import tqdm

from experiments.program import child
from poet_jax.core.units import format_seconds


def steps_in_turn(steps: int, take: Callable[[], None]) -> Iterator[float]:
    """Of a child: seconds of each of its steps, every one in its turn."""
    print("ready", flush=True)
    for _ in range(steps):
        sys.stdin.readline()  # its turn
        start = time.perf_counter()
        take()
        seconds = time.perf_counter() - start
        yield seconds
        print(seconds, flush=True)


def train_in_turns(names: Sequence[str], steps: int) -> list[dict[str, Any]]:
    """What the children `--child=NAME` measured. They get ready one after the other."""
    children = []
    for name in names:
        children.append(_start(name))
        _said(children[-1])
    with tqdm(total=steps, unit="step") as bar:
        for _ in range(steps):
            seconds = []
            for one in children:
                print(file=one.stdin, flush=True)
                seconds.append(float(_said(one)))
            bar.set_postfix(dict(zip(names, map(format_seconds, seconds), strict=True)))
            bar.update()
    results = [json.loads(_said(one)) for one in children]
    for one in children:
        one.wait()
    return results


def _start(name: str) -> subprocess.Popen:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        child(f"--child={name}"), stdin=pipe, stdout=pipe, text=True
    )


def _said(child: subprocess.Popen) -> str:
    """The next line of a child."""
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        raise subprocess.CalledProcessError(child.wait(), child.args)
    return line
