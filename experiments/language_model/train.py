"""Fine-tuning that can be killed: its schemes, optimizers, state and loop."""

import functools
import json
import pathlib
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tqdm import tqdm

from experiments.language_model import files, text
from experiments.language_model.models import Model, variables
from experiments.program import appending, read_rows, write_rows
from poet_jax import PagedArray, init_paged, load_paged, save_paged
from poet_jax.stores import Store
from poet_jax.update import Update, bias_only, lora
from poet_jax.update.part import EVERYTHING

# With the learning rate of each for a checkpoint: the fewer parameters, the larger.
UPDATES = {"lora": 5e-4, "full": 5e-5, "bias": 1e-3}
FIRST_RATE = 2e-3  # of a model at random
OPTIMIZERS = {"adamw": optax.adamw, "adafactor": optax.adafactor}
# Matrices of the numbered layers; the head has none of these.
ADAPTED = "*/*/**/kernel"
COLUMNS = ("step", "loss", "seconds")
STATE = "state.safetensors"  # in the folder of a run


def update_of(name: str, rank: int, model: Model) -> Update | None:
    """The scheme called `name`, of UPDATES; None for full fine-tuning.

    Raises ValueError for the biases of a model that has none.
    """
    if name == "lora":
        return lora(rank, ADAPTED)
    if name == "full":
        return None
    if not any(path.endswith("/bias") for path in variables(model)):
        raise ValueError(
            "--update=bias needs biases, and the model has none. GPT-2 and Qwen2 have "
            "some. Use --update=lora."
        )
    return bias_only()


def optimizer_of(
    name: str, learning_rate: float, steps: int, store: Store | None = None
) -> optax.GradientTransformation:
    """The optimizer called `name`, of OPTIMIZERS, for gradients of norm 1 at most.

    Its rate rises over a tenth of `steps`, then falls as a cosine. Its state begins in
    `store`, if that is given.
    """
    warm_up = max(steps // 10, 1)
    rates = optax.warmup_cosine_decay_schedule(
        0.0, learning_rate, warm_up, max(steps, warm_up + 1)
    )
    chosen = optax.chain(optax.clip_by_global_norm(1.0), OPTIMIZERS[name](rates))
    return chosen if store is None else on_storage(chosen, store)


def on_storage(
    optimizer: optax.GradientTransformation, store: Store
) -> optax.GradientTransformation:
    """The optimizer with a state that begins in `store`."""
    return optax.GradientTransformation(
        functools.partial(init_paged, optimizer.init, store), optimizer.update
    )


def _changing(step: Any) -> dict[str, nnx.Variable]:
    """What a step changes: trained parameters and the optimizer's state, by name."""
    part = getattr(step.optimizer, "part", EVERYTHING)
    trained = None if part.trained is None else dict(part.trained)
    parameters = {
        f"model/{path}": variable
        for path, variable in variables(step.model, nnx.Param).items()
        if trained is None or path in trained
    }
    state = variables(step.optimizer).items()
    return parameters | {f"optimizer/{path}": variable for path, variable in state}


def save_state(path: pathlib.Path, step: Any, settings: Mapping[str, Any]) -> None:
    """Write what the step has changed so far; a kill leaves the older file or this."""
    arrays = {name: x.get_value() for name, x in _changing(step).items()}
    save_paged(arrays, path, {"settings": json.dumps(dict(settings))})


def load_state(path: pathlib.Path, step: Any, settings: Mapping[str, Any]) -> int:
    """Put what was saved into the step; the number of steps that were done by then.

    State on storage is read where the step needs it. Raises ValueError for a damaged
    file, other settings and another model.
    """
    remedy = "Use another --folder to start anew."
    files.check_settings(path, settings, remedy)
    changing, saved = _changing(step), load_paged(path)
    found, expected = (
        {name: tuple(x.shape) for name, x in arrays.items()}
        for arrays in (saved, changing)
    )
    files.check(found, expected, path, remedy)
    for name, variable in changing.items():
        stays = isinstance(variable.get_value(), PagedArray)
        variable.set_value(saved[name] if stays else jnp.asarray(saved[name]))
    return int(step.optimizer.step[...])


def fine_tune(
    step: Any,
    rows: np.ndarray,
    folder: pathlib.Path,
    settings: Mapping[str, Any],
    save_every: int,
) -> list[dict[str, str]]:
    """Train up to settings["steps"] from where the run in `folder` was left.

    `rows` are [N, length + 1]. The settings are all that losses depend on, among them
    batch_size and seed. Returns the lines of losses.csv, of all steps so far.
    """
    state, losses = folder / STATE, folder / "losses.csv"
    start = load_state(state, step, settings) if state.exists() else 0
    done = [row for row in read_rows(losses) if int(row["step"]) < start]
    write_rows(losses, COLUMNS, done)
    steps, size, seed = (settings[x] for x in ("steps", "batch_size", "seed"))
    batches = text.batches(rows, size, seed, start, steps)
    progress = tqdm(batches, initial=start, total=steps, unit="step")
    with appending(losses, COLUMNS) as append:
        for number, batch in enumerate(progress, start):
            begun = time.perf_counter()
            loss = float(step(jax.device_put(batch)))
            seconds = time.perf_counter() - begun
            append({"step": number, "loss": loss, "seconds": seconds})
            progress.set_postfix(loss=f"{loss:.4f}")
            if (number + 1) % save_every == 0 or number + 1 == steps:
                save_state(state, step, settings)
    return read_rows(losses)
