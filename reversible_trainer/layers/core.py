"""Dense, embedding, dropout, activations, feed-forward.

Arithmetic: a layer computes in the dtype of its weights and returns the dtype of its
input. So weights cast to bfloat16 give bfloat16 matrix products on a float32 stream.
"""
# ruff: noqa: D102  (the methods are those of layers/base.py)

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from reversible_trainer.layers.base import Layer, Stack
from reversible_trainer.layers.initializers import Initializer, LecunNormal, Normal, Zeros
from reversible_trainer.tree import Array, Tree, describe


def at_least_float32(dtype: Any) -> Any:
    """float32 for narrower types, else the type itself: for statistics, softmax and losses."""
    return np.promote_types(dtype, np.float32)


def linear(weights: Tree, x: Array) -> Array:
    """`x @ kernel + bias` (the bias if there is one), in the dtype of the weights."""
    kernel = weights["kernel"]
    # Of a matrix, XLA's CPU compiler makes the kernel's gradient without transposing the cotangent first.
    rows = x.astype(kernel.dtype).reshape(-1, x.shape[-1])
    y = (rows @ kernel).reshape(*x.shape[:-1], kernel.shape[-1])
    return y + weights["bias"] if "bias" in weights else y


def dropout(x: Array, rate: float, key: Array | None) -> Array:
    """Zeroes each element with probability `rate` and scales up the others; nothing if `key` is None."""
    if key is None or rate == 0:
        return x
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)


def check_rate(name: str, rate: float) -> None:
    """Refuses a dropout rate outside of [0, 1)."""
    if not 0 <= rate < 1:
        raise ValueError(f"{name}: the dropout rate must be at least 0 and less than 1; got {rate}.")


def as_outputs(result: Any, n_out: int) -> Stack:
    """What a function returned, one array or a tuple of them, as a layer's `n_out` outputs."""
    outputs = result if isinstance(result, tuple) else (result,)
    if len(outputs) != n_out or not all(isinstance(y, jax.Array) for y in outputs):
        got = ", ".join(describe(y) if isinstance(y, jax.Array) else type(y).__name__ for y in outputs)
        raise ValueError(
            f"expected n_out = {n_out} arrays, one by itself or several in a tuple; got ({got}). Set n_out, or wrap "
            "what was called in something that returns so many arrays."
        )
    return outputs


@dataclasses.dataclass(frozen=True)
class Dense(Layer):
    """`x @ kernel + bias`.

    Args:
      features: Width of the output: `[..., D] -> [..., features]`.
      use_bias: Whether there is a bias.
      kernel_init: For `kernel`, `[D, features]`.
      bias_init: For `bias`, `[features]`.
    """

    features: int
    use_bias: bool = True
    kernel_init: Initializer = LecunNormal()
    bias_init: Initializer = Zeros()

    def init(self, key, inputs):
        kernel_key, bias_key = jax.random.split(key)
        weights = {"kernel": self.kernel_init(kernel_key, (inputs[0].shape[-1], self.features))}
        if self.use_bias:
            weights["bias"] = self.bias_init(bias_key, (self.features,))
        return weights, ()

    def forward(self, weights, state, inputs, key, memo=None):
        (x,) = inputs
        return (linear(weights, x).astype(x.dtype),), state, None


@dataclasses.dataclass(frozen=True)
class Embedding(Layer):
    """Rows of a table: integers `[...]` to floats `[..., features]`.

    Args:
      vocab_size: Number of rows; indices outside are clipped.
      features: Width of a row.
      table_init: For `table`, `[vocab_size, features]`. Rows of unit scale by default:
        small ones, normalized by the first layer of a block, magnify the rounding errors
        of reversing.
      max_length: Longest last axis of the input that is accepted; None: any.

    The output is at least float32, whatever the weights are computed in, since it starts
    the residual streams.
    """

    vocab_size: int
    features: int
    table_init: Initializer = Normal(1.0)
    max_length: int | None = None

    def init(self, key, inputs):
        return {"table": self.table_init(key, (self.vocab_size, self.features))}, ()

    def forward(self, weights, state, inputs, key, memo=None):
        (tokens,) = inputs
        if self.max_length is not None and tokens.shape[-1] > self.max_length:
            raise ValueError(f"the sequence has {tokens.shape[-1]} tokens, more than max_length")
        rows = jnp.take(weights["table"], tokens, axis=0, mode="clip")
        return (rows.astype(at_least_float32(rows.dtype)),), state, None


@dataclasses.dataclass(frozen=True)
class Dropout(Layer):
    """Zeroes each element with probability `rate`, scales the others by `1 / (1 - rate)`.

    Without a key (evaluation) it does nothing.

    Source: Srivastava et al. 2014 (https://jmlr.org/papers/v15/srivastava14a.html).
    """

    rate: float

    def __post_init__(self):
        super().__post_init__()
        check_rate(self.name, self.rate)

    def forward(self, weights, state, inputs, key, memo=None):
        return (dropout(inputs[0], self.rate, key),), state, None


@dataclasses.dataclass(frozen=True)
class Gelu(Layer):
    """Gaussian error linear unit, in its tanh approximation.

    Source: Hendrycks and Gimpel 2016 (https://arxiv.org/abs/1606.08415).
    """

    def forward(self, weights, state, inputs, key, memo=None):
        return (jax.nn.gelu(inputs[0]),), state, None


@dataclasses.dataclass(frozen=True)
class Relu(Layer):
    """`max(x, 0)`."""

    def forward(self, weights, state, inputs, key, memo=None):
        return (jax.nn.relu(inputs[0]),), state, None


@dataclasses.dataclass(frozen=True)
class Function(Layer):
    """A function of arrays, without weights, state or randomness.

    Args:
      f: Function defined at module level, since layers compare by value.
      n_in: How many arrays it takes.
      n_out: How many it returns: one, or a tuple of so many.

    Example:
      >>> import operator
      >>> layer = Function(operator.mul, n_in=2)
      >>> outputs, _, _ = layer.forward((), (), (jnp.arange(3), jnp.arange(3)), None)
      >>> outputs[0].tolist()
      [0, 1, 4]
    """

    f: Callable[..., Any]
    n_in: int = 1  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType]
    n_out: int = 1  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType]

    def forward(self, weights, state, inputs, key, memo=None):
        return as_outputs(self.f(*inputs), self.n_out), state, None


@dataclasses.dataclass(frozen=True)
class FeedForward(Layer):
    """Two dense layers with an activation between: `[..., D] -> [..., F] -> [..., D]`.

    Args:
      ff_width: F, the width between.
      activation: Function of one array.
      dropout: Rate of dropout between the two.
      kernel_init: For both kernels; the biases start at zero.
    """

    ff_width: int
    activation: Callable[[Array], Array] = jax.nn.gelu
    dropout: float = 0.0
    kernel_init: Initializer = LecunNormal()

    def __post_init__(self):
        super().__post_init__()
        check_rate(self.name, self.dropout)

    def init(self, key, inputs):
        up_key, down_key = jax.random.split(key)
        width = inputs[0].shape[-1]
        up, _ = Dense(self.ff_width, kernel_init=self.kernel_init).init(up_key, inputs)
        hidden = jax.ShapeDtypeStruct((self.ff_width,), inputs[0].dtype)
        down, _ = Dense(width, kernel_init=self.kernel_init).init(down_key, (hidden,))
        return {"up": up, "down": down}, ()

    def forward(self, weights, state, inputs, key, memo=None):
        (x,) = inputs
        hidden = dropout(self.activation(linear(weights["up"], x)), self.dropout, key)
        return (linear(weights["down"], hidden).astype(x.dtype),), state, None
