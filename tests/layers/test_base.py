"""The protocol: layers are values, and errors say which layer, where, given what."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from reversible_trainer.layers import (
    Attention,
    Dense,
    Dropout,
    Embedding,
    FeedForward,
    Gelu,
    HalfResidual,
    LayerError,
    Normal,
    Residual,
    ReversibleSelect,
    ReversibleSwap,
    Select,
    Serial,
)
from reversible_trainer.layers.base import arity, differentiate, take, unique_names

X = jax.ShapeDtypeStruct((2, 4, 8), jnp.float32)


def test_equal_layers_are_equal_and_share_a_program():
    make = lambda: Serial(Residual(FeedForward(4, dropout=0.1)), Dense(3, kernel_init=Normal(0.1)))  # noqa: E731
    assert make() == make() and hash(make()) == hash(make())
    traces = []

    @functools.partial(jax.jit, static_argnums=0)
    def run(layer, x):
        traces.append(layer)
        return layer.forward({"Gelu": ()}, {"Gelu": ()}, (x,), None)[0]

    for _ in range(2):
        run(Serial(Gelu()), jnp.ones(3))
    assert len(traces) == 1


@pytest.mark.parametrize(
    "a, b",
    [
        (Dropout(0.2), Dropout(0.9)),
        (Dense(3), Dense(3, kernel_init=Normal(0.1))),
        (Residual(Gelu()), HalfResidual(Gelu())),
        (Serial(Gelu()), Serial(Gelu(), Gelu())),
    ],
)
def test_layers_that_differ_are_not_equal(a, b):
    assert a != b


@pytest.mark.parametrize(
    "make, match",
    [
        (lambda: FeedForward(4, activation=lambda x: x), "compare by value"),
        (lambda: FeedForward(4, activation=functools.partial(jax.nn.gelu, approximate=False)), "compare by value"),
        (lambda: Dense(4, kernel_init=jax.nn.initializers.normal(0.02)), "compare by value"),
        (lambda: ReversibleSelect([1, 0]), "hashable.*got a list"),
        (lambda: Serial(Gelu(), jax.nn.gelu), "expected layers"),
        (lambda: HalfResidual(jax.nn.gelu), "f must be a layer"),
    ],
)
def test_fields_that_do_not_compare_by_value_are_refused(make, match):
    with pytest.raises(TypeError, match=match):
        make()


def test_repr_reads_like_the_call():
    assert repr(Serial(Gelu(), HalfResidual(Dropout(0.1)))) == "Serial(Gelu(), HalfResidual(f=Dropout(rate=0.1)))"


def test_an_error_names_the_innermost_layer_its_place_and_its_inputs():
    layer = Residual(Serial(Dense(8), Attention(3)))
    with pytest.raises(LayerError) as error:
        layer.init(jax.random.key(0), (X,))
    message = str(error.value)
    assert message.startswith("Attention(heads=3")
    assert "created at" in message and "test_base.py:" in message
    assert "init of (float32[2,4,8])" in message and "heads must divide the width; got heads=3, width=8" in message


def test_an_error_when_called_by_keyword_is_a_layer_error_too():
    with pytest.raises(LayerError, match="keyword arguments"):
        Attention(3).init(key=jax.random.key(0), inputs=(X,))


def test_stack_too_low():
    with pytest.raises(ValueError, match=r"expected 2 entries on the stack, got 1: \(float32\[2,4,8\]\)"):
        take((X,), 2)


def test_arity_counts_what_rides_along():
    assert arity([]) == (0, 0)
    assert arity([Gelu(), ReversibleSwap(), Select((), n_in=3)]) == (3, 0)
    assert arity([Select((0, 0, 0)), ReversibleSwap(), Gelu()]) == (1, 3)


def test_unique_names():
    assert unique_names([Gelu(), Dense(1), Gelu(), Gelu()]) == ["Gelu", "Dense", "Gelu_2", "Gelu_3"]


def test_differentiate_gives_none_for_integers_and_takes_none_for_zero():
    @dataclasses.dataclass(frozen=True)
    class Gather(Select):
        def forward(self, weights, state, inputs, key, memo=None):
            x, i = inputs
            return (x[i], i, 2.0 * x), state, None

    x, i = jnp.arange(3.0), jnp.array(2)
    _, _, _, pullback = differentiate(Gather((0, 1, 0)), (), (), (x, i), None)
    (x_ct, i_ct), weight_grads = pullback((jnp.ones(()), None, None))
    assert x_ct.tolist() == [0, 0, 1] and i_ct is None and weight_grads == ()


def test_weights_are_float32_and_float64_under_x64():
    block = Serial(Embedding(5, 8), Residual(Attention(2)), FeedForward(4))
    tokens = jax.ShapeDtypeStruct((2, 4), jnp.int32)
    for x64, dtype in (False, jnp.float32), (True, jnp.float64):
        with jax.enable_x64(x64):
            weights, _ = jax.eval_shape(lambda key: block.init(key, (tokens,)), jax.random.key(0))
            assert {leaf.dtype for leaf in jax.tree.leaves(weights)} == {jnp.dtype(dtype)}
