"""What a step sees of its residual streams: whether they come back as they were, and how near their range they are."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from reversible_trainer.layers.base import Stack, is_differentiable
from reversible_trainer.layers.fixed_point import FixedPoint, checksum, near_range
from reversible_trainer.tree import Array, Tree


class Seen(NamedTuple):
    """Handed from pass to pass.

    Attributes:
      near: bool [blocks]; blocks that left a fixed-point stream within a factor of 4 of its range.
      near_range_blocks: int32, how many.
      mismatched: bool [blocks]; blocks whose reconstructed fixed-point inputs had other bits than
        the forward sweep's, though their outputs had the right ones.
      mismatched_blocks: int32, how many.
      last: int32 [microbatches]; the last block whose inputs came out wrong: the block below
        can do no better. -1: none.
      drift: float32, the largest difference between a floating-point stream and its
        reconstruction, over the stream's largest value.
    """

    near: Any
    near_range_blocks: Any
    mismatched: Any
    mismatched_blocks: Any
    last: Any
    drift: Any


def nothing(blocks: int, microbatches: int) -> Seen:
    """At the start of a step."""
    flags, zero = np.zeros(blocks, bool), np.zeros((), np.int32)
    last = np.full(microbatches, -1, np.int32)
    return Seen(flags, zero, flags.copy(), zero.copy(), last, np.zeros((), np.float32))


def has_fixed_point(stack: Stack) -> bool:
    """Whether one of the entries is a fixed-point stream."""
    return any(isinstance(x, FixedPoint) for x in stack)


def has_floats(stack: Stack) -> bool:
    """Whether one of the entries is a floating-point array."""
    return any(is_differentiable(x) and not isinstance(x, FixedPoint) for x in stack)


def checksums(stack: Stack) -> Tree:
    """Of the fixed-point streams."""
    return tuple(checksum(x) for x in stack if isinstance(x, FixedPoint))


def look(seen: Seen, outputs: Stack, index: Array) -> Seen:
    """Notes whether the fixed-point streams that a block leaves are near their range."""
    near = jnp.stack([near_range(x) for x in outputs if isinstance(x, FixedPoint)]).any()
    flags, count = _flagged(seen.near, seen.near_range_blocks, near, index)
    return seen._replace(near=flags, near_range_blocks=count)


def compare(seen: Seen, inputs: Stack, sums: Tree, truth: Stack | None, index: Array, microbatch: Array) -> Seen:
    """Notes how a block's reconstructed inputs differ from the real ones.

    Args:
      sums: Checksums of the real fixed-point streams.
      truth: The real inputs, or None where they are not known.
    """
    if sums:
        wrong = jnp.stack([jnp.any(a != b) for a, b in zip(checksums(inputs), sums, strict=True)]).any()
        here = wrong & (seen.last[microbatch] != index + 1)
        flags, count = _flagged(seen.mismatched, seen.mismatched_blocks, here, index)
        last = seen.last.at[microbatch].set(jnp.where(wrong, index, seen.last[microbatch]))
        seen = seen._replace(mismatched=flags, mismatched_blocks=count, last=last)
    if truth is not None:
        pairs = [(x, y) for x, y in zip(inputs, truth, strict=True) if has_floats((y,))]
        drifts = [_difference(x, y) for x, y in pairs]
        seen = seen._replace(drift=jnp.stack([seen.drift, *drifts]).max())
    return seen


def _flagged(flags: Array, count: Array, flag: Array, index: Array) -> tuple[Array, Array]:
    new = flag & ~flags[index]
    return flags.at[index].set(flags[index] | flag), count + new.astype(jnp.int32)


def _difference(x: Array, y: Array) -> Array:
    """The largest difference over the largest value, float32; infinite where either is not finite."""
    x, y = (jax.lax.convert_element_type(v, jnp.promote_types(y.dtype, jnp.float32)) for v in (x, y))
    ratio = jnp.max(jnp.abs(x - y)) / jnp.maximum(jnp.max(jnp.abs(y)), jnp.finfo(y.dtype).tiny)
    return jnp.where(jnp.isfinite(ratio), ratio, jnp.inf).astype(jnp.float32)
