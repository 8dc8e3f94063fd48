"""Normalization over the last axis. Statistics are at least float32, outputs have the input's dtype."""
# ruff: noqa: D102  (the methods are those of layers/base.py)

from __future__ import annotations

import dataclasses

import jax.lax
import jax.numpy as jnp

from reversible_trainer.layers.base import Layer
from reversible_trainer.layers.core import at_least_float32
from reversible_trainer.layers.initializers import Ones, Zeros


@dataclasses.dataclass(frozen=True)
class RMSNorm(Layer):
    """`x / rms(x) * scale`, `scale` being `[D]`.

    Source: Zhang and Sennrich 2019 (https://arxiv.org/abs/1910.07467).
    """

    epsilon: float = 1e-6

    def init(self, key, inputs):
        return {"scale": Ones()(key, inputs[0].shape[-1:])}, ()

    def forward(self, weights, state, inputs, key, memo=None):
        (x,) = inputs
        wide = x.astype(at_least_float32(x.dtype))
        y = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + self.epsilon)
        return ((y * weights["scale"].astype(wide.dtype)).astype(x.dtype),), state, None


@dataclasses.dataclass(frozen=True)
class LayerNorm(Layer):
    """`(x - mean(x)) / std(x) * scale + bias`, `scale` and `bias` being `[D]`.

    Source: Ba et al. 2016 (https://arxiv.org/abs/1607.06450).
    """

    epsilon: float = 1e-6

    def init(self, key, inputs):
        shape = inputs[0].shape[-1:]
        return {"scale": Ones()(key, shape), "bias": Zeros()(key, shape)}, ()

    def forward(self, weights, state, inputs, key, memo=None):
        (x,) = inputs
        wide = x.astype(at_least_float32(x.dtype))
        scale, bias = (weights[name].astype(wide.dtype) for name in ("scale", "bias"))
        centred = wide - jnp.mean(wide, -1, keepdims=True)
        y = centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred), -1, keepdims=True) + self.epsilon)
        return ((y * scale + bias).astype(x.dtype),), state, None
