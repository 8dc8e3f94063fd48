"""What layers made of other libraries' modules must do, for test_flax.py and test_equinox.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
from helpers import assert_trees_close, assert_trees_equal
from training import recorded_gradients

from reversible_trainer.layers import (
    CrossEntropy,
    Dense,
    Dup,
    HalfResidual,
    LossSerial,
    ReversibleConcatenatePair,
    ReversibleSerial,
    ReversibleSwap,
    Serial,
)
from reversible_trainer.layers.base import differentiate, put, take
from reversible_trainer.streaming import Placement
from reversible_trainer.trainer import Trainer
from reversible_trainer.tree import path_name

KEY = jax.random.key(3)
WIDTH = 6


def batch(seed=0):
    """Float64 vectors, targets, weights."""
    generator = np.random.default_rng(seed)
    return generator.normal(size=(4, WIDTH)), generator.integers(0, 3, 4).astype(np.int32), generator.random(4)


def model(make, other):
    """Standard and reversible blocks of two layers; the first two blocks are equal, but not the same object."""
    reversible = ReversibleSerial(HalfResidual(make()), ReversibleSwap(), HalfResidual(other()))
    head = LossSerial(ReversibleConcatenatePair(), Dense(3), CrossEntropy())
    return [make(), make(), Serial(other(), Dup()), reversible, head]


def assert_trains_as_the_oracle(blocks, **options):
    """Loss, weights, slots and states after each of three steps, in float64; gives the trainer and its state."""
    trainer = Trainer(blocks, optax.adam, placement=Placement.pinned(), **options)
    state = trainer.init(KEY, batch())
    run = (0, KEY, *oracle.copy((state.weights, state.slots, state.states)))
    for number in range(3):
        state, metrics = trainer.step(state, batch(number), 0.01)
        run, loss, _ = oracle.step(blocks, optax.adam, run, batch(number), 0.01)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-10)
        assert int(metrics["skipped_blocks"]) == 0
        assert_trees_close((state.weights, state.slots, state.states), run[2:])
    return trainer, state


def assert_microbatches_update_the_state_once(standard, f):
    """Two microbatches a step: both see what the step before has left, in both sweeps. Gives the states."""
    head = LossSerial(ReversibleConcatenatePair(), Dense(3), CrossEntropy())
    blocks, data = (Serial(standard, Dup()), HalfResidual(f), head), batch()
    trainer = Trainer(blocks, recorded_gradients, placement=Placement.pinned(), microbatches=2)
    state = trainer.init(KEY, data)
    for number in range(2):
        weights, states = oracle.copy((state.weights, state.states))
        key, grads, left = jax.random.fold_in(KEY, number), [], []
        for m in range(2):
            part = tuple(x[2 * m : 2 * m + 2] for x in data)
            for found, of_part in zip((grads, left), _gradients(blocks, weights, states, key, m, part), strict=True):
                found.append(of_part)
        expected = jax.tree.map(lambda a, b: (a + b) / data[2].sum(), *grads)
        states = jax.tree.map(lambda a, b: (a + b) / 2 if jnp.issubdtype(a.dtype, jnp.floating) else b, *left)
        state, _ = trainer.step(state, data, 0.1)
        ours = [slots[block.name] for slots, block in zip(state.slots, blocks, strict=True)]
        assert_trees_close((ours, state.states), (expected, states))
    return state.states


@functools.partial(jax.jit, static_argnums=0)
def _gradients(blocks, weights, states, key, m, microbatch):
    """`(gradients of the summed loss, new states)` of a plain pass over one microbatch."""

    def loss(weights):
        stack, new_states = microbatch, []
        for i, block in enumerate(blocks):
            inputs, rest = take(stack, block.n_in)
            outputs, new, _ = block.forward(weights[i], states[i], inputs, oracle.pass_key(key, i, m))
            new_states.append(new)
            stack = put(rest, outputs)
        return stack[0], new_states

    return jax.grad(loss, has_aux=True)(weights)


def assert_equals_own(layer, weights, state, inputs, key, own):
    """Outputs, state and gradients are those of `own(weights, *inputs) -> (outputs, state)`, the library's call."""
    wave = lambda y: jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)  # noqa: E731

    @jax.jit
    def ours(weights, inputs):
        outputs, new_state, _, pullback = differentiate(layer, weights, state, inputs, key)
        return outputs, new_state, pullback(tuple(map(wave, outputs)))

    @jax.jit
    def theirs(weights, inputs):
        with jax.numpy_dtype_promotion("standard"):
            outputs, vjp, new_state = jax.vjp(own, weights, *inputs, has_aux=True)
            weight_grads, *input_cts = vjp(tuple(map(wave, outputs)))
        return outputs, new_state, (tuple(input_cts), weight_grads)

    assert_trees_close(ours(weights, inputs), theirs(weights, inputs))


def assert_draws_from_its_key(layer, x):
    """Equal keys, equal outputs; without a key, no randomness, and the module's own evaluation."""
    weights, state = layer.init(KEY, (x,))
    run = lambda key: layer.forward(weights, state, (x,), key)[0]  # noqa: E731
    assert_trees_equal(run(KEY), run(KEY))
    assert not jnp.array_equal(run(KEY)[0], run(jax.random.key(4))[0])
    assert_trees_equal(run(None), run(None))
    return run(None)[0]


def paths(tree):
    return [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def programs(trainer, layer):
    """Names of a trainer's programs for the layers of a name."""
    return sorted(p.name for p in trainer.programs if p.name.endswith(f" {layer.name}"))
