"""Language models in public files, and what they compute.

The references compute in numpy, with public names, one sequence at a time.
"""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_three_sentences
from flax import nnx
from language_models import TINY, arrays_of, assert_same, logits_of
from safetensors import safe_open
from safetensors.numpy import save_file

from experiments.language_model import checkpoint
from experiments.language_model.models import (
    SIZES,
    LlamaConfig,
    empty,
    loss_fn,
    make,
    variables,
)

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 19,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 14,
    "rms_norm_eps": 1e-3,
    "max_position_embeddings": 16,
}
CONFIGS = {
    "llama": LLAMA | {"rope_theta": 50.0},
    "qwen2": LLAMA
    | {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 1}
    | {"rope_parameters": {"rope_theta": 70.0, "rope_type": "default"}},
    "gemma": LLAMA
    | {"architectures": ["GemmaForCausalLM"], "num_attention_heads": 4}
    | {"num_key_value_heads": 2, "head_dim": 10, "tie_word_embeddings": True},
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": 19,
        "n_embd": 12,
        "n_layer": 2,
        "n_head": 3,
        "n_positions": 16,
        "layer_norm_epsilon": 1e-3,
    },
}
TOKENS = np.array([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]], np.int32)


def weights_of(kind):
    """Random parameters of CONFIGS[kind], by public name, as public files have them."""
    config, rng = CONFIGS[kind], np.random.default_rng(0)
    width = config.get("hidden_size") or config["n_embd"]
    shapes = {}
    for number in range(2):
        if kind == "gpt2":
            layer = f"transformer.h.{number}"
            for name, size in (("attn.c_attn", 3), ("attn.c_proj", 1), ("mlp.c_fc", 4)):
                shapes[f"{layer}.{name}.weight"] = width, size * width
                shapes[f"{layer}.{name}.bias"] = (size * width,)
            shapes[f"{layer}.mlp.c_proj.weight"] = 4 * width, width
            for name in ("mlp.c_proj.bias", "ln_1.weight", "ln_1.bias", "ln_2.weight"):
                shapes[f"{layer}.{name}"] = (width,)
            shapes[f"{layer}.ln_2.bias"] = (width,)
            continue
        layer, inner = f"model.layers.{number}", config["intermediate_size"]
        heads = config["num_attention_heads"]
        size = config.get("head_dim", width // heads)
        rows = {"q": heads * size}
        rows |= dict.fromkeys("kv", config.get("num_key_value_heads", heads) * size)
        for name, outputs in rows.items():
            shapes[f"{layer}.self_attn.{name}_proj.weight"] = outputs, width
            if kind == "qwen2":
                shapes[f"{layer}.self_attn.{name}_proj.bias"] = (outputs,)
        shapes[f"{layer}.self_attn.o_proj.weight"] = width, heads * size
        shapes[f"{layer}.mlp.gate_proj.weight"] = inner, width
        shapes[f"{layer}.mlp.up_proj.weight"] = inner, width
        shapes[f"{layer}.mlp.down_proj.weight"] = width, inner
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}.{name}.weight"] = (width,)
    if kind == "gpt2":
        shapes |= {"transformer.wte.weight": (19, width)}
        shapes |= {"transformer.wpe.weight": (16, width)}
        shapes |= {f"transformer.ln_f.{x}": (width,) for x in ("weight", "bias")}
    else:
        shapes |= {"model.embed_tokens.weight": (19, width)}
        shapes |= {"model.norm.weight": (width,)}
        if not config.get("tie_word_embeddings"):
            shapes["lm_head.weight"] = 19, width
    return {
        name: rng.normal(size=shape).astype(np.float32) * 0.5
        for name, shape in shapes.items()
    }


def softmax(x):
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def gelu(x):
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def attention(queries, keys, values):
    """Of lists of heads, [length, head_dim] each; equally many queries share a key."""
    shared, results = len(queries) // len(keys), []
    for number, query in enumerate(queries):
        key, value = keys[number // shared], values[number // shared]
        scores = query @ key.T / np.sqrt(query.shape[1])
        scores[np.triu_indices(len(scores), 1)] = -np.inf
        results.append(softmax(scores) @ value)
    return np.concatenate(results, 1)


def turned(x, theta):
    """x [length, head_dim] as complex numbers, each turned by its position's angle."""
    half = x.shape[1] // 2
    angles = np.arange(len(x))[:, None] * theta ** (-np.arange(half) / half)
    pairs = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angles)
    return np.concatenate([pairs.real, pairs.imag], 1)


def llama_reference(kind, weights, tokens):
    """Logits [length, vocabulary] of tokens [length]."""
    config, gemma = CONFIGS[kind], kind == "gemma"
    rope = config.get("rope_parameters", config)
    theta = rope.get("rope_theta", 10_000.0)

    def norm(x, name):
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"])
        return x * (weights[f"{name}.weight"] + gemma)

    def linear(x, name):
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0)

    x = weights["model.embed_tokens.weight"][tokens].astype(np.float64)
    x = x * np.sqrt(config["hidden_size"]) if gemma else x
    heads = config["num_attention_heads"]
    size = config.get("head_dim", config["hidden_size"] // heads)
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        normed = norm(x, f"{layer}.input_layernorm")
        q, k, v = (
            np.split(y, y.shape[1] // size, 1)
            for y in (linear(normed, f"{layer}.self_attn.{n}_proj") for n in "qkv")
        )
        q, k = ([turned(head, theta) for head in part] for part in (q, k))
        x = x + linear(attention(q, k, v), f"{layer}.self_attn.o_proj")
        normed = norm(x, f"{layer}.post_attention_layernorm")
        gate, up = (linear(normed, f"{layer}.mlp.{n}_proj") for n in ("gate", "up"))
        gate = gelu(gate) if gemma else gate / (1 + np.exp(-gate))
        x = x + linear(gate * up, f"{layer}.mlp.down_proj")
    embedding = weights["model.embed_tokens.weight"]
    return norm(x, "model.norm") @ weights.get("lm_head.weight", embedding).T


def gpt2_reference(kind, weights, tokens):
    """Logits [length, vocabulary] of tokens [length]."""
    config = CONFIGS[kind]

    def norm(x, name):
        mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        x = (x - mean) / np.sqrt(variance + config["layer_norm_epsilon"])
        return x * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def linear(x, name):
        return x @ weights[f"{name}.weight"] + weights[f"{name}.bias"]

    embedding = weights["transformer.wte.weight"]
    x = embedding[tokens].astype(np.float64)
    x = x + weights["transformer.wpe.weight"][: len(tokens)]
    for number in range(config["n_layer"]):
        layer = f"transformer.h.{number}"
        joined = linear(norm(x, f"{layer}.ln_1"), f"{layer}.attn.c_attn")
        parts = (np.split(part, config["n_head"], 1) for part in np.split(joined, 3, 1))
        x = x + linear(attention(*parts), f"{layer}.attn.c_proj")
        inner = gelu(linear(norm(x, f"{layer}.ln_2"), f"{layer}.mlp.c_fc"))
        x = x + linear(inner, f"{layer}.mlp.c_proj")
    return norm(x, "transformer.ln_f") @ embedding.T


def write_checkpoint(folder, kind, weights, **changes):
    folder.mkdir(exist_ok=True)
    config = CONFIGS[kind] | changes
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_public_checkpoint_computes_what_its_paper_says(kind, tmp_path):
    weights = weights_of(kind)
    model = checkpoint.load(write_checkpoint(tmp_path, kind, weights))
    reference = gpt2_reference if kind == "gpt2" else llama_reference
    expected = np.stack([reference(kind, weights, row) for row in TOKENS])
    np.testing.assert_allclose(logits_of(model, TOKENS), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("file_bytes", [2**20, 2000, 1])
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_saved_model_has_the_public_arrays_and_comes_back(kind, file_bytes, tmp_path):
    weights = weights_of(kind)
    model = checkpoint.load(write_checkpoint(tmp_path / "public", kind, weights))
    checkpoint.save(model, tmp_path / "ours", file_bytes)
    found = {}
    paths = sorted((tmp_path / "ours").glob("*.safetensors"))
    assert len(paths) == 1 if file_bytes == 2**20 else len(paths) > 2
    for path in paths:
        with safe_open(path, framework="numpy") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}
    assert found.keys() == weights.keys()
    for name, array in weights.items():
        np.testing.assert_array_equal(found[name], array, name)
    again = checkpoint.load(tmp_path / "ours")
    assert again.config == model.config
    assert_same(again, model)


def test_a_model_saved_over_another_leaves_nothing_of_it(tmp_path):
    for seed, file_bytes in ((0, 2000), (1, 2**20), (2, 2000)):
        model = make(TINY, seed)
        checkpoint.save(model, tmp_path, file_bytes)
        assert_same(checkpoint.load(tmp_path), model)


def test_older_files_have_buffers_a_head_and_no_prefix(tmp_path):
    weights = weights_of("gpt2")
    model = checkpoint.load(write_checkpoint(tmp_path / "new", "gpt2", weights))
    older = {name.removeprefix("transformer."): x for name, x in weights.items()}
    older["h.0.attn.bias"] = np.ones((1, 1, 16, 16), np.float32)
    older["lm_head.weight"] = older["wte.weight"].copy()
    folder = write_checkpoint(tmp_path / "old", "gpt2", older)
    assert_same(checkpoint.load(folder), model)
    assert_same(checkpoint.load(folder / "model.safetensors"), model)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_half_precision_is_read_and_written(dtype, tmp_path):
    model = make(TINY, dtype=jnp.bfloat16)
    checkpoint.save(model, tmp_path)
    again = checkpoint.load(tmp_path, dtype)
    for path, array in arrays_of(model).items():
        found = arrays_of(again)[path]
        assert found.dtype == dtype
        np.testing.assert_array_equal(found.astype(array.dtype), array)
    loss = nnx.jit(loss_fn)(again, TOKENS)
    assert loss.dtype == "float32" and abs(loss - np.log(64)) < 0.1


DAMAGES = {
    "missing": (lambda x: x.pop("model.norm.weight"), "without model.norm.weight"),
    "extra": (lambda x: x.update(more=np.zeros(2)), "with the unknown model.more"),
    "misshapen": (
        lambda x: x.update({"model.norm.weight": np.zeros(5, np.float32)}),
        r"another shape of model.norm.weight \[5\] instead of \[12\]",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_arrays_of_another_model_are_named(name, tmp_path):
    damage, says = DAMAGES[name]
    weights = weights_of("llama")
    damage(weights)
    folder = write_checkpoint(tmp_path, "llama", weights)
    with pytest.raises(ValueError, match=says) as caught:
        checkpoint.load(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architectures": ["BertModel"]}, "Those that can be read are Llama"),
        ({"architectures": None}, "Those that can be read are Llama"),
        ({"attention_bias": True}, "attention_bias=False only"),
        ({"hidden_act": "relu"}, "hidden_act='silu' only"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_type='default' only"),
        ({"hidden_size": None}, "has no hidden_size"),
    ],
)
def test_a_model_that_ours_is_not_is_refused(changes, says, tmp_path):
    folder = write_checkpoint(tmp_path, "llama", weights_of("llama"), **changes)
    with pytest.raises(ValueError, match=says) as caught:
        checkpoint.load(folder)
    assert_three_sentences(caught.value)


def test_no_public_architecture_has_all_options(tmp_path):
    model = make(LlamaConfig(8, 4, 1, 1, 1, 4, 4, qkv_bias=True, gemma=True))
    with pytest.raises(ValueError, match="Use qkv_bias=False") as caught:
        checkpoint.save(model, tmp_path / "new")
    assert_three_sentences(caught.value)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_that_is_missing_or_cut_short_is_named(name, tmp_path):
    path = write_checkpoint(tmp_path, "llama", weights_of("llama")) / name
    content = path.read_bytes()
    for end in (0, 4, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:end])
        with pytest.raises(ValueError, match="is damaged") as caught:
            checkpoint.load(tmp_path)
        assert str(path) in str(caught.value)
    path.unlink()
    with pytest.raises(FileNotFoundError, match="is not a file") as caught:
        checkpoint.load(tmp_path)
    assert_three_sentences(caught.value, path)


def test_sizes_have_the_published_numbers_of_parameters():
    """GPT-2, SmolLM-135M and TinyLlama 1.1B, as listed on huggingface.co."""
    published = {"125m": 124_439_808, "135m": 134_515_008, "1b": 1_100_048_384}
    for name, number in published.items():
        model = empty(SIZES[name])
        assert sum(x.size for x in variables(model).values()) == number
