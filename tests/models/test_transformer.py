"""Transformers: weight paths, causality, first loss, refusals, gin."""

import functools

import gin
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_trees_equal

from reversible_trainer.layers import LossLayer, ReversibleLayer
from reversible_trainer.layers.base import put, take
from reversible_trainer.models import reversible_transformer_lm, transformer_lm
from reversible_trainer.tree import path_name

KEY = jax.random.key(0)
MODELS = [transformer_lm, reversible_transformer_lm]
SMALL = {"vocab_size": 17, "width": 16, "depth": 2, "heads": 2, "ff_width": 32}


@functools.partial(jax.jit, static_argnums=0)
def run(blocks, batch):
    """New weights, the loss of the batch, and the logits."""
    stack, weights, top = batch, [], ()
    for i, block in enumerate(blocks):
        top, rest = take(stack, block.n_in)
        block_weights, state = block.init(jax.random.fold_in(KEY, i), top)
        weights.append(block_weights)
        logits = block.predict(block_weights, state, top[:-2]) if isinstance(block, LossLayer) else None
        stack = put(rest, block.forward(block_weights, state, top, None)[0])
    return weights, stack, logits


def batch_of(tokens):
    return tokens, jnp.roll(tokens, -1, axis=1), jnp.ones(tokens.shape, bool)


@pytest.mark.parametrize("model", MODELS)
def test_model(model):
    blocks = tuple(model(**SMALL | {"depth": 1}, dropout=0.1))
    tokens = jax.random.randint(KEY, (4, 12), 0, 17, jnp.int32)
    _, (loss, weight, _), logits = run(blocks, batch_of(tokens))
    assert weight == 48 and logits.shape == (4, 12, 17)
    assert abs(loss / weight - np.log(17)) < 1  # unit logits cost half a nat over the uniform guess
    _, _, changed = run(blocks, batch_of(tokens.at[:, 7].set(0)))
    assert_trees_equal(changed[:, :7], logits[:, :7])
    assert not jnp.array_equal(changed[:, 7:], logits[:, 7:])


def test_blocks_are_equal_reversible_and_end_in_a_loss():
    blocks = reversible_transformer_lm(**SMALL)
    assert len(blocks) == 4 and blocks[1] == blocks[2]
    assert all(isinstance(block, ReversibleLayer) for block in blocks[1:-1])
    assert isinstance(blocks[-1], LossLayer) and blocks[-1].metric_names == ("accuracy",)
    assert len(reversible_transformer_lm(depth=0)) == 2
    assert blocks == reversible_transformer_lm(**SMALL) != reversible_transformer_lm(**SMALL, dropout=0.1)


def test_weight_paths_and_shapes():
    """Routing rules and checkpoints name these."""
    batch = tuple(jax.ShapeDtypeStruct((2, 4), dtype) for dtype in ("int32", "int32", "bool"))
    weights, _, _ = jax.eval_shape(functools.partial(run, tuple(reversible_transformer_lm(**SMALL))), batch)
    shapes = [{path_name(p): x.shape for p, x in jax.tree_util.tree_leaves_with_path(w)} for w in weights]
    assert shapes[0] == {"Embedding/table": (17, 16)}
    assert shapes[1] == {
        "HalfResidual/Serial/Attention/key/kernel": (16, 16),
        "HalfResidual/Serial/Attention/output/kernel": (16, 16),
        "HalfResidual/Serial/Attention/query/kernel": (16, 16),
        "HalfResidual/Serial/Attention/value/kernel": (16, 16),
        "HalfResidual/Serial/RMSNorm/scale": (16,),
        "HalfResidual_2/Serial/FeedForward/down/bias": (16,),
        "HalfResidual_2/Serial/FeedForward/down/kernel": (32, 16),
        "HalfResidual_2/Serial/FeedForward/up/bias": (32,),
        "HalfResidual_2/Serial/FeedForward/up/kernel": (16, 32),
        "HalfResidual_2/Serial/RMSNorm/scale": (16,),
    }
    assert shapes[3] == {"Dense/kernel": (32, 17), "RMSNorm/scale": (32,)}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "arguments, match",
    [
        ({"vocab_size": 0}, "vocab_size must be a whole number, at least 1; got 0"),
        ({"depth": -1}, "depth must be a whole number, at least 0; got -1"),
        ({"width": 16, "heads": 3}, "heads must divide the width; got heads=3, width=16"),
        ({"dropout": 1.0}, "dropout rate must be at least 0 and less than 1; got 1.0"),
        ({"max_length": 0}, "max_length must be a whole number, at least 1; got 0"),
    ],
)
def test_arguments_that_make_no_model_are_refused(model, arguments, match):
    with pytest.raises(ValueError, match=match):
        model(**arguments)


def test_arithmetic():
    """Both start from the same weights in the same places."""
    found = {}
    for arithmetic in ("float32", "fixed_point"):
        blocks = tuple(reversible_transformer_lm(**SMALL, arithmetic=arithmetic))
        weights, sums, _ = run(blocks, batch_of(jnp.arange(12).reshape(2, 6)))
        found[arithmetic] = jax.tree_util.tree_leaves_with_path(weights), sums[0]
    (floats, loss), (fixed, fixed_loss) = found.values()
    assert [path for path, _ in floats] == [path for path, _ in fixed]
    assert_trees_equal([x for _, x in floats], [x for _, x in fixed])
    assert float(loss) == pytest.approx(float(fixed_loss), rel=1e-4)
    with pytest.raises(ValueError, match="arithmetic must be"):
        reversible_transformer_lm(arithmetic="int8")


def test_gin_sets_arguments():
    gin.parse_config("reversible_transformer_lm.depth = 1\ntransformer_lm.depth = 3")
    assert len(reversible_transformer_lm()) == 3 and len(transformer_lm()) == 5
