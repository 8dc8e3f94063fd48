"""Reformers: trained as the oracle trains them, causality, padding, patterns of attention, refusals."""

import functools

import jax
import numpy as np
import optax
import oracle
import pytest
from helpers import assert_trees_close, assert_trees_equal

from reversible_trainer.layers import (
    Attention,
    AxialPositions,
    Chunked,
    ChunkedLoss,
    Layer,
    LocalAttention,
    LossLayer,
    LSHAttention,
    ReversibleLayer,
    RMSNorm,
    ToFixedPoint,
)
from reversible_trainer.layers.base import put, take
from reversible_trainer.models import reformer, reformer_lm
from reversible_trainer.streaming import Placement
from reversible_trainer.trainer import Trainer
from reversible_trainer.tree import path_name

KEY = jax.random.key(0)
SIZES = {"vocab_size": 11, "width": 8, "heads": 2, "ff_width": 16, "max_length": 12}


def lm_batch(seed=0):
    generator = np.random.default_rng(seed)
    tokens, targets = generator.integers(0, 11, (2, 2, 12)).astype(np.int32)
    return tokens, targets, generator.random((2, 12)) < 0.8


def pair_batch(seed=0):
    """A source of 7, the last three of one padding, to a target of 12."""
    source = np.random.default_rng(seed + 100).integers(0, 11, (2, 7)).astype(np.int32)
    return source, np.arange(7) < np.array([[7], [4]]), *lm_batch(seed)


@functools.partial(jax.jit, static_argnums=0)
def run(blocks, batch):
    """The loss of a batch under new weights, and the logits."""
    stack, logits = batch, None
    for i, block in enumerate(blocks):
        top, rest = take(stack, block.n_in)
        weights, state = block.init(jax.random.fold_in(KEY, i), top)
        logits = block.predict(weights, state, top[:-2]) if isinstance(block, LossLayer) else None
        stack = put(rest, block.forward(weights, state, top, None)[0])
    return stack[0] / stack[1], logits


def assert_equals_oracle(blocks, batches):
    trainer = Trainer(blocks, optax.sgd, placement=Placement.pinned())
    state = trainer.init(jax.random.key(3), batches[0])
    plain = (0, jax.random.key(3), *oracle.copy((state.weights, state.slots, state.states)))
    for batch in batches:
        state, metrics = trainer.step(state, batch, 0.1)
        plain, loss, _ = oracle.step(blocks, optax.sgd, plain, batch, 0.1)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-10)
        assert_trees_close((state.weights, state.slots, state.states), plain[2:])


def test_the_language_model_trains_as_the_oracle(x64):
    chunks = {"lsh_chunk_length": 4, "ff_chunk_length": 6, "loss_chunk_length": 3}
    blocks = reformer_lm(**SIZES, **chunks, attention=("lsh",), depth=1, dropout=0.1, norm="rms", arithmetic="float32")
    assert_equals_oracle(blocks, [lm_batch(0), lm_batch(1)])


def test_encoder_and_decoder_train_as_the_oracle(x64):
    decoder = {"attention": ("local",), "local_chunk_length": 4}
    blocks = reformer(**SIZES, **decoder, depth=2, encoder_depth=1, norm="rms", positions="none", arithmetic="float32")
    assert_equals_oracle(blocks, [pair_batch(0), pair_batch(1)])


@pytest.mark.parametrize(
    "arguments",
    [
        {"attention": ("full", "local"), "local_chunk_length": 4, "positions": "rotary"},
        # Chunks that see all others: what is seen does not depend on the hashes, which depend on later tokens.
        {"attention": ("lsh",), "lsh_chunk_length": 4, "chunks_before": 2, "positions": "sinusoidal", "norm": "rms"},
    ],
    ids=["full and local", "hashed"],
)
def test_later_tokens_change_nothing_before(arguments):
    blocks = tuple(reformer_lm(**SIZES, depth=len(arguments["attention"]), **arguments))
    tokens, *rest = lm_batch()
    loss, logits = run(blocks, (tokens, *rest))
    assert logits.shape == (2, 12, 11) and abs(float(loss) - np.log(11)) < 1.5
    changed = tokens.copy()
    changed[:, 7] = (tokens[:, 7] + 1) % 11
    _, after = run(blocks, (changed, *rest))
    assert_trees_close(after[:, :7], logits[:, :7], factor=10)  # hashed attention adds up in another order
    assert not np.allclose(after[:, 7:], logits[:, 7:], atol=1e-2)


def test_padding_of_the_source_is_never_seen():
    blocks = tuple(reformer(**SIZES, depth=1, norm="rms", positions="sinusoidal"))
    source, visible, tokens, *rest = pair_batch()
    found = run(blocks, (source, visible, tokens, *rest))
    other = np.where(visible, source, (source + 1) % 11)
    assert_trees_equal(run(blocks, (other, visible, tokens, *rest))[0], found[0])
    assert not np.array_equal(run(blocks, ((source + 1) % 11, visible, tokens, *rest))[1], found[1])
    changed = tokens.copy()
    changed[:, 7] = (tokens[:, 7] + 1) % 11
    _, logits = run(blocks, (source, visible, changed, *rest))
    assert_trees_equal(logits[:, :7], found[1][:, :7])
    assert not np.allclose(logits[:, 7:], found[1][:, 7:], atol=1e-2)


@pytest.mark.parametrize("model, batch", [(reformer_lm, lm_batch), (reformer, pair_batch)])
def test_fixed_point_streams_go_through_all_blocks(model, batch):
    blocks = tuple(model(**SIZES, depth=1, arithmetic="fixed_point", loss_chunk_length=6))
    loss, logits = jax.eval_shape(functools.partial(run, blocks), batch())
    assert loss.dtype == logits.dtype == "float32" and logits.shape == (2, 12, 11)
    assert sum(len(parts(block, ToFixedPoint)) for block in blocks) == (1 if model is reformer_lm else 2)


def parts(layer, kind):
    """All layers of a kind inside `layer`, itself included."""
    inner = [getattr(layer, "f", None), *getattr(layer, "layers", ())]
    found = [x for f in inner if isinstance(f, Layer) for x in parts(f, kind)]
    return [layer, *found] if isinstance(layer, kind) else found


def test_kinds_of_attention_take_turns():
    blocks = reformer_lm(depth=5, attention=("local", "full", "lsh"), local_chunk_length=8, hashes=2)
    kinds = [parts(block, (Attention, LocalAttention, LSHAttention)) for block in blocks[1:-1]]
    assert [type(kind) for (kind,) in kinds] == [LocalAttention, Attention, LSHAttention, LocalAttention, Attention]
    assert kinds[0][0].chunk_length == 8 and kinds[2][0].chunk_length == 64 and kinds[2][0].hashes == 2
    assert all(isinstance(block, ReversibleLayer) for block in blocks[1:-1])
    assert blocks[1] == blocks[4] and not parts(blocks[1], Chunked)


def test_chunks_and_norms():
    blocks = reformer_lm(depth=1, ff_chunk_length=32, loss_chunk_length=16, norm="rms")
    assert [x.chunk_length for x in parts(blocks[1], Chunked)] == [32] and len(parts(blocks[1], RMSNorm)) == 2
    assert isinstance(blocks[-1], ChunkedLoss) and blocks[-1].chunk_length == 16
    batch = tuple(jax.ShapeDtypeStruct((2, 64), dtype) for dtype in ("int32", "int32", "bool"))
    paths = [_paths(model, batch) for model in (blocks, reformer_lm(depth=1, norm="rms"))]
    assert paths[0] == paths[1]  # a checkpoint does not know of chunks
    assert "0/AxialPositions/rows" in paths[0] and "1/HalfResidual_2/Serial/FeedForward/up/kernel" in paths[0]


def _paths(blocks, batch):
    trainer = Trainer(blocks, optax.sgd)
    return [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(trainer.init_signature(batch).weights)]


def test_axial_positions_are_derived():
    (layer,) = parts(reformer_lm(max_length=4096)[0], AxialPositions)
    assert (layer.shape, layer.widths) == ((64, 64), (32, 96))
    (layer,) = parts(reformer_lm(max_length=10, width=6, heads=1)[0], AxialPositions)
    assert (layer.shape, layer.widths) == ((3, 4), (1, 5))
    (layer,) = parts(reformer_lm(max_length=10, axial_shape=(2, 5), axial_widths=(64, 64))[0], AxialPositions)
    assert (layer.shape, layer.widths) == ((2, 5), (64, 64))
    assert not any(parts(reformer_lm(positions=positions)[0], AxialPositions) for positions in ("rotary", "learned"))


@pytest.mark.parametrize("model", [reformer_lm, reformer])
@pytest.mark.parametrize(
    "arguments, match",
    [
        ({"depth": -1}, "depth must be a whole number, at least 0; got -1"),
        ({"attention": ("local", "hash")}, "attention must be one of 'full', 'local', 'lsh'; got 'hash'"),
        ({"attention": "lsh"}, "attention must be a tuple of kinds.*got 'lsh'"),
        ({"positions": "relative"}, "positions must be one of 'axial', 'learned'.*got 'relative'"),
        ({"max_length": None}, "positions='axial' have a table and need max_length"),
        ({"axial_shape": (4, 4), "max_length": 17}, r"got \(4, 4\) for max_length=17"),
        ({"axial_widths": (64, 32)}, r"\(64, 32\) for width=128"),
        ({"norm": "batch"}, "norm must be one of 'layer', 'rms'; got 'batch'"),
        ({"ff_activation": "tanh"}, "ff_activation must be one of 'relu', 'gelu'; got 'tanh'"),
        ({"ff_chunk_length": 0}, "chunk_length must be a whole number, at least 1; got 0"),
        ({"arithmetic": "int8"}, "arithmetic must be"),
    ],
)
def test_arguments_that_make_no_model_are_refused(model, arguments, match):
    with pytest.raises(ValueError, match=match):
        model(**arguments)
