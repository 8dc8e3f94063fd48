"""Refuses optimizers whose result depends on the whole tree: a fused update sees one block at a time."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from reversible_trainer.passes import Clock, Optimizer, optimizer_update, strong
from reversible_trainer.tree import Tree, path_name

# Compiled for one call on a few numbers.
_QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def check_separable(optimizer: Optimizer, weights: Tree) -> None:
    """Checks that what a leaf's update is depends on that leaf alone.

    Miniatures of the weights (no dimension above 4, but for weights that the optimizer does not
    take in another size) are updated twice, with gradients so large that any global clipping
    acts, then with ordinary ones. That is done over with one leaf's gradients larger still, for
    every leaf, and with every other leaf left out: the other leaves' updates must not change.

    Args:
      optimizer: Factory.
      weights: Signature of a tree whose paths are those of the trainer.

    Raises:
      ValueError: If they do.
    """
    leaves, structure = jax.tree_util.tree_flatten(weights)
    _check_separable(optimizer, structure, tuple((x.shape, x.dtype) for x in leaves))


@functools.lru_cache(maxsize=64)  # optimizers compare by identity; a second trainer with the same one need not wait
def _check_separable(optimizer: Optimizer, structure: Any, leaves: tuple[tuple[tuple[int, ...], Any], ...]) -> None:
    weights = jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(*leaf) for leaf in leaves])
    paths = jax.tree.leaves_with_path(weights)
    everything, generator = range(len(paths)), np.random.default_rng(0)

    def part(values: Sequence[Any], chosen: Sequence[int]) -> Tree:
        return jax.tree.unflatten(structure, [v if i in chosen else None for i, v in enumerate(values)])

    def miniature(i: int, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        small = jax.ShapeDtypeStruct([min(d, 4) for d in leaf.shape], leaf.dtype)
        try:
            jax.eval_shape(optimizer(0.1).init, part([small] * len(paths), [i]))
        except ValueError:  # such as Muon's, whose parts must add up to an axis
            return leaf
        return small

    probes = [miniature(i, leaf) for i, (_, leaf) in enumerate(paths)]

    def draw(scale: float) -> list[Any]:
        return [jnp.asarray(scale * generator.normal(size=x.shape), x.dtype) for x in probes]

    def updates(leaves: list[Any], gradients: list[Any], chosen: Sequence[int]) -> dict[int, Any]:
        weights = part(leaves, chosen)

        def step(slots: Tree, g: list[Any]) -> tuple[Tree, Any]:
            clock = Clock(None, jnp.int32(0), 0.1)
            changes, slots = optimizer_update(optimizer, clock, part(g, chosen), slots, weights, jnp.int32(0))
            return slots, jax.tree.leaves(changes)

        seen = jax.lax.scan(step, strong(optimizer(0.1).init(weights)), gradients)[1]
        return dict(zip(chosen, seen, strict=True))

    def run(leaves: list[Any], gradients: list[Any]) -> tuple[Any, Any, Any]:
        def larger(j: Any) -> Any:
            return updates(
                leaves, [jnp.where(i == j, 1e3, 1).astype(g.dtype) * g for i, g in enumerate(gradients)], everything
            )

        alone, apart = jax.lax.map(larger, jnp.arange(-1, len(paths))), [everything[::2], everything[1::2]]
        return jax.tree.map(lambda x: x[0], alone), alone, [updates(leaves, gradients, half) for half in apart]

    gradients = [jnp.stack(pair) for pair in zip(draw(1e6), draw(1.0), strict=True)]
    results = jax.jit(run, compiler_options=_QUICKLY)(draw(1.0), gradients)
    whole, alone, apart = jax.tree.map(lambda x: np.asarray(x, np.float64), results)
    others = [(i, alone[i][j + 1]) for i in everything for j in everything if i != j]
    for i, seen in (*others, *apart[0].items(), *apart[1].items()):
        scale = np.abs(whole[i]).max((*range(1, whole[i].ndim),), initial=0.0, keepdims=True)
        if not np.all(np.abs(seen - whole[i]) <= 0.05 * scale + 1e-12):
            raise ValueError(
                f"Trainer: the optimizer's update of {path_name(paths[i][0])!r} depends on other weights or their "
                "gradients, and a fused update sees one block at a time. Take anything global out of it; for "
                "clipping, the trainer's clip_global clips by the norm of all gradients and clip_per_block by that of "
                "one block's."
            )
