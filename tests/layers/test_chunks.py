"""Layers in chunks equal the same without, gradients and all, and need less memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_trees_close

from reversible_trainer.layers import (
    Chunked,
    ChunkedLoss,
    ConcatenateStreams,
    CrossEntropy,
    Dense,
    Dropout,
    Dup,
    FeedForward,
    LayerError,
    LossSerial,
    LSHAttention,
    ReversibleConcatenatePair,
    RMSNorm,
    Serial,
)
from reversible_trainer.layers.base import differentiate
from reversible_trainer.layers.fixed_point import rounded

KEY = jax.random.key(0)
SUBLAYER = Serial(RMSNorm(), FeedForward(16))
HEAD = LossSerial(ReversibleConcatenatePair(), RMSNorm(), Dense(11, use_bias=False), CrossEntropy())
B, T, D = 2, 12, 6


def entries(layer, dtype="float64"):
    """What `layer` takes: floats, and for a loss targets, some of them padding, and a mask."""
    xs = jax.random.normal(KEY, (layer.n_in, B, T, D), dtype)
    if layer.n_in == 1:
        return (xs[0],)
    targets = jax.random.randint(KEY, (B, T), -1, 11, jnp.int32)
    return xs[0], xs[1], targets, jax.random.bernoulli(KEY, 0.7, (B, T))


@functools.partial(jax.jit, static_argnums=0)
def both(layer, weights, state, inputs, key=None):
    """Outputs and gradients."""
    outputs, _, _, pullback = differentiate(layer, weights, state, inputs, key)
    return outputs, pullback(tuple(jnp.cos(y) for y in outputs))


@pytest.mark.parametrize("chunk_length", [4, 12, 50])
@pytest.mark.parametrize("plain", [SUBLAYER, HEAD], ids=["layer", "loss"])
def test_chunks_change_nothing(plain, chunk_length, x64):
    layer = (ChunkedLoss if plain is HEAD else Chunked)(plain, chunk_length)
    inputs = entries(layer)
    weights, state = jax.jit(plain.init)(KEY, inputs)
    assert_trees_close(jax.jit(layer.init)(KEY, inputs), (weights, state))
    assert (layer.name, layer.n_in, layer.n_out) == (plain.name, plain.n_in, plain.n_out)
    assert_trees_close(both(layer, weights, state, inputs), both(plain, weights, state, inputs))


def test_streams_in_fixed_point_can_be_cut():
    layer = LossSerial(ConcatenateStreams(), Dense(11), CrossEntropy())
    x1, x2, *rest = entries(HEAD, "float32")
    weights, state = jax.jit(layer.init)(KEY, (x1, x2, *rest))
    inputs = (rounded(x1), rounded(x2), *rest)
    chunked, plain = (both(f, weights, state, inputs) for f in (ChunkedLoss(layer, 4), layer))
    assert_trees_close(chunked, plain, factor=10)  # sums over 24 positions in another order


def test_predict_gives_the_logits_of_the_whole_sequence(x64):
    layer = ChunkedLoss(HEAD, 4)
    x1, x2, *_ = entries(layer)
    weights, state = jax.jit(layer.init)(KEY, entries(layer))
    assert_trees_close(layer.predict(weights, state, (x1, x2)), HEAD.predict(weights, state, (x1, x2)))
    assert layer.metric_names == ("accuracy",)


def test_each_chunk_has_its_own_dropout():
    layer = Chunked(Dropout(0.5), 3)
    (y,), _ = both(layer, (), (), (jnp.ones((1, T, 8)),), KEY)
    chunks = np.asarray(y).reshape(4, -1)
    assert len({tuple(chunk) for chunk in chunks}) == 4
    (again,), _ = both(layer, (), (), (jnp.ones((1, T, 8)),), KEY)
    np.testing.assert_array_equal(y, again)


def test_gradients_of_narrow_weights_add_up_in_float32():
    """512 chunks whose gradients are one each: sums in bfloat16 would stop at 256, whose successor is 258."""
    layer, x = Chunked(Dense(1, use_bias=False), 1), jnp.ones((1, 512, 1))
    weights = {"kernel": jnp.ones((1, 1), jnp.bfloat16)}
    grads = jax.jit(jax.grad(lambda w: jnp.sum(layer.forward(w, (), (x,), None)[0][0])))(weights)
    assert grads["kernel"].dtype == jnp.bfloat16 and float(grads["kernel"][0, 0]) == 512


def temporaries(layer, inputs):
    """Bytes that the gradient needs besides arguments and results."""
    weights, state = jax.eval_shape(layer.init, KEY, inputs)

    def gradient(weights, state, inputs):
        outputs, _, _, pullback = differentiate(layer, weights, state, inputs, None)
        return pullback((jnp.ones_like(outputs[0]), *map(jnp.zeros_like, outputs[1:])))

    return jax.jit(gradient).lower(weights, state, inputs).compile().memory_analysis().temp_size_in_bytes


def test_a_loss_in_chunks_holds_the_logits_of_one(optimized):
    head = LossSerial(Dense(2048, use_bias=False), CrossEntropy())
    shape = 1, 1024
    inputs = tuple(jax.ShapeDtypeStruct(s, d) for s, d in (((*shape, 4), "float32"), (shape, "int32"), (shape, "bool")))
    logits = 1024 * 2048 * 4
    assert temporaries(head, inputs) >= logits
    assert temporaries(ChunkedLoss(head, 32), inputs) < logits / 4


def test_a_feed_forward_in_chunks_holds_the_hidden_layer_of_one(optimized):
    layer, inputs = FeedForward(2048), (jax.ShapeDtypeStruct((1, 1024, 4), "float32"),)
    hidden = 1024 * 2048 * 4
    assert temporaries(layer, inputs) >= hidden
    assert temporaries(Chunked(layer, 32), inputs) < hidden / 4


@pytest.mark.parametrize(
    "make, match",
    [
        (lambda: Chunked(Dup(), 4), "one input and one output; got n_in = 1, n_out = 2"),
        (lambda: Chunked(HEAD, 4), "for a loss there is ChunkedLoss"),
        (lambda: ChunkedLoss(Dense(3), 4), "f must be a LossLayer; got Dense"),
        (lambda: Chunked(Dense(3), 0), r"Chunked\('Dense'\): chunk_length must be a whole number, at least 1; got 0"),
        (lambda: ChunkedLoss(HEAD, 2.0), "at least 1; got 2.0"),
    ],
)
def test_what_cannot_be_cut_is_refused(make, match):
    with pytest.raises((ValueError, TypeError), match=match):
        make()


def test_lengths_states_and_memos_that_do_not_fit_are_refused():
    x = jnp.ones((1, 8, 4))
    with pytest.raises(LayerError, match="10 positions are no multiple of chunk_length, 4, nor fewer; pad"):
        both(Chunked(Dropout(0.5), 4), (), (), (jnp.ones((1, 10, 4)),))
    with pytest.raises(LayerError, match=r"\[B, T, ...\] with one T"):
        both(ChunkedLoss(CrossEntropy(), 4), (), (), (x, jnp.ones((1, 8), int), jnp.ones(8)))
    with pytest.raises(LayerError, match="'LSHAttention' has a state, which would have to be carried"):
        Chunked(LSHAttention(2, chunk_length=2, fixed=True), 4).init(KEY, (x,))
    layer = LSHAttention(2, chunk_length=2)
    with pytest.raises(LayerError, match="'LSHAttention' has a memo"):
        both(Chunked(layer, 4), *layer.init(KEY, (x,)), (x,))
