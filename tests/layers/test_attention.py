"""Attention against a hand-written one, causality, rotary positions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_trees_close, assert_trees_equal

from reversible_trainer.layers import Attention
from reversible_trainer.layers.attention import attend, rotate

KEY = jax.random.key(0)


def by_hand(q, k, v, causal):
    """In NumPy, all scores at once."""
    T, K = q.shape[1], q.shape[3]
    scores = np.einsum("bthk,bshk->bhts", q, k) / np.sqrt(K)
    scores = np.where(np.tril(np.ones((T, T), bool)) | (not causal), scores, -np.inf)
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
def run(layer, x):
    weights, state = layer.init(KEY, (x,))
    return layer.forward(weights, state, (x,), None)[0][0]


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
