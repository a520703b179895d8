"""The models of `experiments.models` as training steps, named by flags."""

from typing import Any

import jax
import optax
from absl import flags
from flax import nnx

import poet_jax
from experiments.data import DATASETS, Dataset
from experiments.models import FRAMEWORKS, load_for_model, loss_fn, make_model
from poet_jax import cli

MODEL = flags.DEFINE_string(
    "model", "cnn", "Model, such as resnet18 or bert:layers=2,width=128,heads=2."
)
FRAMEWORK = flags.DEFINE_enum(
    "framework", "nnx", FRAMEWORKS, "Flax interface that the model is written in."
)
DATASET = flags.DEFINE_string("dataset", "mnist", f"One of {', '.join(DATASETS)}.")
DATA_FOLDER = flags.DEFINE_string(
    "data_folder", None, "Folder with data_batch_1 to data_batch_5 of cifar10."
)
PLAN_CACHE = flags.DEFINE_string(
    "plan_cache", None, "Folder that keeps plans, so that a later start plans nothing."
)
BATCH_SIZE = flags.DEFINE_integer("batch_size", 64, "Examples per step.", lower_bound=1)
LEARNING_RATE = flags.DEFINE_float("learning_rate", 1e-3, "Learning rate of AdamW.")
SEED = flags.DEFINE_integer("seed", 0, "Seed of parameters, dropout and batches.")
cli.define_flags(
    "budget", "device", "planner", "solver", "objective", "time_limit", "output"
)


def load_data() -> Dataset:
    """The dataset that flags name."""
    return load_for_model(MODEL.value, DATASET.value, DATA_FOLDER.value)


def load_model(dataset: Dataset) -> Any:
    """The model that flags name, for such data."""
    return make_model(
        MODEL.value, FRAMEWORK.value, dataset_spec=dataset.spec, seed=SEED.value
    )


def train_step(model: Any, optimizer: Any = None) -> Any:
    """The step of `poet_jax.train_step` with AdamW, or `optimizer`, as flags say."""
    device = cli.asked_device()
    return poet_jax.train_step(
        model,
        cli.asked_budget(device),
        loss_fn=loss_fn,
        optimizer=optimizer or optax.adamw(LEARNING_RATE.value),
        device=device,
        planner=cli.asked_planner(),
        plan_cache=PLAN_CACHE.value,
    )


def make_step() -> tuple[Any, ...]:
    """A step and its arguments as shapes, as `python -m poet_jax` takes them."""
    dataset = load_data()
    batch = next(dataset.batches(BATCH_SIZE.value, SEED.value, 1))
    if FRAMEWORK.value == "linen":
        step = train_step(load_model(dataset))
        return step, jax.eval_shape(step.init, jax.random.key(SEED.value), batch), batch

    def make():
        model = load_model(dataset)
        optimizer = optax.adamw(LEARNING_RATE.value)
        return model, nnx.Optimizer(model, optimizer, wrt=nnx.Param)

    return train_step(*nnx.eval_shape(make)), batch
