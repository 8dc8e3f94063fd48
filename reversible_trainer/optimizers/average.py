"""An exponential average of the weights, which is often better than the last ones."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from reversible_trainer.optimizers.common import Factory
from reversible_trainer.tree import Array, TrainState, Tree


class AverageSlots(NamedTuple):
    """Slots of `averaging`.

    Attributes:
      average: Of the weights, in their structure and dtypes.
      inner: Slots of the optimizer itself.
    """

    average: Tree
    inner: Tree


def averaging(optimizer: Factory, decay: float) -> Factory:
    """A factory of `optimizer` that also keeps an exponential average of the weights, among its slots.

    After step t the average moves by `1 - min(decay, (1 + t) / (10 + t))` of the way to the new
    weights: quickly at first, so that the weights of the beginning are soon forgotten. The
    updates are those of `optimizer`. Being slots, averages live on the host, are checkpointed
    and are sent with their block.

    Args:
      optimizer: The factory.
      decay: Of the average per step, from 0 to below 1, such as 0.999.
    """
    if not isinstance(decay, int | float) or not 0 <= decay < 1:
        raise ValueError(f"averaging: the decay of the average must be from 0 to below 1; got {decay!r}.")

    def factory(learning_rate: Any) -> optax.GradientTransformation:
        inner = optax.with_extra_args_support(optimizer(learning_rate))

        def init(params: Tree) -> AverageSlots:
            return AverageSlots(jax.tree.map(jnp.asarray, params), inner.init(params))

        def update(
            updates: Tree, state: Any, params: Tree = None, *, step: Array | int = 0, **extra: Any
        ) -> tuple[Tree, AverageSlots]:
            updates, inner_slots = inner.update(updates, state.inner, params, step=step, **extra)
            count = jnp.asarray(step + 1, jnp.float32)
            move = 1 - jnp.minimum(decay, (1 + count) / (10 + count))
            new = optax.apply_updates(params, updates)
            average = jax.tree.map(lambda a, w: a + (move * (w - a)).astype(a.dtype), state.average, new)
            return updates, AverageSlots(average, inner_slots)

        return optax.GradientTransformationExtraArgs(init, update)

    return factory


def averages(state: TrainState) -> TrainState:
    """The run with the averages of `averaging` in place of its weights, and without slots; for inference.

    Weights that nothing averages, as those of frozen blocks, stay.
    """
    copy = state.copy()
    for i, slots in enumerate(state.slots):
        if isinstance(slots, AverageSlots):
            (copy.weights[i],) = slots.average.values()
        copy.slots[i] = None
    return copy
