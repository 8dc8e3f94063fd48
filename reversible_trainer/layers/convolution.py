"""Layers for images `[B, H, W, C]`."""
# ruff: noqa: D102  (the methods are those of layers/base.py)

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from reversible_trainer.layers.base import Layer, ReversibleLayer
from reversible_trainer.layers.initializers import HeNormal, Initializer, Zeros
from reversible_trainer.tree import Array


@dataclasses.dataclass(frozen=True)
class Conv(Layer):
    """Convolution, `[B, H, W, C] -> [B, H / stride, W / stride, features]`, rounded up; borders are padded with zeros.

    Args:
      features: Channels of the output.
      kernel_size: Height and width of the window.
      strides: Steps of the window, down and to the right.
      use_bias: Whether there is a bias.
      kernel_init: For `kernel`, `[*kernel_size, C, features]`; by default right behind a ReLU.
      bias_init: For `bias`, `[features]`.
    """

    features: int
    kernel_size: tuple[int, int] = (3, 3)
    strides: tuple[int, int] = (1, 1)
    use_bias: bool = True
    kernel_init: Initializer = HeNormal()
    bias_init: Initializer = Zeros()

    def __post_init__(self):
        super().__post_init__()
        for name, pair in {"kernel_size": self.kernel_size, "strides": self.strides}.items():
            if len(pair) != 2 or not all(type(n) is int and n >= 1 for n in pair):
                raise ValueError(f"Conv: {name} must be two whole numbers, at least 1, as in (3, 3); got {pair!r}.")

    def init(self, key, inputs):
        kernel_key, bias_key = jax.random.split(key)
        channels = _image(inputs[0]).shape[-1]
        weights = {"kernel": self.kernel_init(kernel_key, (*self.kernel_size, channels, self.features))}
        if self.use_bias:
            weights["bias"] = self.bias_init(bias_key, (self.features,))
        return weights, ()

    def forward(self, weights, state, inputs, key, memo=None):
        x, kernel = _image(inputs[0]), weights["kernel"]
        y = jax.lax.conv_general_dilated(
            x.astype(kernel.dtype), kernel, self.strides, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return ((y + weights["bias"] if self.use_bias else y).astype(x.dtype),), state, None


@dataclasses.dataclass(frozen=True)
class MeanPool(Layer):
    """The mean over all pixels, `[B, H, W, C] -> [B, C]`."""

    def forward(self, weights, state, inputs, key, memo=None):
        return (jnp.mean(_image(inputs[0]), axis=(1, 2)),), state, None


@dataclasses.dataclass(frozen=True)
class ReversibleSpaceToDepth(ReversibleLayer):
    """Tiles of pixels become channels, `[B, H, W, C] -> [B, H / block, W / block, block^2 C]`: smaller, nothing lost.

    Args:
      block: Side of a tile; must divide height and width.

    Example:
      >>> import jax.numpy as jnp
      >>> layer, x = ReversibleSpaceToDepth(2), jnp.arange(8).reshape(1, 2, 4, 1)
      >>> ys, _, _ = layer.forward((), (), (x,), None)
      >>> ys[0].tolist(), layer.reverse((), (), ys, None)[0].shape
      ([[[[0, 1, 4, 5], [2, 3, 6, 7]]]], (1, 2, 4, 1))

    Source: Jacobsen et al. 2018, section 3.1 (https://arxiv.org/abs/1802.07088).
    """

    block: int = 2

    def __post_init__(self):
        super().__post_init__()
        if type(self.block) is not int or self.block < 1:
            raise ValueError(f"ReversibleSpaceToDepth: block must be a whole number, at least 1; got {self.block!r}.")

    def forward(self, weights, state, inputs, key, memo=None):
        x, n = _image(inputs[0]), self.block
        B, H, W, C = x.shape
        if H % n or W % n:
            raise ValueError(f"block = {n} must divide height and width; got {H} x {W} pixels. Pad the images.")

        def move(a: Array) -> Array:
            tiles = a.reshape(B, H // n, n, W // n, n, C).swapaxes(2, 3)
            return tiles.reshape(B, H // n, W // n, n * n * C)

        return (jax.tree.map(move, x),), state, None  # a fixed-point stream is a tree

    def reverse(self, weights, state, outputs, key, memo=None):
        y, n = outputs[0], self.block
        B, H, W, C = y.shape

        def move(a: Array) -> Array:
            tiles = a.reshape(B, H, W, n, n, C // n**2).swapaxes(2, 3)
            return tiles.reshape(B, H * n, W * n, C // n**2)

        return (jax.tree.map(move, y),)


def _image(x):
    if len(x.shape) != 4:
        raise ValueError(f"expected images [B, H, W, C]; got {list(x.shape)}")
    return x
