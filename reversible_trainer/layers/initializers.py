"""How weights start: `jax.nn.initializers` as values.

`jax.nn.initializers.normal(0.02) == jax.nn.initializers.normal(0.02)` is False, and equal
layers must be equal; so each is a frozen dataclass here, called `init(key, shape)`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.nn import initializers

from reversible_trainer.tree import Array


@dataclasses.dataclass(frozen=True)
class Initializer:
    """Base class; a subclass names the function of `jax.nn.initializers` it stands for."""

    def make(self) -> initializers.Initializer:
        """The JAX function, `(key, shape, dtype) -> Array`."""
        raise NotImplementedError

    def __call__(self, key: Array, shape: Sequence[int], dtype: Any = None) -> Array:
        """A new array; by default float32, float64 under `jax_enable_x64`."""
        return self.make()(key, tuple(shape), jax.dtypes.canonicalize_dtype(float) if dtype is None else dtype)


@dataclasses.dataclass(frozen=True)
class Zeros(Initializer):
    """Zeros everywhere."""

    def make(self) -> initializers.Initializer:  # noqa: D102
        return initializers.zeros


@dataclasses.dataclass(frozen=True)
class Ones(Initializer):
    """Ones everywhere."""

    def make(self) -> initializers.Initializer:  # noqa: D102
        return initializers.ones


@dataclasses.dataclass(frozen=True)
class Normal(Initializer):
    """Normal with mean zero.

    Example:
      >>> Normal(0.02) == Normal(0.02), Normal(0.02) == Normal(1.0)
      (True, False)
    """

    stddev: float = 0.02

    def make(self) -> initializers.Initializer:  # noqa: D102
        return initializers.normal(self.stddev)


@dataclasses.dataclass(frozen=True)
class TruncatedNormal(Initializer):
    """Normal with mean zero, cut at two standard deviations."""

    stddev: float = 0.02

    def make(self) -> initializers.Initializer:  # noqa: D102
        return initializers.truncated_normal(self.stddev)


@dataclasses.dataclass(frozen=True)
class VarianceScaling(Initializer):
    """Variance `scale / n`, where `n` is the fan that `mode` names.

    Args:
      scale: Positive number.
      mode: "fan_in", "fan_out" or "fan_avg"; kernels are `[..., in, out]`.
      distribution: "truncated_normal", "normal" or "uniform".
    """

    scale: float = 1.0
    mode: str = "fan_in"
    distribution: str = "truncated_normal"

    def make(self) -> initializers.Initializer:  # noqa: D102
        return initializers.variance_scaling(self.scale, self.mode, self.distribution)  # pyright: ignore[reportArgumentType]


def LecunNormal() -> VarianceScaling:
    """Keeps the variance of what goes forward: `VarianceScaling(1, "fan_in")`."""
    return VarianceScaling(1.0, "fan_in", "truncated_normal")


def HeNormal() -> VarianceScaling:
    """The same before a ReLU: `VarianceScaling(2, "fan_in")`."""
    return VarianceScaling(2.0, "fan_in", "truncated_normal")


def GlorotNormal() -> VarianceScaling:
    """Between forward and backward: `VarianceScaling(1, "fan_avg")`."""
    return VarianceScaling(1.0, "fan_avg", "truncated_normal")


def GlorotUniform() -> VarianceScaling:
    """The same, uniform."""
    return VarianceScaling(1.0, "fan_avg", "uniform")
