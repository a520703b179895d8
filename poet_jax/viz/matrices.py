"""The schedule matrices of POET: what runs, and what is where, stage by stage."""

import dataclasses

import numpy as np

from poet_jax.core.graph import Graph
from poet_jax.core.plan import PageIn, PageOut, Plan
from poet_jax.core.program import Run, lower, walk
from poet_jax.core.representation import brief


@dataclasses.dataclass(frozen=True, eq=False)
class Matrices:
    """A plan as in Patil et al. (ICML 2022), but for values instead of nodes in `S`.

    Stage t ends with the first run of node t and what is freed or written right after
    it. Stage N is the end of the step.

    Attributes:
      R: [N+1, N] how often node i runs in stage t.
      S_ram: [N+1, V] whether value i is in RAM when stage t starts.
      S_storage: [N+1, V] whether value i is on storage, or on its way, when stage t
        starts.
    """

    R: np.ndarray
    S_ram: np.ndarray
    S_storage: np.ndarray

    __repr__ = brief


def matrices(graph: Graph, plan: Plan) -> Matrices:
    """The matrices of `plan`, node by node. Raises PlanInvalid as `lower` does."""
    program = lower(graph, plan)
    graph = program.graph
    stages = len(graph.nodes) + 1
    R = np.zeros((stages, len(graph.nodes)), np.int64)
    S_ram = np.zeros((stages, len(graph.values)), bool)
    S_storage = np.zeros_like(S_ram)
    ram, storage = set(graph.initial), set(graph.stored)
    stays = {*graph.stored, *graph.landing}
    done: set[int] = set()
    stage = begun = 0

    def begin() -> None:
        """Stages up to this one start, if they have not yet."""
        nonlocal begun
        S_ram[begun : stage + 1, list(ram)] = True
        S_storage[begun : stage + 1, list(storage)] = True
        begun = stage + 1

    for row, moment in enumerate(walk(program)):
        x = moment.instruction
        if isinstance(x, Run | PageIn):
            begin()
        ram.update(moment.arrives)
        ram.difference_update(moment.leaves)
        match x:
            case Run((node,)):
                R[stage, node] += 1
                done.add(node)
                while stage in done:
                    stage += 1
            case PageIn(value):
                if program.last_page_in[value] == row and value not in stays:
                    storage.remove(value)
            case PageOut(value):
                storage.add(value)
    begin()
    return Matrices(R, S_ram, S_storage)
