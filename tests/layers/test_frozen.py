"""Frozen layers: the same layer, untrained."""

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_trees_equal

from reversible_trainer.layers import CrossEntropy, Dense, Frozen, HalfResidual, LossLayer, ReversibleLayer, Serial
from reversible_trainer.layers.base import differentiate

KEY = jax.random.key(0)
X = jnp.linspace(0, 1, 12).reshape(3, 4)


def test_a_frozen_layer_is_the_layer_but_for_its_gradient():
    layer = Serial(Dense(4), Frozen(Dense(4)))
    weights, state = layer.init(KEY, (X,))
    outputs, _, _, pullback = differentiate(layer, weights, state, (X,), None)
    assert_trees_equal(outputs, Serial(Dense(4), Dense(4)).forward(weights, state, (X,), None)[0])
    (x_ct,), grads = pullback((jnp.ones_like(X),))
    assert jnp.any(x_ct != 0) and jnp.any(grads["Dense"]["kernel"] != 0)
    assert not jnp.any(grads["Dense_2"]["kernel"])


def test_kinds_of_layers_keep_their_kind_and_compare_by_value():
    half = Frozen(HalfResidual(Dense(4)))
    assert isinstance(half, ReversibleLayer) and (half.n_in, half.n_out, half.name) == (2, 2, "HalfResidual")
    weights, state = half.init(KEY, (X, X))
    outputs, _, memo = half.forward(weights, state, (X, X), None)
    assert jnp.allclose(half.reverse(weights, state, outputs, None, memo)[0], X, atol=1e-6)
    assert isinstance(Frozen(CrossEntropy()), LossLayer) and Frozen(CrossEntropy()).metric_names == ("accuracy",)
    assert half == Frozen(HalfResidual(Dense(4))) != Frozen(HalfResidual(Dense(5)))
    assert not isinstance(Frozen(Dense(4)), ReversibleLayer)
    with pytest.raises(TypeError, match="Frozen: expected a layer"):
        Frozen(Dense)
