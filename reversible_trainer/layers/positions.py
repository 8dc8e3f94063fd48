"""Positions added to a sequence: learned, sinusoidal, axial. Rotary ones are part of `Attention`.

Each is `[B, T, D] -> [B, T, D]`, in the dtype of its input.
"""
# ruff: noqa: D102  (the methods are those of layers/base.py)

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from reversible_trainer.layers.base import Layer
from reversible_trainer.layers.core import at_least_float32
from reversible_trainer.layers.initializers import Initializer, Normal


@dataclasses.dataclass(frozen=True)
class LearnedPositions(Layer):
    """Adds row t of a table to position t.

    Args:
      max_length: Number of rows; T may be shorter.
      table_init: For `table`, `[max_length, D]`. Of unit scale, as the embedding that it is added to.
    """

    max_length: int
    table_init: Initializer = Normal(1.0)

    def init(self, key, inputs):
        return {"table": self.table_init(key, (self.max_length, inputs[0].shape[-1]))}, ()

    def forward(self, weights, state, inputs, key, memo=None):
        (x_BTD,) = inputs
        T = x_BTD.shape[1]
        _check_length(T, self.max_length, "max_length")
        return (x_BTD + weights["table"][:T].astype(x_BTD.dtype),), state, None


@dataclasses.dataclass(frozen=True)
class SinusoidalPositions(Layer):
    """Adds `sin(t / base^(2i/D))` to element 2i of position t, and the cosine to element 2i + 1.

    Source: Vaswani et al. 2017, section 3.5 (https://arxiv.org/abs/1706.03762).
    """

    base: float = 10_000.0

    def forward(self, weights, state, inputs, key, memo=None):
        (x_BTD,) = inputs
        _, T, D = x_BTD.shape
        dtype = at_least_float32(x_BTD.dtype)
        frequency = self.base ** (-jnp.arange(0, D, 2, dtype=dtype) / D)
        angle = jnp.arange(T, dtype=dtype)[:, None] * frequency
        pairs = jnp.stack([jnp.sin(angle), jnp.cos(angle)], axis=-1)
        return (x_BTD + pairs.reshape(T, -1)[:, :D].astype(x_BTD.dtype),), state, None


@dataclasses.dataclass(frozen=True)
class AxialPositions(Layer):
    """Adds to position t row `t // C` of one table, and beside it row `t % C` of another: R + C rows for R C positions.

    Args:
      shape: (R, C); T may be anything up to R C.
      widths: (d0, d1) of the two tables, which add up to D.
      table_init: For `rows`, `[R, 1, d0]`, and `columns`, `[1, C, d1]`. Of unit scale, as the
        embedding that they are added to.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> layer = AxialPositions(shape=(2, 3), widths=(1, 1))
      >>> weights = {"rows": jnp.array([[[10.0]], [[20.0]]]), "columns": jnp.array([[[1.0], [2.0], [3.0]]])}
      >>> (y,), _, _ = layer.forward(weights, (), (jnp.zeros((1, 5, 2)),), None)
      >>> y[0].tolist()
      [[10.0, 1.0], [10.0, 2.0], [10.0, 3.0], [20.0, 1.0], [20.0, 2.0]]

    Source: Kitaev et al. 2020 (https://arxiv.org/abs/2001.04451), whose code has the tables in these shapes.
    """

    shape: tuple[int, int]
    widths: tuple[int, int]
    table_init: Initializer = Normal(1.0)

    def __post_init__(self):
        super().__post_init__()
        for field in ("shape", "widths"):
            pair = getattr(self, field)
            if not isinstance(pair, tuple) or len(pair) != 2 or min(pair) < 1:
                raise ValueError(f"AxialPositions: {field} must be two positive numbers; got {pair!r}.")

    def init(self, key, inputs):
        D, (R, C), (d0, d1) = inputs[0].shape[-1], self.shape, self.widths
        if d0 + d1 != D:
            raise ValueError(f"the widths must add up to that of the input; got {d0} + {d1} = {d0 + d1}, not {D}")
        row_key, column_key = jax.random.split(key)
        return {"rows": self.table_init(row_key, (R, 1, d0)), "columns": self.table_init(column_key, (1, C, d1))}, ()

    def forward(self, weights, state, inputs, key, memo=None):
        (x_BTD,) = inputs
        _, T, D = x_BTD.shape
        C = self.shape[1]
        _check_length(T, math.prod(self.shape), "the product of shape")
        used = -(-T // C)  # rows of the grid
        tables = weights["rows"][:used], weights["columns"]
        grid = jnp.concatenate([jnp.broadcast_to(table, (used, C, table.shape[-1])) for table in tables], axis=-1)
        return (x_BTD + grid.reshape(used * C, D)[:T].astype(x_BTD.dtype),), state, None


def _check_length(length: int, most: int, named: str) -> None:
    if length > most:
        raise ValueError(f"the sequence has {length} positions, more than {named}, {most}")
