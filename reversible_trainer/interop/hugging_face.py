"""Models of Hugging Face's `transformers`, from their folders; neither it nor torch is needed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from reversible_trainer.interop.torch_files import read_tensors
from reversible_trainer.layers import (
    AxialPositions,
    Chunked,
    ChunkedLoss,
    CrossEntropy,
    Dense,
    Dropout,
    Dup,
    Embedding,
    FeedForward,
    HalfResidual,
    Layer,
    LayerNorm,
    LearnedPositions,
    LocalAttention,
    LossLayer,
    LossSerial,
    LSHAttention,
    ReversibleConcatenatePair,
    ReversibleSerial,
    ReversibleSwap,
    Serial,
)
from reversible_trainer.layers.base import output_signature, put, take
from reversible_trainer.tree import Array, Tree, describe, path_name

_WHO = "from_hugging_face_reformer"


def from_hugging_face_reformer(
    folder: str | os.PathLike[str], directions: Mapping[int, np.ndarray] | None = None
) -> tuple[list[Layer], list[Tree], list[Tree]]:
    """A `ReformerModelWithLMHead` of `transformers`, as blocks and what a `TrainState` holds for them.

    Args:
      folder: Has `config.json` and the weights: `model.safetensors` or `pytorch_model.bin`,
        or their parts with an index.
      directions: Layer, counted from 0, -> the directions `[H, K, hashes, N]` that its LSH
        attention hashes with from now on, N being half the number of buckets, or half the sum
        of their factors. Other LSH layers draw directions of their own: for each pass, or
        once if the model has a `hash_seed`. (Those of `transformers` come from torch's
        generator, so only recorded ones give the very same logits.)

    Returns:
      `(blocks, weights, states)`: lists with an entry per block, its arrays NumPy's. They get
      into a run like this:

          blocks, weights, states = from_hugging_face_reformer(folder)
          trainer = Trainer(blocks, optimizer)
          place = trainer.placement.to_host
          state = trainer.init(key, batch)
          state = dataclasses.replace(state, weights=[*map(place, weights)], states=[*map(place, states)])

    Raises:
      ValueError: If a file cannot be read, a setting has no counterpart here, or the weights
        are not those of the settings; the message says which.

    Logits are those of `transformers` but for rounding, for sequences that need no padding: as
    long as a multiple of the chunk lengths, or no longer than any of them. (And which have more
    chunks than `local_num_chunks_before`: fewer, and `transformers` counts some twice.) Dropout
    in training differs in places: that of the embedding comes after the positions, and that
    within the feed-forward layers after the activation.

    Source: Kitaev et al. 2020 (https://arxiv.org/abs/2001.04451).
    """
    folder, directions = Path(folder), directions or {}
    settings = _settings(folder / "config.json")
    blocks = _blocks(settings, directions)
    weights, states = _signatures(blocks)
    arrays = _without_duplicates(_read_weights(folder))
    return blocks, _filled(weights, arrays), _drawn(states, settings, directions)


# Settings.

_DEFAULTS = {  # of settings that config.json may lack
    "chunk_size_feed_forward": 0,
    "chunk_size_lm_head": 0,
    "hash_seed": None,
    "is_decoder": False,
    "num_buckets": None,
    "tie_word_embeddings": False,
}


class _Settings(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        raise ValueError(f"{_WHO}: config.json lacks {name}; expected the settings of a Reformer.")


def _exact_gelu(x: Array) -> Array:
    return jax.nn.gelu(x, approximate=False)


_ACTIVATIONS = {
    "relu": jax.nn.relu,
    "gelu": _exact_gelu,
    "gelu_new": jax.nn.gelu,
    "gelu_pytorch_tanh": jax.nn.gelu,
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
}


def _settings(path: Path) -> _Settings:
    """What `config.json` says, if all of it can be honoured."""
    settings = _Settings(_DEFAULTS | _read_json(path))

    def check(name: str, honoured: bool, why: str) -> None:
        if not honoured:
            raise ValueError(
                f"{_WHO}: {path} says {name} = {json.dumps(settings[name])}, which has no like here: {why}."
            )

    check("model_type", settings["model_type"] == "reformer", "only the Reformer can be imported")
    around = "without a causal mask the first chunk sees the last one there, and nothing before itself here"
    check("is_decoder", settings["is_decoder"] is True, around)
    check("attn_layers", {*settings["attn_layers"]} <= {"local", "lsh"}, 'a layer must be "local" or "lsh"')
    for kind in {*settings["attn_layers"]}:
        check(
            f"{kind}_num_chunks_after", settings[f"{kind}_num_chunks_after"] == 0, "a decoder sees none after its own"
        )
    check("hidden_act", settings["hidden_act"] in _ACTIVATIONS, f"there are {', '.join(_ACTIVATIONS)}")
    check("tie_word_embeddings", not settings["tie_word_embeddings"], "the head reads two streams side by side")
    if settings["axial_pos_embds"]:
        check("axial_pos_shape", len(settings["axial_pos_shape"]) == 2, "there are two axes")
    return settings


def _blocks(settings: _Settings, directions: Mapping[int, np.ndarray]) -> list[Layer]:
    kinds = settings["attn_layers"]
    if wrong := sorted(directions.keys() - {i for i, kind in enumerate(kinds) if kind == "lsh"}):
        raise ValueError(f"{_WHO}: directions are given for layers {wrong}, which are no LSH layers; all are {kinds}.")
    vocab_size, rate = settings["vocab_size"], settings["hidden_dropout_prob"]
    norm, dropout = LayerNorm(settings["layer_norm_eps"]), Dropout(rate)
    if settings["axial_pos_embds"]:
        shape, widths = (tuple(settings[name]) for name in ("axial_pos_shape", "axial_pos_embds_dim"))
        positions: Layer = AxialPositions(shape, widths)
    else:
        positions = LearnedPositions(settings["max_position_embeddings"])
    feed_forward: Layer = FeedForward(settings["feed_forward_size"], _ACTIVATIONS[settings["hidden_act"]], rate)
    if length := settings["chunk_size_feed_forward"]:
        feed_forward = Chunked(feed_forward, length)
    head: LossLayer = LossSerial(ReversibleConcatenatePair(), norm, dropout, Dense(vocab_size), CrossEntropy())
    if length := settings["chunk_size_lm_head"]:
        head = ChunkedLoss(head, length)

    def block(i: int) -> Layer:
        attention = Serial(norm, _attention(settings, kinds[i], i in directions), dropout)
        half = HalfResidual(Serial(norm, feed_forward, dropout))
        return ReversibleSerial(HalfResidual(attention), ReversibleSwap(), half, ReversibleSwap())

    embedding = Serial(
        Embedding(vocab_size, settings["hidden_size"], max_length=settings["max_position_embeddings"]),
        positions,
        dropout,
        Dup(),
    )
    return [embedding, *map(block, range(len(kinds))), head]


def _attention(settings: _Settings, kind: str, given: bool) -> Layer:
    """Attention of one layer; `given` says whether its directions are."""
    heads, width, before = (
        settings[name] for name in ("num_attention_heads", "attention_head_size", f"{kind}_num_chunks_before")
    )
    length, rate = settings[f"{kind}_attn_chunk_length"], settings[f"{kind}_attention_probs_dropout_prob"]
    if kind == "local":
        return LocalAttention(heads, length, before, dropout=rate, head_width=width)
    buckets, seed = settings["num_buckets"], settings["hash_seed"]
    if buckets is None and seed is not None and not given:
        raise ValueError(
            f"{_WHO}: config.json says hash_seed = {seed} but not num_buckets, so that how many directions are kept "
            "depends on the length. Set num_buckets there, or hash_seed to null, or give directions."
        )
    buckets, fixed = tuple(buckets) if isinstance(buckets, list) else buckets, given or seed is not None
    return LSHAttention(
        heads,
        length,
        before,
        hashes=settings["num_hashes"],
        buckets=buckets,
        fixed=fixed,
        dropout=rate,
        head_width=width,
    )


# From arrays there to arrays here.

_EMBEDDING = {
    "Embedding/table": "word_embeddings.weight",
    "AxialPositions/rows": "position_embeddings.weights.0",
    "AxialPositions/columns": "position_embeddings.weights.1",
    "LearnedPositions/table": "position_embeddings.embedding.weight",
}
_LAYER = {
    "HalfResidual/Serial/LayerNorm/scale": "attention.layer_norm.weight",
    "HalfResidual/Serial/LayerNorm/bias": "attention.layer_norm.bias",
    "HalfResidual/Serial/LocalAttention/query/kernel": "attention.self_attention.query.weight",
    "HalfResidual/Serial/LocalAttention/key/kernel": "attention.self_attention.key.weight",
    "HalfResidual/Serial/LocalAttention/value/kernel": "attention.self_attention.value.weight",
    "HalfResidual/Serial/LocalAttention/output/kernel": "attention.output.dense.weight",
    "HalfResidual/Serial/LSHAttention/query_key/kernel": "attention.self_attention.query_key.weight",
    "HalfResidual/Serial/LSHAttention/value/kernel": "attention.self_attention.value.weight",
    "HalfResidual/Serial/LSHAttention/output/kernel": "attention.output.dense.weight",
    "HalfResidual_2/Serial/LayerNorm/scale": "feed_forward.layer_norm.weight",
    "HalfResidual_2/Serial/LayerNorm/bias": "feed_forward.layer_norm.bias",
    "HalfResidual_2/Serial/FeedForward/up/kernel": "feed_forward.dense.dense.weight",
    "HalfResidual_2/Serial/FeedForward/up/bias": "feed_forward.dense.dense.bias",
    "HalfResidual_2/Serial/FeedForward/down/kernel": "feed_forward.output.dense.weight",
    "HalfResidual_2/Serial/FeedForward/down/bias": "feed_forward.output.dense.bias",
}
_HEAD = {
    "LayerNorm/scale": "reformer.encoder.layer_norm.weight",
    "LayerNorm/bias": "reformer.encoder.layer_norm.bias",
    "Dense/kernel": "lm_head.decoder.weight",
    "Dense/bias": "lm_head.bias",
}


def _their_name(block: int, blocks: int, path: str) -> str:
    """What the weights at `path` of a block are called there."""
    if block == 0:
        return f"reformer.embeddings.{_EMBEDDING[path]}"
    return _HEAD[path] if block == blocks - 1 else f"reformer.encoder.layers.{block - 1}.{_LAYER[path]}"


def _signatures(blocks: list[Layer]) -> tuple[list[Tree], list[Tree]]:
    """Weights and states of all blocks, nothing computed."""
    tokens, mask = jax.ShapeDtypeStruct((1, 1), np.int32), jax.ShapeDtypeStruct((1, 1), np.bool_)
    stack, weights, states = (tokens, tokens, mask), [], []
    for block in blocks:
        inputs, rest = take(stack, block.n_in)
        entry, state = jax.eval_shape(
            lambda key, block=block, inputs=inputs: block.init(key, inputs), jax.random.key(0)
        )
        weights.append(entry)
        states.append(state)
        stack = put(rest, output_signature(block, entry, state, inputs))
    return weights, states


def _without_duplicates(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """`arrays` with one name for the head's bias, and without the constants that older versions stored."""
    arrays = {name: x for name, x in arrays.items() if not name.endswith(("mask_value_float16", "mask_value_float32"))}
    bias = arrays.pop("lm_head.decoder.bias", None)
    if bias is not None and not np.array_equal(arrays.setdefault("lm_head.bias", bias), bias):
        raise ValueError(f"{_WHO}: lm_head.bias and lm_head.decoder.bias are one array there, but differ in the files.")
    return arrays


def _filled(weights: list[Tree], arrays: dict[str, np.ndarray]) -> list[Tree]:
    """Trees like `weights`, of `arrays`."""
    leaves = {
        _their_name(i, len(weights), path_name(path)): (path, x)
        for i, entry in enumerate(weights)
        for path, x in jax.tree_util.tree_leaves_with_path(entry)
    }
    if leaves.keys() != arrays.keys():
        differences = {"missing": leaves.keys() - arrays.keys(), "unknown": arrays.keys() - leaves.keys()}
        text = "; ".join(f"{what} are {', '.join(sorted(names))}" for what, names in differences.items() if names)
        raise ValueError(f"{_WHO}: the files hold other weights than config.json asks for: {text}.")

    def convert(name: str) -> np.ndarray:
        (path, ours), x = leaves[name], arrays[name]
        kernel = path_name(path[-1:]) == "kernel"  # [in, out] here, [out, in] there
        expected = jax.ShapeDtypeStruct(ours.shape[::-1] if kernel else ours.shape, ours.dtype)
        if x.shape != expected.shape or not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{_WHO}: {name} is {describe(x)}, but by config.json it must be {describe(expected)}.")
        return np.array(x.T if kernel else x, ours.dtype, order="C")

    values = iter(map(convert, leaves))
    return [jax.tree.map(lambda _: next(values), entry) for entry in weights]


def _drawn(states: list[Tree], settings: _Settings, directions: Mapping[int, np.ndarray]) -> list[Tree]:
    """Trees like `states`, whose only arrays are directions."""

    def value(layer: int, like: jax.ShapeDtypeStruct) -> np.ndarray:
        if layer not in directions:
            key = jax.random.fold_in(jax.random.key(settings["hash_seed"]), layer)
            return np.asarray(jax.random.normal(key, like.shape, like.dtype))
        given = np.asarray(directions[layer], like.dtype)
        # Without num_buckets, how many there are depends on the length, which `like` does not know.
        expected = (
            like if settings["num_buckets"] else jax.ShapeDtypeStruct(like.shape[:3] + given.shape[3:], like.dtype)
        )
        if given.shape != expected.shape:
            raise ValueError(
                f"{_WHO}: the directions of layer {layer} are {describe(given)}, expected {describe(expected)}."
            )
        return given

    return [jax.tree.map(lambda x, layer=i - 1: value(layer, x), state) for i, state in enumerate(states)]


# Weights from files.


def _read_weights(folder: Path) -> dict[str, np.ndarray]:
    """All arrays by name, from one file or the files that an index names."""
    readers: dict[str, Callable[[Path], dict[str, np.ndarray]]] = {
        "model.safetensors": _read_safetensors,
        "pytorch_model.bin": _read_bin,
    }
    for name, read in readers.items():
        if (folder / name).exists():
            return read(folder / name)
        if (index := folder / f"{name}.index.json").exists():
            places = _read_json(index)["weight_map"]
            arrays = {}
            for part in sorted(set(places.values())):
                if Path(part).name != part:
                    raise ValueError(f"{_WHO}: {index} names {part!r}, a file in another folder.")
                arrays |= read(folder / part)
            if absent := sorted(places.keys() - arrays.keys()):
                raise ValueError(f"{_WHO}: {index} names weights that no file has: {absent}.")
            return arrays
    raise ValueError(f"{_WHO}: {folder} has no weights; expected {' or '.join(readers)}, or one's .index.json.")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{_WHO}: {path} cannot be read: {error}.") from None


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    try:
        with safe_open(path, framework="numpy") as arrays:
            return {name: arrays.get_tensor(name) for name in arrays.keys()}
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{_WHO}: {path} cannot be read: {error}.") from None


def _read_bin(path: Path) -> dict[str, np.ndarray]:
    try:
        return read_tensors(path)
    except ValueError as error:
        raise ValueError(
            f"{_WHO}: {path} cannot be read without torch: {error}. Where torch and `transformers` are installed, "
            "`ReformerModelWithLMHead.from_pretrained(folder).save_pretrained(folder)` writes model.safetensors."
        ) from None
