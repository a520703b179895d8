"""Let copies to storage run on under compute: `Program -> Program`."""

import dataclasses

from poet_jax.core.costs import Costs
from poet_jax.core.plan import Free, PageIn
from poet_jax.core.program import Instruction, Program, Run, walk
from poet_jax.core.simulate import Lanes, simulate


def postpone(program: Program, costs: Costs, memory_bytes: float) -> Program:
    """`program` with each `Free` that waits for storage where it waits no more.

    It is moved behind what computes meanwhile, until the copy is done, or until its
    room within `memory_bytes` is needed. So the step is never longer, and its peak is
    above `memory_bytes` only where it was.
    """
    moments = list(walk(program))
    if not any(x.waits and isinstance(x.instruction, Free) for x in moments):
        return program
    live_bytes = simulate(program, costs).live_bytes
    lanes = Lanes(costs)
    instructions: list[Instruction] = []
    waiting: list[tuple[float, int]] = []  # (when its copy is done, value)
    waiting_bytes = 0

    def add(instruction: Instruction) -> None:
        lanes.run(instruction)
        instructions.append(instruction)

    for moment, live in zip(moments, live_bytes, strict=True):
        x = moment.instruction
        if isinstance(x, Free) and moment.waits:
            waiting.append((lanes.departure[x.value], x.value))
            waiting_bytes += int(costs.nbytes[x.value])
            continue
        waiting.sort()
        for done, value in list(waiting):
            brings = isinstance(x, Run | PageIn)
            over = brings and live + waiting_bytes > memory_bytes
            if over or value in moment.arrives or done <= lanes.compute:
                waiting.remove((done, value))
                waiting_bytes -= int(costs.nbytes[value])
                add(Free(value))
        add(x)
    for _, value in sorted(waiting):
        add(Free(value))
    return dataclasses.replace(program, instructions=tuple(instructions))
