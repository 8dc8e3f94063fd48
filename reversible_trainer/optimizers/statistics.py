"""Shampoo's statistics and preconditioners: which there are, how they are stacked, what is done with them.

All statistics of one size, exponent and dtype are one stack `[K, n, n]`, whichever blocks
of whichever weights they belong to, so that one batched solve serves them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from reversible_trainer.optimizers import blocking, common
from reversible_trainer.optimizers.matrix import HIGHEST
from reversible_trainer.tree import Array, Tree


class Kind(NamedTuple):
    """What statistics of one stack have in common: size `n`, exponent `p` of their roots, dtype."""

    n: int
    p: int
    dtype: Any


class Part(NamedTuple):
    """Neighbours in a stack: the `blocks` of one cut of one group of weights, contracted to one axis."""

    group: int
    cut: int
    axis: int
    blocks: int


class Plan(NamedTuple):
    """What the shapes of a tree decide.

    Attributes:
      groups: Weights of one shape.
      shapes: Per group, the shape as Shampoo sees it; None for what it leaves alone.
      kinds: The stacks of statistics.
      block_size: Dimensions are cut at multiples of this.
    """

    groups: list[common.Group]
    shapes: list[tuple[int, ...] | None]
    kinds: dict[Kind, list[Part]]
    block_size: int


def plan(tree: Tree, block_size: int, merge: bool, largest: int, exponent: int) -> Plan:
    """Plans the statistics of a tree of weights."""
    groups = common.group(tree)
    shapes: list[tuple[int, ...] | None] = []
    kinds: dict[Kind, list[Part]] = {}
    for i, group in enumerate(groups):
        shape = group.shape
        if shape == () or 0 in shape or max(shape) > largest:
            shapes.append(None)
            continue
        shape = blocking.merge(shape, block_size) if merge else shape
        shapes.append(shape)
        for c, cut in enumerate(blocking.cuts(shape, block_size)):
            for axis, n in enumerate(cut.sizes):
                part = Part(i, c, axis, len(group.members) * cut.blocks)
                kinds.setdefault(Kind(n, exponent or 2 * len(shape), group.dtype), []).append(part)
    return Plan(groups, shapes, kinds, block_size)


def identities(plan: Plan) -> tuple[Array, ...]:
    """A stack `[K, n, n]` of identities per kind."""
    return tuple(
        jnp.tile(jnp.eye(kind.n, dtype=kind.dtype), (sum(part.blocks for part in parts), 1, 1))
        for kind, parts in plan.kinds.items()
    )


Blocks = list[list[Array]]  # per group and cut, `[count, *sizes]`


def cut(plan: Plan, stacks: Sequence[Array]) -> Blocks:
    """Cuts stacks of weights into blocks; what is left alone has none."""
    return [
        []
        if shape is None
        else [blocking.take(x.reshape(-1, *shape), c) for c in blocking.cuts(shape, plan.block_size)]
        for x, shape in zip(stacks, plan.shapes, strict=True)
    ]


def contract(plan: Plan, blocks: Blocks) -> list[Array]:
    """Per kind, the contractions `C_i(G)` of every block with itself over all axes but one: `[K, n, n]`."""
    contractions = []
    for parts in plan.kinds.values():
        sides = [_matrix(blocks[part.group][part.cut], part.axis) for part in parts]
        contractions.append(jnp.concatenate([jnp.matmul(x, x.mT, precision=HIGHEST) for x in sides]))
    return contractions


def precondition(plan: Plan, blocks: Blocks, preconditioners: Sequence[Array]) -> list[Array | None]:
    """The blocks with their preconditioner applied along every axis, as stacks again; None for what is left alone."""
    q = [list(cuts) for cuts in blocks]
    for stack, parts in zip(preconditioners, plan.kinds.values(), strict=True):
        start = 0
        for i, c, axis, count in parts:
            q[i][c] = _apply(stack[start : start + count], q[i][c], axis)
            start += count
    return [
        None if shape is None else blocking.put(cuts, shape, plan.block_size).reshape(-1, *group.shape)
        for cuts, shape, group in zip(q, plan.shapes, plan.groups, strict=True)
    ]


def _matrix(blocks: Array, axis: int) -> Array:
    """`[M, s_1 .. s_r]` as `[M, s_axis, the rest]`."""
    x = jnp.moveaxis(blocks, axis + 1, 1)
    return x.reshape(*x.shape[:2], -1)


def _apply(p: Array, blocks: Array, axis: int) -> Array:
    if axis + 2 == blocks.ndim:  # P is symmetric, and this way round nothing is transposed
        x = blocks.reshape(blocks.shape[0], -1, blocks.shape[-1])
        return jnp.matmul(x, p, precision=HIGHEST).reshape(blocks.shape)
    q = jnp.matmul(p, _matrix(blocks, axis), precision=HIGHEST)
    return jnp.moveaxis(q.reshape(jnp.moveaxis(blocks, axis + 1, 1).shape), 1, axis + 1)
