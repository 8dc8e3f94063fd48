"""Positions against tables written out by hand, and what they refuse."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_trees_close

from reversible_trainer.layers import AxialPositions, LayerError, LearnedPositions, SinusoidalPositions

KEY = jax.random.key(0)


@functools.partial(jax.jit, static_argnums=0)
def run(layer, x):
    weights, state = layer.init(KEY, (x,))
    return weights, layer.forward(weights, state, (x,), None)[0][0]


def test_learned_positions_are_the_first_rows_of_a_table():
    x = jnp.ones((2, 3, 4))
    weights, y = run(LearnedPositions(5), x)
    assert weights["table"].shape == (5, 4)
    assert_trees_close(y, x + weights["table"][:3])


@pytest.mark.parametrize("D", [6, 5])
def test_sinusoidal_positions_against_numpy(D):
    t, i = np.arange(7)[:, None], np.arange(D)
    angle = t / 10_000.0 ** (2 * (i // 2) / D)
    expected = np.where(i % 2, np.cos(angle), np.sin(angle)).astype(np.float32)
    _, y = run(SinusoidalPositions(), jnp.zeros((1, 7, D)))
    assert_trees_close(y[0], jnp.array(expected))


@pytest.mark.parametrize("T", [12, 7, 2])
def test_axial_positions_against_two_tables(T):
    x = jnp.full((2, T, 5), 3.0)
    weights, y = run(AxialPositions((3, 4), (2, 3)), x)
    assert (weights["rows"].shape, weights["columns"].shape) == ((3, 1, 2), (1, 4, 3))
    pairs = [jnp.concatenate([weights["rows"][t // 4, 0], weights["columns"][0, t % 4]]) for t in range(T)]
    assert_trees_close(y, x + jnp.stack(pairs))


@pytest.mark.parametrize("layer", [LearnedPositions(4), SinusoidalPositions(), AxialPositions((2, 2), (1, 3))])
def test_positions_keep_the_dtype_of_the_stream(layer):
    x = jnp.zeros((1, 3, 4))
    weights, y = run(layer, x)
    half = jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights)
    (narrow,), _, _ = layer.forward(half, (), (x,), None)
    assert narrow.dtype == jnp.float32
    np.testing.assert_allclose(narrow, y, rtol=1e-2)  # half a unit in the last place of bfloat16 is 4e-3
    (z,), _, _ = layer.forward(weights, (), (x.astype(jnp.bfloat16),), None)
    assert z.dtype == jnp.bfloat16


def test_what_does_not_fit_is_refused():
    x = jnp.zeros((1, 5, 4))
    with pytest.raises(LayerError, match="the sequence has 5 positions, more than max_length, 4"):
        run(LearnedPositions(4), x)
    with pytest.raises(LayerError, match="5 positions, more than the product of shape, 4"):
        run(AxialPositions((2, 2), (2, 2)), x)
    with pytest.raises(LayerError, match="must add up to that of the input; got 2 [+] 3 = 5, not 4"):
        run(AxialPositions((2, 3), (2, 3)), x)
    for shape, widths in (((2, 3, 4), (2, 2)), ((2, 3), (4,)), ((0, 3), (2, 2))):
        with pytest.raises(ValueError, match="must be two positive numbers"):
            AxialPositions(shape, widths)
