"""The plain trainer: the whole model differentiated at once, everything in one memory.

The streamed trainer must equal it: same loss, same weights, same slots.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from reversible_trainer.layers.base import put, take


def pass_key(key, block, microbatch=0):
    """The key of one block's pass over one microbatch."""
    return jax.random.fold_in(jax.random.fold_in(key, block), microbatch)


def loss(blocks, weights, states, key, batch):
    """`(mean loss, new states)` of a whole model."""
    stack, new_states = batch, []
    for i, block in enumerate(blocks):
        inputs, rest = take(stack, block.n_in)
        outputs, new_state, _ = block.forward(weights[i], states[i], inputs, pass_key(key, i))
        stack = put(rest, outputs)
        new_states.append(new_state)
    return stack[0] / stack[1], new_states


@functools.partial(jax.jit, static_argnums=0)
def gradients(blocks, weights, states, key, batch):
    """`((mean loss, new states), gradients)`."""
    return jax.value_and_grad(functools.partial(loss, blocks), has_aux=True)(weights, states, key, batch)


@functools.partial(jax.jit, static_argnums=(0, 1))
def update(optimizer, name, weights, slots, grads, learning_rate, index):
    """One block's `(weights, slots)` after its update."""
    with jax.numpy_dtype_promotion("standard"):  # optax needs it
        transformation, named = optax.with_extra_args_support(optimizer(learning_rate)), {name: weights}
        updates, slots = transformation.update({name: grads}, slots, named, block_index=index)
        return optax.apply_updates(named, updates)[name], slots


def copy(tree):
    """Private copies in plain memory."""
    return jax.tree.map(lambda x: jnp.array(np.array(x)), tree)


def step(blocks, optimizer, run, batch, learning_rate):
    """One step of `run = (step, key, weights, slots, states)`: `(run, loss, gradients)`."""
    number, key, weights, slots, states = run
    key_now = jax.random.fold_in(key, number)
    (mean, states), grads = gradients(tuple(blocks), weights, states, key_now, copy(batch))
    weights, slots = list(weights), list(slots)
    rate = jnp.asarray(learning_rate, float)
    for i, block in enumerate(blocks):
        if jax.tree.leaves(weights[i]):
            weights[i], slots[i] = update(optimizer, block.name, weights[i], slots[i], grads[i], rate, jnp.int32(i))
    return (number + 1, key, weights, slots, states), mean, grads
