"""Second moments of weights along their axes: which there are, how they are stacked, what is done with them.

All statistics of one size, exponent and dtype are one stack `[K, n, n]`, whichever blocks
of whichever weights they belong to, so that one batched solve serves them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from reversible_trainer.optimizers import blocking, common
from reversible_trainer.optimizers.matrix import HIGHEST
from reversible_trainer.tree import Array


class Kind(NamedTuple):
    """What statistics of one stack have in common: size `n`, exponent `p` of their roots if any, dtype."""

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
      shapes: Per group, the shape in which its weights are cut; None for what is left alone.
      kinds: The stacks of statistics.
      block_size: Dimensions are cut at multiples of this; 0 for not at all.
    """

    groups: list[common.Group]
    shapes: list[tuple[int, ...] | None]
    kinds: dict[Kind, list[Part]]
    block_size: int


def plan(
    groups: list[common.Group],
    shapes: list[tuple[int, ...] | None],
    block_size: int,
    exponent: Callable[[int], int] = lambda rank: 0,
    wanted: Callable[[int], bool] = lambda n: True,
) -> Plan:
    """Plans the statistics of groups of weights, with `exponent(rank)`, along axes of a `wanted` size."""
    kinds: dict[Kind, list[Part]] = {}
    for i, (group, shape) in enumerate(zip(groups, shapes, strict=True)):
        for c, cut in enumerate(() if shape is None else blocking.cuts(shape, block_size)):
            for axis, n in enumerate(cut.sizes):
                if wanted(n):
                    part = Part(i, c, axis, len(group.members) * cut.blocks)
                    kinds.setdefault(Kind(n, exponent(len(cut.sizes)), group.dtype), []).append(part)
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


def multiply(plan: Plan, matrices: Sequence[Array], blocks: Blocks) -> Blocks:
    """The blocks, each multiplied along every axis by its matrix of stacks `[K, n, n]`: y_i = sum_j M_ij x_j."""
    y = [list(cuts) for cuts in blocks]
    for stack, parts in zip(matrices, plan.kinds.values(), strict=True):
        for part, m in zip(parts, split(stack, parts), strict=True):
            y[part.group][part.cut] = _multiply(m, y[part.group][part.cut], part.axis)
    return y


def split(stack: Array, parts: Sequence[Part]) -> list[Array]:
    """A stack `[K, ...]` as one array per part."""
    return jnp.split(stack, [sum(part.blocks for part in parts[:i]) for i in range(1, len(parts))])


def uncut(plan: Plan, blocks: Blocks) -> list[Array | None]:
    """Inverse of `cut`; None for what is left alone."""
    return [
        None if shape is None else blocking.put(cuts, shape, plan.block_size).reshape(-1, *group.shape)
        for cuts, shape, group in zip(blocks, plan.shapes, plan.groups, strict=True)
    ]


def _matrix(blocks: Array, axis: int) -> Array:
    """`[M, s_1 .. s_r]` as `[M, s_axis, the rest]`."""
    x = jnp.moveaxis(blocks, axis + 1, 1)
    return x.reshape(*x.shape[:2], -1)


def _multiply(m: Array, blocks: Array, axis: int) -> Array:
    if axis + 2 == blocks.ndim:  # this way round nothing is transposed
        x = blocks.reshape(blocks.shape[0], -1, blocks.shape[-1])
        return jnp.matmul(x, m.mT, precision=HIGHEST).reshape(blocks.shape)
    y = jnp.matmul(m, _matrix(blocks, axis), precision=HIGHEST)
    return jnp.moveaxis(y.reshape(jnp.moveaxis(blocks, axis + 1, 1).shape), 1, axis + 1)
