"""Layers run on a few positions at a time, so that what they make in between never exists for a whole sequence."""
# ruff: noqa: D102  (the methods are those of layers/base.py)

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from reversible_trainer.layers.base import Layer, LossLayer, Stack
from reversible_trainer.layers.core import at_least_float32
from reversible_trainer.tree import Array, Tree


@dataclasses.dataclass(frozen=True)
class Chunked(Layer):
    """`f` on `[B, T, D]` in chunks of positions, one after the other: the numbers are the same.

    The backward pass runs f again on each chunk, and holds one chunk's temporaries at a time.

    Args:
      f: Layer that treats every position by itself, such as `FeedForward`, with one input, one
        output, and neither state nor memo. Names of weights are as without `Chunked`.
      chunk_length: Positions in a chunk. T must be a multiple, or shorter: then it is one chunk.

    Example:
      >>> import jax
      >>> from reversible_trainer.layers import Dense
      >>> layer, x = Chunked(Dense(2), chunk_length=4), jax.numpy.ones((1, 8, 3))
      >>> weights, state = layer.init(jax.random.key(0), (x,))
      >>> (y,), _, _ = layer.forward(weights, state, (x,), None)
      >>> layer.name, sorted(weights), y.shape
      ('Dense', ['bias', 'kernel'], (1, 8, 2))

    Source: Kitaev et al. 2020, section 3 (https://arxiv.org/abs/2001.04451).
    """

    f: Layer
    chunk_length: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.f, Layer) or isinstance(self.f, LossLayer):
            raise TypeError(f"Chunked: f must be a layer, and for a loss there is ChunkedLoss; got {self.f!r}.")
        if (self.f.n_in, self.f.n_out) != (1, 1):
            arity = f"n_in = {self.f.n_in}, n_out = {self.f.n_out}"
            raise ValueError(f"Chunked('{self.f.name}'): f must have one input and one output; got {arity}.")
        _check_chunk_length(self)

    @property
    def name(self) -> str:
        return self.f.name  # so that weights have the paths that they have without chunks

    def init(self, key, inputs):
        weights, state = self.f.init(key, inputs)
        _check_empty(self, state, "state")
        return weights, state

    def forward(self, weights, state, inputs, key, memo=None):
        def run(weights: Tree, chunk: Stack, key: Array | None) -> Array:
            (y,), _, memo = self.f.forward(weights, state, chunk, key)
            _check_empty(self, memo, "memo")
            return y

        return (_join(_map(run, self.chunk_length, weights, inputs, key)),), state, None


@dataclasses.dataclass(frozen=True)
class ChunkedLoss(LossLayer):
    """A loss taken of chunks of positions, one after the other; its sums are added up.

    So the logits of a whole sequence never exist at once, neither forward nor backward.

    Args:
      f: Loss that treats every position by itself, as `LossSerial(RMSNorm(), Dense(V), CrossEntropy())`
        does, without state. All that it takes is `[B, T, ...]`. Names of weights are as without.
      chunk_length: Positions in a chunk. T must be a multiple, or shorter: then it is one chunk.
    """

    f: LossLayer
    chunk_length: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.f, LossLayer):
            raise TypeError(f"ChunkedLoss: f must be a LossLayer; got {self.f!r}.")
        _check_chunk_length(self)

    @property
    def name(self) -> str:
        return self.f.name

    @property
    def n_in(self) -> int:
        return self.f.n_in

    @property
    def metric_names(self) -> tuple[str, ...]:
        return self.f.metric_names

    def init(self, key, inputs):
        weights, state = self.f.init(key, inputs)
        _check_empty(self, state, "state")
        return weights, state

    def forward(self, weights, state, inputs, key, memo=None):
        def run(weights: Tree, chunk: Stack, key: Array | None) -> Stack:
            sums, _, memo = self.f.forward(weights, state, chunk, key)
            _check_empty(self, memo, "memo")
            return sums

        sums = _map(run, self.chunk_length, weights, inputs, key)
        return jax.tree.map(lambda x: jnp.sum(x, axis=0), sums), state, None

    def predict(self, weights, state, inputs, key=None):
        """The logits of the whole sequence."""
        run = lambda weights, chunk, key: self.f.predict(weights, state, chunk, key)  # noqa: E731
        return _join(_map(run, self.chunk_length, weights, inputs, key))


def _map(
    run: Callable[[Tree, Stack, Array | None], Any], chunk_length: int, weights: Tree, inputs: Stack, key: Array | None
) -> Any:
    """`run(weights, chunk, key)` of one chunk after the other, the results stacked: `[N, ...]`."""
    n = _count(inputs, chunk_length)
    if n == 1:
        return jax.tree.map(lambda y: y[None], run(weights, inputs, key))
    # The loop is given at least float32, since in its transpose the weights' gradients add up over the chunks.
    wide = jax.tree.map(lambda w: w.astype(at_least_float32(w.dtype)), weights)

    def one(wide: Tree, i: Array, chunk: Stack) -> Any:
        narrow = jax.tree.map(lambda w, like: w.astype(like.dtype), wide, weights)
        return run(narrow, chunk, None if key is None else jax.random.fold_in(key, i))

    again = jax.checkpoint(one, prevent_cse=False)  # in a loop nothing can be shared by mistake
    chunks = jax.tree.map(lambda x: _cut(x, n), inputs)  # a fixed-point stream is a tree
    return jax.lax.map(lambda i_chunk: again(wide, *i_chunk), (jnp.arange(n), chunks))


def _count(inputs: Stack, chunk_length: int) -> int:
    """Chunks in a sequence."""
    lengths = {x.shape[1] for x in inputs if len(x.shape) > 1}
    if len(lengths) != 1 or any(len(x.shape) < 2 for x in inputs):
        raise ValueError("all inputs must be [B, T, ...] with one T")
    (T,) = lengths
    if T > chunk_length and T % chunk_length:
        raise ValueError(f"{T} positions are no multiple of chunk_length, {chunk_length}, nor fewer; pad the sequence")
    return max(1, T // chunk_length)


def _cut(x: Array, n: int) -> Array:
    """`[B, T, ...] -> [N, B, T / N, ...]`."""
    B, T, *rest = x.shape
    return jnp.moveaxis(x.reshape(B, n, T // n, *rest), 1, 0)


def _join(x: Array) -> Array:
    """`[N, B, C, ...] -> [B, N C, ...]`."""
    N, B, C, *rest = x.shape
    return jnp.moveaxis(x, 0, 1).reshape(B, N * C, *rest)


def _check_chunk_length(layer: Chunked | ChunkedLoss) -> None:
    if type(layer.chunk_length) is not int or layer.chunk_length < 1:
        raise ValueError(
            f"{type(layer).__name__}('{layer.f.name}'): chunk_length must be a whole number, at least 1; "
            f"got {layer.chunk_length!r}."
        )


def _check_empty(layer: Chunked | ChunkedLoss, tree: Tree, what: str) -> None:
    if jax.tree.leaves(tree):
        raise ValueError(f"'{layer.f.name}' has a {what}, which would have to be carried from chunk to chunk")
