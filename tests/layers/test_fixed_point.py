"""Fixed-point streams: nothing is lost on the way back, and gradients are those of the numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_trees_close, assert_trees_equal
from test_reversible import KEY, LAYERS, entries

from reversible_trainer.layers import (
    Dense,
    Dup,
    FromFixedPoint,
    HalfResidual,
    LayerError,
    ReversibleSerial,
    ReversibleSwap,
    Serial,
    ToFixedPoint,
)
from reversible_trainer.layers.base import differentiate
from reversible_trainer.layers.fixed_point import FixedPoint, add, checksum, near_range, rounded, subtract, to_float


def streams(layer, scale):
    """`entries`, those of floating point as streams."""
    return tuple(rounded_bare(scale * x) if x.dtype == jnp.float32 else x for x in entries(layer, "float32"))


def rounded_bare(x):
    return FixedPoint(rounded(x).bits)


@functools.partial(jax.jit, static_argnums=0)
def both_ways(layer, weights, state, xs):
    outputs, _, memo, pullback = differentiate(layer, weights, state, xs, KEY)
    cts = tuple(None if isinstance(y, jax.Array) else jnp.cos(to_float(y)) for y in outputs)
    inputs, gradients = layer.reverse_and_grad(weights, state, outputs, cts, KEY, memo)
    return outputs, layer.reverse(weights, state, outputs, KEY, memo), inputs, gradients, pullback(cts)


@pytest.mark.parametrize("scale", [1.0, 5000.0])  # with the larger one sums wrap around
@pytest.mark.parametrize("name", LAYERS)
def test_reversing_gives_back_the_very_bits(name, scale):
    layer = LAYERS[name]
    xs = streams(layer, scale)
    outputs, reversed_, inputs, gradients, expected = both_ways(layer, *layer.init(KEY, xs), xs)
    assert_trees_equal(reversed_, xs)
    assert_trees_equal(inputs, xs)
    assert_trees_close(gradients, expected, factor=10)  # sums over 8 positions
    assert all(x.carrier is None for x in (*outputs, *inputs) if isinstance(x, FixedPoint))


def test_gradients_are_those_of_the_numbers():
    layer = LAYERS["block"]
    xs = streams(layer, 1.0)
    weights, state = layer.init(KEY, xs)
    floats = tuple(map(to_float, xs))

    def ends(xs, weights):
        return tuple(map(to_float, layer.forward(weights, state, xs, KEY)[0]))

    values, pull = jax.vjp(ends, floats, weights)
    cts = tuple(map(jnp.cos, values))
    *_, pullback = differentiate(layer, weights, state, xs, KEY)
    actual, expected = pullback(cts), pull(cts)
    assert [ct.dtype for ct in actual[0]] == [jnp.float32] * 2
    # Each of two couplings has rounded to 2^-18 what the next one sees.
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-4), actual, expected)


def test_in_and_out_of_fixed_point():
    layer = Serial(Dup(), ToFixedPoint(), HalfResidual(Dense(3)), FromFixedPoint())
    xs = (jnp.array([[0.1, -2.0, 3.0]]),)
    weights, state = layer.init(KEY, xs)
    (y, x), *_, pullback = differentiate(layer, weights, state, xs, KEY)
    assert float(jnp.abs(x - xs[0]).max()) <= 2.0**-19 and y.dtype == x.dtype == jnp.float32
    (x_ct,), _ = pullback((jnp.ones_like(y), jnp.ones_like(x)))
    kernel = weights["HalfResidual"]["Dense"]["kernel"]
    np.testing.assert_allclose(x_ct, 2 + kernel.sum(1)[None], rtol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_sums_wrap_around_and_come_back(seed):
    x = FixedPoint(jax.random.bits(jax.random.key(seed), (64,), jnp.uint32).astype(jnp.int32))
    y = 4000 * jax.random.normal(jax.random.key(seed + 9), (64,))
    assert_trees_equal(subtract(add(x, y), y), x)


def test_checksums_see_changed_and_exchanged_numbers():
    x = FixedPoint(jnp.arange(24, dtype=jnp.int32).reshape(2, 12))
    one = FixedPoint(x.bits.at[1, 3].add(1))
    swapped = FixedPoint(x.bits.at[0, 0].set(7).at[0, 7].set(0))
    sums = [checksum(v).tolist() for v in (x, one, swapped)]
    assert sums[0][0] != sums[1][0] and sums[0][0] == sums[2][0] and sums[0][1] != sums[2][1]


def test_near_the_range():
    values = [2047.9, -2047.9, 2048.0, -2048.1]
    assert [bool(near_range(rounded(jnp.array([0.0, v])))) for v in values] == [False, False, True, True]


def test_a_standard_layer_says_what_to_do_with_a_stream():
    with pytest.raises(LayerError, match=r"fixed-point stream is no array.*FromFixedPoint\(\)"):
        Serial(ToFixedPoint(1), Dense(3)).init(KEY, (jnp.ones(3),))
    with pytest.raises(ValueError, match="fraction must be a whole number from 1 to 30"):
        ToFixedPoint(fraction=31)


def test_streams_of_different_grids_are_not_joined():
    layer = ReversibleSerial(HalfResidual(Dense(2)), ReversibleSwap(), LAYERS["concatenate"])
    xs = (FixedPoint(jnp.ones(2, jnp.int32), None, 18), FixedPoint(jnp.ones(2, jnp.int32), None, 10))
    weights, state = layer.init(KEY, xs[:1] * 2)
    with pytest.raises(LayerError, match="(?s)10.*18"):
        layer.forward(weights, state, xs, KEY)
