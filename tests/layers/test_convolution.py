"""Layers for images: against loops, round trips, gradients, fans, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_trees_close, assert_trees_equal
from jax.test_util import check_grads

from reversible_trainer.layers import Conv, LayerError, MeanPool, ReversibleSpaceToDepth

KEY = jax.random.key(0)


def convolved(x, kernel, bias, strides):
    """A convolution pixel by pixel, padded as TensorFlow's "SAME": if unevenly, more at the end."""
    sides = []
    for size, window, stride in zip(x.shape[1:3], kernel.shape, strides, strict=False):
        total = max((-(-size // stride) - 1) * stride + window - size, 0)
        sides.append((total // 2, total - total // 2))
    x = np.pad(x, ((0, 0), *sides, (0, 0)))
    h, w = kernel.shape[:2]
    rows, columns = (range(0, n - k + 1, s) for n, k, s in zip(x.shape[1:3], (h, w), strides, strict=True))
    pixels = [[np.einsum("BHWC,HWCD->BD", x[:, i : i + h, j : j + w], kernel) for j in columns] for i in rows]
    return np.array(pixels).transpose(2, 0, 1, 3) + bias


@pytest.mark.parametrize("kernel_size, strides", [((3, 3), (1, 1)), ((2, 3), (2, 1)), ((1, 1), (2, 2))])
def test_convolution_against_loops(x64, kernel_size, strides):
    layer = Conv(4, kernel_size, strides)
    x = jax.random.normal(KEY, (2, 5, 6, 3))
    weights, _ = layer.init(KEY, (x,))
    assert weights["kernel"].shape == (*kernel_size, 3, 4) and not weights["bias"].any()
    weights["bias"] = jnp.arange(4.0)
    (y,), _, _ = layer.forward(weights, (), (x,), None)
    assert_trees_close(y, jnp.array(convolved(*map(np.asarray, (x, weights["kernel"], weights["bias"])), strides)))
    check_grads(lambda w, x: layer.forward(w, (), (x,), None)[0], (weights, x), order=1, modes=["rev"])


def test_convolution_without_bias_keeps_the_stream_in_float32():
    layer, x = Conv(2, use_bias=False), jnp.ones((1, 3, 3, 1))
    weights, _ = layer.init(KEY, (x,))
    assert list(weights) == ["kernel"]
    (y,), _, _ = layer.forward({"kernel": weights["kernel"].astype(jnp.bfloat16)}, (), (x,), None)
    assert y.dtype == jnp.float32


def test_a_kernel_starts_with_the_variance_that_its_fan_in_asks_for():
    weights, _ = Conv(64, (3, 5)).init(KEY, (jax.ShapeDtypeStruct((1, 8, 8, 32), "float32"),))
    # 31,000 draws: five standard deviations of their variance are 4 %.
    np.testing.assert_allclose(weights["kernel"].var() * 3 * 5 * 32, 2, rtol=0.04)


def test_mean_over_pixels():
    x = jnp.arange(24.0).reshape(1, 3, 4, 2)
    assert_trees_equal(MeanPool().forward((), (), (x,), None)[0], (jnp.array([[11.0, 12.0]]),))


@pytest.mark.parametrize("block", [1, 2, 3])
def test_space_to_depth_loses_nothing(block):
    layer, x = ReversibleSpaceToDepth(block), jax.random.normal(KEY, (2, 6, 12, 5))
    ys, _, _ = layer.forward((), (), (x,), None)
    assert ys[0].shape == (2, 6 // block, 12 // block, 5 * block**2)
    assert_trees_equal(ys[0][1, 1, 2], x[1, block : 2 * block, 2 * block : 3 * block].reshape(-1))
    assert_trees_equal(layer.reverse((), (), ys, None), (x,))
    inputs, (cts, grads) = layer.reverse_and_grad((), (), ys, ys, None)
    assert_trees_equal((inputs, cts, grads), ((x,), (x,), ()))  # it is a permutation


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Conv(4, (3,)), "kernel_size must be two whole numbers, at least 1, as in"),
        (lambda: Conv(4, strides=(0, 1)), "strides must be two whole numbers, at least 1"),
        (lambda: ReversibleSpaceToDepth(0), "block must be a whole number, at least 1; got 0"),
    ],
)
def test_wrong_hyper_parameters_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_what_is_no_image_is_refused():
    for layer in (Conv(2), MeanPool(), ReversibleSpaceToDepth()):
        with pytest.raises(LayerError, match=r"expected images \[B, H, W, C\]; got \[2, 3\]"):
            layer.forward({"kernel": jnp.ones(1)}, (), (jnp.ones((2, 3)),), None)
    with pytest.raises(LayerError, match="block = 2 must divide height and width; got 4 x 3 pixels"):
        ReversibleSpaceToDepth(2).forward((), (), (jnp.ones((1, 4, 3, 1)),), None)
