"""Language models: text, generation, and training that resumes."""

import dataclasses
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_three_sentences
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from language_models import TINY, TINY_GPT2, assert_same, logits_of
from processes import run_module

import poet_jax
from experiments.language_model import adapters, base, checkpoint, text, train
from experiments.language_model.generate import continued, generate
from experiments.language_model.models import (
    IN_RAM,
    LlamaConfig,
    loss_fn,
    make,
    placing,
    variables,
)
from experiments.program import read_rows
from poet_jax.flax import nnx as nnx_steps
from poet_jax.update.quantization import dequantized


@given(st.integers(2, 60), st.integers(1, 12))
def test_every_token_but_a_remainder_is_in_a_row_once_in_order(count, length):
    tokens = list(range(count))
    if count <= length:
        with pytest.raises(ValueError, match="At least one row") as caught:
            text.pack(tokens, length)
        assert_three_sentences(caught.value)
        return
    rows = text.pack(tokens, length)
    assert rows.shape[1] == length + 1 and rows.dtype == np.int32
    assert rows.ravel().tolist() == tokens[: rows.size]
    assert count - rows.size < length + 1


@given(st.integers(1, 9), st.integers(1, 12), st.integers(0, 20))
def test_batches_do_not_depend_on_where_they_start(count, size, start):
    rows = np.arange(2 * count).reshape(count, 2)
    whole = list(text.batches(rows, size, 7, 0, 24))
    np.testing.assert_array_equal(
        whole[start:], list(text.batches(rows, size, 7, start, 24))
    )
    seen = np.concatenate(whole)[:, 0]
    for epoch in range(len(seen) // count):
        assert len(set(seen[epoch * count : (epoch + 1) * count])) == count


def test_tokens_of_a_trained_tokenizer_are_its_text(tmp_path):
    words = "the cat sat on the mat; the cat – «le chat» – sat.\n"
    tokenizer = text.train_tokenizer(words, 280)
    assert 256 < tokenizer.get_vocab_size() <= 280
    tokens = tokenizer.encode(words).ids
    assert len(tokens) < len(words.encode()) and tokenizer.decode(tokens) == words
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    again = text.load_tokenizer(tmp_path / "tokenizer.json")
    assert again.encode("a new text").ids == tokenizer.encode("a new text").ids


def test_a_tokenizer_that_does_not_fit_is_refused(tmp_path):
    tokenizer = text.train_tokenizer("abc", 256)
    config = LlamaConfig(256, 8, 1, 1, 1, 8, 8, positions=16)
    text.check_fits(tokenizer, 16, config)
    with pytest.raises(ValueError, match="has 16 positions") as caught:
        text.check_fits(tokenizer, 17, config)
    assert_three_sentences(caught.value)
    with pytest.raises(ValueError, match="has 256 tokens, and the model") as caught:
        text.check_fits(tokenizer, 16, TINY)
    assert_three_sentences(caught.value)
    path = tmp_path / "tokenizer.json"
    with pytest.raises(FileNotFoundError, match="is not a file") as caught:
        text.load_tokenizer(path)
    assert_three_sentences(caught.value, path)
    path.write_text("{}")
    with pytest.raises(ValueError, match="is not a tokenizer") as caught:
        text.load_tokenizer(path)
    assert_three_sentences(caught.value, path)


@pytest.mark.parametrize("config", [TINY, TINY_GPT2], ids=["llama", "gpt2"])
def test_a_cache_changes_no_token(config):
    model, start = make(config), [5, 3, 9]
    for variable in variables(model).values():
        variable.set_value(variable[...] * 8)  # so that no token is near another
    tokens = np.array([start + 6 * [0]], np.int32)
    for place in range(3, 9):  # tokens see those before alone
        tokens[0, place] = logits_of(model, tokens)[0, place - 1].argmax()
    expected = tokens[0, 3:].tolist()
    assert generate(model, start, 6) == expected and len(set(expected)) > 1
    drawn = {tuple(generate(model, start, 6, temperature=99, seed=x)) for x in (0, 1)}
    assert len(drawn) == 2
    assert generate(model, start, 6, temperature=1e-4) == expected


def test_a_prompt_that_cannot_be_continued_is_refused():
    tokenizer = text.train_tokenizer("abc", 256)
    model = make(LlamaConfig(256, 8, 1, 1, 1, 8, 8, positions=16))
    assert continued(model, tokenizer, "abc", 13, 0.0).startswith("abc")
    with pytest.raises(ValueError, match="no token") as caught:
        continued(model, tokenizer, "", 3, 0.0)
    assert_three_sentences(caught.value)
    with pytest.raises(ValueError, match="has 16 positions"):
        continued(model, tokenizer, "abc", 14, 0.0)


SETTINGS = {"steps": 6, "batch_size": 4, "seed": 0}
ROWS = text.pack([number * number % 61 for number in range(400)], 16)


def tiny_step(folder, update, optimizer="adamw", config=TINY):
    model = make(dataclasses.replace(config, layers=1))
    return poet_jax.train_step(
        model,
        "80%",
        loss_fn=loss_fn,
        optimizer=train.optimizer_of(optimizer, 2e-2, SETTINGS["steps"]),
        update=train.update_of(update, 2, model),
        device=poet_jax.devices.JETSON_TX2,
        planner=poet_jax.greedy,
        plan_cache=folder / "plans",
    )


class Killed(Exception):
    pass


@dataclasses.dataclass
class Dying:
    """A step that raises Killed after some calls."""

    step: nnx_steps.TrainStep
    calls: int

    def __getattr__(self, name):
        return getattr(self.step, name)

    def __call__(self, batch):
        if not self.calls:
            raise Killed
        self.calls -= 1
        return self.step(batch)


def losses_of(step, folder):
    folder.mkdir(exist_ok=True)
    lines = train.fine_tune(step, ROWS, folder, SETTINGS, save_every=2)
    assert [int(line["step"]) for line in lines] == list(range(6))
    return [float(line["loss"]) for line in lines]


@pytest.mark.usefixtures("standard_promotion")  # of a schedule of rates of optax
@pytest.mark.parametrize(
    ("update", "optimizer", "config"),
    [("full", "adamw", TINY_GPT2), ("lora", "adafactor", TINY)],
)
def test_a_run_that_was_killed_has_the_losses_of_one_that_was_not(
    update, optimizer, config, tmp_path
):
    step, again = (tiny_step(tmp_path, update, optimizer, config) for _ in range(2))
    schedule = step.plan(text.batch(ROWS, 0, 4, 0))
    assert schedule.budget.memory_bytes < schedule.baseline.peak_bytes
    assert schedule.compiled_bytes <= schedule.budget.memory_bytes
    start = tmp_path / "start.safetensors"
    train.save_state(start, step, SETTINGS)
    with pytest.raises(Killed):
        losses_of(Dying(step, 5), tmp_path / "killed")
    assert train.load_state(start, step, SETTINGS) == 0
    whole = losses_of(step, tmp_path / "whole")
    assert losses_of(again, tmp_path / "killed") == whole
    assert len(set(whole)) == 6 and (update != "full" or whole[-1] < whole[0] - 0.3)
    assert_same(step.model, again.model)
    assert_same(step.optimizer, again.optimizer)
    assert losses_of(Dying(step, 0), tmp_path / "killed") == whole  # it is complete


@pytest.mark.usefixtures("standard_promotion")
def test_another_run_is_not_resumed(tmp_path):
    step = tiny_step(tmp_path, "lora")
    path = tmp_path / "state.safetensors"
    train.save_state(path, step, SETTINGS)
    with pytest.raises(ValueError, match="is of --seed=0") as caught:
        train.load_state(path, step, SETTINGS | {"seed": 1})
    assert_three_sentences(caught.value)
    with pytest.raises(ValueError, match="without model/"):
        train.load_state(path, tiny_step(tmp_path, "full"), SETTINGS)
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(ValueError, match="is damaged"):
        train.load_state(path, step, SETTINGS)


@pytest.mark.parametrize("kind", [None, "int8", "int4"])
def test_a_base_comes_back_from_its_file(kind, tmp_path):
    path, store = tmp_path / "base", poet_jax.HostStore()
    model = make(TINY, place=placing(kind, store))
    settings = {"quantize": kind, "seed": 0}
    base.save(path, model, settings)
    again = base.load(path, TINY, jnp.float32, settings)
    for one, other in zip(*map(arrays, (model, again)), strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(ValueError, match="is of --seed=0.*--base") as caught:
        base.load(path, TINY, jnp.float32, settings | {"seed": 1})
    assert_three_sentences(caught.value)


def arrays(model):
    return map(np.asarray, jax.tree.leaves(nnx.to_pure_dict(nnx.state(model))))


def test_biases_of_a_model_without_are_refused():
    with pytest.raises(ValueError, match="Use --update=lora") as caught:
        train.update_of("bias", 8, make(TINY))
    assert_three_sentences(caught.value)


def test_the_program_writes_what_it_trained(tmp_path):
    words = "A budget counts every byte of the step.\n" * 50
    (tmp_path / "words.txt").write_text(words)
    model = make(LlamaConfig(280, 64, 1, 2, 1, 4, 16, positions=32))
    checkpoint.save(model, tmp_path / "start")
    tokenizer = text.train_tokenizer(words, 280)
    tokenizer.save(str(tmp_path / "start" / "tokenizer.json"))
    command = [sys.executable, "-m", "experiments.language_model", "--budget=90%"]
    folders = f"--checkpoint={tmp_path / 'start'}", f"--folder={tmp_path / 'run'}"
    what = f"--text={tmp_path / 'words.txt'}", "--quantize=int8", "--rank=2"
    sizes = "--steps=3", "--length=16", "--generate=3", "--prompt=every"
    device = "--device=JETSON_TX2", "--planner=greedy", f"--base={tmp_path / 'base'}"
    command += [*folders, *what, *sizes, *device]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "compiled:" in done.stdout and "\nbefore: every" in done.stdout
    losses = [float(row["loss"]) for row in read_rows(tmp_path / "run" / "losses.csv")]
    assert len(losses) == 3
    part = adapters.load(tmp_path / "run" / "adapters", model)
    assert len(part.adapters) == 7
    add, few = adapters.added(part, IN_RAM), placing("int8")
    model = checkpoint.load(
        tmp_path / "start",
        place=lambda path, x: add(path, dequantized(few(path, x))),
    )
    after = continued(model, tokenizer, "every", 3, 0.0)
    assert f"\nafter: {after}\n" in done.stdout
    rows = text.pack(tokenizer.encode(words).ids, 16)
    assert loss_fn(model, text.batch(rows, 0, 8, 0)) < losses[0]


def test_ten_million_parameters_learn_to_say_a_text(tmp_path):
    words = " ".join(text.read_text()[:600].split())
    (tmp_path / "words.txt").write_text(words)
    prompt = words[:40].rsplit(" ", 1)[0]
    command = [sys.executable, "-m", "experiments.language_model", "--size=10m"]
    how = "--update=full", "--budget=75%", "--planner=greedy", "--device=JETSON_TX2"
    what = f"--text={tmp_path / 'words.txt'}", f"--folder={tmp_path}"
    sizes = "--batch_size=4", "--length=64", "--steps=45", "--learning_rate=6e-4"
    said = f"--prompt={prompt}", "--generate=12"
    command += [*how, *what, *sizes, *said]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    losses = [float(row["loss"]) for row in read_rows(tmp_path / "losses.csv")]
    assert losses[-1] < losses[0] / 2
    before, after = (
        re.search(f"^{when}: (.*)", done.stdout, re.MULTILINE)[1].strip()
        for when in ("before", "after")
    )
    assert before not in words and after in words and len(after) > len(prompt)


def test_a_system_is_measured_that_needs_no_torch(tmp_path):
    flags = ("--size=1m", "--tasks=lora", "--systems=jit_checkpoint", "--steps=2")
    run_module("benchmarks.beside_torch", tmp_path, *flags)
    (row,) = read_rows(tmp_path / "beside_torch.csv")
    assert (row["task"], row["system"]) == ("lora", "jit_checkpoint")
    # Of random parameters and tokens.
    assert float(row["first_loss"]) == pytest.approx(np.log(2048), rel=0.01)
    assert 0 < int(row["step_bytes"]) <= int(row["process_bytes"])
