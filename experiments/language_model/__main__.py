"""Fine-tune a language model on a text within a memory budget, and see what it says.

    python -m experiments.language_model --size=1m --update=full --steps=400
    python -m experiments.language_model --checkpoint=outputs/language_model/model \\
        --folder=outputs/adapted --text=README.md --update=lora --rank=8 --budget=60%

take 80 and 35 s on two cores. Expect losses that fall from 7.65 to about 3.7, and from
about 6.0 to 5.3; adapters in 38 MiB, where keeping everything needs 63 MiB.

With --quantize kernels that adapters are added to are kept in few bits, and with
--on_storage parameters and the optimizer's state lie in a file. So

    python -m experiments.language_model --size=1b --quantize=int4 --on_storage \\
        --budget=800MiB --batch_size=1 --length=256 --steps=10 --generate=0

trains adapters of 1.1 billion parameters.

The model starts at random, or from a --checkpoint in the public format. The budget
counts all that a step has in memory. What is written is in --folder: the losses, the
model or its adapters, and a state from which the same command resumes after a kill,
with the losses of a run that was not disturbed.
"""

import contextlib
import pathlib
import statistics
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags
from flax import nnx
from tokenizers import Tokenizer

import poet_jax
from experiments.language_model import adapters, base, checkpoint, text, train
from experiments.language_model.architectures import read_config
from experiments.language_model.generate import continued
from experiments.language_model.models import (
    SIZES,
    Config,
    Model,
    empty,
    loss_fn,
    make,
    placing,
)
from experiments.program import program
from poet_jax import cli
from poet_jax.stores import Store
from poet_jax.update.quantization import LARGEST

TOKENIZER_FILE = "tokenizer.json"

SIZE = flags.DEFINE_enum("size", "10m", list(SIZES), "Size of a model at random.")
CHECKPOINT = flags.DEFINE_string(
    "checkpoint",
    None,
    "Folder of a model in the format of Hugging Face.",
)
BASE = flags.DEFINE_string(
    "base",
    None,
    "File for the parameters, which a step reads there; made if it is not there.",
)
ADAPTERS = flags.DEFINE_string(
    "adapters", None, "Folder of adapters in the format of PEFT, added at the start."
)
TEXT = flags.DEFINE_string("text", None, "File to train on; by default Python's docs.")
TOKENIZER = flags.DEFINE_string("tokenizer", None, "A tokenizer.json.")
UPDATE = flags.DEFINE_enum("update", "lora", list(train.UPDATES), "What is trained.")
RANK = flags.DEFINE_integer("rank", 8, "Rank of adapters.", lower_bound=1)
QUANTIZE = flags.DEFINE_enum(
    "quantize", None, list(LARGEST), "Bits of kernels that are not trained."
)
ON_STORAGE = flags.DEFINE_bool(
    "on_storage", False, "Keep parameters and the optimizer's state in a file."
)
OPTIMIZER = flags.DEFINE_enum(
    "optimizer", "adamw", list(train.OPTIMIZERS), "What applies gradients."
)
LEARNING_RATE = flags.DEFINE_float("learning_rate", None, "Instead of the usual one.")
DTYPE = flags.DEFINE_enum(
    "dtype", "float32", ["float32", "bfloat16"], "Of parameters and activations."
)
LENGTH = flags.DEFINE_integer("length", 128, "Tokens of a row.", lower_bound=1)
BATCH_SIZE = flags.DEFINE_integer("batch_size", 8, "Rows of a step.", lower_bound=1)
MICROBATCHES = flags.DEFINE_integer(
    "microbatches", 1, "Parts of a batch, one after another.", lower_bound=1
)
STEPS = flags.DEFINE_integer("steps", 100, "Steps to train for.", lower_bound=1)
SAVE_EVERY = flags.DEFINE_integer("save_every", 50, "Steps between states on disk.", 1)
SEED = flags.DEFINE_integer("seed", 0, "Seed of parameters and batches.")
FOLDER = flags.DEFINE_string(
    "folder",
    "outputs/language_model",
    "Folder for results, and for the state to resume from.",
)
PROMPT = flags.DEFINE_string("prompt", "The value of", "Text to continue.")
GENERATE = flags.DEFINE_integer(
    "generate", 32, "Tokens to continue it by, with the model in RAM; 0 for none.", 0
)
TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "Of what it says; 0 is greedy.", 0)
cli.define_flags("budget", "device", "planner", "solver", "objective", "time_limit")


# All that the parameters of a base depend on, and all that losses do.
OF_BASE = (SIZE, CHECKPOINT, ADAPTERS, QUANTIZE, DTYPE, SEED)
SETTINGS = (
    *OF_BASE, TEXT, TOKENIZER, UPDATE, RANK, OPTIMIZER, LEARNING_RATE, LENGTH,
    BATCH_SIZE, STEPS,
)  # fmt: skip


def load_model(store: Store | None) -> Model:
    """The model that flags name, with its large arrays in --base, or else in `store`,
    if either is given."""
    if BASE.value is None:
        return make_model(store)
    path, settings = pathlib.Path(BASE.value), {x.name: x.value for x in OF_BASE}
    if not path.exists():
        with contextlib.closing(poet_jax.FileStore(path.parent)) as made:
            base.save(path, make_model(made), settings)
    return base.load(path, config_of(), jnp.dtype(DTYPE.value), settings)


def config_of() -> Config:
    """The configuration of the model that flags name."""
    if CHECKPOINT.value is not None:
        return read_config(pathlib.Path(CHECKPOINT.value))[1]
    return SIZES[SIZE.value]


def make_model(store: Store | None) -> Model:
    """The model that flags name, at random or from its checkpoint."""
    dtype, place = jnp.dtype(DTYPE.value), placing(QUANTIZE.value, store)
    if ADAPTERS.value is not None:
        part = adapters.load(ADAPTERS.value, empty(config_of(), dtype))
        place = adapters.added(part, place)
    if CHECKPOINT.value is not None:
        return checkpoint.load(CHECKPOINT.value, dtype, place)
    return make(SIZES[SIZE.value], SEED.value, dtype, place)


def load_tokenizer(words: str, vocabulary: int, folder: pathlib.Path) -> Tokenizer:
    """The tokenizer that flags name, else one of the text, which `folder` keeps."""
    if TOKENIZER.value is not None:
        return text.load_tokenizer(pathlib.Path(TOKENIZER.value))
    if CHECKPOINT.value is not None:
        return text.load_tokenizer(pathlib.Path(CHECKPOINT.value) / TOKENIZER_FILE)
    kept = folder / TOKENIZER_FILE
    if not kept.exists():
        text.train_tokenizer(words, vocabulary).save(str(kept))
    return text.load_tokenizer(kept)


def train_step(model: Model, folder: pathlib.Path, store: Store | None) -> Any:
    """The step that flags name."""
    if QUANTIZE.value is not None and UPDATE.value == "full":
        raise ValueError(
            f"--quantize={QUANTIZE.value} is for kernels that are not trained, and "
            "--update=full trains all. Use --update=lora, or leave --quantize out."
        )
    usual = train.UPDATES[UPDATE.value] if CHECKPOINT.value else train.FIRST_RATE
    rate = LEARNING_RATE.value or usual
    device = cli.asked_device()
    return poet_jax.train_step(
        model,
        cli.asked_budget(device),
        loss_fn=loss_fn,
        optimizer=train.optimizer_of(OPTIMIZER.value, rate, STEPS.value, store),
        update=train.update_of(UPDATE.value, RANK.value, model),
        microbatches=MICROBATCHES.value,
        device=device,
        planner=cli.asked_planner(),
        plan_cache=folder / "plans",
        executor=poet_jax.HostExecutor(store),
    )


def save(step: Any, tokenizer: Tokenizer, folder: pathlib.Path) -> pathlib.Path:
    """Write the adapters, or else the model."""
    if UPDATE.value == "lora":
        part = nnx.as_pure(step.optimizer.part)
        adapters.save(part, step.model, folder / "adapters")
        return folder / "adapters"
    checkpoint.save(step.merged(), folder / "model")
    tokenizer.save(str(folder / "model" / TOKENIZER_FILE))
    return folder / "model"


def say(when: str, step: Any, tokenizer: Tokenizer) -> None:
    """Print how the model continues the prompt."""
    if GENERATE.value:
        said = PROMPT.value, GENERATE.value, TEMPERATURE.value
        print(f"{when}: {continued(step.merged(), tokenizer, *said)}")


@program
def main() -> None:
    folder = pathlib.Path(FOLDER.value)
    folder.mkdir(parents=True, exist_ok=True)
    if not jax.config.jax_compilation_cache_dir:  # a run that resumes compiles nothing
        jax.config.update("jax_compilation_cache_dir", str(folder / "compiled"))
    store = poet_jax.FileStore(folder) if ON_STORAGE.value else None
    words, model = text.read_text(TEXT.value), load_model(store)
    tokenizer = load_tokenizer(words, model.config.vocabulary, folder)
    text.check_fits(tokenizer, LENGTH.value, model.config)
    rows = text.pack(tokenizer.encode(words).ids, LENGTH.value)
    step = train_step(model, folder, store)
    print(step.plan(text.batch(rows, 0, BATCH_SIZE.value, SEED.value)))

    say("before", step, tokenizer)
    settings = {flag.name: flag.value for flag in SETTINGS}
    lines = train.fine_tune(step, rows, folder, settings, SAVE_EVERY.value)
    losses, seconds = (
        [float(line[name]) for line in lines] for name in ("loss", "seconds")
    )
    speed = BATCH_SIZE.value * LENGTH.value / statistics.median(seconds)
    print(
        f"loss {losses[0]:.4f} at the first step, {losses[-1]:.4f} at the last; "
        f"{speed:,.0f} tokens per second; saved in {save(step, tokenizer, folder)}"
    )
    say("after", step, tokenizer)


if __name__ == "__main__":
    app.run(main)
