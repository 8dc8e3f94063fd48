"""Attention against a hand-written one, causality, rotary positions, padding, attention to another sequence."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_trees_close, assert_trees_equal

from reversible_trainer.layers import Attention, CrossAttention
from reversible_trainer.layers.attention import attend, rotate
from reversible_trainer.layers.base import differentiate

KEY = jax.random.key(0)


def by_hand(q, k, v, causal):
    """In NumPy, all scores at once."""
    T, S, K = q.shape[1], k.shape[1], q.shape[3]
    scores = np.einsum("bthk,bshk->bhts", q, k) / np.sqrt(K)
    scores = np.where(np.tril(np.ones((T, S), bool)) | (not causal), scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhts,bshk->bthk", p / p.sum(-1, keepdims=True), v)


@pytest.mark.parametrize("causal", [True, False])
def test_attend_against_numpy(causal):
    with jax.enable_x64(True):
        # 270 positions are three chunks of causal attention, the last one short.
        q, k, v = jax.random.normal(KEY, (3, 2, 270, 2, 4), jnp.float64)
        out = jax.jit(attend, static_argnums=3)(q, k, v, causal)
        assert_trees_close(out, jnp.array(by_hand(*(np.asarray(x) for x in (q, k, v)), causal)))


@pytest.mark.parametrize("implementation", ["xla", pytest.param("cudnn", marks=pytest.mark.accelerator)])
@pytest.mark.parametrize("causal", [True, False])
def test_every_implementation_is_the_same_attention(implementation, causal):
    dtype = jnp.bfloat16 if implementation == "cudnn" else jnp.float32
    q, k, v = jax.random.normal(KEY, (3, 2, 140, 2, 64), dtype)
    run = jax.jit(attend, static_argnums=(3, 4))
    assert_trees_close(run(q, k, v, causal, implementation), run(q, k, v, causal, "chunked"), factor=10)


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match="None or one of 'chunked', 'xla', 'cudnn'; got 'flash'"):
        Attention(2, implementation="flash")


def test_the_layer_is_its_four_kernels():
    with jax.enable_x64(True):
        x = jax.random.normal(KEY, (2, 5, 8), jnp.float64)
        layer = Attention(2, rotary=False)
        weights, _ = layer.init(KEY, (x,))
        kernels = {name: np.asarray(weights[name]["kernel"]) for name in weights}
        q, k, v = ((np.asarray(x) @ kernels[name]).reshape(2, 5, 2, 4) for name in ("query", "key", "value"))
        expected = by_hand(q, k, v, True).reshape(2, 5, 8) @ kernels["output"]
        assert_trees_close(jax.jit(layer.forward)(weights, (), (x,), None)[0], (jnp.array(expected),))


@functools.partial(jax.jit, static_argnums=0)
def run(layer, *inputs):
    weights, state = layer.init(KEY, inputs)
    return layer.forward(weights, state, inputs, None)[0][0]


def test_a_later_position_changes_nothing_before():
    x = jax.random.normal(KEY, (1, 140, 8), jnp.bfloat16)
    changed = x.at[:, 130].add(1)
    y, y_changed = run(Attention(2), x), run(Attention(2), changed)
    assert y.dtype == jnp.bfloat16
    assert_trees_equal(y[:, :130], y_changed[:, :130])
    assert not np.any(np.all(np.asarray(y[:, 130:] == y_changed[:, 130:]), axis=-1))


def test_rotary_scores_depend_on_distance_only():
    q, k = (jnp.broadcast_to(x, (1, 7, 1, 8)) for x in jax.random.normal(KEY, (2, 8)))
    scores = np.einsum("bthk,bshk->ts", rotate(q), rotate(k))
    for distance in range(-6, 7):
        diagonal = np.diagonal(scores, distance)
        # Not the tolerance for float32: cancellation in a sum of eight products of order one.
        np.testing.assert_allclose(diagonal, diagonal[0], atol=1e-5)
    assert np.ptp(scores[:, 0]) > 0.1
    assert_trees_equal(rotate(q)[:, 0], q[:, 0])


def test_refuses_heads_that_do_not_fit():
    for heads, match in ((3, "heads must divide the width; got heads=3, width=8"), (8, "must be even; got width=8 /")):
        with pytest.raises(ValueError, match=match):
            run(Attention(heads), jnp.ones((1, 2, 8)))


MASK = np.array([[1, 1, 1, 0, 0], [1, 0, 1, 1, 1], [0, 0, 0, 0, 0]], np.int32)


@pytest.mark.parametrize("implementation", ["chunked", "xla"])
def test_cross_attention_sees_what_the_mask_shows(implementation):
    layer = CrossAttention(2, implementation)
    x, encoded = jax.random.normal(KEY, (3, 4, 8)), jax.random.normal(KEY, (3, 5, 6))

    @jax.jit
    def run(x, encoded):
        weights, _ = layer.init(KEY, (x, encoded, MASK))
        (y,), _, _, pullback = differentiate(layer, weights, (), (x, encoded, MASK), None)
        return weights, y, pullback((jnp.ones_like(y),))

    weights, y, ((x_ct, encoded_ct, mask_ct), weight_grads) = run(x, encoded)
    kernels = {name: np.asarray(weights[name]["kernel"]) for name in weights}
    for i, seen in enumerate(map(np.flatnonzero, MASK[:2])):
        q = (np.asarray(x[i]) @ kernels["query"]).reshape(1, 4, 2, 4)
        k, v = ((np.asarray(encoded[i])[seen] @ kernels[name]).reshape(1, -1, 2, 4) for name in ("key", "value"))
        expected = by_hand(q, k, v, False).reshape(4, 8) @ kernels["output"]
        assert_trees_close(y[i], jnp.array(expected), factor=10)
    assert mask_ct is None and x_ct.shape == x.shape
    assert not jnp.any(encoded_ct[:2][MASK[:2] == 0])
    # The last row sees nothing at all.
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves((y, x_ct, encoded_ct, weight_grads)))


def test_masked_attention_is_attention_without_the_padding():
    layer = Attention(2, causal=False, masked=True)
    x = jax.random.normal(KEY, (1, 5, 8))
    assert layer.n_in == 2
    short = run(Attention(2, causal=False), x[:, :3])
    assert_trees_close(run(layer, x, MASK[:1].astype(bool))[:, :3], short, factor=10)
    assert bool(jnp.isfinite(run(layer, x, MASK[2:].astype(bool))).all())
