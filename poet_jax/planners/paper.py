"""The published MILP (Patil et al., ICML 2022), dense and literal: the oracle.

T stages over T nodes. In stage t node t is computed for the first time and earlier
nodes may be computed again. A page-in is usable, and counted, only in the next stage;
the deadline counts compute only; both are stricter or looser than `simulate`, which has
the last word.
"""

import dataclasses
import time

import numpy as np

from poet_jax.core.costs import Costs
from poet_jax.core.graph import Graph
from poet_jax.core.plan import BasePlanner, Budget, Plan, Stages, Status
from poet_jax.planners.milp.solver import Model, check_solver, xsum
from poet_jax.planners.planner import (
    budget_too_small,
    fits,
    judge,
    keep_everything,
    least_objective,
    prefetch,
)


@dataclasses.dataclass(frozen=True)
class PaperSolution:
    """The published variables' values, [T, T] booleans, and the published objective.

    Attributes:
      R: R[t, i], node i is computed in stage t.
      S_ram, S_storage: node i's values are in RAM, on storage, when stage t starts.
      M_in, M_out: node i's values are paged in, out, during stage t.
      joules: of compute and paging, as published: without static power.
      bound: no solution has fewer.
    """

    R: np.ndarray
    S_ram: np.ndarray
    S_storage: np.ndarray
    M_in: np.ndarray
    M_out: np.ndarray
    joules: float
    bound: float


@dataclasses.dataclass(frozen=True)
class PaperPlanner(BasePlanner):
    """The published formulation through python-mip, all its variables and rows.

    5 T^2 + T E binaries: for graphs of up to about 60 nodes. A node's values are kept
    and paged together; what is always in RAM (arguments, constants) is taken off the
    budget.

    Attributes:
      solver: "CBC" or "HIGHS".
      time_limit_seconds: of the solver.
      gap: relative gap at which the solver stops.
      remat, paging: False forbids that means.

    Its call raises BudgetTooSmall if the published rows have no solution. Its plan may
    exceed the budget under the simulator's rules; `schedule` then refuses it.
    """

    solver: str = "CBC"
    time_limit_seconds: float = 600.0
    gap: float = 1e-7
    remat: bool = True
    paging: bool = True

    def __post_init__(self):
        check_solver(self.solver)

    def __call__(
        self, graph: Graph, costs: Costs, budget: Budget, start: Plan | None = None
    ) -> Plan:
        since = time.monotonic()
        judged = keep_everything(graph, costs)
        bound = least_objective(graph, costs, "energy")
        at_home = graph.stored or graph.landing
        status = Status.HEURISTIC if at_home else Status.OPTIMAL
        if not fits(judged.usage, budget):
            solution = self.solve(graph, costs, budget)
            if solution is None:
                raise budget_too_small(
                    graph, costs, budget, judged, "PaperPlanner", least_bytes=0
                )
            judged = judge(graph, costs, _stages(graph, solution).actions(graph))
            judged = prefetch(costs, judged, budget)
            # Optimal under the published rules, which are not the simulator's.
            status = Status.HEURISTIC
        return judged.plan("PaperPlanner", since, bound=bound, status=status)

    def solve(self, graph: Graph, costs: Costs, budget: Budget) -> PaperSolution | None:
        """The published optimum, or None if no solution was found in the time."""
        T = len(graph.nodes)
        model = Model(self.solver, self.gap)

        def matrix(upper: int):
            """[T, T] binaries; those with i - t >= `upper` are zero."""
            return [
                [model.add_var(binary=True, ub=float(i - t < upper)) for i in range(T)]
                for t in range(T)
            ]

        R, S_ram, S_storage = matrix(1), matrix(0), matrix(0)
        M_in, M_out = matrix(1), matrix(1)
        edges = sorted(
            {(graph.producer[v], n) for n, x in enumerate(graph.nodes) for v in x.reads
             if v in graph.producer}
        )  # fmt: skip
        pageable = [
            self.paging and all(graph.values[v].pageable for v in node.writes)
            for node in graph.nodes
        ]
        for t in range(T):
            model += R[t][t] == 1
            for i in range(T):
                if not pageable[i]:
                    model += M_in[t][i] + M_out[t][i] + S_storage[t][i] == 0
                if i < t and not (self.remat and graph.nodes[i].repeatable):
                    model += R[t][i] == 0
                model += M_in[t][i] <= S_storage[t][i]
                model += M_out[t][i] <= S_ram[t][i]
                if t + 1 < T:
                    model += S_ram[t + 1][i] <= S_ram[t][i] + R[t][i] + M_in[t][i]
                    model += S_storage[t + 1][i] <= S_storage[t][i] + M_out[t][i]
            for u, v in edges:
                model += R[t][v] <= R[t][u] + S_ram[t][u]

        nbytes = _node_sums(graph, costs.nbytes)
        self._memory(model, graph, costs, budget, edges, nbytes, R, S_ram)
        pairs = [(t, i) for t in range(T) for i in range(T)]
        if budget.seconds is not None:
            spent = xsum(float(costs.seconds[i]) * R[t][i] for t, i in pairs)
            model += spent <= budget.seconds
        page_in = _node_sums(graph, costs.page_in_joules)
        page_out = _node_sums(graph, costs.page_out_joules)
        # Solvers stop at absolute differences too, so one pass over all counts as 1000.
        unit = float(costs.joules.sum()) / 1000 or 1.0
        joules = (
            float(cost[i]) / unit * M[t][i]
            for cost, M in ((costs.joules, R), (page_in, M_in), (page_out, M_out))
            for t, i in pairs
        )
        model.minimise(xsum(joules))
        solution = model.optimize(self.time_limit_seconds)
        if solution.values is None:
            return None
        chosen = solution.values

        def values(M) -> np.ndarray:
            indices = [y.idx for row in M for y in row]
            return (chosen[indices] > 0.5).reshape(T, T)

        return PaperSolution(
            R=values(R),
            S_ram=values(S_ram),
            S_storage=values(S_storage),
            M_in=values(M_in),
            M_out=values(M_out),
            joules=solution.objective * unit,
            bound=solution.bound * unit,
        )

    def _memory(self, model, graph, costs, budget, edges, nbytes, R, S_ram) -> None:
        """U[t, k]: bytes while node k is computed in stage t, and what is freed
        after."""
        T = len(graph.nodes)
        fixed = sum(int(costs.nbytes[v]) for v in graph.initial)
        unit = float(max([*nbytes, 1.0]))
        limit = (budget.memory_bytes - fixed) / unit
        if limit < 0:
            model += model.add_var(ub=0) >= 1  # no room at all
            return
        successors: dict[int, list[int]] = {}
        for i, k in edges:
            successors.setdefault(i, []).append(k)
        for t in range(T):
            free = {edge: model.add_var(binary=True) for edge in edges}
            for i, k in edges:
                later = [R[t][j] for j in successors[i] if j > k]
                hazards = 1 - R[t][k] + xsum(later)
                most = 1 + len(later)
                if t + 1 < T:
                    hazards, most = hazards + S_ram[t + 1][i], most + 1
                model += 1 - free[i, k] <= hazards
                model += most * (1 - free[i, k]) >= hazards
            used = xsum(nbytes[i] / unit * S_ram[t][i] for i in range(T))
            for k in range(T):
                room = model.add_var(ub=limit)
                used = used + nbytes[k] / unit * R[t][k]
                model += room == used
                freed = [nbytes[i] / unit * free[i, j] for i, j in edges if j == k]
                used = room - xsum(freed)


def _node_sums(graph: Graph, of_values) -> list[float]:
    return [float(sum(of_values[v] for v in node.writes)) for node in graph.nodes]


def _stages(graph: Graph, solution: PaperSolution) -> Stages:
    """The published matrices as actions: reruns and page-ins that something reads."""
    stages = Stages.empty(graph)
    T = len(graph.nodes)
    for t in range(T):
        stages.reruns[t] = {int(i) for i in np.flatnonzero(solution.R[t, :t])}
    for t in range(T):
        for i in np.flatnonzero(solution.M_in[t]):
            if t + 1 < T and not solution.S_ram[t, i] and not solution.R[t, i]:
                for v in graph.nodes[i].writes:
                    stages.page_ins[t + 1].add(v)
                    stages.page_outs.add(v)
    return stages
