"""Reformers of `transformers`, recorded by scripts/record_hugging_face_reformer.py, give the same logits here."""

import dataclasses
import json
import pickle
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_trees_equal
from safetensors.numpy import load_file, save_file

from reversible_trainer.interop.hugging_face import from_hugging_face_reformer
from reversible_trainer.trainer import Trainer
from reversible_trainer.tree import TrainState

RECORDED = Path(__file__).parent / "hugging_face_reformer"
BIAS = "reformer.encoder.layers.0.feed_forward.output.dense.bias"
KERNEL = "reformer.encoder.layers.0.feed_forward.dense.dense.weight"


def read(name):
    """Tokens, logits and directions."""
    arrays = np.load(RECORDED / name / "recorded.npz")
    directions = {int(key.removeprefix("directions_")): arrays[key] for key in arrays if key.startswith("directions_")}
    return arrays["tokens"], arrays["logits"], directions


def load(folder, directions=None):
    """A trainer over the model in `folder`, and a run of it that has no slots."""
    blocks, weights, states = from_hugging_face_reformer(folder, directions)
    trainer = Trainer(blocks, optax.sgd)
    place = trainer.placement.to_host
    state = TrainState(0, place(jax.random.key(0)), [*map(place, weights)], [()] * len(blocks), [*map(place, states)])
    return trainer, state


@pytest.fixture
def changed(tmp_path):
    """`changed(settings, arrays)` copies "automatic" with other settings and arrays; None removes one."""

    def change(settings=(), arrays=()):
        folder, source = tmp_path / "changed", RECORDED / "automatic"
        folder.mkdir()
        settings = {**json.loads((source / "config.json").read_text()), **dict(settings)}
        arrays = {**load_file(source / "model.safetensors"), **dict(arrays)}
        (folder / "config.json").write_text(json.dumps({k: x for k, x in settings.items() if x is not None}))
        save_file({k: x for k, x in arrays.items() if x is not None}, folder / "model.safetensors")
        return folder

    return change


@pytest.mark.parametrize("name", ["mixed", "local", "factored", "automatic", "narrow_heads", "one_chunk"])
def test_logits_are_those_of_transformers(name):
    tokens, logits, directions = read(name)
    trainer, state = load(RECORDED / name, directions)
    # 1e-4: softmax, layer norms and products of matrices are rounded in another order.
    np.testing.assert_allclose(trainer.predict(state, (tokens,)), logits, rtol=0, atol=1e-4)


def test_training_goes_on_from_there():
    tokens, _, _ = read("local")
    blocks, weights, states = from_hugging_face_reformer(RECORDED / "local")
    trainer = Trainer(blocks, optax.adam)
    batch = (tokens, np.roll(tokens, -1, axis=1), np.ones(tokens.shape, bool))
    state = trainer.init(jax.random.key(0), batch)
    place = trainer.placement.to_host
    state = dataclasses.replace(state, weights=[*map(place, weights)], states=[*map(place, states)])
    state, first = trainer.step(state, batch, 1e-3)
    state, second = trainer.step(state, batch, 1e-3)
    assert float(first["loss"]) > float(second["loss"])
    assert int(second["skipped_blocks"]) == 0


def test_a_hash_seed_draws_directions_once():
    _, _, states = from_hugging_face_reformer(RECORDED / "factored")
    _, _, again = from_hugging_face_reformer(RECORDED / "factored")
    (first,), (second,) = (jax.tree.leaves(state) for state in states[1:-1])
    assert first.shape == second.shape == (2, 8, 3, 3)
    assert not np.array_equal(first, second)
    assert_trees_equal(states, again)


def test_without_a_hash_seed_there_is_no_state():
    _, _, states = from_hugging_face_reformer(RECORDED / "mixed")
    assert not jax.tree.leaves(states)


@pytest.mark.parametrize(
    "arrays, message",
    [
        ({BIAS: None}, f"missing are {BIAS}.$"),
        ({"lm_head.scale": np.ones(2)}, r"unknown are lm_head\.scale\.$"),
        ({BIAS: None, "lm_head.scale": np.ones(2)}, f"missing are {BIAS}; unknown are lm_head"),
        ({BIAS: np.ones(3)}, rf"{BIAS} is float64\[3\], but by config.json it must be float32\[16\]"),
        ({KERNEL: np.ones((24, 15))}, rf"{KERNEL} is float64\[24,15\], but by config.json it must be float32\[24,16\]"),
        ({BIAS: np.ones(16, np.int8)}, rf"{BIAS} is int8\[16\], but by config.json it must be float32\[16\]"),
        ({"lm_head.decoder.bias": np.ones(19)}, "lm_head.decoder.bias are one array there, but differ"),
    ],
)
def test_other_weights_are_refused_by_name(changed, arrays, message):
    with pytest.raises(ValueError, match=message):
        from_hugging_face_reformer(changed(arrays=arrays))


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"is_decoder": None}, "is_decoder = false, which has no like here: without a causal mask the first chunk"),
        ({"model_type": "bert"}, 'model_type = "bert"'),
        ({"attn_layers": ["full"]}, r'attn_layers = \["full"\].*a layer must be "local" or "lsh"'),
        ({"lsh_num_chunks_after": 1}, "lsh_num_chunks_after = 1"),
        ({"hidden_act": "gelu_fast"}, 'hidden_act = "gelu_fast".*there are relu, gelu'),
        ({"tie_word_embeddings": True}, "tie_word_embeddings = true"),
        ({"axial_pos_shape": [2, 4, 4]}, r"axial_pos_shape = \[2, 4, 4\]"),
        ({"hash_seed": 1}, "hash_seed = 1 but not num_buckets"),
        ({"vocab_size": None}, "config.json lacks vocab_size"),
    ],
)
def test_settings_without_a_like_are_refused_by_name(changed, settings, message):
    with pytest.raises(ValueError, match=message):
        from_hugging_face_reformer(changed(settings))


@pytest.mark.parametrize(
    "directions, message",
    [
        ({0: np.ones((2, 8, 2, 2))}, r"directions are given for layers \[0\], which are no LSH layers"),
        ({-1: np.ones((2, 8, 2, 2))}, r"for layers \[-1\]"),
        ({1: np.ones((2, 8, 2, 3))}, r"of layer 1 are float32\[2,8,2,3\], expected float32\[2,8,2,2\]"),
    ],
)
def test_other_directions_are_refused(directions, message):
    with pytest.raises(ValueError, match=message):
        from_hugging_face_reformer(RECORDED / "mixed", directions)


def test_weights_of_other_precision_become_float32(changed):
    folder = changed(arrays={BIAS: np.full(16, 0.1, jnp.bfloat16), KERNEL: np.full((24, 16), 0.1)})
    _, weights, _ = from_hugging_face_reformer(folder)
    assert {str(x.dtype) for x in jax.tree.leaves(weights)} == {"float32"}


# Files.


def test_a_folder_without_weights_is_refused(changed):
    folder = changed()
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="has no weights; expected model.safetensors or pytorch_model.bin"):
        from_hugging_face_reformer(folder)


def test_an_index_that_names_other_folders_or_what_no_file_has_is_refused(changed):
    folder = changed()
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {BIAS: "../part.safetensors"}}))
    with pytest.raises(ValueError, match="names '../part.safetensors', a file in another folder"):
        from_hugging_face_reformer(folder)
    index.write_text(json.dumps({"weight_map": {"scale": "part.safetensors"}}))
    with pytest.raises(ValueError, match=r"names weights that no file has: \['scale'\]"):
        from_hugging_face_reformer(folder)


class Harmful:
    def __reduce__(self):
        return eval, ("1",)


def archive(path, pickled):
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("model/data.pkl", pickle.dumps(pickled, 2))


def damaged(path):
    whole = (RECORDED / "one_chunk" / "pytorch_model.bin").read_bytes()
    path.write_bytes(whole[:-4])


@pytest.mark.parametrize(
    "write, message",
    [
        (lambda path: archive(path, {"x": Harmful()}), "it holds a __builtin__.eval, and not only tensors"),
        (
            lambda path: path.write_bytes(pickle.dumps(Harmful(), 2)),
            "it holds a __builtin__.eval, and not only tensors",
        ),
        (lambda path: archive(path, [1]), "it is no dictionary of tensors"),
        (lambda path: path.write_bytes(b"?"), "cannot be read without torch"),
        (damaged, "a storage has .* bytes, and its tensors expect"),
    ],
)
def test_a_torch_file_of_anything_but_tensors_is_refused_and_told_how_to_convert(changed, write, message):
    folder = changed()
    (folder / "model.safetensors").unlink()
    write(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=message) as error:
        from_hugging_face_reformer(folder)
    assert "save_pretrained(folder)` writes model.safetensors" in str(error.value)
