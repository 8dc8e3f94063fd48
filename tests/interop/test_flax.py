"""Modules of linen and nnx as layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from helpers import assert_trees_close, assert_trees_equal, slow
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

from reversible_trainer.interop.flax import FlaxLayer
from reversible_trainer.layers import HalfResidual, LayerError

# flax's batch statistics are float32, whatever comes in.
pytestmark = pytest.mark.filterwarnings("ignore:scatter inputs have incompatible types:FutureWarning")


class LinenBlock(linen.Module):
    """Batch norm, dropout, and a count of passes on which the output depends."""

    width: int
    rate: float = 0.2

    @linen.compact
    def __call__(self, x, train):
        x = linen.BatchNorm(use_running_average=not train, momentum=0.5, param_dtype=jnp.float64)(x)
        x = linen.Dropout(self.rate, deterministic=not train)(x)
        passes = self.variable("passes", "count", jnp.zeros, (), jnp.int32)
        y = linen.tanh(linen.Dense(self.width, param_dtype=jnp.float64)(x)) / (1 + passes.value)
        if train and not self.is_initializing():
            passes.value += 1
        return y


class NNXBlock(nnx.Module):
    """The same in nnx, told by `train()` and `eval()` what it is doing."""

    def __init__(self, width, rate=0.2, *, rngs):
        self.norm = nnx.BatchNorm(width, momentum=0.5, param_dtype=jnp.float64, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(width, width, param_dtype=jnp.float64, rngs=rngs)])
        self.passes = nnx.BatchStat(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        y = nnx.tanh(self.layers[0](self.dropout(self.norm(x)))) / (1 + self.passes[...])
        if not self.norm.use_running_average:
            self.passes[...] += 1
        self.seen = nnx.Intermediate(y)  # is nobody's state
        return y


def linen_block():
    return FlaxLayer(LinenBlock, width=WIDTH)


def nnx_block():
    return FlaxLayer(NNXBlock, width=WIDTH)


def passes(states):
    """How often each block has counted a pass."""
    return [int(x) for x in jax.tree.leaves(states) if x.dtype == jnp.int32]


# "auto": the standard blocks recompute, the reversible one reverses.
@pytest.mark.parametrize("policy", ["auto", slow("recompute"), slow("keep")])
def test_trains_as_the_oracle(policy, x64):
    trainer, state = assert_trains_as_the_oracle(model(linen_block, nnx_block), policy=policy)
    assert passes(state.states) == [3] * 5  # one pass a step, however often a block runs again
    assert programs(trainer, linen_block()) == ["backward LinenBlock", "forward LinenBlock", "init LinenBlock"]


def test_microbatches_update_the_state_once(x64):
    assert passes(assert_microbatches_update_the_state_once(linen_block(), nnx_block())) == [2, 2]


def test_linen_equals_its_own_apply(x64):
    layer, x = linen_block(), jnp.asarray(batch()[0])
    weights, state = layer.init(KEY, (jax.ShapeDtypeStruct(x.shape, x.dtype),))
    rngs = dict(zip(("params", "dropout"), jax.random.split(KEY), strict=True))
    module = LinenBlock(WIDTH)
    with jax.numpy_dtype_promotion("standard"):
        assert_trees_equal({"params": weights, **state}, module.init(rngs, x, train=True))
    assert paths(weights) == ["BatchNorm_0/bias", "BatchNorm_0/scale", "Dense_0/bias", "Dense_0/kernel"]
    assert paths(state) == ["batch_stats/BatchNorm_0/mean", "batch_stats/BatchNorm_0/var", "passes/count"]

    def own(training, weights, x):
        variables, collections = {"params": weights, **state}, list(state)
        y, new = module.apply(variables, x, train=training, rngs=rngs if training else {}, mutable=collections)
        return (y,), jax.tree.map(lambda new, old: new.astype(old.dtype), new, state)

    for key in (KEY, None):
        assert_equals_own(layer, weights, state, (x,), key, lambda *given, key=key: own(key is not None, *given))


def test_nnx_equals_its_own_call(x64):
    layer, x = FlaxLayer(NNXBlock, width=WIDTH, rate=0.0), jnp.asarray(batch()[0])
    weights, state = layer.init(KEY, (x,))
    assert_trees_equal(weights, nnx.to_pure_dict(nnx.state(NNXBlock(WIDTH, rngs=nnx.Rngs(KEY)), nnx.Param)))
    assert paths(weights) == ["layers/0/bias", "layers/0/kernel", "norm/bias", "norm/scale"]
    assert paths(state) == ["norm/mean", "norm/var", "passes"]

    def own(training, weights, x):
        module = NNXBlock(WIDTH, 0.0, rngs=nnx.Rngs(KEY))
        module.layers[0].bias[...], module.layers[0].kernel[...] = weights["layers"][0].values()
        module.norm.bias[...], module.norm.scale[...] = weights["norm"].values()
        (module.train if training else module.eval)()
        y = module(x)
        new = nnx.to_pure_dict(nnx.state(module, nnx.BatchStat))
        return (y,), jax.tree.map(lambda new, old: new.astype(old.dtype), new, state)

    for key in (KEY, None):
        assert_equals_own(layer, weights, state, (x,), key, lambda *given, key=key: own(key is not None, *given))


def test_dropout():
    x = jnp.ones((8, WIDTH))
    for module in (linen, nnx):
        assert_trees_equal(assert_draws_from_its_key(FlaxLayer(module.Dropout, rate=0.5), x), x)


class Twice(nnx.Module):
    """Two masks, each drawn from the module's own streams or from those that the call is given."""

    def __init__(self, *, rngs):
        self.first, self.second = nnx.Dropout(0.5, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x, rngs):
        return self.first(x), self.second(x), self.first(x, rngs=rngs)


def test_each_stream_of_nnx_has_a_key_of_its_own():
    layer, x = FlaxLayer(Twice, n_out=3), jnp.ones((8, WIDTH))
    outputs, _, _ = layer.forward({}, {}, (x,), KEY)
    masks = {np.asarray(y).tobytes() for y in outputs}
    assert len(masks) == 3
    assert_trees_equal(layer.forward({}, {}, (x,), KEY)[0], outputs)
    assert_trees_equal(layer.forward({}, {}, (x,), None)[0], (x, x, x))


class Mixed(linen.Module):
    """Two inputs, two outputs, two ways to be told of training."""

    factor: float
    deterministic: bool | None = None

    def __call__(self, x, tokens, is_new=False, mask=None):
        return x * self.factor * (1 if self.deterministic else 2) * (3 if is_new else 1), tokens


def test_several_inputs_and_outputs_and_ways_to_be_told_of_training():
    x, tokens = jnp.ones(2, jnp.bfloat16), jnp.arange(2)
    layer = FlaxLayer(Mixed, factor=5.0, n_out=2, train_argument="is_new")
    assert (layer.n_in, layer.n_out) == (2, 2)
    run = lambda layer, key: layer.forward({}, {}, (x, tokens), key)[0]  # noqa: E731
    assert_trees_equal(run(layer, KEY), (30 * x, tokens))
    assert_trees_equal(run(layer, None), (5 * x, tokens))
    fixed = FlaxLayer(Mixed, factor=5.0, deterministic=True, n_out=2)
    assert_trees_equal(run(fixed, KEY), (5 * x, tokens))


def test_computes_in_the_dtype_of_its_weights():
    layer, x = FlaxLayer(linen.Dense, features=WIDTH), jnp.linspace(0, 1, WIDTH)[None]
    weights, _ = layer.init(KEY, (x,))
    half = jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights)
    (y,), _, _ = layer.forward(half, {}, (x,), None)
    assert y.dtype == jnp.float32
    assert_trees_equal(y, (x.astype(jnp.bfloat16) @ half["kernel"]).astype(jnp.float32))
    assert_trees_close(y.astype(jnp.bfloat16), (x @ weights["kernel"]).astype(jnp.bfloat16))


def test_weights_that_flax_has_boxed():
    boxed = linen.with_partitioning(jax.nn.initializers.ones, (None, "model"))
    layer, x = FlaxLayer(linen.Sequential, layers=(linen.Dense(2, kernel_init=boxed),)), jnp.ones((1, 3))
    weights, state = layer.init(KEY, (x,))
    assert paths(weights) == ["layers_0/bias", "layers_0/kernel"]
    assert layer.forward(weights, state, (x,), None)[0][0].tolist() == [[3, 3]]


def test_equal_hyper_parameters_make_equal_layers():
    same = FlaxLayer(LinenBlock, rate=0.1, width=3), FlaxLayer(LinenBlock, width=3, rate=0.1)
    assert same[0] == same[1] and hash(same[0]) == hash(same[1]) and same[0] is not same[1]
    assert "FlaxLayer(LinenBlock, rate=0.1, width=3" in repr(same[0])
    others = [FlaxLayer(LinenBlock, width=3, rate=0.2), FlaxLayer(NNXBlock, width=3, rate=0.1)]
    others += [FlaxLayer(LinenBlock, width=3, rate=0.1, n_out=2)]
    assert len({*same, *others}) == 4


class Sowing(linen.Module):
    """Keeps what it has seen in a collection."""

    def __call__(self, x):
        self.sow("losses", "norm", jnp.sum(x))
        return x


class Growing(nnx.Module):
    """Adds to its state in a pass."""

    def __call__(self, x):
        self.last = nnx.BatchStat(x)
        return x


class NeedsMask(linen.Module):
    def __call__(self, x, *, mask):
        return x


class Named(linen.Module):
    n_in: int


def test_refuses_when_it_is_built():
    for make, message in [
        (
            lambda: FlaxLayer(linen.Dense(3)),
            r"FlaxLayer: expected a class that derives from flax.linen.Module or .*got Dense",
        ),
        (lambda: FlaxLayer(LinenBlock, width=[3]), "width=.3.*must be hashable.*Use a tuple for a list"),
        (lambda: FlaxLayer(linen.Dense, features=3, kernel_init=lambda *_: 0), "kernel_init.*module level"),
        (lambda: FlaxLayer(LinenBlock, width=np.ones(3)), "hold no arrays.*'width', a ndarray"),
        (lambda: FlaxLayer(nnx.Sequential, layers=(nnx.Linear(2, 2, rngs=nnx.Rngs(0)),)), "hold no arrays"),
        (lambda: FlaxLayer(LinenBlock, size=3), r"FlaxLayer\(LinenBlock\).*'width'.*are width, rate; given were size"),
        (lambda: FlaxLayer(NNXBlock, width=3, rngs=0), "unexpected.*'rngs'.*'rngs' is given by the layer"),
        (
            lambda: FlaxLayer(LinenBlock, width=3, n_in=2),
            r"multiple values.*call takes \(x, train\); expected n_in = 2 inputs",
        ),
        (lambda: FlaxLayer(NeedsMask), "missing.*'mask'.*Set n_in, or train_argument"),
        (lambda: FlaxLayer(LinenBlock, width=3, train_argument="fit"), "unexpected.*'fit'"),
        (lambda: FlaxLayer(Named), "arguments of its own.*got n_in. Rename them in a subclass"),
    ]:
        with pytest.raises((TypeError, ValueError), match=message):
            make()


def test_refuses_when_it_is_traced():
    x = jnp.ones((2, WIDTH))
    with pytest.raises(LayerError, match=r"FlaxLayer\(Dense.*test_flax.py.*expected n_out = 2 arrays.*got \(float32"):
        layer = FlaxLayer(linen.Dense, features=3, n_out=2)
        layer.forward(layer.init(KEY, (x,))[0], {}, (x,), None)
    with pytest.raises(LayerError, match="Sowing.*depend on the values of its inputs.*Sow only"):
        FlaxLayer(Sowing).init(KEY, (x,))
    with pytest.raises(LayerError, match=r"stay the same arrays.*expected \(nothing\), got \(last\)"):
        FlaxLayer(Growing).forward({}, {}, (x,), KEY)
    with pytest.raises(LayerError, match="HalfResidual..Dense.*Give 'Dense' an output of float32"):
        HalfResidual(FlaxLayer(linen.Dense, features=3)).init(KEY, (x, x))
