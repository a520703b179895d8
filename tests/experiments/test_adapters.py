"""Adapters of language models in public files."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_three_sentences
from flax import nnx
from language_models import TINY, TINY_GPT2, arrays_of
from safetensors import safe_open
from safetensors.numpy import save_file

from experiments.language_model import adapters
from experiments.language_model.models import IN_RAM, LlamaConfig, make, variables
from poet_jax.update.part import Adapter, Part


def adapted(config, ranks, dtype=jnp.float32):
    """A model, and adapters that are not zero, of ranks by path."""
    model, rng = make(config, dtype=dtype), np.random.default_rng(0)
    kernels = variables(model, nnx.Param)

    def drawn(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    return model, Part(
        adapters={
            path: Adapter(
                drawn(kernels[path].shape[0], rank), drawn(rank, kernels[path].shape[1])
            )
            for path, rank in ranks.items()
        },
        trained=(),
    )


QUERIES = {f"layers/{number}/self_attn/q_proj/kernel": 3 for number in range(2)}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_adapters_are_in_the_public_format_and_come_back(dtype, tmp_path):
    model, part = adapted(TINY, QUERIES, dtype)
    adapters.save(part, model, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA" and config["target_modules"] == ["q_proj"]
    assert config["r"] == config["lora_alpha"] == 3 and not config["fan_in_fan_out"]
    name = "base_model.model.model.layers.1.self_attn.q_proj"
    with safe_open(tmp_path / "adapter_model.safetensors", framework="numpy") as file:
        assert len(file.keys()) == 4
        a, b = (file.get_tensor(f"{name}.lora_{x}.weight") for x in "AB")
    adapter = part.adapters["layers/1/self_attn/q_proj/kernel"]
    np.testing.assert_array_equal(a, adapter.a.T)
    np.testing.assert_array_equal(b, adapter.b.T)
    again = adapters.load(tmp_path, model)
    assert jax.tree.structure(again) == jax.tree.structure(part)
    jax.tree.map(np.testing.assert_array_equal, again, part)


def test_adapters_of_some_layers_are_named_in_full(tmp_path):
    model, part = adapted(TINY_GPT2, {"h/1/attn/c_proj/kernel": 2})
    adapters.save(part, model, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_modules"] == ["transformer.h.1.attn.c_proj"]
    assert config["fan_in_fan_out"]
    assert adapters.load(tmp_path, model).adapters.keys() == part.adapters.keys()


def test_added_adapters_are_scaled_and_change_their_matrices_alone(tmp_path):
    model, part = adapted(TINY, QUERIES)
    before = arrays_of(model)
    adapters.save(part, model, tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_alpha": 6}))
    place = adapters.added(adapters.load(tmp_path, model), IN_RAM)
    for name, array in arrays_of(make(TINY, place=place)).items():
        if name in QUERIES:
            a, b = part.adapters[name]
            np.testing.assert_allclose(array, before[name] + 2 * a @ b, 1e-5, 1e-5)
        else:
            np.testing.assert_array_equal(array, before[name])


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"peft_type": "LOHA"}, "LORA"), ({"use_dora": True}, "use_dora=False only")],
)
def test_adapters_of_another_kind_are_refused(changes, says, tmp_path):
    model, part = adapted(TINY, QUERIES)
    adapters.save(part, model, tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ValueError, match=says) as caught:
        adapters.load(tmp_path, model)
    assert_three_sentences(caught.value)


def test_adapters_of_another_model_are_refused(tmp_path):
    model, part = adapted(TINY, QUERIES)
    adapters.save(part, model, tmp_path)
    with pytest.raises(ValueError, match="with the unknown base_model.model.model"):
        adapters.load(tmp_path, make(TINY_GPT2))
    wider = LlamaConfig(64, 20, 2, 4, 2, 6, 24)
    with pytest.raises(ValueError, match=r"\[3, 16\] instead of \[3, 20\]"):
        adapters.load(tmp_path, make(wider))
    path = tmp_path / "adapter_model.safetensors"
    with safe_open(path, framework="numpy") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}
    arrays.pop("base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight")
    save_file(arrays, path)
    with pytest.raises(ValueError, match="without base_model.*q_proj.lora_B"):
        adapters.load(tmp_path, model)
    (tmp_path / "adapter_config.json").unlink()
    with pytest.raises(FileNotFoundError, match="is not a file"):
        adapters.load(tmp_path, model)


def test_adapters_of_several_ranks_or_none_are_refused(tmp_path):
    for ranks in (dict(zip(QUERIES, (2, 3), strict=True)), {}):
        model, part = adapted(TINY, ranks)
        with pytest.raises(ValueError, match="of one rank") as caught:
            adapters.save(part, model, tmp_path)
        assert_three_sentences(caught.value)
