"""Dense layers, embeddings, dropout, norms, combinators, losses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_trees_close, assert_trees_equal

from reversible_trainer.layers import (
    CrossEntropy,
    Dense,
    Dropout,
    Dup,
    Embedding,
    FeedForward,
    Function,
    Gelu,
    LayerError,
    LayerNorm,
    LossSerial,
    Relu,
    Residual,
    RMSNorm,
    Select,
    Serial,
)
from reversible_trainer.tree import path_name

KEY = jax.random.key(0)


@functools.partial(jax.jit, static_argnums=0)
def run(layer, *inputs):
    """A new layer's outputs, with a key."""
    weights, state = layer.init(KEY, inputs)
    return layer.forward(weights, state, inputs, KEY)[0]


def paths(weights):
    return [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(weights)]


def test_norms_against_numpy():
    x = np.linspace(-1, 3, 12, dtype=np.float32).reshape(3, 4) ** 3
    centred = x - x.mean(-1, keepdims=True)
    assert_trees_close(run(RMSNorm(), x)[0], jnp.array(x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)))
    assert_trees_close(run(LayerNorm(), x)[0], jnp.array(centred / np.sqrt(x.var(-1, keepdims=True) + 1e-6)))


def test_norm_statistics_of_bfloat16_are_float32():
    x = jnp.full((1, 4), 300, jnp.bfloat16) + jnp.array([0, 2, 4, 6], jnp.bfloat16)
    (y,) = run(LayerNorm(), x)
    assert y.dtype == jnp.bfloat16  # the mean, 303, is no bfloat16: its statistics would be off by a quarter
    assert_trees_close(y, jnp.array([[-1.342, -0.447, 0.447, 1.342]], jnp.bfloat16))


def test_feed_forward_is_two_dense_layers():
    x = jnp.linspace(-1, 1, 6).reshape(2, 3)
    layer = FeedForward(5, activation=jax.nn.relu)
    weights, _ = layer.init(KEY, (x,))
    assert paths(weights) == ["down/bias", "down/kernel", "up/bias", "up/kernel"]
    assert weights["up"]["kernel"].shape == (3, 5) and weights["down"]["kernel"].shape == (5, 3)
    by_hand = Serial(Dense(5), Relu(), Dense(3))
    hand_weights = {"Dense": weights["up"], "Relu": (), "Dense_2": weights["down"]}
    outputs, _, _ = layer.forward(weights, (), (x,), None)
    expected, _, _ = by_hand.forward(hand_weights, {"Dense": (), "Relu": (), "Dense_2": ()}, (x,), None)
    assert_trees_close(outputs, expected)


def test_bfloat16_weights_keep_a_float32_stream():
    block = Serial(Embedding(5, 4), Residual(Serial(RMSNorm(), FeedForward(8))), Dense(3))
    tokens = jnp.array([0, 4, 2])

    @jax.jit
    def both(tokens):
        weights, state = block.init(KEY, (tokens,))
        half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), weights)
        return [block.forward(w, state, (tokens,), None)[0][0] for w in (weights, half)]

    full, half = both(tokens)
    assert half.dtype == jnp.float32
    # Three roundings to bfloat16 in a row, and the outputs are of order one.
    np.testing.assert_allclose(full, half, atol=0.06)


def test_dropout():
    x = jnp.ones((64, 64), jnp.bfloat16)
    drop = lambda rate, key: Dropout(rate).forward((), (), (x,), key)[0]  # noqa: E731
    assert_trees_equal(drop(0.25, KEY), drop(0.25, KEY))
    assert not jnp.array_equal(drop(0.25, KEY)[0], drop(0.25, jax.random.key(1))[0])
    assert_trees_equal(drop(0.25, None), (x,))
    assert_trees_equal(drop(0.0, KEY), (x,))
    (y,) = drop(0.25, KEY)
    assert y.dtype == x.dtype and set(np.unique(y.astype(np.float32)).tolist()) == {0.0, 1.3359375}
    assert abs(float((y == 0).mean()) - 0.25) < 0.03  # four standard deviations of 4096 draws
    with pytest.raises(ValueError, match="Dropout: the dropout rate must be at least 0 and less than 1; got 1.0"):
        Dropout(1.0)


def test_function():
    x, y = jnp.array([3.0, 4.0]), jnp.array([2.0, 5.0])
    assert_trees_equal(run(Function(jax.nn.gelu), x), run(Gelu(), x))
    layer = Function(jnp.divmod, n_in=2, n_out=2)
    assert_trees_equal(run(layer, x, y), tuple(jnp.divmod(x, y)))
    assert_trees_equal(run(Serial(Dup(), layer), x), (jnp.ones(2), jnp.zeros(2)))
    assert layer == Function(jnp.divmod, 2, 2) and layer != Function(jnp.minimum, 2)
    with pytest.raises(TypeError, match="Function.f=<function.*Use a function defined at module level"):
        Function(lambda x: x)
    with pytest.raises(LayerError, match=r"Function.*expected n_out = 1 arrays.*got \(float32\[2\], float32\[2\]\)"):
        run(Function(jnp.divmod, n_in=2), x, y)


def test_serial_gives_each_layer_its_own_key_and_name():
    x = jnp.ones((4, 4))
    a, b = run(Serial(Dup(), Dropout(0.5), Select((1, 0)), Dropout(0.5)), x)
    assert not jnp.array_equal(a, b)
    weights, _ = Serial(Dense(4), Gelu(), Serial(Dense(4)), Dense(4)).init(KEY, (x,))
    assert paths(weights) == [
        "Dense/bias",
        "Dense/kernel",
        "Dense_2/bias",
        "Dense_2/kernel",
        "Serial/Dense/bias",
        "Serial/Dense/kernel",
    ]
    assert not jnp.array_equal(weights["Dense"]["kernel"], weights["Dense_2"]["kernel"])


def test_serial_leaves_deeper_entries_alone():
    x, y, z = jnp.ones(2), jnp.zeros(3), jnp.ones((), jnp.int32)
    layer = Serial(Dense(4), Select((1, 0, 1)))
    assert (layer.n_in, layer.n_out) == (2, 3)
    assert_trees_equal(run(Serial(layer, Select((2, 0, 3))), x, y, z), (y, y, z))


def test_select_and_residual_refuse():
    for make in (lambda: Select((0, 2), n_in=2), lambda: Select((-1,))):
        with pytest.raises(ValueError, match="indices must be in"):
            make()
    with pytest.raises(ValueError, match="f must have one output"):
        Residual(Dup())
    with pytest.raises(LayerError, match="f must return the shape and dtype it takes"):
        Residual(Dense(3)).init(KEY, (jnp.ones((2, 4)),))


def test_embedding_refuses_longer_sequences():
    with pytest.raises(LayerError, match="5 tokens, more than max_length"):
        run(Embedding(7, 2, max_length=4), jnp.arange(5))


def cross_entropy(logits, targets, mask):
    return CrossEntropy().forward((), (), (logits, targets, mask), None)[0]


@pytest.mark.parametrize("mask", [[[True, False], [True, True]], [[0.5, 0.0], [1.0, 2.0]]])
def test_cross_entropy_sums_over_the_mask(mask):
    logits = np.linspace(-2, 2, 12, dtype=np.float32).reshape(2, 2, 3) ** 2
    targets, weight = np.array([[2, -1], [0, 1]], np.int32), np.array(mask, np.float32)
    nll = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    correct = (logits.argmax(-1) == targets) * weight
    expected = [(nll * weight).sum(), weight.sum(), correct.sum()]
    outputs = cross_entropy(jnp.array(logits), targets, jnp.array(mask))
    assert_trees_close(outputs, tuple(jnp.array(e, jnp.float32) for e in expected))


def test_cross_entropy_gradient_of_masked_logits_is_zero():
    targets, mask = jnp.array([0, -1]), jnp.array([True, False])
    grad = jax.grad(lambda logits: cross_entropy(logits, targets, mask)[0])(jnp.ones((2, 4), jnp.bfloat16))
    assert grad.dtype == jnp.bfloat16
    assert grad.astype(jnp.float32).tolist() == [[-0.75, 0.25, 0.25, 0.25], [0, 0, 0, 0]]


def test_loss_serial_predicts_what_its_loss_is_taken_of():
    head = LossSerial(RMSNorm(), Dropout(0.5), Dense(5), CrossEntropy())
    x, targets, mask = jnp.arange(6.0).reshape(2, 3), jnp.array([1, 4]), jnp.array([True, False])
    weights, state = head.init(KEY, (x, targets, mask))
    logits = head.predict(weights, state, (x,))
    assert logits.shape == (2, 5)
    outputs, _, _ = head.forward(weights, state, (x, targets, mask), None)
    assert_trees_close(outputs, cross_entropy(logits, targets, mask))
    assert not jnp.array_equal(head.predict(weights, state, (x,), KEY), logits)


def test_loss_serial_refuses():
    with pytest.raises(TypeError, match="the last layer must be a LossLayer"):
        LossSerial(Dense(4))
    with pytest.raises(ValueError, match="the loss must take all that is left; 1 remain"):
        LossSerial(Dup(), Select((0, 2, 3, 1)), CrossEntropy())


def test_negative_targets_have_no_weight():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(1, 4, 5)), jnp.float32)
    marked, mask = jnp.array([[1, -1, 3, -100]]), jnp.ones((1, 4), bool)
    sums, _, _ = CrossEntropy().forward((), (), (logits, marked, mask), None)
    hidden = jnp.array([[True, False, True, False]])
    expected, _, _ = CrossEntropy().forward((), (), (logits, jnp.maximum(marked, 0), hidden), None)
    assert [float(x) for x in sums] == [float(x) for x in expected] and float(sums[1]) == 2
