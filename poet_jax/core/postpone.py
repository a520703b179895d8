"""Let copies to storage run on under compute: `Program -> Program`."""

import dataclasses
from collections.abc import Collection

from poet_jax.core.costs import Costs
from poet_jax.core.in_place import Pairs
from poet_jax.core.plan import Action, Compute, Free, PageIn
from poet_jax.core.program import Program
from poet_jax.core.simulate import Lanes, simulate


def postpone(program: Program, costs: Costs, memory_bytes: float) -> Program:
    """`program` with each `Free` that waits for storage where it waits no more.

    It is moved behind what computes meanwhile, until the copy is done, or until its
    room within `memory_bytes` is needed. So the step is never longer, and its peak is
    above `memory_bytes` only where it was.
    """
    if not program.waiting_frees:
        return program
    live_bytes = simulate(program, costs).live_bytes
    lanes = Lanes(program, costs)
    instructions: list[Action] = []
    waiting: list[tuple[float, int]] = []  # (when its copy is done, value)
    waiting_bytes = 0

    def add(instruction: Action, replaces: Pairs = ()) -> None:
        lanes.run(instruction, replaces)
        instructions.append(instruction)

    for row, x in enumerate(program.instructions):
        if row in program.waiting_frees and isinstance(x, Free):
            waiting.append((lanes.departure[x.value], x.value))
            waiting_bytes += int(costs.nbytes[x.value])
            continue
        arriving = _arriving(program, x)
        waiting.sort()
        for done, value in list(waiting):
            brings = isinstance(x, Compute | PageIn)
            over = brings and live_bytes[row] + waiting_bytes > memory_bytes
            if over or value in arriving or done <= lanes.compute:
                waiting.remove((done, value))
                waiting_bytes -= int(costs.nbytes[value])
                add(Free(value))
        add(x, program.replaces.get(row, ()))
    for _, value in sorted(waiting):
        add(Free(value))
    return dataclasses.replace(program, instructions=tuple(instructions))


def _arriving(program: Program, instruction: Action) -> Collection[int]:
    """The values that an instruction brings to RAM."""
    match instruction:
        case Compute(node):
            return program.graph.nodes[node].writes
        case PageIn(value):
            return (value,)
    return ()
