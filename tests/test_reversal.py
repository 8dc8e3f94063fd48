"""Reversal in training: exact on fixed-point streams, watched on all, and what happens when it fails."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_trees_equal, slow
from training import SIZES, batch, recorded_gradients, small_lm

from reversible_trainer.layers import (
    ConcatenateStreams,
    CrossEntropy,
    Dense,
    Dropout,
    Dup,
    Embedding,
    FeedForward,
    HalfResidual,
    Layer,
    LossSerial,
    ReversibleSerial,
    ReversibleSwap,
    RMSNorm,
    Serial,
    ToFixedPoint,
)
from reversible_trainer.layers.initializers import Normal
from reversible_trainer.models import reversible_transformer_lm
from reversible_trainer.streaming import Placement
from reversible_trainer.trainer import ReversalError, Trainer

RATE = 0.01


@dataclasses.dataclass(frozen=True)
class Faulty(Layer):
    """`x`, and a little more if it runs again."""

    error: float = 1e-3

    def forward(self, weights, state, inputs, key, memo=None):
        (x,) = inputs
        return (x if memo is None else x + memo,), state, jnp.full((), self.error, x.dtype)


def block(*before):
    return ReversibleSerial(
        HalfResidual(Serial(RMSNorm(), *before, FeedForward(SIZES["ff_width"]))),
        ReversibleSwap(),
    )


def model(blocks, fixed=True, scale=1.0):
    width = SIZES["width"]
    return [
        Serial(Embedding(SIZES["vocab_size"], width, table_init=Normal(scale)), Dup(), *[ToFixedPoint()] * fixed),
        *blocks,
        LossSerial(ConcatenateStreams(), Dense(SIZES["vocab_size"]), CrossEntropy()),
    ]


def train(blocks, optimizer=optax.adam, steps=2, **settings):
    trainer = Trainer(blocks, optimizer, **settings)
    state = trainer.init(jax.random.key(0), batch())
    for number in range(steps):
        state, metrics = trainer.step(state, batch(number), RATE)
    return trainer, state, {name: np.asarray(x) for name, x in metrics.items()}


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("settings", [{}, slow({"compute_dtype": "bfloat16", "placement": Placement.pinned()})])
def test_reversing_equals_keeping_and_recomputing_bit_for_bit(settings):
    blocks = reversible_transformer_lm(**SIZES, depth=2, arithmetic="fixed_point")
    found = {
        policy: train(blocks, recorded_gradients, policy=policy, verify_reversal="raise", **settings)
        for policy in ("reverse", "recompute", "keep")
    }
    assert found["reverse"][2]["mismatched_blocks"] == 0 and "mismatched_blocks" not in found["keep"][2]
    for policy in ("recompute", "keep"):
        for part in ("weights", "slots"):  # the slots are the last gradients
            assert_trees_equal(getattr(found["reverse"][1], part), getattr(found[policy][1], part))


def test_microbatches_dropout_and_deferred_updates_reverse_exactly_too():
    blocks = model([block(Dropout(0.3))] * 2)
    for settings in ({"microbatches": 2}, {"update": "deferred", "clip_global": 1.0, "waiting": "host"}):
        _, state, metrics = train(blocks, placement=Placement.pinned(), verify_reversal="raise", **settings)
        assert metrics["mismatched_blocks"] == 0 and np.isfinite(metrics["loss"]) and state.step == 2


def test_fixed_point_and_float_streams_train_alike():
    losses = [train(model([block()] * 3, fixed))[2]["loss"] for fixed in (True, False)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_evaluation_and_logits_of_fixed_point_streams():
    blocks = model([block()] * 2)
    trainer, state, _ = train(blocks, steps=1)
    tokens, targets, mask = batch(5)
    logits = np.asarray(trainer.predict(state, (tokens,)))
    evaluated = trainer.evaluate(state, (tokens, targets, mask))
    expected = optax.losses.softmax_cross_entropy_with_integer_labels(logits, targets)
    assert float(evaluated["loss"]) == pytest.approx(float(np.average(expected, weights=mask)), rel=1e-5)


@pytest.mark.parametrize("microbatches", [slow(1), 2])
def test_a_planted_fault_is_caught_at_the_first_step_and_its_block_named(microbatches, caplog):
    """And not the blocks below it, which are given what it spoiled."""
    blocks = model([block(), block(Faulty()), block(), block()])
    _, _, metrics = train(blocks, steps=1, verify_reversal=True, microbatches=microbatches)
    assert metrics["mismatched_blocks"] == 1
    assert "in step 1 blocks were not reversed exactly, their inputs came back with other bits: 2 Rev" in caplog.text
    with pytest.raises(ReversalError, match="other bits: 2 ReversibleSerial") as error:
        train(blocks, steps=1, verify_reversal="raise", microbatches=microbatches)
    assert error.value.blocks == [2] and error.value.state.step == 1


def test_blocks_that_cannot_be_reversed_exactly_may_recompute(caplog):
    """The second of them is found when the first no longer spoils what it is given."""
    blocks = model([block(), block(Faulty()), block(), block(Faulty())])
    trainer, _, metrics = train(blocks, steps=3, verify_reversal="recompute")
    assert metrics["mismatched_blocks"] == 0 and caplog.text.count("These blocks recompute from now on") == 2
    plan = trainer.plan(batch())
    assert [b.policy for b in plan.blocks[1:-1]] == ["reverse", "recompute", "reverse", "recompute"]
    assert "not reversed exactly" in plan.blocks[2].why


def test_without_verification_nothing_is_said(caplog):
    _, _, metrics = train(model([block(Faulty())]), steps=1)
    assert "mismatched_blocks" not in metrics and not caplog.text


def test_drift_of_floating_point_streams(caplog):
    _, _, metrics = train(small_lm(4, 0.0), verify_reversal=True)
    assert 0 < metrics["drift"] < 1e-5 and "mismatched_blocks" not in metrics and not caplog.text
    faulty = model([block(), block(Faulty(0.3))], fixed=False)
    _, _, metrics = train(faulty, steps=1, verify_reversal=True)
    assert metrics["drift"] > 1e-2 and "came back with a difference of" in caplog.text
    with pytest.raises(ReversalError, match="more than drift_limit = 0.001"):
        train(faulty, steps=1, verify_reversal="raise", drift_limit=1e-3)
    train(faulty, steps=1, verify_reversal="raise", drift_limit=None)


@pytest.mark.parametrize("microbatches", [1, slow(2)])
def test_streams_near_their_range_are_counted(microbatches):
    near = train(model([block()] * 2, scale=1000.0), steps=1, microbatches=microbatches)[2]["near_range_blocks"]
    assert near == 3  # the embedding leaves numbers above 2048 already
    assert train(model([block()] * 2), steps=1, microbatches=microbatches)[2]["near_range_blocks"] == 0


def test_unknown_settings_are_refused():
    with pytest.raises(ValueError, match="expected one of False, True, 'warn', 'raise', 'recompute', got 'stop'"):
        Trainer(small_lm(1), optax.sgd, verify_reversal="stop")
    with pytest.raises(ValueError, match="drift_limit=-1"):
        Trainer(small_lm(1), optax.sgd, drift_limit=-1)
    with pytest.raises(ValueError, match="arithmetic must be 'float32' or 'fixed_point'; got 'int8'"):
        reversible_transformer_lm(**SIZES, arithmetic="int8")
