"""The passes over one block: pure functions of arrays, each of which becomes one compiled program."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from reversible_trainer.layers.base import Layer, LossLayer, ReversibleLayer, Stack, differentiate
from reversible_trainer.tree import Array, Tree, describe, same_signature, total

Optimizer = Callable[[Any], optax.GradientTransformation]  # learning rate -> transformation


class Clock(NamedTuple):
    """What changes from step to step: the run's key, the step's number, the learning rate."""

    key: Any
    step: Any
    learning_rate: Any

    def block_key(self, index: Array) -> Array:
        """The key of one block in this step."""
        return jax.random.fold_in(jax.random.fold_in(self.key, self.step), index)


class Health(NamedTuple):
    """Handed down the backward sweep: whether to update, and what was not.

    Attributes:
      ok: bool; False from the first block on whose gradients were not finite.
      skipped: int32, number of blocks left as they were.
      first: int32, index of the first of them, -1 if none.
      failures: int32, what the optimizers' slots have counted under that name: roots and
        the like that were not finite and so not taken, since the run began.
    """

    ok: Any
    skipped: Any
    first: Any
    failures: Any


def init(layer: Layer, optimizer: Optimizer, inputs: Stack, key: Array, index: Array) -> tuple[Tree, Tree, Tree]:
    """`(weights, slots, state)` of a new block; `inputs` are signatures."""
    weights, state = layer.init(jax.random.fold_in(key, index), inputs)
    for path, x in jax.tree_util.tree_leaves_with_path(weights):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            where = jax.tree_util.keystr(path, simple=True, separator="/")
            raise TypeError(
                f"{layer!r}: weights are trained and must be floating-point, got {x.dtype} at {where!r}. "
                "Keep untrained arrays in the layer's state."
            )
    slots: Tree = ()
    if jax.tree.leaves(weights):
        with jax.numpy_dtype_promotion("standard"):  # optax needs it, whatever the caller has set
            slots = optimizer(0.0).init({layer.name: weights})
    return strong((weights, slots, state))


def forward(
    layer: Layer, weights: Tree, state: Tree, inputs: Stack, clock: Clock, index: Array
) -> tuple[Stack, Tree, Tree]:
    """`(outputs, new_state, memo)` of a training pass."""
    return layer.forward(weights, state, inputs, clock.block_key(index))


def infer(layer: Layer, weights: Tree, state: Tree, inputs: Stack) -> tuple[Stack]:
    """A block's outputs, deterministic."""
    return (layer.forward(weights, state, inputs, None)[0],)


def backward(
    layer: Layer,
    optimizer: Optimizer,
    reverse: bool,
    weights: Tree,
    slots: Tree,
    state: Tree,
    new_state: Tree,
    entries: Stack,
    cotangents: Stack,
    memo: Tree,
    clock: Clock,
    total_weight: Array,
    health: Health,
    index: Array,
) -> tuple[Tree, Tree, Tree, Stack, Stack, Health]:
    """Gradients and update of one block; with `reverse` it reconstructs the inputs too.

    Args:
      entries: The block's outputs with `reverse`, else its inputs.
      cotangents: Of its outputs.
      new_state: What the forward pass left; it replaces `state` if the block is updated.
      total_weight: The loss's weight sum, which makes gradients a mean.

    Returns:
      `(weights, slots, state, inputs, input_cotangents, health)`; `inputs` is empty
      without `reverse`.
    """
    key = clock.block_key(index)
    if reverse:
        assert isinstance(layer, ReversibleLayer)
        inputs, (input_cts, grads) = layer.reverse_and_grad(weights, state, entries, cotangents, key, memo)
    else:
        inputs = ()
        *_, pullback = differentiate(layer, weights, state, entries, key, memo)
        input_cts, grads = pullback(cotangents)
    weights, slots, state, health = _update(
        layer, optimizer, weights, slots, state, new_state, grads, clock, total_weight, health, index
    )
    return weights, slots, state, inputs, input_cts, health


def loss(
    layer: LossLayer,
    optimizer: Optimizer,
    weights: Tree,
    slots: Tree,
    state: Tree,
    inputs: Stack,
    clock: Clock,
    index: Array,
) -> tuple[Tree, Tree, Tree, Stack, dict[str, Array], Array, Health]:
    """Forward pass, gradients and update of the last block.

    Returns:
      `(weights, slots, state, input_cotangents, metrics, total_weight, health)`.
    """
    sums, new_state, _, pullback = differentiate(layer, weights, state, inputs, clock.block_key(index))
    input_cts, grads = pullback((jnp.ones_like(sums[0]), *map(jnp.zeros_like, sums[1:])))
    ok = jnp.isfinite(sums[0]) & (sums[1] > 0)
    none = jnp.zeros((), jnp.int32)
    health = Health(ok, none, none - 1, none)
    weights, slots, state, health = _update(
        layer, optimizer, weights, slots, state, new_state, grads, clock, sums[1], health, index
    )
    return weights, slots, state, input_cts, means(layer, sums), sums[1], health


def evaluate(layer: LossLayer, weights: Tree, state: Tree, inputs: Stack) -> tuple[dict[str, Array]]:
    """The last block's metrics, deterministic."""
    sums, _, _ = layer.forward(weights, state, inputs, None)
    return (means(layer, sums),)


def predict(layer: LossLayer, weights: Tree, state: Tree, inputs: Stack) -> tuple[Array]:
    """The last block's logits, deterministic."""
    return (layer.predict(weights, state, inputs),)


def update(
    optimizer: Optimizer, learning_rate: Any, grads: Tree, slots: Tree, weights: Tree, index: Any
) -> tuple[Tree, Tree]:
    """`(updates, slots)` of an optimizer, told the facts that ours know what to do with."""
    with jax.numpy_dtype_promotion("standard"):  # optax needs it, whatever the caller has set
        transformation = optax.with_extra_args_support(optimizer(learning_rate))
        return transformation.update(grads, slots, weights, block_index=index)


def means(layer: LossLayer, sums: Stack) -> dict[str, Array]:
    """The loss's sums as means, and the weight they were taken over; nothing weighed gives 0."""
    weight = jnp.where(sums[1] > 0, sums[1], 1)
    named = dict(zip(layer.metric_names, sums[2:], strict=True))
    return {"loss": sums[0] / weight, **{k: v / weight for k, v in named.items()}, "weight": sums[1]}


def _update(
    layer: Layer,
    optimizer: Optimizer,
    weights: Tree,
    slots: Tree,
    state: Tree,
    new_state: Tree,
    grads: Tree,
    clock: Clock,
    total_weight: Array,
    health: Health,
    index: Array,
) -> tuple[Tree, Tree, Tree, Health]:
    """The optimizer's update, unless this block's gradients or an earlier block's are not finite."""
    scale = jnp.where(total_weight > 0, total_weight, 1)
    grads = jax.tree.map(lambda g: g / scale.astype(g.dtype), grads)
    ok = functools.reduce(jnp.logical_and, [jnp.isfinite(g).all() for g in jax.tree.leaves(grads)], health.ok)
    kept = (weights, slots, state)
    if jax.tree.leaves(weights):
        tree: Any = {layer.name: weights}  # weight paths begin with the layer's name
        updates, slots = update(optimizer, clock.learning_rate, {layer.name: grads}, slots, tree, index)
        new: Any = optax.apply_updates(tree, updates)
        weights = new[layer.name]
    updated = strong((weights, slots, new_state))
    for what, new, old in zip(("weights", "slots", "state"), updated, kept, strict=True):
        if not same_signature(new, old):
            whose = f"{layer!r}: forward" if what == "state" else f"the optimizer, updating {layer.name},"
            raise ValueError(
                f"Trainer: {whose} must keep structure, shapes and dtypes of the {what}; expected "
                f"({describe(old)}), got ({describe(new)})."
            )
    weights, slots, state = jax.tree.map(lambda new, old: jnp.where(ok, new, old), updated, kept)
    first = jnp.where((health.first < 0) & ~ok, index, health.first)
    health = Health(ok, health.skipped + (~ok).astype(jnp.int32), first, health.failures + total(slots, "failures"))
    return weights, slots, state, health


def strong(tree: Tree) -> Tree:
    """Without JAX's weak types, which would make the next call's arguments differ from this one's."""
    return jax.tree.map(lambda x: jax.lax.convert_element_type(x, jnp.asarray(x).dtype), tree)
