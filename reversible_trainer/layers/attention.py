"""Multi-head attention: of a sequence to itself, with rotary positions, and to another one."""
# ruff: noqa: D102  (the methods are those of layers/base.py)

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from reversible_trainer.layers.base import Layer
from reversible_trainer.layers.core import at_least_float32, linear
from reversible_trainer.layers.initializers import Initializer, LecunNormal
from reversible_trainer.tree import Array, Tree

# Queries per chunk of causal attention: 64-128 were the fastest on a CPU. More than eight
# chunks save little and, as each has its own shape, compile slowly.
_CHUNK, _MAX_CHUNKS = 128, 8


def rotate(x_BTHK: Array, base: float = 10_000.0) -> Array:
    """Rotary positions: turns the pair `(x[k], x[k + K/2])` of position t by `t * base^(-2k/K)`.

    Products of queries and keys so turned depend on the distance of their positions.

    Source: Su et al. 2021, eq. 15 (https://arxiv.org/abs/2104.09864).
    """
    _, T, _, K = x_BTHK.shape
    dtype = at_least_float32(x_BTHK.dtype)
    frequency_K = base ** (-jnp.arange(0, K, 2, dtype=dtype) / K)
    angle_TK = jnp.arange(T, dtype=dtype)[:, None] * frequency_K
    cos, sin = jnp.cos(angle_TK)[:, None, :], jnp.sin(angle_TK)[:, None, :]
    a, b = jnp.split(x_BTHK.astype(dtype), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x_BTHK.dtype)


IMPLEMENTATIONS = ("chunked", "xla", "cudnn")


def attend(
    q_BTHK: Array,
    k_BSHK: Array,
    v_BSHK: Array,
    causal: bool,
    implementation: str | None = None,
    mask_BS: Array | None = None,
) -> Array:
    """`softmax(q k / sqrt(K)) v` for each head; `causal` hides later positions.

    Args:
      q_BTHK: Queries.
      k_BSHK: Keys.
      v_BSHK: Values.
      causal: Whether a position sees only itself and earlier ones.
      implementation: "chunked", ours; "xla" and "cudnn", those of
        `jax.nn.dot_product_attention`. None takes "cudnn" where it works, on a GPU in 16 bits
        with heads of at most 128, and "chunked" elsewhere.
      mask_BS: Where zero or False, the position is not seen; None: all are. One for whom
        nothing is left to see gets some mean of the values.
    """
    mask_BS = None if mask_BS is None else mask_BS.astype(bool)
    if implementation is None:
        small = q_BTHK.dtype.itemsize == 2 and q_BTHK.shape[-1] <= 128
        implementation = "cudnn" if small and jax.default_backend() == "gpu" else "chunked"
    if implementation == "chunked":
        return _in_chunks(q_BTHK, k_BSHK, v_BSHK, causal, mask_BS)
    form: Any = implementation
    mask_BHTS = None if mask_BS is None else mask_BS[:, None, None, :]
    with jax.numpy_dtype_promotion("standard"):  # it fails under strict promotion
        return jax.nn.dot_product_attention(
            q_BTHK, k_BSHK, v_BSHK, mask=mask_BHTS, is_causal=causal, implementation=form
        )


def _in_chunks(q_BTHK: Array, k_BSHK: Array, v_BSHK: Array, causal: bool, mask_BS: Array | None = None) -> Array:
    """Causal attention in chunks of queries, each of which sees only the keys up to its end: close to half the work.

    `jax.nn.dot_product_attention` is half as fast on a CPU, and takes its softmax in float32 even under float64.
    """
    T, S = q_BTHK.shape[1], k_BSHK.shape[1]
    size = max(_CHUNK, -(-T // _MAX_CHUNKS)) if causal else T
    chunks = []
    for start in range(0, T, size):
        stop = min(start + size, T)
        seen = stop if causal else S
        scores = _scores(q_BTHK[:, start:stop], k_BSHK[:, :seen])
        if causal:
            hidden_TS = jnp.arange(seen) > jnp.arange(start, stop)[:, None]
            scores = jnp.where(hidden_TS, -jnp.inf, scores)
        if mask_BS is not None:  # no infinity, of which the softmax would be nan where nothing is left
            scores = jnp.where(mask_BS[:, None, None, :seen], scores, jnp.finfo(scores.dtype).min)
        probabilities = jax.nn.softmax(scores).astype(v_BSHK.dtype)
        chunks.append(jnp.einsum("BHTS,BSHK->BTHK", probabilities, v_BSHK[:, :seen]))
    return jnp.concatenate(chunks, axis=1)


def _scores(q_BTHK: Array, k_BSHK: Array) -> Array:
    """`q k / sqrt(K)`, BHTS, at least float32."""
    q_BTHK = q_BTHK * q_BTHK.shape[-1] ** -0.5
    return jnp.einsum("BTHK,BSHK->BHTS", q_BTHK, k_BSHK, preferred_element_type=at_least_float32(q_BTHK.dtype))


@dataclasses.dataclass(frozen=True)
class Attention(Layer):
    """Multi-head self-attention, `[B, T, D] -> [B, T, D]`.

    Args:
      heads: H; must divide D. With `rotary`, D / H must be even.
      causal: Whether a position sees only itself and earlier ones.
      rotary: Whether queries and keys carry rotary positions. Without, attention knows
        nothing about order (but for what `causal` gives away).
      implementation: Of the softmax: None chooses for the backend; see `attend`.
      kernel_init: For the four kernels, `[D, D]` each, `query`, `key`, `value`, `output`.
        They are kept apart, since matrix optimizers treat each as a matrix of its own.
      masked: Whether there is a second input, `[B, T]`, bool or integer: positions where it
        is zero are not seen.

    Source: Vaswani et al. 2017, section 3.2 (https://arxiv.org/abs/1706.03762).
    """

    heads: int
    causal: bool = True
    rotary: bool = True
    implementation: str | None = None
    kernel_init: Initializer = LecunNormal()
    masked: bool = False

    def __post_init__(self):
        super().__post_init__()
        _check_implementation(self)

    @property
    def n_in(self) -> int:
        return 2 if self.masked else 1

    def init(self, key, inputs):
        D = inputs[0].shape[-1]
        head_width(D, self.heads, self.rotary)
        return _kernels(self.kernel_init, key, D, D), ()

    def forward(self, weights, state, inputs, key, memo=None):
        x_BTD, *mask = inputs
        K = head_width(x_BTD.shape[-1], self.heads, self.rotary)
        q, k, v = (_heads(weights[name], x_BTD, K) for name in ("query", "key", "value"))
        if self.rotary:
            q, k = rotate(q), rotate(k)
        y = attend(q, k, v, self.causal, self.implementation, *mask)
        return (linear(weights["output"], y.reshape(x_BTD.shape)).astype(x_BTD.dtype),), state, None


@dataclasses.dataclass(frozen=True)
class CrossAttention(Layer):
    """Multi-head attention to another sequence: `(x [B, T, D], encoded [B, S, E], mask [B, S]) -> [B, T, D]`.

    Queries come from x, keys and values from `encoded`, whose positions are not seen where the
    mask, bool or integer, is zero. Where all are hidden, the output is finite and means nothing.

    Args:
      heads: H; must divide D.
      implementation: Of the softmax, as in `Attention`.
      kernel_init: For `query` and `output`, `[D, D]`, and `key` and `value`, `[E, D]`.

    Source: Vaswani et al. 2017, section 3.2.3 (https://arxiv.org/abs/1706.03762).
    """

    heads: int
    implementation: str | None = None
    kernel_init: Initializer = LecunNormal()

    def __post_init__(self):
        super().__post_init__()
        _check_implementation(self)

    @property
    def n_in(self) -> int:
        return 3

    def init(self, key, inputs):
        D, E = inputs[0].shape[-1], inputs[1].shape[-1]
        head_width(D, self.heads, rotary=False)
        return _kernels(self.kernel_init, key, D, E), ()

    def forward(self, weights, state, inputs, key, memo=None):
        x_BTD, encoded_BSE, mask_BS = inputs
        K = head_width(x_BTD.shape[-1], self.heads, rotary=False)
        q = _heads(weights["query"], x_BTD, K)
        k, v = (_heads(weights[name], encoded_BSE, K) for name in ("key", "value"))
        y = attend(q, k, v, False, self.implementation, mask_BS)
        return (linear(weights["output"], y.reshape(x_BTD.shape)).astype(x_BTD.dtype),), state, None


def _check_implementation(layer: Attention | CrossAttention) -> None:
    if layer.implementation not in (None, *IMPLEMENTATIONS):
        known = ", ".join(map(repr, IMPLEMENTATIONS))
        raise ValueError(f"{layer.name}: implementation must be None or one of {known}; got {layer.implementation!r}.")


def _kernels(kernel_init: Initializer, key: Array, D: int, E: int) -> Tree:
    """Weights: queries and outputs have width D, what keys and values are made of has E."""
    shapes = {"query": (D, D), "key": (E, D), "value": (E, D), "output": (D, D)}
    keys = jax.random.split(key, len(shapes))
    return {name: {"kernel": kernel_init(k, shape)} for k, (name, shape) in zip(keys, shapes.items(), strict=True)}


def _heads(weights: Tree, x_BTD: Array, K: int) -> Array:
    """`[B, T, D] -> [B, T, H, K]`."""
    B, T, _ = x_BTD.shape
    return linear(weights, x_BTD).reshape(B, T, -1, K)


def head_width(width: int, heads: int, rotary: bool = True) -> int:
    """K = D / H; refuses heads that do not divide the width, and odd heads that cannot be rotated."""
    if heads < 1 or width % heads:
        raise ValueError(f"attention: heads must divide the width; got heads={heads}, width={width}.")
    if rotary and width // heads % 2:
        raise ValueError(
            f"attention: rotary positions turn pairs, so a head's width must be even; got width={width} / "
            f"heads={heads} = {width // heads}. Change heads, or set rotary=False."
        )
    return width // heads
