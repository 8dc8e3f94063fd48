"""Losses: the last layer of a model, and the block it comes in. Losses are sums, see `LossLayer`."""
# ruff: noqa: D102  (the methods are those of layers/base.py)

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import optax

from reversible_trainer.layers.base import LossLayer, Stack
from reversible_trainer.layers.combinators import Serial
from reversible_trainer.layers.core import at_least_float32
from reversible_trainer.tree import Array


@dataclasses.dataclass(frozen=True)
class CrossEntropy(LossLayer):
    """`(logits [..., V], targets [...], mask [...]) -> (loss_sum, weight_sum, correct_sum)`.

    The mask, bool or float, weighs each target; where it is zero the target may be anything.
    Negative targets (-1 is a common mark for padding) have no weight; a target of V or more
    makes the loss NaN. Sums are at least float32.
    """

    @property
    def metric_names(self) -> tuple[str, ...]:
        return ("accuracy",)

    @property
    def n_in(self) -> int:
        return 3

    def forward(self, weights, state, inputs, key, memo=None):
        logits, targets, mask = inputs
        logits = logits.astype(at_least_float32(logits.dtype))
        mask = jnp.where(targets < 0, 0, mask.astype(logits.dtype))
        targets = jnp.where(mask == 0, 0, targets)  # padding may be -1, whose loss would be nan: nan * 0 is no zero
        losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, targets)
        correct = (jnp.argmax(logits, axis=-1).astype(targets.dtype) == targets).astype(logits.dtype)
        return (jnp.sum(losses * mask), jnp.sum(mask), jnp.sum(correct * mask)), state, None

    def predict(self, weights, state, inputs, key=None):
        return inputs[0]


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class LossSerial(Serial, LossLayer):
    """Layers and then a `LossLayer`, itself one: so logits live inside one block only.

    Example:
      >>> from reversible_trainer.layers import CrossEntropy, Dense, RMSNorm
      >>> head = LossSerial(RMSNorm(), Dense(256, use_bias=False), CrossEntropy())
      >>> head.n_in, head.n_out, head.metric_names
      (3, 3, ('accuracy',))
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.layers or not isinstance(self.layers[-1], LossLayer):
            raise TypeError(f"LossSerial: the last layer must be a LossLayer; got {self!r}.")
        if self.n_out != self.loss.n_out:
            raise ValueError(f"LossSerial: the loss must take all that is left; {self.n_out - self.loss.n_out} remain.")

    @property
    def loss(self) -> LossLayer:
        """The last layer."""
        assert isinstance(self.layers[-1], LossLayer)
        return self.layers[-1]

    @property
    def metric_names(self) -> tuple[str, ...]:
        return self.loss.metric_names

    def predict(self, weights, state, inputs: Stack, key: Array | None = None):
        """The logits; targets and mask may be left out of `inputs`."""
        stack, _, _ = self._run(len(self.layers) - 1, weights, state, inputs, key)
        name, loss, loss_key, _ = self._parts(key)[-1]
        return loss.predict(weights[name], state[name], stack, loss_key)
