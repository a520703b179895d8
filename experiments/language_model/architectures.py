"""Public architectures: how Hugging Face names their sizes and parameters.

The names are those of huggingface.co/docs/transformers for Llama, Qwen2, Gemma and
GPT-2.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from experiments.language_model import files
from experiments.language_model.models import Config, GPT2Config, LlamaConfig

# Our last step of a path where it is not the public one.
WEIGHTS = ("kernel", "embedding", "scale")
# What older files have beside parameters: masks and rotary frequencies.
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
HEAD = "lm_head.weight"

LLAMA_KEYS = {
    "vocabulary": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mlp_width": "intermediate_size",
    "positions": "max_position_embeddings",
    "epsilon": "rms_norm_eps",
    "theta": "rope_theta",
    "tied": "tie_word_embeddings",
}
GPT2_KEYS = {
    "vocabulary": "vocab_size",
    "width": "n_embd",
    "layers": "n_layer",
    "heads": "n_head",
    "positions": "n_positions",
    "epsilon": "layer_norm_epsilon",
}
REQUIRED = {"vocabulary", "width", "layers", "heads"}


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A public architecture, and the configurations of ours that are of it.

    Attributes:
      kind: of its configurations.
      model_type: what config.json calls it.
      prefix: of the names of all parameters but the head's.
      turned: kernels are stored as [outputs, inputs].
      keys: what config.json calls each size.
      choices: of our configuration, the same for every model of the architecture.
      defaults: by our name, of sizes that config.json leaves out.
      options: of config.json, with the values that our model computes; None is absent.
    """

    kind: type[Any]
    model_type: str
    prefix: str
    turned: bool
    keys: Mapping[str, str]
    choices: Mapping[str, Any]
    defaults: Mapping[str, Any]
    options: Mapping[str, tuple[Any, ...]]

    def has(self, config: Config) -> bool:
        """Whether a configuration is of this architecture."""
        return isinstance(config, self.kind) and all(
            getattr(config, name) == value for name, value in self.choices.items()
        )

    def public(self, path: str) -> str:
        """What files call our parameter, such as "layers/0/mlp/up_proj/kernel"."""
        *steps, last = path.split("/")
        name = ".".join([*steps, "weight" if last in WEIGHTS else last])
        return name if name == HEAD else f"{self.prefix}{name}"

    def turns(self, path: str) -> bool:
        """Whether files have the transpose of our parameter."""
        return self.turned and path.endswith("/kernel")


def _llama(
    model_type: str,
    choices: dict[str, Any],
    defaults: dict[str, Any],
    options: dict[str, tuple[Any, ...]],
) -> Architecture:
    shared = {"epsilon": 1e-6, "theta": 10_000.0, "tied": False}
    return Architecture(
        LlamaConfig,
        model_type,
        "model.",
        True,
        LLAMA_KEYS,
        choices,
        shared | defaults,
        {"rope_type": ("default",)} | options,
    )


ARCHITECTURES = {
    "LlamaForCausalLM": _llama(
        "llama",
        {"qkv_bias": False, "gemma": False},
        {"positions": 2048},
        {
            "hidden_act": ("silu", None),
            "attention_bias": (False, None),
            "mlp_bias": (False, None),
        },
    ),
    "Qwen2ForCausalLM": _llama(
        "qwen2",
        {"qkv_bias": True, "gemma": False},
        {"positions": 32_768},
        {"hidden_act": ("silu", None), "use_sliding_window": (False, None)},
    ),
    "GemmaForCausalLM": _llama(
        "gemma",
        {"qkv_bias": False, "gemma": True},
        {"positions": 8192, "tied": True, "head_dim": 256},
        {
            "hidden_activation": ("gelu_pytorch_tanh", None),
            "attention_bias": (False, None),
        },
    ),
    "GPT2LMHeadModel": Architecture(
        GPT2Config,
        "gpt2",
        "transformer.",
        False,
        GPT2_KEYS,
        {},
        {"positions": 1024, "epsilon": 1e-5},
        {
            "activation_function": ("gelu_new", None),
            "n_inner": (None,),
            "scale_attn_weights": (True, None),
            "scale_attn_by_inverse_layer_idx": (False, None),
            "tie_word_embeddings": (True, None),
        },
    ),
}


def architecture_of(config: Config) -> tuple[str, Architecture]:
    """The public name and architecture of a configuration.

    Raises ValueError if no public one has its choices.
    """
    for name, architecture in ARCHITECTURES.items():
        if architecture.has(config):
            return name, architecture
    raise ValueError(
        f"{config} has no public architecture. None has both its biases and Gemma's "
        "norms. Use qkv_bias=False or gemma=False."
    )


def read_config(folder: pathlib.Path) -> tuple[Architecture, Config]:
    """The architecture and sizes in the config.json of a folder.

    Raises FileNotFoundError without the file, and ValueError for what our models do not
    compute.
    """
    path = folder / "config.json"
    given = files.read_json(path)
    name = next(iter(given.get("architectures") or ()), None)
    if name not in ARCHITECTURES:
        raise ValueError(
            f"{path} has the architecture {name!r}. Those that can be read are "
            f"{', '.join(ARCHITECTURES)}. Use a checkpoint of one of these."
        )
    architecture = ARCHITECTURES[name]
    rope = given.get("rope_parameters") or given.get("rope_scaling") or {}
    given |= {"rope_type": rope.get("rope_type", rope.get("type", "default"))}
    given.setdefault("rope_theta", rope.get("rope_theta"))
    _check_options(path, name, given)
    return architecture, _sizes(path, architecture, given)


def _check_options(path: pathlib.Path, name: str, given: Mapping[str, Any]) -> None:
    for option, values in ARCHITECTURES[name].options.items():
        if given.get(option) not in values:
            raise ValueError(
                f"{path} has {option}={given.get(option)!r}. A {name} can be read with "
                f"{option}={values[0]!r} only. Use a checkpoint that has it."
            )


def _sizes(
    path: pathlib.Path, architecture: Architecture, given: Mapping[str, Any]
) -> Config:
    sizes = {
        name: given[key]
        for name, key in architecture.keys.items()
        if given.get(key) is not None
    }
    required = REQUIRED | (architecture.keys.keys() & {"mlp_width"})
    if missing := sorted(architecture.keys[name] for name in required - sizes.keys()):
        raise ValueError(
            f"{path} has no {', '.join(missing)}. These sizes have no default. Add "
            "them, or fetch the file again."
        )
    defaults = dict(architecture.defaults)
    if architecture.kind is LlamaConfig:
        head_dim = sizes["width"] // sizes["heads"]
        defaults = {"kv_heads": sizes["heads"], "head_dim": head_dim} | defaults
    return architecture.kind(**(defaults | sizes | dict(architecture.choices)))


def public_config(config: Config, dtype: str) -> dict[str, Any]:
    """What config.json says of a model with parameters of `dtype`."""
    name, architecture = architecture_of(config)
    sizes = {key: getattr(config, ours) for ours, key in architecture.keys.items()}
    options = {
        option: values[0]
        for option, values in architecture.options.items()
        if option != "rope_type" and values[0] is not None
    }
    kind = {"architectures": [name], "model_type": architecture.model_type}
    return {**kind, **sizes, **options, "torch_dtype": dtype}
