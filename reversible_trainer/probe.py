"""Refuses optimizers whose result depends on the whole tree: a fused update sees one block at a time."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from reversible_trainer.passes import Optimizer, update
from reversible_trainer.tree import Tree, path_name


def check_separable(optimizer: Optimizer, weights: Tree) -> None:
    """Checks that updating leaves together and apart gives the same.

    Miniatures of the weights (no dimension above 4) are updated twice, with gradients so
    large that any global clipping acts, then with ordinary ones: once as one tree, then
    in two halves, in as many ways as it takes for every pair of leaves to be parted once.

    Args:
      optimizer: Factory.
      weights: Signature of a tree whose paths are those of the trainer.

    Raises:
      ValueError: If they differ.
    """
    paths, structure = jax.tree_util.tree_flatten_with_path(weights)
    generator = np.random.default_rng(0)

    def miniature(scale: float) -> list[Any]:
        return [jnp.asarray(scale * generator.normal(size=[min(d, 4) for d in x.shape]), x.dtype) for _, x in paths]

    def updates(leaves: list[Any], gradients: list[list[Any]], chosen: list[int]) -> list[Any]:
        def part(values: list[Any]) -> Tree:
            return jax.tree.unflatten(structure, [v if i in chosen else None for i, v in enumerate(values)])

        slots, out = optimizer(0.1).init(part(leaves)), []
        for g in gradients:
            change, slots = update(optimizer, 0.1, part(g), slots, part(leaves), jnp.int32(0))
            out.append(jax.tree.leaves(change))
        return out

    everything = list(range(len(paths)))
    halves = [
        [[i for i in everything if (i >> bit) & 1 == side] for side in (0, 1)]
        for bit in range((len(paths) - 1).bit_length())
    ]

    @jax.jit
    def run(leaves: list[Any], gradients: list[list[Any]]) -> tuple[Any, Any]:
        apart = [[updates(leaves, gradients, chosen) for chosen in pair] for pair in halves]
        return updates(leaves, gradients, everything), apart

    together, apart = run(miniature(1.0), [miniature(1e6), miniature(1.0)])
    for pair, results in zip(halves, apart, strict=True):
        for chosen, result in zip(pair, results, strict=True):
            for step in range(2):
                for i, ours in zip(chosen, result[step], strict=True):
                    whole = np.asarray(together[step][i], np.float64)
                    difference = np.abs(np.asarray(ours, np.float64) - whole).max(initial=0.0)
                    if not difference <= 0.05 * np.abs(whole).max(initial=0.0) + 1e-12:
                        raise ValueError(
                            f"Trainer: the optimizer updates {path_name(paths[i][0])!r} differently when it sees only "
                            "part of the weights, and a fused update sees one block at a time. Take anything global "
                            "out of it; for clipping, the trainer's clip_global clips by the norm of all gradients "
                            "and clip_per_block by that of one block's."
                        )
