"""RevNet: the streamed trainer equals the plain one, blocks and weight paths, refusals."""

import functools

import gin
import jax
import numpy as np
import optax
import oracle
import pytest
from helpers import assert_trees_close

from reversible_trainer import Trainer
from reversible_trainer.layers import LossLayer, ReversibleLayer
from reversible_trainer.models import rev_net, transformer_route
from reversible_trainer.optimizers import muon
from reversible_trainer.tree import path_name

SMALL = {"classes": 3, "width": 2, "depth": 1, "stages": 2}


def batch(dtype=np.float32):
    generator = np.random.default_rng(0)
    labels = generator.integers(3, size=4).astype(np.int32)
    return generator.random((4, 4, 4, 1)).astype(dtype), labels, np.array([True, True, True, False])


def test_a_streamed_step_is_a_plain_step(x64):
    blocks = rev_net(**SMALL, dropout=0.1, arithmetic="float32")
    trainer, images = Trainer(blocks, optax.sgd), batch(np.float64)  # sgd's weights show gradients as they are
    state = trainer.init(jax.random.key(0), images)
    plain = (0, state.key, *map(oracle.copy, (state.weights, state.slots, state.states)))
    for _ in range(2):
        state, metrics = trainer.step(state, images, 0.1)
        plain, loss, grads = oracle.step(blocks, optax.sgd, plain, images, 0.1)
        assert_trees_close(np.asarray(metrics["loss"]), np.asarray(loss))
        assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(grads))
    assert_trees_close(oracle.copy(state.weights), plain[2])
    assert trainer.ledger.peak_bytes <= trainer.plan(images).peak_accelerator_bytes
    assert trainer.predict(state, images[:1]).shape == (4, 3)


def test_all_blocks_but_the_first_and_last_are_reversible():
    blocks = rev_net(classes=10, width=2, depth=3, stages=2)
    assert len(blocks) == 9 and len(set(blocks)) == 5
    assert all(isinstance(block, ReversibleLayer) for block in blocks[1:-1])
    assert isinstance(blocks[-1], LossLayer) and blocks[-1].metric_names == ("accuracy",)
    assert len(rev_net(depth=0, stages=1)) == 2


def shapes(trainer, images):
    state = trainer.init_signature(images)
    return [{path_name(p): x.shape for p, x in jax.tree.leaves_with_path(w)} for w in state.weights]


def test_weight_paths_and_shapes():
    """Routing rules and checkpoints name these; `transformer_route` serves here too."""
    optimizer = transformer_route(functools.partial(muon, convolutions=["*"]), optax.adam)
    found = shapes(Trainer(rev_net(**SMALL), optimizer), batch())
    assert found[0] == {"Conv/bias": (4,), "Conv/kernel": (3, 3, 1, 4)} and found[2] == {}
    half = {name: shape for name, shape in found[3].items() if name.startswith("HalfResidual/")}
    assert half == {
        "HalfResidual/Serial/Conv/bias": (4,),
        "HalfResidual/Serial/Conv/kernel": (3, 3, 8, 4),
        "HalfResidual/Serial/Conv_2/bias": (8,),
        "HalfResidual/Serial/Conv_2/kernel": (3, 3, 4, 8),
        "HalfResidual/Serial/LayerNorm/bias": (8,),
        "HalfResidual/Serial/LayerNorm/scale": (8,),
        "HalfResidual/Serial/LayerNorm_2/bias": (4,),
        "HalfResidual/Serial/LayerNorm_2/scale": (4,),
    }
    assert found[4] == {"Dense/bias": (3,), "Dense/kernel": (16, 3), "LayerNorm/bias": (16,), "LayerNorm/scale": (16,)}


@pytest.mark.parametrize(
    "arguments, match",
    [
        ({"classes": 0}, "rev_net: classes must be a whole number, at least 1; got 0"),
        ({"depth": -1}, "depth must be a whole number, at least 0; got -1"),
        ({"stages": 1.5}, "stages must be a whole number, at least 1; got 1.5"),
        ({"dropout": 1.0}, "dropout rate must be at least 0 and less than 1; got 1.0"),
        ({"arithmetic": "int8"}, "arithmetic must be"),
    ],
)
def test_arguments_that_make_no_model_are_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        rev_net(**arguments)


@pytest.mark.slow
def test_fixed_point_streams_are_reversed_exactly():
    trainer = Trainer(rev_net(**SMALL, dropout=0.1), optax.sgd, verify_reversal="raise")
    _, metrics = trainer.step(trainer.init(jax.random.key(0), batch()), batch(), 0.1)
    assert metrics["mismatched_blocks"] == 0 and metrics["near_range_blocks"] == 0


def test_gin_sets_arguments():
    gin.parse_config("rev_net.stages = 3\nrev_net.depth = 1")
    assert len(rev_net()) == 7
