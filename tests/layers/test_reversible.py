"""Reversible layers: round trip, gradients, memos and state."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_trees_close, assert_trees_equal

from reversible_trainer.layers import (
    Attention,
    Dense,
    Dropout,
    FeedForward,
    Gelu,
    HalfResidual,
    Layer,
    LayerError,
    Residual,
    ReversibleConcatenatePair,
    ReversibleReshape,
    ReversibleSelect,
    ReversibleSerial,
    ReversibleSplit,
    ReversibleSwap,
    RMSNorm,
    Serial,
)
from reversible_trainer.layers.base import differentiate

KEY = jax.random.key(0)
SHAPE = (2, 4, 6)


@dataclasses.dataclass(frozen=True)
class Gated(Layer):
    """`(x, gate, mask) -> x * gate` where the integer mask is 1: a layer with context."""

    @property
    def n_in(self):
        return 3

    def forward(self, weights, state, inputs, key, memo=None):
        x, gate, mask = inputs
        return (jnp.where(mask == 1, x * gate, 0),), state, None


@dataclasses.dataclass(frozen=True)
class Coin(Layer):
    """Keeps an element or drops it, as drawn from the key; the memo is what was drawn."""

    def forward(self, weights, state, inputs, key, memo=None):
        if memo is None:
            memo = jnp.ones(inputs[0].shape, bool) if key is None else jax.random.bernoulli(key, 0.5, inputs[0].shape)
        return (jnp.where(memo, inputs[0], 0),), state, memo


@dataclasses.dataclass(frozen=True)
class Counting(Layer):
    """`x * (1 + count)`, where the state counts passes."""

    def init(self, key, inputs):
        return (), jnp.ones((), inputs[0].dtype)

    def forward(self, weights, state, inputs, key, memo=None):
        return (inputs[0] * (1 + state),), state + 1, None


BLOCK = ReversibleSerial(
    HalfResidual(Serial(RMSNorm(), Attention(3), Dropout(0.3))),
    ReversibleSwap(),
    HalfResidual(Serial(RMSNorm(), FeedForward(8, dropout=0.3))),
    ReversibleSwap(),
)
LAYERS = {
    "coupling": HalfResidual(Gelu()),
    "context": HalfResidual(Serial(Gated(), Dense(6))),
    "memo": HalfResidual(Serial(Dense(6), Coin())),
    "swap": ReversibleSwap(),
    "select": ReversibleSelect((2, 0, 1)),
    "concatenate": ReversibleConcatenatePair(),
    "split": ReversibleSplit(),
    "reshape": ReversibleReshape((4, 6), (3, 8)),
    "serial": ReversibleSerial(ReversibleSplit(), ReversibleSelect((1, 0)), ReversibleConcatenatePair()),
    "state": ReversibleSerial(HalfResidual(Counting()), ReversibleSwap(), HalfResidual(Counting())),
    "block": BLOCK,
}


def entries(layer, dtype):
    """Random entries, the third an integer one."""
    xs = [jax.random.normal(jax.random.key(i), SHAPE, dtype) for i in range(4)]
    xs[3] = (xs[3] > 0).astype(jnp.int32)
    return tuple(xs[: layer.n_in])


@functools.partial(jax.jit, static_argnums=0)
def both_ways(layer, weights, state, xs):
    """A forward pass, all ways back, and the vjp of forward."""
    outputs, _, memo, pullback = differentiate(layer, weights, state, xs, KEY)
    cts = tuple(jnp.cos(y) if jnp.issubdtype(y.dtype, jnp.floating) else None for y in outputs)
    return {
        "reverse": layer.reverse(weights, state, outputs, KEY, memo),
        "reverse_and_grad": layer.reverse_and_grad(weights, state, outputs, cts, KEY, memo),
        "vjp": pullback(cts),
    }


@pytest.mark.parametrize("name, dtype", [*((name, "float64") for name in LAYERS), ("memo", "float32")])
def test_reverse_and_gradient(name, dtype):
    with jax.enable_x64(dtype == "float64"):
        layer = LAYERS[name]
        xs = entries(layer, dtype)
        out = both_ways(layer, *layer.init(KEY, xs), xs)
        assert_trees_close(out["reverse"], xs)
        inputs, gradients = out["reverse_and_grad"]
        assert_trees_close(inputs, xs)
        assert_trees_close(gradients, out["vjp"], factor=1 if dtype == "float64" else 10)  # sums over 8 positions


def test_gradient_against_central_differences():
    with jax.enable_x64(True):
        xs = entries(BLOCK, "float64")
        weights, state = BLOCK.init(KEY, xs)

        @jax.jit
        def loss(xs, weights):  # whose cotangents are those of `both_ways`
            return sum(jnp.sum(jnp.sin(y)) for y in BLOCK.forward(weights, state, xs, KEY)[0])

        _, gradients = both_ways(BLOCK, weights, state, xs)["reverse_and_grad"]
        direction = jax.tree.map(lambda x: np.sin(np.arange(1.0, x.size + 1)).reshape(x.shape), (xs, weights))
        dots = jax.tree.map(np.vdot, gradients, direction)
        h = 1e-5
        ahead, behind = (jax.tree.map(lambda x, d, s=s: x + s * d, (xs, weights), direction) for s in (h, -h))
        slope = (loss(*ahead) - loss(*behind)) / (2 * h)
        # Central differences err by h^2 times a third derivative.
        assert sum(jax.tree.leaves(dots)) == pytest.approx(float(slope), rel=1e-7)


def test_memo_repeats_decisions_whatever_the_key():
    layer, other_key = ReversibleSerial(HalfResidual(Coin()), ReversibleSwap()), jax.random.key(7)
    xs = entries(layer, "float32")
    weights, state = layer.init(KEY, xs)
    ys, _, memo = layer.forward(weights, state, xs, KEY)
    assert memo[1] is None and memo[0].dtype == bool
    assert_trees_close(layer.reverse(weights, state, ys, other_key, memo), xs)
    assert_trees_equal(layer.forward(weights, state, xs, other_key, memo), (ys, state, memo))
    assert not jnp.allclose(layer.reverse(weights, state, ys, other_key)[0], xs[0])


def test_reversing_uses_the_state_before_the_pass():
    layer = HalfResidual(Counting())
    xs = entries(layer, "float32")
    weights, state = layer.init(KEY, xs)
    ys, new_state, _ = layer.forward(weights, state, xs, None)
    assert_trees_equal((state, new_state), ({"Counting": jnp.ones(())}, {"Counting": jnp.full((), 2.0)}))
    assert_trees_close(layer.reverse(weights, state, ys, None), xs)
    assert not jnp.allclose(layer.reverse(weights, new_state, ys, None)[0], xs[0])


def test_half_residual_runs_f_once_when_going_back():
    calls = []

    @dataclasses.dataclass(frozen=True)
    class Traced(Layer):
        def forward(self, weights, state, inputs, key, memo=None):
            calls.append(self)
            return inputs, state, None

    layer, xs = HalfResidual(Traced()), entries(HalfResidual(Gelu()), "float32")
    layer.reverse_and_grad({"Traced": ()}, {"Traced": ()}, xs, xs, None)
    assert len(calls) == 1


def test_half_residual_refuses_another_shape_or_dtype():
    x = jax.ShapeDtypeStruct((8, 128, 512), jnp.float32)
    with pytest.raises(LayerError) as error:
        HalfResidual(Dense(256)).init(KEY, (x, x))
    assert (
        "HalfResidual('Dense'): f must return the shape and dtype it takes; got float32[8,128,512] -> "
        "float32[8,128,256]. Give 'Dense' an output of float32[8,128,512], or place it in a standard block."
    ) in str(error.value)
    half = jnp.ones(2, jnp.bfloat16)
    with pytest.raises(LayerError, match=r"got bfloat16\[2\] -> bfloat16\[2\].*an output of float32\[2\]"):
        HalfResidual(Gelu()).forward({"Gelu": ()}, {"Gelu": ()}, (jnp.ones(2), half), None)


@pytest.mark.parametrize(
    "make, error, match",
    [
        (lambda: ReversibleSelect((0, 0)), ValueError, "each of 0 ... 1 once"),
        (lambda: ReversibleSelect((0, 2)), ValueError, "each of 0 ... 1 once"),
        (lambda: ReversibleSerial(HalfResidual(Gelu()), Residual(Gelu())), TypeError, "every layer must be reversible"),
        (lambda: ReversibleReshape((4, 6), (5, 5)), ValueError, "equally many elements"),
        (lambda: ReversibleReshape((4, 6), (-4, -6)), ValueError, "without -1"),
        (lambda: HalfResidual(ReversibleSwap()), ValueError, "f must have one output"),
    ],
)
def test_what_cannot_be_reversed_is_refused(make, error, match):
    with pytest.raises(error, match=match):
        make()


def test_shapes_that_cannot_be_reversed_are_refused():
    with pytest.raises(LayerError, match="both must have one shape"):
        ReversibleConcatenatePair().forward((), (), (jnp.ones((2, 3)), jnp.ones((2, 4))), None)
    with pytest.raises(LayerError, match=r"expected \[B, 4, 6\]; got \[2, 4, 5\]"):
        ReversibleReshape((4, 6), (24,)).forward((), (), (jnp.ones((2, 4, 5)),), None)
