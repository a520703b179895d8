"""The experiments' models, data and training program."""

import ast
import contextlib
import csv
import dataclasses
import json
import math
import pathlib
import pickle
import shutil
import subprocess

import jax
import numpy as np
import optax
import pytest
from absl import flags
from absl.testing import flagsaver
from flax import nnx
from processes import run_module

import poet_jax
from experiments import explain, models, train
from experiments.benchmarks import measuring, memory
from experiments.benchmarks.small_models import SMALL_STEPS
from experiments.data import DatasetSpec, load_dataset

IMAGES = DatasetSpec((32, 32, 3), 10)
TEXT = DatasetSpec((16,), 8, vocabulary=256)
NARROW_TEXT = "layers=2,width=32,heads=4,length=16"
NAMES = (
    "mlp:width=16",
    "cnn:width=4",
    "resnet18:width=4",
    "resnet34:width=4",
    "resnet50:width=4",
    "vgg16:width=4",
    "mobilenetv2:width=0.1,depth=0.3",
    f"bert:{NARROW_TEXT}",
    f"bert:{NARROW_TEXT},norm=pre,dropout=0.1",
    f"gpt:{NARROW_TEXT}",
    f"gpt:{NARROW_TEXT},norm=post,dropout=0.1",
)


def parameters(tree):
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def shapes_of(name, spec, batch=4):
    """((logits, parameters, batch statistics) in nnx, the same in linen)."""
    dtype = "float32" if spec.vocabulary is None else "int32"
    inputs = jax.ShapeDtypeStruct((batch, *spec.input_shape), dtype)
    module = nnx.eval_shape(
        lambda: models.make_model(name, "nnx", dataset_spec=spec, seed=0)
    )
    logits = nnx.eval_shape(lambda module, x: module(x), module, inputs)
    state = nnx.state(module, nnx.Param), nnx.state(module, nnx.BatchStat)
    linen = models.make_model(name, "linen", dataset_spec=spec, seed=0)
    linen_logits, variables = jax.eval_shape(
        lambda key, x: linen.init_with_output({"params": key, "dropout": key}, x),
        jax.random.key(0),
        inputs,
    )
    linen_state = variables["params"], variables.get("batch_stats", {})
    return (
        (logits.shape, *map(parameters, state)),
        (linen_logits.shape, *map(parameters, linen_state)),
    )


@pytest.mark.parametrize("name", NAMES)
def test_frameworks_agree_on_logits_and_parameters(name):
    text = models.is_text_model(name)
    in_nnx, in_linen = shapes_of(name, TEXT if text else IMAGES)
    assert in_nnx == in_linen
    expected = (4, 16, 256) if models.is_causal(name) else (4, 8 if text else 10)
    assert in_nnx[0] == expected


@pytest.mark.parametrize("name", [NAMES[1], NAMES[2], NAMES[5], NAMES[6]])
@pytest.mark.parametrize("shape", [(8, 8, 1), (28, 28, 1)])
def test_image_models_take_every_image_size(name, shape):
    in_nnx, in_linen = shapes_of(name, DatasetSpec(shape, 10))
    assert in_nnx == in_linen and in_nnx[0] == (4, 10)


def test_resnets_have_the_published_number_of_parameters():
    """ResNet-18 and -50 of CIFAR-10 as commonly reported: 11.17 and 23.52 million."""
    assert shapes_of("resnet18", IMAGES)[0][1] == 11_173_962
    assert shapes_of("resnet50", IMAGES)[0][1] == 23_520_842


def test_mobilenetv2_has_the_published_number_of_parameters():
    """3,504,872 with 1,000 classes, as torchvision lists it, for images of any size."""
    spec = DatasetSpec((32, 32, 3), 1000)
    assert shapes_of("mobilenetv2", spec)[0][1] == 3_504_872


def test_gpt_does_not_look_ahead():
    spec = DatasetSpec((16,), 256, vocabulary=256)
    model = models.make_model(f"gpt:{NARROW_TEXT}", "nnx", dataset_spec=spec, seed=0)
    tokens = np.arange(16, dtype=np.int32)[None]
    changed = tokens.copy()
    changed[0, 10] = 200
    before, after = np.asarray(model(tokens)), np.asarray(model(changed))
    np.testing.assert_allclose(before[0, :10], after[0, :10], rtol=0, atol=1e-6)
    assert np.abs(before[0, 10:] - after[0, 10:]).max(axis=1).min() > 1e-4


def test_train_and_eval_mode_differ_by_dropout_and_batch_statistics():
    images = np.random.default_rng(0).normal(size=(4, 8, 8, 1)).astype(np.float32)
    spec = DatasetSpec((8, 8, 1), 10)
    model = models.make_model("cnn:width=4", "nnx", dataset_spec=spec, seed=0)
    trained = [np.asarray(model(images)) for _ in range(2)]
    model.eval()
    evaluated = [np.asarray(model(images)) for _ in range(2)]
    assert not np.array_equal(*trained)
    np.testing.assert_array_equal(*evaluated)


@pytest.mark.parametrize(
    ("name", "framework", "spec", "says"),
    [
        ("resnet19", "nnx", IMAGES, "The models are mlp"),
        ("mlp:depth=2", "nnx", IMAGES, "The options of mlp"),
        ("mlp:width=wide", "nnx", IMAGES, "The options of mlp"),
        ("mlp", "torch", IMAGES, "nnx and in linen"),
        ("bert2", "nnx", IMAGES, "It reads tokens"),
        ("resnet18", "linen", TEXT, "It reads images"),
        ("bert:width=10,heads=4", "nnx", TEXT, "heads divides width"),
        ("bert:norm=both", "linen", TEXT, "norm is pre or post"),
    ],
)
def test_bad_model_says_what_to_use(name, framework, spec, says):
    with pytest.raises(ValueError, match=says) as error:
        models.make_model(name, framework, dataset_spec=spec, seed=0)
    assert "Use -" in str(error.value) or "Use for example -" in str(error.value)


@pytest.mark.parametrize(
    ("name", "next_byte", "shape", "size"),
    [
        ("digits", False, (8, 8, 1), 1797),
        ("mnist", False, (28, 28, 1), 5000),
        ("photos", False, (32, 32, 3), 5000),
        ("text", False, (64,), None),
        ("text", True, (64,), None),
    ],
)
def test_dataset(name, next_byte, shape, size):
    dataset = load_dataset(name, length=64, next_byte=next_byte)
    again = load_dataset(name, length=64, next_byte=next_byte)
    np.testing.assert_array_equal(dataset.inputs, again.inputs)
    assert dataset.spec.input_shape == shape
    assert len(dataset.inputs) == len(dataset.labels) == (size or len(dataset.inputs))
    assert len(dataset.inputs) > 1000
    assert dataset.labels.dtype == np.int32
    assert dataset.labels.min() >= 0 and dataset.labels.max() < dataset.num_classes
    if dataset.spec.vocabulary is None:
        assert dataset.inputs.dtype == np.float32
        assert dataset.inputs.min() == -1 and dataset.inputs.max() == 1
    else:
        assert dataset.inputs.dtype == np.int32
        assert 0 <= dataset.inputs.min() and dataset.inputs.max() < 256
    if not next_byte:
        assert set(dataset.labels) == set(range(dataset.num_classes))
    else:
        np.testing.assert_array_equal(dataset.inputs[:, 1:], dataset.labels[:, :-1])


def test_batches_are_a_function_of_the_seed_and_cover_the_dataset():
    dataset = load_dataset("digits")
    first, again, other = (list(dataset.batches(100, seed, 18)) for seed in (1, 1, 2))
    for (x, y), (x_again, y_again) in zip(first, again, strict=True):
        assert x.shape == (100, 8, 8, 1) and y.shape == (100,)
        np.testing.assert_array_equal(x, x_again)
        np.testing.assert_array_equal(y, y_again)
    assert not np.array_equal(first[0][0], other[0][0])
    seen = np.sort(np.concatenate([y for _, y in first])[:1797])
    np.testing.assert_array_equal(seen, np.sort(dataset.labels))


def test_cifar10_is_read_from_a_folder(tmp_path):
    pixels = np.arange(2 * 3072, dtype=np.int64) % 256
    for number in range(1, 6):
        batch = {b"data": pixels.astype(np.uint8).reshape(2, 3072), b"labels": [3, 9]}
        (tmp_path / f"data_batch_{number}").write_bytes(pickle.dumps(batch))
    dataset = load_dataset("cifar10", folder=str(tmp_path))
    assert dataset.spec == IMAGES and list(dataset.labels) == [3, 9] * 5
    # The file holds a red plane, a green one, then a blue one.
    green = dataset.inputs[0, 0, 1, 1]
    np.testing.assert_allclose(green, pixels[1024 + 1] * 2 / 255 - 1, rtol=1e-6)


def test_missing_data_says_what_to_use(tmp_path):
    with pytest.raises(FileNotFoundError, match="Use --data_folder=PATH"):
        load_dataset("cifar10", folder=str(tmp_path))
    with pytest.raises(ValueError, match="The datasets are digits"):
        load_dataset("imagenet")


def run_train(output, **values):
    """Run train.main in this process with flags `values`; the metrics it wrote."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    with flagsaver.flagsaver(output=str(output), **values):
        train.main(["train"])
    lines = (output / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    ("model", "dataset", "framework", "planner", "budget"),
    [
        ("mlp:width=32", "digits", "nnx", "milp", "90%"),
        ("cnn:width=8", "mnist", "linen", "greedy", "80%"),
        ("bert2:layers=1,width=32,length=32", "text", "nnx", "greedy", "70%"),
        ("gpt2layer:layers=1,width=32,length=32", "text", "linen", "greedy", "75%"),
    ],
)
def test_train(tmp_path, capsys, model, dataset, framework, planner, budget):
    lines = run_train(
        tmp_path,
        model=model,
        dataset=dataset,
        framework=framework,
        planner=planner,
        budget=budget,
        device="JETSON_TX2",
        batch_size=64,
        steps=2,
        **({"time_limit": 5.0} if planner == "milp" else {}),
    )
    assert [line["step"] for line in lines] == [0, 1]
    assert all(math.isfinite(line["loss"]) and line["seconds"] > 0 for line in lines)
    assert lines[0]["loss"] != lines[1]["loss"]
    plan = json.loads((tmp_path / "plan.json").read_text())
    budget_bytes = plan["budget"]["memory_bytes"]
    assert all(0 < line["peak_bytes"] <= budget_bytes for line in lines)
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert "energies are modelled" in capsys.readouterr().out


def test_training_says_what_a_device_would_have_spent(tmp_path, capsys):
    """A board of one's own, in its RAM: joules and epochs by the plan that was run."""
    board = dataclasses.replace(poet_jax.devices.STM32F746, ram_bytes=160 * 2**10)
    board.save(tmp_path / "board.toml")
    run_train(
        tmp_path,
        model="mlp:width=32",
        dataset="digits",
        device=str(tmp_path / "board.toml"),
        planner="paging_only",
        batch_size=128,
        steps=2,
        battery_wh=2.0,
    )
    spent = json.loads((tmp_path / "device.json").read_text())
    examples = len(load_dataset("digits").inputs)
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["budget"]["memory_bytes"] == board.ram_bytes
    assert spent["joules_per_step"] == pytest.approx(plan["plan"]["objective"])
    assert spent["joules_per_epoch"] == pytest.approx(
        math.ceil(examples / 128) * spent["joules_per_step"]
    )
    assert spent["steps_per_battery"] == 7200 / spent["joules_per_step"]
    assert spent["bytes_written_per_step"] > 0
    worn = spent["steps_until_worn"] * spent["bytes_written_per_step"]
    assert worn == pytest.approx(board.store_endurance_bytes)
    out = capsys.readouterr().out
    assert "steps from one battery" in out and "assumed: half of one" in out


def test_training_within_a_budget_is_plain_training(tmp_path):
    """The losses are those of `nnx.jit` on the same batches, and they fall."""
    steps, batch_size, learning_rate, name = 40, 64, 1e-2, "mlp:width=32"
    lines = run_train(
        tmp_path,
        model=name,
        dataset="digits",
        planner="milp",
        budget="95%",
        device="JETSON_TX2",
        batch_size=batch_size,
        steps=steps,
        learning_rate=learning_rate,
        time_limit=5.0,
    )
    dataset = load_dataset("digits")
    model = models.make_model(name, "nnx", dataset_spec=dataset.spec, seed=0)
    optimizer = nnx.Optimizer(model, optax.adamw(learning_rate), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, batch):
        loss, gradients = nnx.value_and_grad(models.loss_fn)(model, batch)
        optimizer.update(model, gradients)
        return loss

    plain = [
        float(step(model, optimizer, batch))
        for batch in dataset.batches(batch_size, 0, steps)
    ]
    np.testing.assert_allclose([line["loss"] for line in lines], plain, rtol=1e-3)
    assert plain[-1] < plain[0] / 2


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"model": "transformer"}, "The models are"),
        ({"model": "bert2", "dataset": "digits"}, "It reads tokens"),
        ({"dataset": "cifar10"}, "never downloaded"),
        ({"dataset": "digits", "device": "abacus"}, "The devices are host, MKR1000"),
        ({"dataset": "digits", "budget": "64"}, "is not a size"),
        (
            {
                "model": "mlp",
                "dataset": "digits",
                "budget": "1KiB",
                "planner": "greedy",
            },
            "a budget of at least",
        ),
    ],
)
def test_bad_flags_end_with_a_message(tmp_path, values, says):
    with pytest.raises(SystemExit, match=says):
        run_train(tmp_path, **({"device": "JETSON_TX2"} | values))


def test_the_demo_runs(tmp_path):
    flags = ("--model=mlp:width=16", "--batch_size=8", "--steps=2", "--time_limit=1")
    output = run_module("demo", tmp_path, "--budget=90%", *flags)
    assert "bytes compiled, XLA's own count" in output
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "plan.json").exists()


def test_fidelity_holds_on_a_small_model(tmp_path):
    flags = ("--dataset=digits", "--steps=2", "--batch_size=512", "--budget=80%")
    run_module("benchmarks.fidelity", tmp_path, "--model=mlp:width=64", *flags)
    result = json.loads((tmp_path / "mlp.json").read_text())
    assert result["bit_equal_between_planners"]
    for planner in ("greedy", "paging_only"):
        assert result[planner]["gradient_relative_norm"] <= 1e-5
        assert result[planner]["largest_loss_difference"] <= 1e-4


def test_the_planning_benchmark_goes_on_where_it_stopped(tmp_path):
    flags = ("--graphs=skips", "--kinds=gradient", "--shares=75", "--time_limit=2")
    path = tmp_path / "plans.csv"
    run_module("benchmarks.plan_benchmark", tmp_path, *flags, "--planners=greedy")
    (greedy,) = csv.DictReader(path.read_text().splitlines())
    run_module("benchmarks.plan_benchmark", tmp_path, *flags, "--planners=greedy,milp")
    again, milp = csv.DictReader(path.read_text().splitlines())
    assert again == greedy
    assert float(milp["over_keep_all"]) <= float(greedy["over_keep_all"])
    assert (tmp_path / "plans.png").read_bytes().startswith(b"\x89PNG")


def rows_of(path):
    return list(csv.DictReader(path.read_text().splitlines()))


def test_the_step_benchmark_measures_the_least_memory_beside_jit(tmp_path):
    flags = ("--models=mlp", "--shares=least", "--seconds=0", "--time_limit=1")
    run_module("benchmarks.step_benchmark", tmp_path, *flags)
    (row,) = rows_of(tmp_path / "steps.csv")
    assert int(row["compiled_bytes"]) <= int(row["budget_bytes"])
    assert int(row["planned_bytes"]) <= int(row["budget_bytes"])
    assert int(row["budget_bytes"]) < int(row["jit_bytes"])
    assert 0 < float(row["compile_seconds"]) < float(row["first_seconds"])
    assert 0 < float(row["jit_compile_seconds"]) < float(row["jit_first_seconds"])
    assert float(row["ratio"]) > 0 and float(row["checkpoint_ratio"]) > 0
    assert int(row["watched_steps"]) >= 10 and int(row["pairs"]) >= 5
    assert float(row["loss_difference"]) < 1e-4
    assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "name", ["benchmarks.small_steps", "language_model.schemes:language_schemes"]
)
def test_a_figure_is_drawn_from_its_rows(tmp_path, name):
    module, _, rows = name.partition(":")
    rows = rows or module.rpartition(".")[2]
    results = pathlib.Path(models.__file__).parent / "results" / rows
    shutil.copy(results / f"{rows}.csv", tmp_path)
    run_module(module, tmp_path, "--plot")
    assert (tmp_path / f"{rows}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("scenario", ["five_shapes", "train_and_evaluate"])
def test_steps_of_several_shapes_share_a_budget(tmp_path, scenario):
    flags = ("--size=2048", "--width=64", "--steps=5", "--devices=RASPBERRY_PI_4")
    run_module("benchmarks.shapes", tmp_path, *flags, f"--scenarios={scenario}")
    (row,) = rows_of(tmp_path / "shapes.csv")
    assert (row["scenario"], row["device"]) == (scenario, "RASPBERRY_PI_4")
    assert int(row["compiled_bytes"]) <= int(row["budget_bytes"])
    assert int(row["beyond_bytes"]) <= 8 * 2**20


SMALL = ("encoder2_bfloat16", "gpt2", "vit", "mixer", "gru_unrolled", "gru_scan", "cnn",
         "unet", "lora", "accumulated")  # fmt: skip


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.usefixtures("standard_promotion")
def test_a_small_step_returns_a_state_like_the_one_it_is_given(name):
    case = SMALL_STEPS[name]()
    state, batch = jax.eval_shape(case.init)
    new, loss = jax.eval_shape(case.step, state, batch)
    assert loss.shape == () and loss.dtype == "float32"
    assert jax.tree.structure(new) == jax.tree.structure(state)
    for before, after in zip(*map(jax.tree.leaves, (state, new)), strict=True):
        assert (before.shape, before.dtype) == (after.shape, after.dtype)


def test_rows_are_written_at_once_and_over_older_ones(tmp_path):
    columns, parts = ("model", "share", "x"), [("a", "1"), ("b", "1"), ("c", "1")]
    path = tmp_path / "rows" / "rows.csv"
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()

    def fails_at(*broken):
        def measure(model, share):
            if model in broken:
                raise subprocess.CalledProcessError(1, ["child"])
            return {"x": f"{model} without {broken}"}

        return measure

    with pytest.raises(SystemExit, match="Use the same command with --only_missing"):
        measuring.fill(path, columns, parts, fails_at("b"))
    assert [row["model"] for row in rows_of(path)] == ["a", "c"]
    with flagsaver.flagsaver(only_missing=True):
        measuring.fill(path, columns, parts, fails_at("a", "c"))
    assert [row["model"] for row in rows_of(path)] == ["a", "c", "b"]
    measuring.fill(path, columns, parts[:1], fails_at())
    assert [row["model"] for row in rows_of(path)] == ["a", "c", "b"]
    assert rows_of(path)[0]["x"] == "a without ()"
    with pytest.raises(SystemExit, match="use another --output"):
        measuring.fill(path, (*columns, "y"), parts, fails_at())


def test_compile_seconds_are_of_any_thread_and_counted_once(monkeypatch):
    listeners, now = [], [0.0]
    names = ("register", "unregister")
    for name, method in zip(names, (listeners.append, listeners.remove), strict=True):
        suffix = "secs_listener" if name == "register" else "listener"
        monkeypatch.setattr(jax.monitoring, f"{name}_event_duration_{suffix}", method)
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: now[0])
    with measuring.compiling() as seconds:
        for stop, took in ((10.0, 2.0), (11.0, 2.0), (20.0, 1.0)):
            now[0] = stop
            listeners[0](measuring.BACKEND_COMPILE, took)
            listeners[0]("/jax/core/compile/jaxpr_trace_duration", 5.0)
    assert seconds() == 4.0 and not listeners


def test_state_on_storage_trains_as_jit_does(tmp_path):
    flags = ("--dataset=digits", "--steps=3", "--batch_size=64", "--budget=100%")
    size = ("--model=mlp:width=256", "--time_limit=1")
    run_module("benchmarks.paged_state", tmp_path, *flags, *size)
    result = json.loads((tmp_path / "mlp.json").read_text())
    ours, plain = result["rows"]
    assert result["largest_loss_difference"] < 1e-4
    assert ours["planned_bytes"] <= ours["budget_bytes"]
    assert ours["compiled_bytes"] <= ours["budget_bytes"]
    assert ours["bytes_paged_out"] > 0.9 * ours["state_bytes"]
    assert ours["state_bytes"] == plain["state_bytes"]


def test_a_limit_that_cannot_be_set_is_named(tmp_path):
    with pytest.raises(OSError, match="memory cgroup") as caught:
        memory.MemoryGroup("test", tmp_path)
    assert str(tmp_path) in str(caught.value) and "Run it as root" in str(caught.value)


def run_explain(output, **values):
    """Run explain.main in this process with flags `values`."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    with flagsaver.flagsaver(output=str(output), values=3, **values):
        explain.main(["explain"])


@pytest.mark.parametrize("framework", ["nnx", "linen"])
def test_a_model_is_explained_from_its_shapes(tmp_path, capsys, framework):
    """The plan is that of the step which experiments.train runs."""
    run_explain(
        tmp_path,
        model="mlp:width=8",
        dataset="digits",
        framework=framework,
        planner="greedy",
        device="JETSON_TX2",
        budget="85%",
        batch_size=64,
    )
    printed = capsys.readouterr().out
    assert printed.count("\n- ") == 4 and "first-order estimate" in printed
    names = {path.name for path in tmp_path.iterdir()}
    files = {"plan.png", "matrices.png", "graph.dot", "trace.json", "report.html"}
    assert files <= names <= files | {"graph.svg"}
    dataset = load_dataset("digits")
    model = models.make_model(
        "mlp:width=8", framework, dataset_spec=dataset.spec, seed=0
    )
    step = poet_jax.train_step(
        model,
        "85%",
        loss_fn=models.loss_fn,
        optimizer=optax.adamw(1e-3),
        device=poet_jax.devices.JETSON_TX2,
        planner=poet_jax.greedy,
    )
    schedule, _ = train.bind(step, model, 0, next(dataset.batches(64, 0, 1)))
    head = str(schedule).partition("\n  values")[0]
    assert head and printed.startswith(head)


@pytest.mark.parametrize(
    "path", sorted(pathlib.Path(train.__file__).parent.glob("*.py"))
)
def test_help_says_what_the_program_says_of_itself(path):
    """absl takes a percent sign before some letters for the program's name."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    count = text.count("%") - 2 * text.count("%%")
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        assert "the program" not in text % (("the program",) * count)


def test_a_sample_of_jaxs_own_harnesses_computes_what_it_does_under_jit(tmp_path):
    run_module("benchmarks.harnesses", tmp_path, "--every=40")
    with open(tmp_path / "harnesses.csv") as file:
        rows = list(csv.DictReader(file))
    counts = {
        name: sum(int(row[name]) for row in rows)
        for name in ("harnesses", "to_the_bit", "to_rounding", "different")
    }
    with open(tmp_path / "differences.csv") as file:
        assert counts["different"] == 0, file.read()
    assert counts["harnesses"] >= 130
    assert counts["to_the_bit"] + counts["to_rounding"] == counts["harnesses"]
