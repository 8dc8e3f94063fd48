"""Modules of equinox as layers."""

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_trees_equal, slow
from module_checks import (
    KEY,
    WIDTH,
    assert_draws_from_its_key,
    assert_equals_own,
    assert_microbatches_update_the_state_once,
    assert_trains_as_the_oracle,
    batch,
    model,
    paths,
    programs,
)

from reversible_trainer.interop.equinox import EquinoxLayer
from reversible_trainer.layers import HalfResidual, LayerError


class Block(equinox.Module):
    """Batch norm by running statistics, dropout, a table of integers, and a count of passes."""

    norm: equinox.nn.BatchNorm
    dropout: equinox.nn.Dropout
    layers: list
    order: jax.Array
    passes: equinox.nn.StateIndex

    def __init__(self, width, rate=0.2, *, key):
        self.norm = equinox.nn.BatchNorm(width, "batch", momentum=0.5, mode="ema")
        self.dropout = equinox.nn.Dropout(rate)
        self.layers = [equinox.nn.Linear(width, width, key=key), jnp.tanh]
        self.order = jnp.arange(width)[::-1]
        self.passes = equinox.nn.StateIndex(jnp.zeros((), jnp.int32))

    def __call__(self, x, state, *, key):
        x, state = self.norm(x, state)
        passes = state.get(self.passes)
        state = state.set(self.passes, passes + (not self.norm.inference))
        x = self.dropout(x[self.order], key=key)
        return self.layers[1](self.layers[0](x)) / (1 + passes), state


def block(rate=0.2):
    return EquinoxLayer(Block, width=WIDTH, rate=rate)


def passes(states):
    """How often each block has counted a pass."""
    return [int(x) for x in jax.tree.leaves(states) if x.dtype == jnp.int32 and x.ndim == 0]


# "auto": the standard blocks recompute, the reversible one reverses.
@pytest.mark.parametrize("policy", ["auto", slow("recompute"), slow("keep")])
def test_trains_as_the_oracle(policy, x64):
    trainer, state = assert_trains_as_the_oracle(model(block, block), policy=policy)
    assert passes(state.states) == [3] * 5  # one pass a step, however often a block runs again
    assert programs(trainer, block()) == ["backward Block", "forward Block", "init Block"]


def test_microbatches_update_the_state_once(x64):
    assert passes(assert_microbatches_update_the_state_once(block(), block())) == [2, 2]


def test_equals_its_own_call(x64):
    layer, x = block(), jnp.asarray(batch()[0])
    weights, state = layer.init(KEY, (jax.ShapeDtypeStruct(x.shape, x.dtype),))
    module, own_state = equinox.nn.make_with_state(Block)(WIDTH, key=KEY)
    arrays, static = equinox.partition(module, equinox.is_inexact_array)
    assert paths(weights) == ["layers/0/bias", "layers/0/weight", "norm/bias", "norm/weight"]
    assert_trees_equal(sorted(map(np.sum, weights.values())), sorted(map(np.sum, jax.tree.leaves(arrays))))
    assert state["arrays"]["order"].tolist() == list(range(WIDTH))[::-1]

    def own(key, weights, x):
        filled = equinox.tree_at(
            lambda m: [m.layers[0].bias, m.layers[0].weight, m.norm.bias, m.norm.weight],
            equinox.combine(arrays, static),
            [weights[path] for path in sorted(weights)],
        )
        filled = equinox.nn.inference_mode(filled, key is None)
        keys = None if key is None else jax.random.split(key, len(x))
        run = lambda x, s, key: filled(x, s, key=key)  # noqa: E731
        y, new = jax.vmap(run, in_axes=(0, None, 0), out_axes=(0, None), axis_name="batch")(x, own_state, keys)
        return (y,), {**state, "state": dict(zip(state["state"], jax.tree.leaves(new), strict=True))}

    for key in (KEY, None):
        assert_equals_own(layer, weights, state, (x,), key, lambda *given, key=key: own(key, *given))


def test_dropout_draws_a_mask_for_each_example():
    x = jnp.ones((8, WIDTH))
    layer = EquinoxLayer(equinox.nn.Dropout, p=0.5)
    assert_trees_equal(assert_draws_from_its_key(layer, x), x)
    (y,), _, _ = layer.forward(*layer.init(KEY, (x,)), (x,), KEY)
    assert len({np.asarray(row).tobytes() for row in y}) > 1
    always = EquinoxLayer(equinox.nn.Dropout, p=0.5, inference=False)
    with pytest.raises(LayerError, match="requires a key"):
        always.forward(*always.init(KEY, (x,)), (x,), None)


class Mixed(equinox.Module):
    """Two inputs, two outputs, and a keyword for training."""

    factor: float

    def __call__(self, x, tokens, is_new=False):
        return x * self.factor * (3 if is_new else 1), tokens


def test_several_inputs_and_outputs_and_ways_to_be_told_of_training():
    x, tokens = jnp.ones((2, 3), jnp.bfloat16), jnp.arange(2)
    layer = EquinoxLayer(Mixed, factor=5.0, n_out=2, train_argument="is_new")
    assert (layer.n_in, layer.n_out) == (2, 2)
    weights, state = layer.init(KEY, (x, tokens))
    assert_trees_equal(layer.forward(weights, state, (x, tokens), KEY)[0], (15 * x, tokens))
    assert_trees_equal(layer.forward(weights, state, (x, tokens), None)[0], (5 * x, tokens))


def test_equal_hyper_parameters_make_equal_layers():
    assert block() == block() and hash(block()) == hash(block())
    assert len({block(), block(), block(0.1), EquinoxLayer(equinox.nn.Dropout)}) == 3


def test_refuses_when_it_is_built():
    linear = equinox.nn.Linear(2, 2, key=KEY)
    for make, message in [
        (lambda: EquinoxLayer(linear), "EquinoxLayer: expected a class that derives from equinox.Module, .*got Linear"),
        (lambda: EquinoxLayer(Block, width=[3]), "width=.3.*must be hashable"),
        (lambda: EquinoxLayer(equinox.nn.Sequential, layers=(linear,)), "hold no arrays.*'layers', a tuple"),
        (lambda: EquinoxLayer(Block, size=3), r"EquinoxLayer\(Block\).*'width'.*are width, rate; given were size"),
        (lambda: EquinoxLayer(Block, width=3, key=KEY), "hold no arrays"),
        (
            lambda: EquinoxLayer(Block, width=3, n_in=2),
            "multiple values.*call takes .x, state, key.; expected n_in = 2",
        ),
    ]:
        with pytest.raises(TypeError, match=message):
            make()


def test_refuses_when_it_is_traced():
    x = jnp.ones((2, WIDTH))
    with pytest.raises(LayerError, match="Give 'Linear' an output of float32"):
        HalfResidual(EquinoxLayer(equinox.nn.Linear, in_features=WIDTH, out_features=3)).init(KEY, (x, x))
    with pytest.raises(LayerError, match=r"EquinoxLayer\(Dropout.*test_equinox.py.*expected n_out = 2 arrays"):
        layer = EquinoxLayer(equinox.nn.Dropout, n_out=2)
        layer.forward(*layer.init(KEY, (x,)), (x,), None)
