"""The optimizers in plain optax, on a small flax model."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import slow

from reversible_trainer.optimizers import muon, orthogonalized, shampoo, soap


class Mlp(nn.Module):
    """Two layers, with biases and a norm."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.LayerNorm()(nn.tanh(nn.Dense(16)(x))))


def polar(matrix, *, path):
    u, _, vt = jnp.linalg.svd(matrix, full_matrices=False)
    return u @ vt


X = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
Y = np.sin(X.sum(1, keepdims=True))
OPTIMIZERS = {
    "shampoo": (functools.partial(shampoo, graft_type="adam", block_size=8), 1e-3),
    "soap": (soap, 1e-2),
    "muon": (functools.partial(muon, extra_scale=0.2, weight_decay=0.0), 2e-2),
    "orthogonalized": (functools.partial(orthogonalized, orthogonalize=polar, weight_decay=0.0), 2e-2),
}


def kinds(tree):
    return jax.tree.map(lambda w: "matrices" if w.ndim == 2 else "others", tree)


def compositions(name):
    """Chained, with hyper-parameters in the slots, over two batches, on some of the weights."""
    factory, rate = OPTIMIZERS[name]
    static = list(factory.keywords) if isinstance(factory, functools.partial) else []
    whole = {
        "chain": optax.chain(optax.clip_by_global_norm(1.0), factory(rate)),
        "inject_hyperparams": optax.inject_hyperparams(factory, static_args=static)(learning_rate=rate),
        "MultiSteps": optax.MultiSteps(factory(rate), 2),
    }
    parts = {key: optax.partition({"matrices": o, "others": optax.adam(1e-2)}, kinds) for key, o in whole.items()}
    takes_all = name in ("shampoo", "soap")  # Muon and its base take matrices only
    partition = optax.partition({"matrices": factory(rate), "others": optax.adam(1e-2)}, kinds)
    return (whole if takes_all else parts) | {"partition": partition}


@pytest.mark.parametrize("name", [slow(n) if n == "soap" else n for n in OPTIMIZERS])
def test_trains_a_flax_model(name):
    with jax.numpy_dtype_promotion("standard"):  # flax and optax rely on it
        model = Mlp()
        weights = model.init(jax.random.key(0), X)
        loss = lambda weights: jnp.mean(jnp.square(model.apply(weights, X) - Y))  # noqa: E731

        def train(optimizer):
            def step(carry, _):
                weights, slots = carry
                value, gradients = jax.value_and_grad(loss)(weights)
                updates, slots = optimizer.update(gradients, slots, weights)
                return (optax.apply_updates(weights, updates), slots), value

            return jax.lax.scan(step, (weights, optimizer.init(weights)), length=120)[1]

        losses = jax.jit(lambda: {key: train(optimizer) for key, optimizer in compositions(name).items()})()
    for key, values in losses.items():
        assert values[-1] < 0.3 * values[0], (key, values[0], values[-1])
