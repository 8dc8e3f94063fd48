"""Layers whose weights are not trained."""
# ruff: noqa: D102  (the methods are those of layers/base.py)

from __future__ import annotations

import dataclasses

import jax

from reversible_trainer.layers.base import Layer, LossLayer, ReversibleLayer


def Frozen(layer: Layer) -> Layer:
    """The same layer, its weights and its state left as they are.

    As a block of the trainer it has no slots and no weight gradient, and is not written back;
    blocks below the lowest trained one have no backward pass at all.

    Args:
      layer: Any layer; a reversible one stays reversible, a loss stays a loss.

    Example:
      >>> from reversible_trainer.layers import Dense
      >>> Frozen(Dense(3)).trains, Frozen(Dense(3)).name
      (False, 'Dense')
    """
    if not isinstance(layer, Layer):
        raise TypeError(f"Frozen: expected a layer; got {layer!r}.")
    if isinstance(layer, LossLayer):
        return FrozenLoss(layer)
    return FrozenReversible(layer) if isinstance(layer, ReversibleLayer) else FrozenLayer(layer)


@dataclasses.dataclass(frozen=True)
class FrozenLayer(Layer):
    """What `Frozen` makes of a standard layer."""

    layer: Layer

    @property
    def trains(self) -> bool:
        return False

    @property
    def name(self) -> str:
        return self.layer.name  # so that its weights have the paths that they had

    @property
    def n_in(self) -> int:
        return self.layer.n_in

    @property
    def n_out(self) -> int:
        return self.layer.n_out

    def init(self, key, inputs):
        return self.layer.init(key, inputs)

    def forward(self, weights, state, inputs, key, memo=None):
        # Inside another layer, whose gradients are taken, its own are zero.
        outputs, _, memo = self.layer.forward(jax.lax.stop_gradient(weights), state, inputs, key, memo)
        return outputs, state, memo


@dataclasses.dataclass(frozen=True)
class FrozenReversible(FrozenLayer, ReversibleLayer):
    """What `Frozen` makes of a reversible layer."""

    layer: ReversibleLayer

    def reverse(self, weights, state, outputs, key, memo=None):
        return self.layer.reverse(weights, state, outputs, key, memo)

    def reverse_and_grad(self, weights, state, outputs, cotangents, key, memo=None):
        return self.layer.reverse_and_grad(weights, state, outputs, cotangents, key, memo)


@dataclasses.dataclass(frozen=True)
class FrozenLoss(FrozenLayer, LossLayer):
    """What `Frozen` makes of a loss."""

    layer: LossLayer

    @property
    def metric_names(self) -> tuple[str, ...]:
        return self.layer.metric_names

    def predict(self, weights, state, inputs, key=None):
        return self.layer.predict(weights, state, inputs, key)
