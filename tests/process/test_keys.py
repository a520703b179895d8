"""What names a plan in a cache does not depend on the process."""

import subprocess
import sys

KEY = """
import sys
sys.path.insert(0, "tests")
import poet_jax
from poet_jax.api.cache import plan_key
from toy import W, X, gradient
schedule = poet_jax.schedule(
    gradient,
    "1GiB",
    planner=poet_jax.greedy,
    device=poet_jax.devices.JETSON_TX2,
).plan(W, X)
print(plan_key(
    schedule.graph, schedule.costs, schedule.budget, poet_jax.MilpPlanner()
))
"""


def test_the_key_is_the_same_in_every_process():
    keys = [
        subprocess.run(
            [sys.executable, "-c", KEY],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu", "PATH": "/usr/bin"},
        ).stdout
        for seed in ("1", "2")
    ]
    assert keys[0] == keys[1] != ""
