"""Layers made of layers, and layers that only move stack entries.

A container's weights, state and keys belong to its layers: weights and states are dicts by
layer name, so weight paths read `Serial/Dense/kernel`; the i-th layer's key is folded from i.
"""
# ruff: noqa: D102  (the methods are those of layers/base.py)

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from reversible_trainer.layers.base import Layer, Stack, arity, fold_key, output_signature, put, take, unique_names
from reversible_trainer.tree import Array, Tree, describe, signature


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Serial(Layer):
    """Layers one after the other, on one stack.

    Args:
      *layers: Any number of layers; what one leaves on the stack, the next may take.

    Example:
      >>> import jax
      >>> from reversible_trainer.layers import Dense, Gelu
      >>> layer = Serial(Dense(8), Gelu(), Dense(2))
      >>> weights, state = layer.init(jax.random.key(0), (jax.ShapeDtypeStruct((4,), "float32"),))
      >>> sorted(weights)
      ['Dense', 'Dense_2', 'Gelu']
    """

    layers: tuple[Layer, ...]

    def __init__(self, *layers: Layer) -> None:
        object.__setattr__(self, "layers", layers)
        self.__post_init__()

    def __post_init__(self) -> None:
        super().__post_init__()
        for layer in self.layers:
            if not isinstance(layer, Layer):
                raise TypeError(f"{self.name}: expected layers as arguments, as in {self.name}(f, g); got {layer!r}.")

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(map(repr, self.layers))})"

    @property
    def n_in(self) -> int:
        return arity(self.layers)[0]

    @property
    def n_out(self) -> int:
        return arity(self.layers)[1]

    def init(self, key, inputs):
        stack, weights, state = tuple(inputs), {}, {}
        for i, (name, layer) in enumerate(zip(unique_names(self.layers), self.layers, strict=True)):
            taken, rest = take(stack, layer.n_in)
            weights[name], state[name] = layer.init(jax.random.fold_in(key, i), taken)
            stack = put(rest, output_signature(layer, signature(weights[name]), signature(state[name]), taken))
        return weights, state

    def forward(self, weights, state, inputs, key, memo=None):
        return self._run(len(self.layers), weights, state, inputs, key, memo)

    def _run(
        self, n: int, weights: Tree, state: Tree, stack: Stack, key: Array | None, memo: Tree = None
    ) -> tuple[Stack, Tree, Tree]:
        """`forward` of the first `n` layers."""
        new_state, memos = {}, []
        for name, layer, key_i, memo_i in self._parts(key, memo)[:n]:
            taken, rest = take(stack, layer.n_in)
            outputs, new_state[name], new_memo = layer.forward(weights[name], state[name], taken, key_i, memo_i)
            stack = put(rest, outputs)
            memos.append(new_memo)
        return stack, new_state, join_memos(memos)

    def _parts(self, key: Array | None, memo: Tree = None) -> list[tuple[str, Any, Array | None, Tree]]:
        """`(name, layer, key, memo)` of each layer in a pass with `key` and `memo`.

        The layer's type is Any, since subclasses know more about their layers.
        """
        memos = (None,) * len(self.layers) if memo is None else memo
        names = unique_names(self.layers)
        keys = (fold_key(key, i) for i in range(len(names)))
        return list(zip(names, self.layers, keys, memos, strict=True))


def join_memos(memos: list[Tree]) -> Tree:
    """A container's memo: its layers' memos, or None if there are none."""
    return None if all(memo is None for memo in memos) else tuple(memos)


@dataclasses.dataclass(frozen=True)
class Residual(Layer):
    """`(x, *context) -> (x + f(x, *context), *context)`.

    Args:
      f: Layer with one output, of the shape and dtype of x.
    """

    f: Layer

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_output(self, self.f)

    @property
    def n_in(self) -> int:
        return self.f.n_in

    @property
    def n_out(self) -> int:
        return self.f.n_in

    def init(self, key, inputs):
        weights, state = self.f.init(key, inputs)
        (y,) = output_signature(self.f, weights, state, inputs)
        check_same(self, self.f, inputs[0], inputs[0], y)
        return {self.f.name: weights}, {self.f.name: state}

    def forward(self, weights, state, inputs, key, memo=None):
        x, *context = inputs
        (y,), new_state, memo = self.f.forward(weights[self.f.name], state[self.f.name], inputs, key, memo)
        check_same(self, self.f, x, x, y)
        return (x + y, *context), {self.f.name: new_state}, memo


def check_one_output(layer: Layer, f: Layer) -> None:
    """Refuses an `f` that is no layer or has more than one output."""
    if not isinstance(f, Layer):
        raise TypeError(f"{layer.name}: f must be a layer; got {f!r}.")
    if f.n_out != 1:
        raise ValueError(f"{layer.name}('{f.name}'): f must have one output, to be added; got n_out = {f.n_out}.")


def check_same(layer: Layer, f: Layer, stream: Any, given: Any, got: Any) -> None:
    """Refuses what f made of `given`, `got`, unless it can be added to `stream`."""
    if (got.shape, got.dtype) != (stream.shape, stream.dtype):
        raise ValueError(
            f"{layer.name}('{f.name}'): f must return the shape and dtype it takes; got {describe(given)} -> "
            f"{describe(got)}. Give '{f.name}' an output of {describe(stream)}, or place it in a standard block."
        )


@dataclasses.dataclass(frozen=True)
class Select(Layer):
    """Takes `n_in` entries and puts back those that `indices` name, the first on top.

    Args:
      indices: Positions counted from the top; an entry may come once, more than once or
        not at all.
      n_in: Entries taken; by default as many as `indices` reach.

    Example:
      >>> swap, drop = Select((1, 0)), Select((), n_in=1)
      >>> swap.forward((), (), ("a", "b"), None)[0]
      ('b', 'a')
    """

    indices: tuple[int, ...]
    n_in: int | None = None  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType]

    def __post_init__(self) -> None:
        super().__post_init__()
        reach = max(self.indices, default=-1) + 1
        n_in = reach if self.n_in is None else self.n_in
        if min(self.indices, default=0) < 0 or reach > n_in:
            raise ValueError(f"Select: indices must be in 0 ... n_in - 1; got {self.indices} with n_in={n_in}.")
        object.__setattr__(self, "n_in", n_in)

    @property
    def n_out(self) -> int:
        return len(self.indices)

    def forward(self, weights, state, inputs, key, memo=None):
        return tuple(inputs[i] for i in self.indices), state, None


@dataclasses.dataclass(frozen=True)
class Dup(Layer):
    """Copies the top entry: `(x,) -> (x, x)`."""

    @property
    def n_out(self) -> int:
        return 2

    def forward(self, weights, state, inputs, key, memo=None):
        return (inputs[0], inputs[0]), state, None
