"""Reversible layers: couplings, and moves of stack entries that lose nothing."""
# ruff: noqa: D102  (the methods are those of layers/base.py)

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from reversible_trainer.layers.base import Layer, ReversibleLayer, Stack, differentiate, output_signature, put, take
from reversible_trainer.layers.combinators import Serial, check_one_output, check_same
from reversible_trainer.layers.fixed_point import FRACTION, add, rounded, subtract, to_float
from reversible_trainer.tree import Array


@dataclasses.dataclass(frozen=True)
class HalfResidual(ReversibleLayer):
    """Additive coupling: `(x1, x2, *context) -> (x1 + f(x2, *context), x2, *context)`.

    One half of a RevNet block; `ReversibleSwap` between two of them lets both
    residual streams be updated.

    Args:
      f: Layer from `[..., D]` to `[..., D]`, and as much context as it takes. Must be
        deterministic given its key and memo, since it runs again during the backward sweep.

    Reversing is exact in real arithmetic; in floating point each layer adds about one
    rounding error, on fixed-point streams none: f sees their numbers as float32, and what it
    returns is rounded before it is added.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from reversible_trainer.layers import Gelu
      >>> layer, key = HalfResidual(Gelu()), jax.random.key(0)
      >>> xs = (jnp.ones(2), jnp.ones(2))
      >>> weights, state = layer.init(key, xs)
      >>> ys, _, memo = layer.forward(weights, state, xs, key)
      >>> [x.tolist() for x in layer.reverse(weights, state, ys, key, memo)]
      [[1.0, 1.0], [1.0, 1.0]]

    Source: Gomez et al. 2017, eq. 6-9 (https://arxiv.org/abs/1707.04585).
    """

    f: Layer

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_output(self, self.f)

    @property
    def n_in(self) -> int:
        return 1 + self.f.n_in

    @property
    def n_out(self) -> int:
        return 1 + self.f.n_in

    def init(self, key, inputs):
        x1, *rest = map(_as_float, inputs)
        weights, state = self.f.init(key, tuple(rest))
        (y,) = output_signature(self.f, weights, state, tuple(rest))
        check_same(self, self.f, x1, rest[0], y)
        return {self.f.name: weights}, {self.f.name: state}

    def forward(self, weights, state, inputs, key, memo=None):
        x1, *rest = inputs
        y, new_state, memo = self._f(weights, state, rest, key, memo)
        check_same(self, self.f, _as_float(x1), _as_float(rest[0]), y)
        return (add(x1, y), *rest), {self.f.name: new_state}, memo

    def reverse(self, weights, state, outputs, key, memo=None):
        y1, *rest = outputs
        y, _, _ = self._f(weights, state, rest, key, memo)
        return (subtract(y1, y), *rest)

    def reverse_and_grad(self, weights, state, outputs, cotangents, key, memo=None):
        y1, *rest = outputs
        y1_ct, *rest_cts = cotangents
        name = self.f.name
        # One run of f serves both: its value reverses, its vjp gives the gradients.
        seen = tuple(map(to_float, rest))
        (y,), _, _, pullback = differentiate(self.f, weights[name], state[name], seen, key, memo)
        f_cts, weight_grads = pullback((y1_ct,))
        rest_cts = map(_add, rest_cts, f_cts)
        return (subtract(y1, y), *rest), ((y1_ct, *rest_cts), {name: weight_grads})

    def _f(self, weights, state, inputs, key, memo):
        """f's only output, its new state and its memo."""
        name = self.f.name
        (y,), new_state, memo = self.f.forward(weights[name], state[name], tuple(map(to_float, inputs)), key, memo)
        return y, new_state, memo


def _as_float(x: Any) -> Any:
    """Signature of what f sees of a stack entry."""
    return jax.eval_shape(to_float, x)


def _add(a: Array | None, b: Array | None) -> Array | None:
    """Sum of two cotangents, None being zero."""
    return b if a is None else a if b is None else a + b


@dataclasses.dataclass(frozen=True)
class ReversibleSelect(ReversibleLayer):
    """Reorders the top entries: `indices` are positions counted from the top, each once.

    Example:
      >>> layer = ReversibleSelect((2, 0, 1))
      >>> outputs, _, _ = layer.forward((), (), ("a", "b", "c"), None)
      >>> outputs, layer.reverse((), (), outputs, None)
      (('c', 'a', 'b'), ('a', 'b', 'c'))
    """

    indices: tuple[int, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        n = len(self.indices)
        if sorted(self.indices) != list(range(n)):
            raise ValueError(
                f"ReversibleSelect: indices must have each of 0 ... {n - 1} once, or inputs would be lost; "
                f"got {self.indices}. Copying and dropping are for Select, in a standard block."
            )

    @property
    def n_in(self) -> int:
        return len(self.indices)

    @property
    def n_out(self) -> int:
        return len(self.indices)

    def forward(self, weights, state, inputs, key, memo=None):
        return tuple(inputs[i] for i in self.indices), state, None

    def reverse(self, weights, state, outputs, key, memo=None):
        return tuple(outputs[self.indices.index(i)] for i in range(len(self.indices)))


@dataclasses.dataclass(frozen=True)
class ReversibleSwap(ReversibleLayer):
    """Swaps the two top entries: `(x1, x2) -> (x2, x1)`."""

    @property
    def n_in(self) -> int:
        return 2

    @property
    def n_out(self) -> int:
        return 2

    def forward(self, weights, state, inputs, key, memo=None):
        return inputs[::-1], state, None

    def reverse(self, weights, state, outputs, key, memo=None):
        return outputs[::-1]


@dataclasses.dataclass(frozen=True)
class ReversibleConcatenatePair(ReversibleLayer):
    """Joins two entries of one shape and kind along the last axis: `[..., D], [..., D] -> [..., 2 D]`."""

    @property
    def n_in(self) -> int:
        return 2

    def forward(self, weights, state, inputs, key, memo=None):
        x1, x2 = inputs
        if x1.shape != x2.shape:
            raise ValueError("both must have one shape, since reversing cuts in the middle")
        return (_join(x1, x2),), state, None

    def reverse(self, weights, state, outputs, key, memo=None):
        return _split(outputs[0])


@dataclasses.dataclass(frozen=True)
class ReversibleSplit(ReversibleLayer):
    """Cuts an entry in the middle of the last axis: `[..., 2 D] -> [..., D], [..., D]`."""

    @property
    def n_out(self) -> int:
        return 2

    def forward(self, weights, state, inputs, key, memo=None):
        return _split(inputs[0]), state, None

    def reverse(self, weights, state, outputs, key, memo=None):
        return (_join(*outputs),)


# A fixed-point stream is a pytree of one array, or two with its carrier: both are moved alike.


def _join(a: Any, b: Any) -> Any:
    return jax.tree.map(lambda x, y: jnp.concatenate([x, y], axis=-1), a, b)


def _split(x: Any) -> Stack:
    return tuple(jax.tree.map(lambda a, i=i: jnp.split(a, 2, axis=-1)[i], x) for i in (0, 1))


@dataclasses.dataclass(frozen=True)
class ReversibleReshape(ReversibleLayer):
    """`[B, *shape_in] -> [B, *shape_out]`, for whatever batch B.

    Both shapes must have the same number of elements.
    """

    shape_in: tuple[int, ...]
    shape_out: tuple[int, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if math.prod(self.shape_in) != math.prod(self.shape_out) or min(self.shape_in + self.shape_out, default=1) < 1:
            raise ValueError(
                "ReversibleReshape: shape_in and shape_out must hold equally many elements, without the batch "
                f"dimension and without -1; got {self.shape_in} and {self.shape_out}."
            )

    def forward(self, weights, state, inputs, key, memo=None):
        return (_reshape(inputs[0], self.shape_in, self.shape_out),), state, None

    def reverse(self, weights, state, outputs, key, memo=None):
        return (_reshape(outputs[0], self.shape_out, self.shape_in),)


def _reshape(x: Any, before: tuple[int, ...], after: tuple[int, ...]) -> Any:
    if x.shape[1:] != before:
        raise ValueError(f"expected [B, {', '.join(map(str, before))}]; got {list(x.shape)}")
    return jax.tree.map(lambda a: a.reshape(a.shape[0], *after), x)


@dataclasses.dataclass(frozen=True)
class ToFixedPoint(Layer):
    """Makes fixed-point streams of the `n` top entries, which reversible blocks then reverse without any error.

    Args:
      n: How many.
      fraction: Bits after the binary point; the other `31 - fraction` are the range.

    Example:
      >>> import jax.numpy as jnp
      >>> (stream,), _, _ = ToFixedPoint(1).forward((), (), (jnp.ones(2),), None)
      >>> stream.bits.tolist()
      [262144, 262144]

    Source: MacKay et al. 2018, section 4 (https://arxiv.org/abs/1810.10999).
    """

    n: int = 2
    fraction: int = FRACTION

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (type(self.fraction) is int and 0 < self.fraction < 31):
            raise ValueError(f"ToFixedPoint: fraction must be a whole number from 1 to 30; got {self.fraction!r}.")

    @property
    def n_in(self) -> int:
        return self.n

    @property
    def n_out(self) -> int:
        return self.n

    def forward(self, weights, state, inputs, key, memo=None):
        return tuple(rounded(x, self.fraction) for x in inputs), state, None


ARITHMETICS = ("float32", "fixed_point")


def streams(model: str, arithmetic: str) -> tuple[Layer, ...]:
    """What makes two residual streams of a model's two arrays: no layer or one."""
    if arithmetic not in ARITHMETICS:
        known = " or ".join(map(repr, ARITHMETICS))
        raise ValueError(f"{model}: arithmetic must be {known}; got {arithmetic!r}.")
    return (ToFixedPoint(),) if arithmetic == "fixed_point" else ()


@dataclasses.dataclass(frozen=True)
class FromFixedPoint(Layer):
    """Makes float32 arrays of the `n` top entries, fixed-point streams; arrays stay as they are."""

    n: int = 2

    @property
    def n_in(self) -> int:
        return self.n

    @property
    def n_out(self) -> int:
        return self.n

    def forward(self, weights, state, inputs, key, memo=None):
        return tuple(map(to_float, inputs)), state, None


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class ReversibleSerial(Serial, ReversibleLayer):
    """Reversible layers one after the other, on one stack: as a rule, a block of a model."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for layer in self.layers:
            if not isinstance(layer, ReversibleLayer):
                raise TypeError(
                    f"ReversibleSerial: every layer must be reversible; got {layer!r}. "
                    "Wrap it in HalfResidual, or build a standard block with Serial."
                )

    def reverse(self, weights, state, outputs, key, memo=None):
        stack = outputs
        for name, layer, key_i, memo_i in reversed(self._parts(key, memo)):
            taken, rest = take(stack, layer.n_out)
            stack = put(rest, layer.reverse(weights[name], state[name], taken, key_i, memo_i))
        return stack

    def reverse_and_grad(self, weights, state, outputs, cotangents, key, memo=None):
        stack, cts, weight_grads = outputs, cotangents, {}
        for name, layer, key_i, memo_i in reversed(self._parts(key, memo)):
            taken, rest = take(stack, layer.n_out)
            taken_cts, rest_cts = take(cts, layer.n_out)
            inputs, (input_cts, weight_grads[name]) = layer.reverse_and_grad(
                weights[name], state[name], taken, taken_cts, key_i, memo_i
            )
            stack, cts = put(rest, inputs), put(rest_cts, input_cts)
        return stack, (cts, weight_grads)


@dataclasses.dataclass(frozen=True)
class ConcatenateStreams(Layer):
    """One array of two residual streams, of either arithmetic: `[..., D], [..., D] -> [..., 2 D]`."""

    @property
    def n_in(self) -> int:
        return 2

    def forward(self, weights, state, inputs, key, memo=None):
        return (jnp.concatenate(list(map(to_float, inputs)), axis=-1),), state, None
