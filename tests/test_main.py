"""The command line: its tables, plans of a caller's own step, and its messages."""

import csv
import json
import subprocess
import sys

import pytest
from absl import flags
from absl.testing import flagsaver
from viz.test_explain import Page

import poet_jax
from poet_jax import cli
from poet_jax.target import loaded

SOURCE = """
import flax.linen as nn
import jax
import jax.numpy as jnp
import poet_jax
from beside import WIDTH
from flax import nnx

ARGS = [jnp.eye(WIDTH)] * 4, jax.ShapeDtypeStruct((1024, WIDTH), jnp.float32)
BATCH = jnp.ones((256, WIDTH)), jnp.zeros(256, jnp.int32)
OPTIONS = {"device": poet_jax.devices.STM32H7, "planner": poet_jax.greedy}


def loss_fn(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def sgd(weights, x):
    loss, gradients = jax.value_and_grad(loss_fn)(weights, x)
    return [w - g for w, g in zip(weights, gradients)], loss


def plain():
    return sgd, *ARGS


def scheduled():
    return poet_jax.schedule(sgd, "90%", donate_argnums=0, **OPTIONS), *ARGS


def of_nnx():
    layers = [nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)) for _ in range(2)]
    model = nnx.Sequential(layers[0], nnx.tanh, layers[1])
    return poet_jax.train_step(model, "100%", **OPTIONS), BATCH


def of_linen():
    model = nn.Sequential([nn.Dense(WIDTH), nn.tanh, nn.Dense(WIDTH)])
    step = poet_jax.train_step(model, "100%", **OPTIONS)
    return step, jax.eval_shape(step.init, jax.random.key(0), BATCH), BATCH


def of_modules():
    @poet_jax.nnx.schedule("100%", **OPTIONS)
    def forward(model, x):
        return model(x)

    return forward, nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)), BATCH[0]


def without_its_batch():
    return of_nnx()[:1] + (1, 2)


def nothing():
    pass


def without_arguments():
    return sgd,


def takes_one(x):
    return sgd, x


def broken():
    raise ValueError("my own mistake")
"""
FILES = {"plan.png", "matrices.png", "graph.dot", "trace.json", "report.html"}


@pytest.fixture
def file(tmp_path):
    """A caller's file, which imports another one beside it."""
    (tmp_path / "beside.py").write_text("WIDTH = 64\n")
    path = tmp_path / "own.py"
    path.write_text(SOURCE)
    return path


def run(*arguments, **values):
    """Run a command in this process with flags `values`."""
    cli.define_flags(*cli.FLAGS)
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    with flagsaver.flagsaver(**{name: None for name in cli.FLAGS if name != "values"}):
        with flagsaver.flagsaver(**values):
            cli.main(["poet_jax", *map(str, arguments)])


def test_devices_are_listed_and_one_is_told(capsys, tmp_path):
    run("devices")
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in lines[1:]]
    assert names == list(poet_jax.devices.ALL)
    start = lines[0].index("device")
    titles = [line[start:].split("  ")[0] for line in lines[1:]]
    assert titles == [device.name for device in poet_jax.devices.ALL.values()]
    poet_jax.devices.JETSON_TX2.save(tmp_path / "board.toml")
    for name in ("JETSON_TX2", str(tmp_path / "board.toml")):
        run("devices", device=name)
        told = {x.split()[0]: x for x in capsys.readouterr().out.splitlines()[2:]}
        assert {"flops_per_second", "static_watts"} <= told.keys()
        assert "assumed: none is published" in told["flops_per_second"]
        assert told["static_watts"].split() == ["static_watts", "0", "default"]


def test_a_function_is_planned_within_a_budget(file, capsys, tmp_path):
    options = {"device": "STM32H7", "planner": "milp", "time_limit": 2.0}
    options |= {"budget": "90%", "donate_argnums": [0], "output": str(tmp_path / "x")}
    run("explain", f"{file}:plain", **options, values=3)
    printed = capsys.readouterr().out
    assert printed.count("\n- ") == 4 and "first-order estimate" in printed
    written = {path.name for path in (tmp_path / "x").iterdir()}
    assert FILES <= written <= FILES | {"graph.svg"}
    assert len(Page((tmp_path / "x" / "report.html").read_text()).tables) > 1
    trace = json.loads((tmp_path / "x" / "trace.json").read_text())
    assert trace["traceEvents"]


def test_no_fewer_than_no_values_are_explained(file, tmp_path):
    with pytest.raises(flags.IllegalFlagValueError, match="non-negative"):
        run("explain", f"{file}:plain", output=str(tmp_path), values=-3)


KINDS = ("scheduled", "of_nnx", "of_linen", "of_modules")


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_keeps_what_no_flag_replaces(kind, file, capsys, tmp_path):
    step, *args = loaded(f"{file}:{kind}")
    run("explain", f"{file}:{kind}", output=str(tmp_path / "own"), values=0)
    printed = capsys.readouterr().out
    expected = str(step.plan(*args)).partition("\n  values")[0]
    assert printed.startswith(expected)
    run("explain", f"{file}:{kind}", output=str(tmp_path / "other"), budget="1GiB",
        device="JETSON_TX2", planner="keep_all")  # fmt: skip
    assert "budget 1.0 GiB" in capsys.readouterr().out


def test_a_sweep_prints_and_writes_a_front(file, capsys, tmp_path):
    budgets = ["60%", "100%", "device"]
    run("sweep", f"{file}:scheduled", budgets=budgets, output=str(tmp_path))
    assert "smallest budget" in capsys.readouterr().out
    rows = list(csv.DictReader((tmp_path / "front.csv").read_text().splitlines()))
    joules = [float(row["joules"]) for row in rows]
    assert joules == sorted(joules, reverse=True) and len(rows) > 1
    assert all(int(row["peak_bytes"]) <= int(row["budget_bytes"]) for row in rows)
    assert (tmp_path / "front.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def instance(tmp_path):
    """Four nodes of a byte each, of which the last also reads the first."""
    costs = ("seconds", "joules", "page_in_seconds", "page_out_seconds")
    costs += ("page_in_joules", "page_out_joules")
    node = dict.fromkeys(costs, 1.0) | {"bytes": 8, "backward": False}
    nodes = [node | {"name": name} for name in "abcd"]
    edges = [[0, 1], [1, 2], [2, 3], [0, 3]]
    path = tmp_path / "instance.json"
    path.write_text(json.dumps({"nodes": nodes, "edges": edges}))
    return path


def test_an_instance_is_explained_and_swept(instance, capsys, tmp_path):
    out = str(tmp_path / "out")
    run("explain", instance, budget="100%", planner="greedy", output=out)
    assert "- a (8 B), keep: Freeing it while it is idle" in capsys.readouterr().out
    run("sweep", instance, output=out)
    assert "smallest budget: 24 B, proven" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="a budget of at least 24"):
        run("explain", instance, budget="60%", planner="greedy", output=out)
    for command, value in (
        ("explain", {"device": "STM32H7"}),
        ("explain", {"budget": "device"}),
        ("sweep", {"budgets": ["50%", "device"]}),
    ):
        with pytest.raises(SystemExit, match="costs of its own. Use --device for a st"):
            run(command, instance, output=out, **value)


@pytest.mark.parametrize(
    ("arguments", "values", "says"),
    [
        ((), {}, "The commands are explain STEP, sweep STEP and devices"),
        (("train", "x"), {}, "The commands are"),
        (("explain",), {}, "Use for example python -m poet_jax explain"),
        (("devices", "JETSON_TX2"), {}, "The commands are"),
        (("devices",), {"device": "ABACUS"}, "The devices are host, MKR1000"),
        (("explain", "own.txt"), {}, "for example train.py:make_step"),
        (("explain", "own.py"), {}, "for example train.py:make_step"),
        (("explain", "other.py:plain"), {}, "there is no such file"),
        (("explain", "other.json"), {}, "other.json"),
        (("explain", "own.py:missing"), {}, r"plain\(\), .*takes_one\(x\)"),
        (("explain", "own.py:takes_one"), {}, "Use for example `return step, state"),
        (("explain", "own.py:nothing"), {}, "returned one NoneType. Such a function"),
        (("explain", "own.py:without_arguments"), {}, r"a tuple of \['function'\]"),
        (("explain", "own.py:without_its_batch"), {}, "Use `return step, batch`"),
        (("explain", "own.py:plain"), {"budget": "64"}, "is not a size"),
        (("explain", "own.py:of_nnx"), {"budget": "64"}, "is not a size"),
        (("explain", "own.py:plain"), {"planner": "best"}, "The planners are keep_all"),
        (
            ("explain", "own.py:plain"),
            {"planner": "greedy", "solver": "CBC"},
            "--planner=greedy does not take --solver",
        ),
        (("explain", "own.py:plain"), {"device": "ABACUS"}, "The devices are host"),
        (("explain", "own.py:of_nnx"), {"donate_argnums": [0]}, "a plain function"),
        (("explain", "own.py:scheduled"), {"budget": "1KiB"}, "a budget of at least"),
        (("sweep", "own.py:plain"), {"budget": "75%"}, "Use --budgets=40%"),
        (("explain", "own.py:plain"), {"budgets": ["75%"]}, "Use --budget=75%"),
        (("explain", "own.py:plain"), {"donate_argnums": [5]}, "2 positional .*s.\\Z"),
        (("explain", "own.py:broken"), {"output": "own.py/x"}, "is no folder that can"),
        (("sweep", "own.py:broken"), {"output": "own.py"}, "such as --output=plan"),
    ],
)
def test_a_mistake_is_told_with_what_to_use(
    arguments, values, says, file, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=says):
        run(*arguments, **({"output": "out"} | values))


def test_a_saved_plan_is_no_instance(file, tmp_path):
    step, *args = loaded(f"{file}:scheduled")
    step.plan(*args).to_json(tmp_path / "plan.json")
    with pytest.raises(SystemExit, match="it is a plan of Schedule.to_json"):
        run("explain", tmp_path / "plan.json", output=str(tmp_path))


def test_an_error_of_the_callers_own_keeps_its_traceback(file, tmp_path):
    with pytest.raises(RuntimeError, match="own.py:broken was run") as caught:
        run("explain", f"{file}:broken", output=str(tmp_path))
    assert "my own mistake" in str(caught.value.__cause__)


def test_the_program_itself_takes_flags_after_its_arguments(file, tmp_path):
    command = [sys.executable, "-m", "poet_jax", "explain", f"{file}:scheduled"]
    command += [f"--output={tmp_path}", "--values=1", "--budget=64"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "is not a size" in done.stderr
    done = subprocess.run(command[:-1], capture_output=True, text=True, check=True)
    assert done.stdout.count("\n- ") == 2
