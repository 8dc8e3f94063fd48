"""Attention for long sequences, in time and memory linear in their length: local, and by hashing."""
# ruff: noqa: D102  (the methods are those of layers/base.py)

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from reversible_trainer.layers.attention import head_width, rotate
from reversible_trainer.layers.base import Layer, fold_key
from reversible_trainer.layers.core import at_least_float32, check_rate, dropout, linear
from reversible_trainer.layers.initializers import Initializer, LecunNormal
from reversible_trainer.tree import Array, Tree

# Scores that exist at once; more are computed in groups, and again in the backward pass.
_SCORES = 2**25
# What hides a key, and what hides a position from itself: finite, so that a position that sees
# nothing else still sees itself.
_HIDDEN, _ITSELF = -1e9, -1e5


@dataclasses.dataclass(frozen=True)
class LocalAttention(Layer):
    """Multi-head self-attention to the chunks nearby, `[B, T, D] -> [B, T, D]`.

    The sequence is cut into chunks. A position sees its own chunk and those next to it;
    there is nothing before the first chunk and nothing after the last.

    Args:
      heads: H; must divide D, unless `head_width` is given. With `rotary`, K must be even.
      chunk_length: Positions of a chunk; must divide T, unless T is shorter: then a
        position sees the whole sequence.
      chunks_before: How many chunks before its own a position sees.
      chunks_after: How many chunks after it. Without effect if `causal`.
      causal: Whether a position sees only itself and earlier ones.
      rotary: Whether queries and keys carry rotary positions.
      dropout: Rate at which probabilities of attention are dropped.
      kernel_init: For the four kernels, `query`, `key`, `value`, `[D, H K]` each, and `output`, `[H K, D]`.
      head_width: K; None: D / H.

    Source: Kitaev et al. 2020 (https://arxiv.org/abs/2001.04451), whose models mix such layers
    with those of hashed attention.
    """

    heads: int
    chunk_length: int = 64
    chunks_before: int = 1
    chunks_after: int = 0
    causal: bool = True
    rotary: bool = False
    dropout: float = 0.0
    kernel_init: Initializer = LecunNormal()
    head_width: int | None = None

    def __post_init__(self):
        super().__post_init__()
        _check_fields(self)

    def init(self, key, inputs):
        _, T, D = inputs[0].shape
        K = _head_width(self, D, self.rotary)
        _cut(self, T)
        return _kernels(self, key, D, K, "query", "key", "value", "output"), ()

    def forward(self, weights, state, inputs, key, memo=None):
        (x_BTD,) = inputs
        T, D = x_BTD.shape[1:]
        _head_width(self, D, self.rotary)
        n, C = _cut(self, T)
        q, k, v = (_project(weights[name], x_BTD, self.heads) for name in ("query", "key", "value"))
        if self.rotary:
            q, k = (rotate(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (q, k))
        near = range(-min(self.chunks_before, n - 1), 1 if self.causal else 1 + min(self.chunks_after, n - 1))
        positions = jnp.arange(T).reshape(n, C)
        seen = jnp.concatenate([positions + i * C for i in near], axis=1)
        seen = jnp.where(seen < T, seen, -1)

        def head(q_TK, k_TK, v_TK, key):
            q, k, v = (x.reshape(n, C, -1) for x in (q_TK, k_TK * k_TK.shape[-1] ** -0.5, v_TK))
            k, v = _nearby(k, near), _nearby(v, near)
            y, _ = _attend(q, k, v, positions, seen, key, causal=self.causal, shared=False, rate=self.dropout)
            return y.reshape(T, -1)

        y = _each_head(head, (q, k, v), key if self.dropout else None, T * seen.shape[1])
        return (_join(weights["output"], y, x_BTD),), state, None


@dataclasses.dataclass(frozen=True)
class LSHAttention(Layer):
    """Multi-head self-attention among positions of similar hash, `[B, T, D] -> [B, T, D]`.

    Queries and keys are the same vectors, the keys normalized. Vectors near each other fall
    into the same bucket; positions sorted by bucket are cut into chunks, and a position sees
    its own chunk and those next to it, the last one coming before the first. Several rounds
    of hashing find neighbours that one misses; they are weighed by what each found. A position
    sees itself only if it sees nothing else.

    Args:
      heads: H; must divide D, unless `head_width` is given.
      chunk_length: Positions of a chunk; must divide T, unless T is shorter: then a position
        sees the whole sequence and nothing is hashed.
      chunks_before: How many chunks before its own a position sees.
      chunks_after: How many chunks after it.
      hashes: Rounds of hashing.
      buckets: How many there are in a round: an even number, or a tuple of even numbers whose
        product it is (a hash is then made of one hash for each, which takes fewer
        directions). None: about `2 T / chunk_length`, as a power of two.
      causal: Whether a position sees only itself and earlier ones.
      fixed: Whether the random directions are drawn once, in `init`, and kept as the state.
        Otherwise each pass draws them from its key, and a pass without a key takes the same
        ones each time.
      dropout: Rate at which probabilities of attention are dropped.
      kernel_init: For the three kernels, `query_key` and `value`, `[D, H K]` each, and `output`, `[H K, D]`.
      head_width: K; None: D / H.

    The memo is the bucket of every position in every round, int32 `[B, H, hashes * T]` (None
    if nothing was hashed): a pass that is given it sees the same neighbours, though its inputs
    differ by rounding.

    What `causal` hides takes up places in a chunk all the same: later positions never reach
    what a position sees, but they have a say in which earlier ones it sees.

    Source: Kitaev et al. 2020, section 2 (https://arxiv.org/abs/2001.04451).
    """

    heads: int
    chunk_length: int = 64
    chunks_before: int = 1
    chunks_after: int = 0
    hashes: int = 1
    buckets: int | tuple[int, ...] | None = None
    causal: bool = True
    fixed: bool = False
    dropout: float = 0.0
    kernel_init: Initializer = LecunNormal()
    head_width: int | None = None

    def __post_init__(self):
        super().__post_init__()
        _check_fields(self)
        factors = self.buckets if isinstance(self.buckets, tuple) else (2 if self.buckets is None else self.buckets,)
        if self.hashes < 1 or not factors or any(n < 2 or n % 2 for n in factors):
            raise ValueError(
                "LSHAttention: hashes must be at least 1, and buckets None, an even number or a tuple of even "
                f"numbers; got hashes={self.hashes}, buckets={self.buckets}."
            )

    def init(self, key, inputs):
        _, T, D = inputs[0].shape
        K = _head_width(self, D)
        _cut(self, T)
        weights = _kernels(self, key, D, K, "query_key", "value", "output")
        if not self.fixed:
            return weights, ()
        dtype = at_least_float32(inputs[0].dtype)
        return weights, {"directions": self._draw(jax.random.fold_in(key, 3), T, K, dtype)}

    def forward(self, weights, state, inputs, key, memo=None):
        (x_BTD,) = inputs
        B, T, D = x_BTD.shape
        _head_width(self, D)
        n, C = _cut(self, T)
        qk, v = (_project(weights[name], x_BTD, self.heads) for name in ("query_key", "value"))
        dropout_key = fold_key(key, 1) if self.dropout else None
        attend = functools.partial(_attend, causal=self.causal, shared=True, rate=self.dropout)
        if n == 1:
            positions = jnp.arange(T)[None]

            def whole(qk_TK, v_TK, key):
                return attend(qk_TK[None], _as_keys(qk_TK)[None], v_TK[None], positions, positions, key)[0][0]

            y = _each_head(whole, (qk, v), dropout_key, T * T)
            return (_join(weights["output"], y, x_BTD),), state, None

        if memo is None:
            memo = self._hash(jax.lax.stop_gradient(qk), state, key)
        R = self.hashes
        near = range(-self.chunks_before, self.chunks_after + 1)
        order, undo = _sort(memo.reshape(B, self.heads, R, T), math.prod(self._factors(T)))

        def head(qk_TK, v_TK, order_RT, undo_RT, key):
            both = jnp.concatenate([qk_TK, v_TK], axis=-1)  # one gather of long rows is faster than two
            both = jax.vmap(_permute, (None, 0, 0))(both, order_RT, undo_RT)
            q, v = jnp.split(both.reshape(R * n, C, -1), 2, axis=-1)
            k, v = _nearby(_as_keys(q), near), _nearby(v, near)
            positions = order_RT.reshape(R * n, C)
            y, log_sum = attend(q, k, v, positions, _nearby(positions, near), key)
            y = jax.vmap(_permute)(y.reshape(R, T, -1), undo_RT, order_RT)
            if R == 1:
                return y[0]
            log_sum = jax.vmap(_permute)(log_sum.reshape(R, T), undo_RT, order_RT)
            share = jnp.exp(log_sum - jax.nn.logsumexp(log_sum, axis=0))[..., None]  # no softmax: see `_attend`
            return jnp.sum(y.astype(share.dtype) * share, axis=0).astype(y.dtype)

        y = _each_head(head, (qk, v, order, undo), dropout_key, R * T * len(near) * C)
        return (_join(weights["output"], y, x_BTD),), state, memo

    def _factors(self, T: int) -> tuple[int, ...]:
        """Numbers of buckets whose product is that of a round."""
        if self.buckets is not None:
            return self.buckets if isinstance(self.buckets, tuple) else (self.buckets,)
        n = max(T // self.chunk_length, 1)
        power = (2 * n).bit_length() - 1
        if 2**power <= 2 * max(math.isqrt(n), self.chunk_length):
            return (2**power,)
        return 2 ** (power // 2), 2 ** (power - power // 2)

    def _draw(self, key: Array, T: int, K: int, dtype: Any) -> Array:
        return jax.random.normal(key, (self.heads, K, self.hashes, sum(self._factors(T)) // 2), dtype)

    def _hash(self, qk_BHTK: Array, state: Tree, key: Array | None) -> Array:
        """The bucket of each position in each round, `[B, H, hashes * T]`."""
        B, H, T, K = qk_BHTK.shape
        dtype, factors = at_least_float32(qk_BHTK.dtype), self._factors(T)
        directions, wanted = state["directions"] if self.fixed else None, sum(factors) // 2
        if directions is None:
            directions = self._draw(jax.random.key(0) if key is None else jax.random.fold_in(key, 0), T, K, dtype)
        elif directions.shape[-1] != wanted:
            raise ValueError(
                f"LSHAttention: a length of {T} takes buckets={factors} and so {wanted} directions; the state has "
                f"{directions.shape[-1]}, drawn for another length. Set buckets, or fixed=False."
            )

        def head(qk_TK, directions_KRN, _):
            along = jnp.einsum("TK,KRN->RTN", qk_TK.astype(dtype), directions_KRN.astype(dtype))
            buckets, scale, start = 0, 1, 0
            for n in factors:
                buckets += scale * _strongest(along[..., start : start + n // 2])
                scale, start = scale * n, start + n // 2
            return buckets + scale * jnp.arange(self.hashes, dtype=jnp.int32)[:, None]

        each = jnp.broadcast_to(directions, (B, *directions.shape))
        return _each_head(head, (qk_BHTK, each), None, self.hashes * T * wanted).reshape(B, H, -1)


def _strongest(x: Array) -> Array:
    """`argmax([x, -x])` along the last axis, for which XLA's CPU compiler makes much slower code."""
    n = x.shape[-1]
    index, size = jnp.arange(n, dtype=jnp.int32), jnp.abs(x)
    candidates = jnp.where(x < 0, n + index, index)
    return jnp.min(jnp.where(size == jnp.max(size, axis=-1, keepdims=True), candidates, 2 * n), axis=-1)


def _sort(memo_BHRT: Array, buckets: int) -> tuple[Array, Array]:
    """`(order, undo)`: positions of each round by bucket, then by position; and where each of them went.

    Rounds have buckets of their own, so that sorting each is sorting all of them together.
    """
    R, T = memo_BHRT.shape[2:]
    if buckets * T < 2**31:
        # One number for both is sorted four times as fast as two.
        bucket_BHRT = memo_BHRT - buckets * jnp.arange(R, dtype=jnp.int32)[:, None]
        order = jnp.sort(bucket_BHRT * T + jnp.arange(T, dtype=jnp.int32), stable=False) % T
    else:
        order = jnp.argsort(memo_BHRT, stable=True).astype(jnp.int32)
    index = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), order.shape)
    return order, jnp.put_along_axis(jnp.zeros_like(order), order, index, axis=-1, inplace=False)


def _attend(
    q_NCK: Array,
    k_NWK: Array,
    v_NWK: Array,
    positions_NC: Array,
    seen_NW: Array,
    key: Array | None,
    causal: bool,
    shared: bool,
    rate: float,
) -> tuple[Array, Array]:
    """Attention of each of N chunks of queries to its window of W keys.

    Args:
      q_NCK: Queries.
      k_NWK: Keys, scaled.
      v_NWK: Values.
      positions_NC: Of the queries.
      seen_NW: Positions of the keys, -1 where there is none.
      key: For dropout.
      causal: Whether later positions are hidden.
      shared: Whether a position sees itself only if it sees nothing else.
      rate: Of dropout.

    Returns:
      Values, NCK, and the logarithm of the sum that the softmax divides by, NC.
    """
    scores = jnp.einsum("NCK,NWK->NCW", q_NCK, k_NWK, preferred_element_type=at_least_float32(q_NCK.dtype))
    seen, position = seen_NW[:, None], positions_NC[..., None]
    scores = jnp.where((seen < 0) | (causal & (seen > position)), _HIDDEN, scores)
    if shared:
        scores = jnp.where(seen == position, _ITSELF, scores)
    most = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    p = jnp.exp(scores - most)
    total = jnp.sum(p, axis=-1, keepdims=True)
    p = dropout(p, rate, key).astype(v_NWK.dtype)
    log_sum = most + jnp.log(total)
    # Not `/ total`: where a position sees only itself, `log_sum` has few digits (1 / 128 at 1e5), and `transformers`,
    # whose logits these are to be in float32, divides by what is left of the sum.
    y = jnp.einsum("NCW,NWK->NCK", p, v_NWK, preferred_element_type=total.dtype) * jnp.exp(most - log_sum)
    return y.astype(v_NWK.dtype), log_sum[..., 0]


def _each_head(f: Callable[..., Array], xs: tuple[Array, ...], key: Array | None, scores: int) -> Array:
    """`f(*xs, key)` of each batch and head, the first two axes of `xs`, `scores` being how many one of them needs."""
    B, H = xs[0].shape[:2]
    rows = (*(x.reshape(B * H, *x.shape[2:]) for x in xs), None if key is None else jax.random.split(key, B * H))
    most = max(1, _SCORES // scores)
    if most >= B * H:
        y = jax.vmap(f)(*rows)
    else:
        size = max(i for i in range(1, most + 1) if B * H % i == 0)
        y = jax.lax.map(jax.checkpoint(lambda row: f(*row)), rows, batch_size=size)
    return y.reshape(B, H, *y.shape[1:])


def _joined(x_NC: Array, near: range) -> Array:
    return jnp.concatenate([jnp.roll(x_NC, -i, axis=0) for i in near], axis=1)


def _parted(near: range, _: None, ct_NW: Array) -> tuple[Array]:
    # What JAX would make of `_joined` adds arrays that are zero but for one chunk.
    parts = jnp.split(ct_NW, len(near), axis=1)
    return (functools.reduce(jnp.add, (jnp.roll(part, i, axis=0) for i, part in zip(near, parts, strict=True))),)


# (x_NC, near) -> x_NW: each chunk's neighbourhood, the first chunk following the last.
_nearby = jax.custom_vjp(_joined, nondiff_argnums=(1,))
_nearby.defvjp(lambda x, near: (_joined(x, near), None), _parted)


@jax.custom_vjp
def _permute(x_T: Array, order_T: Array, undo_T: Array) -> Array:
    """`x[order]`, whose gradient is a gather as well: faster than the sums of a scatter, and in a fixed order."""
    return x_T.at[order_T].get(mode="promise_in_bounds", unique_indices=True)


_permute.defvjp(
    lambda x, order, undo: (_permute(x, order, undo), (order, undo)),
    lambda orders, ct: (_permute(ct, orders[1], orders[0]), None, None),
)


def _as_keys(x: Array, epsilon: float = 1e-6) -> Array:
    """`x / rms(x) / sqrt(K)`."""
    wide = x.astype(at_least_float32(x.dtype))
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + epsilon)
    return (wide * scale * x.shape[-1] ** -0.5).astype(x.dtype)


def _project(weights: Tree, x_BTD: Array, heads: int) -> Array:
    """`linear`, cut into heads: BHTK."""
    B, T, _ = x_BTD.shape
    return linear(weights, x_BTD).reshape(B, T, heads, -1).swapaxes(1, 2)


def _join(weights: Tree, y_BHTK: Array, x_BTD: Array) -> Array:
    """`linear` of the heads side by side, in the shape and dtype of x."""
    y = y_BHTK.swapaxes(1, 2).reshape(*x_BTD.shape[:2], -1)
    return linear(weights, y).astype(x_BTD.dtype)


def _head_width(layer: Any, D: int, rotary: bool = False) -> int:
    K = layer.head_width
    return head_width(D if K is None else K * layer.heads, layer.heads, rotary)


def _kernels(layer: Any, key: Array, D: int, K: int, *names: str) -> Tree:
    keys = jax.random.split(key, len(names))
    shape = D, layer.heads * K
    shapes = (shape[::-1] if name == "output" else shape for name in names)
    return {n: {"kernel": layer.kernel_init(k, s)} for n, k, s in zip(names, keys, shapes, strict=True)}


def _cut(layer: Any, T: int) -> tuple[int, int]:
    """Number of chunks and positions of each; refuses a length that the layer cannot cut."""
    if T <= layer.chunk_length:
        return 1, T
    if T % layer.chunk_length:
        raise ValueError(
            f"{layer.name}: the length must be a multiple of chunk_length={layer.chunk_length}, or no more than that; "
            f"got {T}. Pad the sequences to {-(-T // layer.chunk_length) * layer.chunk_length}, or change chunk_length."
        )
    return T // layer.chunk_length, layer.chunk_length


def _check_fields(layer: Any) -> None:
    check_rate(layer.name, layer.dropout)
    if layer.chunk_length < 1 or min(layer.chunks_before, layer.chunks_after) < 0:
        raise ValueError(
            f"{layer.name}: chunk_length must be at least 1, chunks_before and chunks_after at least 0; got "
            f"{layer.chunk_length}, {layer.chunks_before}, {layer.chunks_after}."
        )
