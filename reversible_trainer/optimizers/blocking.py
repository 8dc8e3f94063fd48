"""How Shampoo sees a weight: dimensions merged, then cut into blocks.

A *stack* holds `N` weights of one shape, `[N, *shape]`. A `Cut` names all blocks of one
size in it; there are at most two sizes per axis, full blocks and the remainder, so a
stack has at most `2 ** rank` cuts however many blocks it has.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import jax.numpy as jnp

from reversible_trainer.tree import Array

Shape = tuple[int, ...]


def merge(shape: Shape, block_size: int) -> Shape:
    """Merges neighbouring dimensions, left to right, while their product is at most `block_size`.

    Example:
      >>> merge((2, 2, 9, 5), 8), merge((1, 9, 1, 5), 8), merge((4, 2), 8), merge((1, 1), 8)
      ((4, 9, 5), (9, 5), (8,), ())
    """
    merged, product = [], 1
    for d in shape:
        if product * d <= block_size:
            product *= d
        else:
            merged.append(product)
            product = d
    return tuple(d for d in (*merged, product) if d > 1)


class Segment(NamedTuple):
    """`pieces` neighbours of `size` entries each along one axis, from `start`."""

    start: int
    pieces: int
    size: int


class Cut(NamedTuple):
    """All blocks of one size: a segment per axis."""

    segments: tuple[Segment, ...]

    @property
    def sizes(self) -> Shape:
        """The shape of one block."""
        return tuple(s.size for s in self.segments)

    @property
    def blocks(self) -> int:
        """Blocks per weight."""
        return math.prod(s.pieces for s in self.segments)


def segments(d: int, block_size: int) -> list[Segment]:
    """An axis of length `d` cut at multiples of `block_size` (0: not at all).

    Example:
      >>> segments(20, 8)
      [Segment(start=0, pieces=2, size=8), Segment(start=16, pieces=1, size=4)]
    """
    if not 0 < block_size < d:
        return [Segment(0, 1, d)]
    full, rest = divmod(d, block_size)
    return [Segment(0, full, block_size)] + ([Segment(full * block_size, 1, rest)] if rest else [])


def cuts(shape: Shape, block_size: int) -> list[Cut]:
    """The cuts of weights of this shape, last axis fastest."""
    return [Cut(c) for c in itertools.product(*(segments(d, block_size) for d in shape))]


def take(stack: Array, cut: Cut) -> Array:
    """The blocks of a cut: `[N, *shape]` to `[N * cut.blocks, *cut.sizes]`."""
    region = tuple(slice(s.start, s.start + s.pieces * s.size) for s in cut.segments)
    split = [n for s in cut.segments for n in (s.pieces, s.size)]
    r = len(cut.segments)
    x = stack[(slice(None), *region)].reshape(-1, *split)
    x = x.transpose(0, *range(1, 2 * r + 1, 2), *range(2, 2 * r + 1, 2))
    return x.reshape(-1, *cut.sizes)


def put(blocks: list[Array], shape: Shape, block_size: int) -> Array:
    """Inverse of `take` for all cuts together, in the order of `cuts`: back to `[N, *shape]`."""
    r = len(shape)
    pieces = []
    for x, cut in zip(blocks, cuts(shape, block_size), strict=True):
        x = x.reshape(-1, *(s.pieces for s in cut.segments), *cut.sizes)
        x = x.transpose(0, *(a for i in range(1, r + 1) for a in (i, r + i)))
        pieces.append(x.reshape(-1, *(s.pieces * s.size for s in cut.segments)))
    for axis in reversed(range(r)):  # pieces that are neighbours along the last axis come first
        n = len(segments(shape[axis], block_size))
        pieces = [jnp.concatenate(pieces[i : i + n], axis + 1) for i in range(0, len(pieces), n)]
    (stack,) = pieces
    return stack
