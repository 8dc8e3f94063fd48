"""Fixed-point streams: integers that are added and subtracted without rounding, so that reversing is exact."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from reversible_trainer.tree import Array

FRACTION = 18  # bits: a range of +-8192 with a resolution of 4e-6


@functools.partial(jax.tree_util.register_dataclass, data_fields=["bits", "carrier"], meta_fields=["fraction"])
@dataclasses.dataclass(frozen=True, eq=False)
class FixedPoint:
    """A residual stream: the numbers `bits / 2^fraction`.

    Whatever is added is rounded to that grid first; sums wrap around at the end of the range,
    `2^(31 - fraction)`. So subtracting gives back the very bits, even after an overflow.

    Attributes:
      bits: int32 array.
      carrier: Zeros, float32, while the stream is differentiated: integers have no gradient, so
        it flows through these. Else None.
      fraction: Bits after the binary point.

    A layer that expects an array says so when it is given a stream: `HalfResidual` shows its f
    the numbers, and in a standard block `FromFixedPoint` makes an array of them.

    Example:
      >>> import jax.numpy as jnp
      >>> x = rounded(jnp.array([1.0, 1e-6]))
      >>> to_float(x).tolist(), to_float(add(x, jnp.array([0.5, 3e-6]))).tolist()
      ([1.0, 0.0], [1.5, 3.814697265625e-06])
    """

    bits: Any
    carrier: Any = None
    fraction: int = FRACTION

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the stream."""
        return self.bits.shape

    def __getattr__(self, name: str) -> Any:  # called only for what is missing
        raise AttributeError(
            f"a fixed-point stream is no array and has no {name!r}. In a standard block put FromFixedPoint() "
            "before this layer; in a reversible one wrap it in HalfResidual."
        )


def rounded(x: Array, fraction: int = FRACTION) -> FixedPoint:
    """The stream nearest to `x`; while it is differentiated, `x` has its gradient."""
    return FixedPoint(_on_grid(x, fraction), _carry(jnp.zeros(x.shape, jnp.float32), x), fraction)


def to_float(x: Any) -> Any:
    """The numbers of a stream, float32; anything else as it is."""
    if not isinstance(x, FixedPoint):
        return x
    y = x.bits.astype(jnp.float32) * jnp.float32(2.0**-x.fraction)
    return y if x.carrier is None else _show(y, x.carrier)


def add(x: Any, y: Array) -> Any:
    """`x + y`, where x may be a stream."""
    if not isinstance(x, FixedPoint):
        return x + y
    carrier = None if x.carrier is None else _carry(x.carrier, y)
    return FixedPoint(x.bits + _on_grid(y, x.fraction), carrier, x.fraction)


def subtract(x: Any, y: Array) -> Any:
    """`x - y`, where x may be a stream, without gradient: what `add` has done is undone."""
    if not isinstance(x, FixedPoint):
        return x - y
    return FixedPoint(x.bits - _on_grid(y, x.fraction), None, x.fraction)


def carried(x: Any) -> Any:
    """The stream with a carrier, to be differentiated."""
    return dataclasses.replace(x, carrier=jnp.zeros(x.shape, jnp.float32))


def bare(x: Any) -> Any:
    """The stream without a carrier; anything else as it is."""
    return dataclasses.replace(x, carrier=None) if isinstance(x, FixedPoint) else x


def near_range(x: FixedPoint) -> Array:
    """Whether some number is within a factor of 4 of the range, bool."""
    quarter = 2**29
    return jnp.any((x.bits >= quarter) | (x.bits < -quarter))


def checksum(x: FixedPoint) -> Array:
    """Two sums over all bits, uint32 [2]; a changed bit changes the first, two exchanged numbers the second."""
    bits = x.bits.reshape(-1).astype(jnp.uint32)
    place = jax.lax.iota(jnp.uint32, bits.size)
    return jnp.stack([jnp.sum(bits), jnp.sum(bits * (place * jnp.uint32(2654435761) | jnp.uint32(1)))])


def _on_grid(y: Array, fraction: int) -> Array:
    return jnp.round(y * jnp.asarray(2.0**fraction, y.dtype)).astype(jnp.int32)


# Gradients pass through these two. That they are functions of their own also fixes the order in which cotangents are
# added up: what comes back through f is summed first, as when a coupling is reversed, and so to the same bits.


@jax.custom_vjp
def _show(y: Array, carrier: Array) -> Array:
    """`y`, whose gradient is the carrier's."""
    return y


_show.defvjp(lambda y, carrier: (y, None), lambda _, ct: (jnp.zeros_like(ct), ct))


@jax.custom_vjp
def _carry(carrier: Array, y: Array) -> Array:
    """`carrier`, whose gradient is y's too."""
    return carrier


def _carry_forward(carrier: Array, y: Array) -> tuple[Array, Array]:
    return carrier, jnp.zeros((), y.dtype)


def _carry_backward(like: Array, ct: Array) -> tuple[Array, Array]:
    return ct, ct.astype(like.dtype)


_carry.defvjp(_carry_forward, _carry_backward)
