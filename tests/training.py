"""Small models, batches and optimizers that the trainer's tests share, so that programs are compiled once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from reversible_trainer.layers import (
    CrossEntropy,
    Dense,
    Dropout,
    Dup,
    Embedding,
    FeedForward,
    HalfResidual,
    LossSerial,
    ReversibleConcatenatePair,
    ReversibleSerial,
    ReversibleSwap,
    RMSNorm,
    Serial,
)
from reversible_trainer.models import reversible_transformer_lm, transformer_lm
from reversible_trainer.optimizers import shampoo

SIZES = dict(vocab_size=11, width=8, heads=2, ff_width=16)


def lm(depth, dropout=0.1):
    return reversible_transformer_lm(**SIZES, depth=depth, dropout=dropout, arithmetic="float32")


def standard_lm(depth, dropout=0.1):
    return transformer_lm(**SIZES, depth=depth, dropout=dropout)


def small_lm(depth, dropout=0.1):
    """Reversible blocks of one feed-forward layer: what they compile to is a third of a transformer's."""
    width = SIZES["width"]
    half = HalfResidual(Serial(RMSNorm(), FeedForward(SIZES["ff_width"]), Dropout(dropout)))
    return [
        Serial(Embedding(SIZES["vocab_size"], width), Dropout(dropout), Dup()),
        *[ReversibleSerial(half, ReversibleSwap())] * depth,
        LossSerial(ReversibleConcatenatePair(), Dense(SIZES["vocab_size"]), CrossEntropy()),
    ]


def batch(seed=0, length=8):
    generator = np.random.default_rng(seed)
    tokens, targets = generator.integers(0, SIZES["vocab_size"], (2, 2, length)).astype(np.int32)
    return tokens, targets, generator.random((2, length)) < 0.8


# Block size 8 and a refresh every second step: statistics are cut, and the second step differs from the first.
SHAMPOO = functools.partial(shampoo, block_size=8, preconditioning_compute_steps=2, graft_type="adam")
ADAFACTOR = functools.partial(optax.adafactor, min_dim_size_to_factor=4)  # so small that it really factors
OPTIMIZERS = {"sgd": optax.sgd, "adam": optax.adam, "adafactor": ADAFACTOR, "shampoo": SHAMPOO}


def recorded_gradients(learning_rate):
    """Gradient descent whose slots are the last gradients."""

    def update(grads, slots, weights=None):
        return jax.tree.map(lambda g: -learning_rate * g, grads), grads

    return optax.GradientTransformation(lambda weights: jax.tree.map(jnp.zeros_like, weights), update)
