"""Search for which convolutions of a MobileNetV2 to adapt within a budget.

    python -m experiments.sparse.adapt_search
    python -m experiments.sparse.adapt --update=searched --budget=15%

The first command measures what each of 20 convolutions adds to the accuracy of training
the new classifier alone, on the task of `experiments.sparse.adapt` with --seed=100,
which no row there has. That takes 5 minutes on two cores; scores are kept in
contributions.jsonl as they come. Then `poet_jax.update.search` chooses those of most
gain within --within, a size or a percentage of what full training needs when everything
is kept; it writes searched.json, and draws contributions.png. With --plot it only
draws.

Gains are measured, each once: one standard error of a row in `experiments.sparse.adapt`
is about a point. Flags that `experiments.sparse.adapt` lists, too, mean the same here.
"""

import json
import pathlib
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from absl import app, flags, logging
from flax import nnx

import poet_jax
from experiments.models import loss_fn
from experiments.program import program
from experiments.sparse import adapt, schemes
from experiments.sparse.halves import Halves
from poet_jax import cli
from poet_jax.update import Update, contributions, search
from poet_jax.viz.figures import drawn

PARTS = ("expand", "depthwise", "project")
SEED = 100
LEARNING_RATE = 1e-2

# Flags of experiments.sparse.adapt that mean the same here, so that --help lists them.
for name in (
    "steps", "examples", "batch_size", "model", "dataset", "pixels", "old_steps",
    "time_limit", "plan_cache", "output", "plot",
):  # fmt: skip
    flags.declare_key_flag(name)

WITHIN = flags.DEFINE_string("within", "15%", "Size, or percentage of full keep-all.")


def items(model: nnx.Module) -> dict[str, float]:
    """A pattern for the kernel of each convolution in a block of `model`."""
    paths = [
        "/".join(map(str, path))
        for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))
    ]
    kernel = re.compile(rf"blocks/\d+/({'|'.join(PARTS)})/.*kernel")
    return {path: 1.0 for path in paths if kernel.fullmatch(path)}


def scorer(key: dict[str, Any], halves: Halves) -> Callable[[Update | None], float]:
    """The accuracy of a scheme, trained as in `experiments.sparse.adapt` without a
    budget.

    All gradients are computed and those of the scheme are used, so that one executable
    serves every scheme.
    """
    train, held_out = halves.few(key["examples"], SEED)
    rate = optax.cosine_decay_schedule(LEARNING_RATE, key["steps"])
    optimizer = optax.adamw(rate)
    start = adapt.beginning(key, halves, SEED, keep=True)
    graphdef, params, rest = nnx.split(start, nnx.Param, ...)

    @jax.jit
    def step(params, moments, mask, batch):
        def loss(params):
            return loss_fn(nnx.merge(graphdef, params, rest, copy=True), batch)

        gradients = jax.grad(loss)(params)
        updates, moments = optimizer.update(gradients, moments, params)
        updates = jax.tree.map(jnp.multiply, updates, mask)
        return optax.apply_updates(params, updates), moments

    def score(update: Update | None) -> float:
        trained, moments = params, optimizer.init(params)
        mask = jax.tree.map(lambda _: False, nnx.as_pure(params))
        if update is not None:
            mask = update.mask(nnx.as_pure(params))
        mask = jax.tree.unflatten(
            jax.tree.structure(params), [jnp.float32(x) for x in jax.tree.leaves(mask)]
        )
        for batch in train.batches(key["batch_size"], SEED, key["steps"]):
            trained, moments = step(trained, moments, mask, batch)
        model = nnx.merge(graphdef, trained, rest, copy=True)
        return schemes.accuracy(model, held_out)

    return score


def found(
    key: dict[str, Any], halves: Halves, gains: dict[str, float]
) -> dict[str, float]:
    """The fractions of the convolutions of most gain within the budget."""
    optimizer = optax.adamw(LEARNING_RATE)
    batch = next(halves.new.batches(key["batch_size"], 0, 1))
    usual = adapt.beginning(key, halves, SEED, keep=False)
    folder = flags.FLAGS.plan_cache
    full_bytes = schemes.full_keep_all_bytes(usual, batch, optimizer, folder)
    step = poet_jax.train_step(
        adapt.beginning(key, halves, SEED, keep=True),
        schemes.budget_bytes(WITHIN.value, full_bytes),
        loss_fn=loss_fn,
        optimizer=optimizer,
        update=Update({**dict.fromkeys(gains, 1.0), **adapt.HEAD}, **adapt.KEEP),
        planner=poet_jax.MilpPlanner(time_limit_seconds=flags.FLAGS.time_limit),
        plan_cache=folder,
    )
    scheme = search(step, batch, gains=gains)
    logging.info("%s", scheme)
    return dict(scheme.update.fractions)


def scored(path: pathlib.Path) -> dict[str, float]:
    """The gains in a file that `contributions` wrote."""

    def missing(update: Update | None) -> float:
        raise ValueError(
            f"A figure was asked for, and {path} has no score of {update}. It is drawn "
            "from that file. Use python -m experiments.sparse.adapt_search, without "
            "--plot."
        )

    lines = path.read_text().splitlines() if path.exists() else []
    patterns = {
        pattern
        for line in lines
        for pattern in json.loads(line)["update"]
        if pattern not in adapt.HEAD
    }
    order = dict.fromkeys(sorted(patterns), 1.0)
    return contributions(missing, order, always=adapt.HEAD, path=path)


def plot(gains: dict[str, float], chosen: set[str], folder: pathlib.Path) -> None:
    """A bar for each convolution, by block; dark outlines for those that are chosen."""
    # Okabe and Ito's colours.
    colours = dict(zip(PARTS, ("#0072B2", "#E69F00", "#009E73"), strict=True))
    labels = ("first pointwise", "depthwise", "second pointwise")
    names = dict(zip(PARTS, labels, strict=True))
    with drawn(folder / "contributions.png", 3) as figure:
        axis = figure.subplots()
        for pattern in sorted(gains, key=lambda x: PARTS.index(x.split("/")[2])):
            _, block, part, *_ = pattern.split("/")
            axis.bar(
                int(block) + 0.27 * (PARTS.index(part) - 1),
                100 * gains[pattern],
                0.25,
                color=colours[part],
                edgecolor="black" if pattern in chosen else "none",
                label=names.pop(part, None),
            )
        axis.axhline(0, color="#999999", linewidth=0.8)
        axis.set_xlabel("block; outlined: chosen by the search")
        axis.set_ylabel("measured points over the classifier alone")
        figure.legend(loc="outside upper center", ncols=3)


@program
def main() -> None:
    schemes.keep_compiled(adapt.COMPILED)
    folder = cli.output_folder()
    chosen, scores = folder / "searched.json", folder / "contributions.jsonl"
    if flags.FLAGS.plot:
        plot(scored(scores), set(json.loads(chosen.read_text())), folder)
        return
    key = {name: flags.FLAGS[name].value for name in adapt.KEY[2:]}
    halves = adapt.load_halves(key["dataset"], key["pixels"])
    model = adapt.beginning(key, halves, SEED, keep=True)
    gains = contributions(
        scorer(key, halves), items(model), always=adapt.HEAD, path=scores
    )
    chosen.write_text(json.dumps(found(key, halves, gains), indent=1) + "\n")
    plot(gains, set(json.loads(chosen.read_text())), folder)


if __name__ == "__main__":
    app.run(main)
