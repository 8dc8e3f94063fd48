"""Multi-head self-attention with rotary positions."""
# ruff: noqa: D102  (the methods are those of layers/base.py)

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from reversible_trainer.layers.base import Layer
from reversible_trainer.layers.core import at_least_float32, linear
from reversible_trainer.layers.initializers import Initializer, LecunNormal
from reversible_trainer.tree import Array

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


def attend(q_BTHK: Array, k_BTHK: Array, v_BTHK: Array, causal: bool, implementation: str | None = None) -> Array:
    """`softmax(q k / sqrt(K)) v` for each head; `causal` hides later positions.

    Args:
      q_BTHK: Queries.
      k_BTHK: Keys.
      v_BTHK: Values.
      causal: Whether a position sees only itself and earlier ones.
      implementation: "chunked", ours; "xla" and "cudnn", those of
        `jax.nn.dot_product_attention`. None takes "cudnn" where it works, on a GPU in 16 bits
        with heads of at most 128, and "chunked" elsewhere.
    """
    if implementation is None:
        small = q_BTHK.dtype.itemsize == 2 and q_BTHK.shape[-1] <= 128
        implementation = "cudnn" if small and jax.default_backend() == "gpu" else "chunked"
    if implementation == "chunked":
        return _in_chunks(q_BTHK, k_BTHK, v_BTHK, causal)
    form: Any = implementation
    with jax.numpy_dtype_promotion("standard"):  # it fails under strict promotion
        return jax.nn.dot_product_attention(q_BTHK, k_BTHK, v_BTHK, is_causal=causal, implementation=form)


def _in_chunks(q_BTHK: Array, k_BTHK: Array, v_BTHK: Array, causal: bool) -> Array:
    """Causal attention in chunks of queries, each of which sees only the keys up to its end: close to half the work.

    `jax.nn.dot_product_attention` is half as fast on a CPU, and takes its softmax in float32 even under float64.
    """
    T = q_BTHK.shape[1]
    size = max(_CHUNK, -(-T // _MAX_CHUNKS)) if causal else T
    chunks = []
    for start in range(0, T, size):
        seen = min(start + size, T)
        scores = _scores(q_BTHK[:, start:seen], k_BTHK[:, :seen])
        if causal:
            hidden_TS = jnp.arange(seen) > jnp.arange(start, seen)[:, None]
            scores = jnp.where(hidden_TS, -jnp.inf, scores)
        probabilities = jax.nn.softmax(scores).astype(v_BTHK.dtype)
        chunks.append(jnp.einsum("BHTS,BSHK->BTHK", probabilities, v_BTHK[:, :seen]))
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

    Source: Vaswani et al. 2017, section 3.2 (https://arxiv.org/abs/1706.03762).
    """

    heads: int
    causal: bool = True
    rotary: bool = True
    implementation: str | None = None
    kernel_init: Initializer = LecunNormal()

    def __post_init__(self):
        super().__post_init__()
        if self.implementation not in (None, *IMPLEMENTATIONS):
            known = ", ".join(map(repr, IMPLEMENTATIONS))
            raise ValueError(f"Attention: implementation must be None or one of {known}; got {self.implementation!r}.")

    def init(self, key, inputs):
        D = inputs[0].shape[-1]
        head_width(D, self.heads, self.rotary)
        names = ("query", "key", "value", "output")
        keys = jax.random.split(key, len(names))
        return {name: {"kernel": self.kernel_init(k, (D, D))} for name, k in zip(names, keys, strict=True)}, ()

    def forward(self, weights, state, inputs, key, memo=None):
        (x_BTD,) = inputs
        B, T, D = x_BTD.shape
        K = head_width(D, self.heads, self.rotary)
        q, k, v = (linear(weights[name], x_BTD).reshape(B, T, self.heads, K) for name in ("query", "key", "value"))
        if self.rotary:
            q, k = rotate(q), rotate(k)
        y_BTD = attend(q, k, v, self.causal, self.implementation).reshape(B, T, D)
        return (linear(weights["output"], y_BTD).astype(x_BTD.dtype),), state, None


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
