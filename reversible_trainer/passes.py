"""The passes over one block: pure functions of arrays, each of which becomes one compiled program."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from reversible_trainer import reversal
from reversible_trainer.layers.base import Layer, LossLayer, ReversibleLayer, Stack, differentiate, linearize, pull
from reversible_trainer.layers.fixed_point import bare
from reversible_trainer.reversal import Seen
from reversible_trainer.tree import Array, Tree, describe, path_name, same_signature, total

Optimizer = Callable[[Any], optax.GradientTransformation]  # learning rate -> transformation


@dataclasses.dataclass(frozen=True, eq=False)
class Recipe:
    """How weights are computed with and updated.

    Attributes:
      optimizer: Factory, learning rate -> `optax.GradientTransformation`.
      compute_dtype: What the blocks compute in; None: in the dtype of the weights.
      clip_per_block: Largest norm of one block's gradients, or None.
      clip_global: Largest norm of all gradients together, or None.
    """

    optimizer: Optimizer
    compute_dtype: Any = None
    clip_per_block: float | None = None
    clip_global: float | None = None

    def cast(self, weights: Tree) -> Tree:
        """Weights as the blocks compute with them."""
        return weights if self.compute_dtype is None else jax.tree.map(lambda w: w.astype(self.compute_dtype), weights)


class Clock(NamedTuple):
    """What changes from step to step: the run's key, the step's number, the learning rate."""

    key: Any
    step: Any
    learning_rate: Any

    def pass_key(self, index: Array, microbatch: Array) -> Array:
        """The key of one block's pass over one microbatch in this step."""
        block_key = jax.random.fold_in(jax.random.fold_in(self.key, self.step), index)
        return jax.random.fold_in(block_key, microbatch)


class Health(NamedTuple):
    """Handed from block to block: whether to update, and what was not.

    Attributes:
      ok: bool; False from the first block on whose gradients were not finite.
      first: int32, index of that block, -1 if there is none.
      square: Sum of the squares of the gradients so far, float32 or wider; 0 if nobody clips.
      skipped: int32, number of blocks left as they were.
      failures: int32, what the optimizers' slots have counted under that name: roots and
        the like that were not finite and so not taken, since the run began.
    """

    ok: Any
    first: Any
    square: Any
    skipped: Any
    failures: Any


def init(layer: Layer, recipe: Recipe, inputs: Stack, key: Array, index: Array) -> tuple[Tree, Tree, Tree]:
    """`(weights, slots, state)` of a new block; `inputs` are signatures."""
    weights, state = layer.init(jax.random.fold_in(key, index), inputs)
    for path, x in jax.tree_util.tree_leaves_with_path(weights):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(
                f"{layer!r}: weights are trained and must be floating-point, got {x.dtype} at {path_name(path)!r}. "
                "Keep untrained arrays in the layer's state."
            )
    return strong((weights, *new_slots(layer, recipe, weights), state))


def new_slots(layer: Layer, recipe: Recipe, weights: Tree) -> tuple[Tree]:
    """The optimizer's slots for weights that it has not updated yet."""
    if not layer.trains or not jax.tree.leaves(weights):
        return ((),)
    with jax.numpy_dtype_promotion("standard"):  # optax needs it, whatever the caller has set
        return (strong(recipe.optimizer(0.0).init({layer.name: weights})),)


# Forward.


def forward(
    layer: Layer,
    policy: str,
    verifies: bool,
    weights: Tree,
    state: Tree,
    inputs: Stack,
    seen: Seen | None,
    clock: Clock,
    index: Array,
    microbatch: Array,
) -> tuple[Stack, Tree, Tree, Seen | None]:
    """A training pass; weights come in the dtype that is computed in.

    Args:
      policy: "keep", or any other.
      verifies: Whether the inputs' reconstruction will be compared with them.
      seen: What this step has seen of its streams, if these are to be looked at.

    Returns:
      `(outputs, new_state, memo, seen)`. If it verifies, the memo is the layer's with
      checksums; if it keeps, all that the pullback needs but for the weights, which are sent again.
    """
    key = clock.pass_key(index, microbatch)
    if policy == "keep":
        outputs, new_state, _, memo = linearize(layer, weights, state, inputs, key)
        memo.args_res[0] = None
    else:
        outputs, new_state, memo = layer.forward(weights, state, inputs, key)
        outputs = tuple(map(bare, outputs))
    if verifies:
        memo = memo, reversal.checksums(inputs)
    if seen is not None:
        seen = reversal.look(seen, outputs, index)
    return outputs, new_state, memo, seen


def infer(layer: Layer, recipe: Recipe, weights: Tree, state: Tree, inputs: Stack) -> tuple[Stack]:
    """A block's outputs, deterministic."""
    outputs, _, _ = layer.forward(recipe.cast(weights), state, inputs, None)
    return (tuple(map(bare, outputs)),)


def evaluate(layer: LossLayer, recipe: Recipe, weights: Tree, state: Tree, inputs: Stack) -> tuple[dict[str, Array]]:
    """The last block's metrics, deterministic."""
    sums, _, _ = layer.forward(recipe.cast(weights), state, inputs, None)
    return (means(layer, sums),)


def predict(layer: LossLayer, recipe: Recipe, weights: Tree, state: Tree, inputs: Stack) -> tuple[Array]:
    """The last block's logits, deterministic."""
    return (layer.predict(recipe.cast(weights), state, inputs),)


# Backward.


def gradients(
    layer: Layer,
    recipe: Recipe,
    policy: str,
    verifies: bool,
    signatures: tuple[Stack, Stack],
    weights: Tree,
    state: Tree,
    entries: Stack,
    cotangents: Stack,
    memo: Tree,
    truth: Stack | None,
    seen: Seen | None,
    sums: Tree,
    clock: Clock,
    index: Array,
    microbatch: Array,
) -> tuple[Stack, Stack, Seen | None, Tree]:
    """Gradients of one block for one microbatch, added to `sums`.

    Args:
      policy: "reverse": `entries` are the outputs; "recompute": the inputs; "keep": there
        are none, and `memo` holds the residuals.
      verifies: Whether reconstructed inputs are compared with the real ones: `memo` holds
        these's checksums.
      signatures: Of inputs and outputs.
      cotangents: Of the outputs.
      truth: The real inputs, if they are known and to be compared.
      seen: What this step has seen of its streams, if it verifies.
      sums: Gradients of earlier microbatches, or None.

    Returns:
      `(inputs, input_cotangents, seen, sums)`; `inputs` are empty unless they were reconstructed.
    """
    memo, checksums = memo if verifies else (memo, ())
    compute_weights, key, inputs = recipe.cast(weights), clock.pass_key(index, microbatch), ()
    if policy == "keep":
        memo.args_res[0] = compute_weights
        input_cts, grads = pull(memo, *signatures, cotangents)
    elif policy == "reverse":
        assert isinstance(layer, ReversibleLayer)
        inputs, (input_cts, grads) = layer.reverse_and_grad(compute_weights, state, entries, cotangents, key, memo)
        if verifies:
            assert seen is not None
            seen = reversal.compare(seen, inputs, checksums, truth, index, microbatch)
    else:
        *_, pullback = differentiate(layer, compute_weights, state, entries, key, memo)
        input_cts, grads = pullback(cotangents)
    return inputs, input_cts, seen, _added(sums, grads, weights) if layer.trains else None


def backward(
    layer: Layer,
    recipe: Recipe,
    policy: str,
    verifies: bool,
    signatures: tuple[Stack, Stack],
    weights: Tree,
    slots: Tree,
    state: Tree,
    new_state: Tree,
    entries: Stack,
    cotangents: Stack,
    memo: Tree,
    truth: Stack | None,
    seen: Seen | None,
    clock: Clock,
    weight_sum: Array,
    health: Health,
    index: Array,
    microbatch: Array,
) -> tuple[Tree, Tree, Tree, Stack, Stack, Seen | None, Health]:
    """`gradients` and `update` in one: `(weights, slots, state, inputs, input_cotangents, seen, health)`."""
    inputs, input_cts, seen, grads = gradients(
        *(layer, recipe, policy, verifies, signatures, weights, state, entries, cotangents, memo, truth, seen, None),
        *(clock, index, microbatch),
    )
    *updated, health = update(
        layer, recipe, True, weights, slots, state, new_state, grads, clock, weight_sum, health, index
    )
    return *updated, inputs, input_cts, seen, health


def loss_gradients(
    layer: LossLayer,
    recipe: Recipe,
    weights: Tree,
    state: Tree,
    inputs: Stack,
    sums: tuple[Tree, Stack | None],
    clock: Clock,
    index: Array,
    microbatch: Array,
) -> tuple[Tree, Stack, tuple[Tree, Stack]]:
    """Forward pass and gradients of the last block for one microbatch.

    Args:
      sums: Gradients, and the layer's outputs, of earlier microbatches, or None.

    Returns:
      `(new_state, input_cotangents, sums)`.
    """
    key = clock.pass_key(index, microbatch)
    outputs, new_state, _, pullback = differentiate(layer, recipe.cast(weights), state, inputs, key)
    input_cts, grads = pullback((jnp.ones_like(outputs[0]), *map(jnp.zeros_like, outputs[1:])))
    grads = _added(sums[0], grads, weights) if layer.trains else None
    return new_state, input_cts, (grads, _added(sums[1], outputs, outputs))


def start(layer: LossLayer, sums: Stack) -> tuple[dict[str, Array], Array, Health]:
    """`(metrics, weight_sum, health)` to begin the backward sweep with: without a finite loss nothing is updated."""
    none = jnp.zeros((), jnp.int32)
    ok = jnp.isfinite(sums[0]) & (sums[1] > 0)
    return means(layer, sums), sums[1], Health(ok, none - 1, jnp.zeros((), rate_dtype()), none, none)


def loss(
    layer: LossLayer,
    recipe: Recipe,
    weights: Tree,
    slots: Tree,
    state: Tree,
    inputs: Stack,
    clock: Clock,
    index: Array,
    microbatch: Array,
) -> tuple[Tree, Tree, Tree, Stack, dict[str, Array], Array, Health]:
    """`loss_gradients`, `start` and `update` in one.

    Returns:
      `(weights, slots, state, input_cotangents, metrics, weight_sum, health)`.
    """
    new_state, input_cts, (grads, sums) = loss_gradients(
        layer, recipe, weights, state, inputs, (None, None), clock, index, microbatch
    )
    metrics, weight_sum, health = start(layer, sums)
    if not layer.trains:
        return weights, slots, state, input_cts, metrics, weight_sum, health
    *updated, health = update(
        layer, recipe, True, weights, slots, state, new_state, grads, clock, weight_sum, health, index
    )
    return *updated, input_cts, metrics, weight_sum, health


def measure(recipe: Recipe, grads: Tree, health: Health, index: Array) -> Health:
    """Adds a block's gradients to what is known of all."""
    leaves, square = jax.tree.leaves(grads), health.square
    ok = functools.reduce(jnp.logical_and, [jnp.isfinite(g).all() for g in leaves], health.ok)
    if recipe.clip_global is not None:  # nobody else asks for it
        square = sum((jnp.sum(jnp.square(g.astype(square.dtype))) for g in leaves), square)
    return health._replace(ok=ok, square=square, first=jnp.where((health.first < 0) & ~ok, index, health.first))


def update(
    layer: Layer,
    recipe: Recipe,
    measures: bool,
    weights: Tree,
    slots: Tree,
    state: Tree,
    new_state: Tree,
    grads: Tree,
    clock: Clock,
    weight_sum: Array,
    health: Health,
    index: Array,
) -> tuple[Tree, Tree, Tree, Health]:
    """The optimizer's update with the mean gradients, clipped, unless something was not finite.

    Args:
      measures: Whether these gradients are not in `health` yet.
      new_state: What the forward pass left; it replaces `state` if the block is updated.
      grads: Gradients of the summed loss.
      weight_sum: The loss's weight sum, which makes them a mean.
    """
    if measures:
        health = measure(recipe, grads, health, index)
    scale = 1 / jnp.where(weight_sum > 0, weight_sum, 1)
    if recipe.clip_global is not None:
        norm = jnp.sqrt(health.square) * scale.astype(health.square.dtype)
        scale = scale * clip(recipe.clip_global, norm).astype(scale.dtype)
    grads = jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)
    if recipe.clip_per_block is not None:
        factor = clip(recipe.clip_per_block, optax.tree.norm(grads))
        grads = jax.tree.map(lambda g: g * factor.astype(g.dtype), grads)
    kept = (weights, slots, state)
    if jax.tree.leaves(weights):
        tree: Any = {layer.name: weights}  # weight paths begin with the layer's name
        named = {layer.name: grads}
        updates, slots = optimizer_update(recipe.optimizer, clock, named, slots, tree, index)
        new: Any = optax.apply_updates(tree, updates)
        weights = new[layer.name]
    updated = strong((weights, slots, new_state))
    _check_kept(f"the optimizer, updating {layer.name},", "weights", weights, kept[0])
    _check_kept(f"{layer!r}: forward", "state", new_state, state)
    weights, slots, state = jax.tree.map(lambda new, old: jnp.where(health.ok, new, old), updated, kept)
    skipped = health.skipped + (~health.ok).astype(jnp.int32)
    failures = health.failures + total(slots, "failures")
    return weights, slots, state, health._replace(skipped=skipped, failures=failures)


def clip(largest: float, norm: Array) -> Array:
    """The factor that makes a norm at most `largest`."""
    return jnp.where(norm < largest, 1, largest / norm)


def optimizer_update(
    optimizer: Optimizer, clock: Clock, grads: Tree, slots: Tree, weights: Tree, index: Any
) -> tuple[Tree, Tree]:
    """`(updates, slots)` of an optimizer, told the facts that ours know what to do with."""
    with jax.numpy_dtype_promotion("standard"):  # optax needs it, whatever the caller has set
        transformation = optax.with_extra_args_support(optimizer(clock.learning_rate))
        updates, new_slots = transformation.update(grads, slots, weights, block_index=index, step=clock.step)
    _check_kept(f"the optimizer, updating {', '.join(weights)},", "slots", new_slots, slots)
    return updates, new_slots


def means(layer: LossLayer, sums: Stack) -> dict[str, Array]:
    """The loss's sums as means, and the weight they were taken over; nothing weighed gives 0."""
    weight = jnp.where(sums[1] > 0, sums[1], 1)
    named = dict(zip(layer.metric_names, sums[2:], strict=True))
    return {"loss": sums[0] / weight, **{k: v / weight for k, v in named.items()}, "weight": sums[1]}


def zeros(like: Tree) -> Tree:
    """Sums to which nothing has been added."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)


def merge(states: tuple[Tree, ...]) -> tuple[Tree]:
    """One state from those that microbatches have left, each beginning with the same: means, of what has means.

    So running statistics move once per step, by the statistics of the whole batch; of counters, flags and
    keys the last one stays.
    """

    def one(*values: Array) -> Array:
        return sum(values[1:], values[0]) / len(values) if jnp.issubdtype(values[0].dtype, jnp.inexact) else values[-1]

    return (strong(jax.tree.map(one, *states)),)


def strong(tree: Tree) -> Tree:
    """Without JAX's weak types, which would make the next call's arguments differ from this one's."""
    return jax.tree.map(lambda x: jax.lax.convert_element_type(x, jnp.asarray(x).dtype), tree)


def _added(sums: Tree | None, terms: Tree, like: Tree) -> Tree:
    """`sums` + `terms` in the dtypes of `like`."""
    terms = jax.tree.map(lambda x, y: x.astype(y.dtype), terms, like)
    return terms if sums is None else jax.tree.map(jnp.add, sums, terms)


def _check_kept(whose: str, what: str, new: Tree, old: Tree) -> None:
    if not same_signature(strong(new), old):
        raise ValueError(
            f"Trainer: {whose} must keep structure, shapes and dtypes of the {what}; expected ({describe(old)}), "
            f"got ({describe(new)})."
        )


def rate_dtype() -> np.dtype:
    """Of the learning rate and of norms: float32, or float64 when JAX is in 64-bit mode."""
    return np.dtype(jax.dtypes.canonicalize_dtype(float))
