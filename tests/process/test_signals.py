"""What is killed, interrupted or crashes leaves the rest as it was."""

import functools
import os
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from processes import (
    at_each_worker,
    interrupted,
    interrupted_waits,
    run_python,
    workers,
)
from strategies import peak_bytes
from toy import OPTIONS, STAGES, W, X, gradient, long_chain, twelve_nodes

import poet_jax


def test_a_killed_process_leaves_no_file(tmp_path):
    code = """
    step(W, X)
    kept = poet_jax.to_storage(X, store, 1)
    print("paging", flush=True)
    time.sleep(600)
    """
    process = run_python(code, tmp_path)
    try:
        assert process.stdout.readline() == "paging\n"
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert not os.listdir(tmp_path)


def test_two_processes_may_share_a_folder(tmp_path):
    code = """
    for _ in range(20):
        result = step(W, X)
    print(result.sum())
    """
    processes = [run_python(code, tmp_path) for _ in range(2)]
    totals = [float(x.communicate(timeout=120)[0]) for x in processes]
    assert totals == [pytest.approx(float(gradient(W, X).sum()), rel=1e-4)] * 2
    assert not os.listdir(tmp_path)


def test_a_crash_of_the_solver_leaves_the_best_heuristic(caplog):
    graph, costs = twelve_nodes()
    with at_each_worker(lambda n: os.kill(n, signal.SIGKILL)):
        plan = poet_jax.MilpPlanner()(graph, costs, poet_jax.Budget(40))
    assert "CBC gave no answer" in caplog.text
    assert "the best heuristic's is used" in caplog.text
    assert plan.status is poet_jax.Status.FEASIBLE
    usage = poet_jax.simulate(poet_jax.lower(graph, plan), costs)
    assert usage.peak_bytes <= 40
    again = poet_jax.MilpPlanner()(graph, costs, poet_jax.Budget(40))
    assert again.status is poet_jax.Status.OPTIMAL
    assert again.objective <= plan.objective


def test_the_solvers_process_ends_when_planning_is_over():
    graph, costs = twelve_nodes()
    poet_jax.MilpPlanner()(graph, costs, poet_jax.Budget(40))
    assert workers()
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join()
    assert not workers()


def test_the_solver_does_not_write_where_the_caller_is(monkeypatch, tmp_path):
    """CBC writes bad8.mps, and the like, into the folder that its process is in."""
    monkeypatch.chdir(tmp_path)
    graph, costs = twelve_nodes()
    poet_jax.MilpPlanner()(graph, costs, poet_jax.Budget(40))
    (worker,) = workers()
    assert os.readlink(f"/proc/{worker}/cwd") != str(tmp_path)


def test_ctrl_c_returns_the_best_plan_so_far(caplog):
    graph, costs = twelve_nodes()
    with interrupted():
        plan = poet_jax.MilpPlanner()(graph, costs, poet_jax.Budget(36))
    assert plan.status is poet_jax.Status.FEASIBLE
    assert poet_jax.simulate(poet_jax.lower(graph, plan), costs).peak_bytes <= 36
    assert "interrupted" in caplog.text
    without_paging = poet_jax.MilpPlanner(paging=False)  # evictions alone need 42
    with interrupted(), pytest.raises(KeyboardInterrupt):  # there is no plan to return
        without_paging(graph, costs, poet_jax.Budget(36))


def test_ctrl_c_in_a_large_graph_returns_the_plan_of_a_heuristic():
    """There heuristics come last."""
    graph, costs = long_chain(160)
    limit = int(0.6 * peak_bytes(graph, costs))
    with interrupted():
        plan = poet_jax.MilpPlanner()(graph, costs, poet_jax.Budget(limit))
    assert plan.status is poet_jax.Status.FEASIBLE
    assert poet_jax.simulate(poet_jax.lower(graph, plan), costs).peak_bytes <= limit


def test_a_search_that_was_interrupted_is_not_kept(tmp_path):
    def run():
        poet_jax.schedule(
            gradient,
            "68%",
            planner=poet_jax.MilpPlanner(time_limit_seconds=10),
            device=poet_jax.devices.RASPBERRY_PI_4,
            executor=STAGES,
            plan_cache=tmp_path,
        ).plan(W, X)

    with interrupted():
        run()
    assert not list(tmp_path.glob("plan-*.json"))
    run()
    assert list(tmp_path.glob("plan-*.json"))


WEIGHTS = np.arange(2**14, dtype=np.float32).reshape(2, 64, 128)


def slow_step(tenths, weights):
    """Takes about so many tenths of a second; JAX looks for Ctrl-C after every two."""
    slope = jax.lax.fori_loop(
        0, tenths * 15 * 10**6, lambda _, x: x * 0.5 + 1, weights[0][0, 0]
    )
    return [w * slope for w in weights]


def test_ctrl_c_leaves_an_interrupted_step_the_pages_that_it_writes(tmp_path):
    """Its program cannot be stopped; nothing else gets its room before it ends, even if
    Ctrl-C comes again."""

    store = poet_jax.FileStore(tmp_path)

    def state():
        return poet_jax.to_storage(list(WEIGHTS), store, 1)

    fun = functools.partial(slow_step, 5)
    options = OPTIONS | {"executor": poet_jax.HostExecutor(store)}
    step = poet_jax.schedule(fun, "1GiB", donate_argnums=0, **options)
    given = state()
    held_bytes = store.nbytes
    with interrupted_waits(2), pytest.raises(KeyboardInterrupt):
        step(given)
    assert store.nbytes == held_bytes
    others = state()
    np.testing.assert_array_equal(step(given), WEIGHTS * 2)
    np.testing.assert_array_equal(others, WEIGHTS)


def test_no_step_begins_before_an_interrupted_one_has_ended():
    fun = functools.partial(slow_step, 10)
    step = poet_jax.schedule(fun, "1GiB", donate_argnums=0, **OPTIONS)
    states = [list(map(jnp.array, WEIGHTS)) for _ in range(3)]
    step.plan(states[0])
    with interrupted_waits(len(states)):
        for state in states:
            with pytest.raises(KeyboardInterrupt):
                step(state)
    assert [x[0].is_deleted() for x in states] == [True, False, False]
