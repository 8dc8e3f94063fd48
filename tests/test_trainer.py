import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from helpers import assert_trees_close, assert_trees_equal, slow
from training import OPTIMIZERS, batch, lm, recorded_gradients, small_lm, standard_lm

from reversible_trainer.layers import (
    CrossEntropy,
    Dense,
    Dropout,
    Dup,
    Embedding,
    HalfResidual,
    LossSerial,
    ReversibleConcatenatePair,
    ReversibleSerial,
    ReversibleSwap,
    RMSNorm,
    Serial,
)
from reversible_trainer.streaming import Placement
from reversible_trainer.trainer import Trainer
from reversible_trainer.tree import path_name

PLACEMENTS = {"shared": Placement.shared, "pinned": Placement.pinned}


def both(blocks, optimizer, placement, steps=3, rate=0.1, **options):
    """Yields `(state, metrics, oracle's run, loss and gradients)` after every step."""
    trainer = Trainer(blocks, optimizer, placement=placement, **options)
    state = trainer.init(jax.random.key(3), batch())
    run = (0, jax.random.key(3), *oracle.copy((state.weights, state.slots, state.states)))
    for number in range(steps):
        state, metrics = trainer.step(state, batch(number), rate)
        run, loss, grads = oracle.step(blocks, optimizer, run, batch(number), rate)
        yield state, metrics, run, loss, grads


def assert_equals_oracle(blocks, optimizer, placement, **options):
    for state, metrics, run, loss, _ in both(blocks, optimizer, placement, **options):
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-10)
        assert_trees_close((state.weights, state.slots, state.states), run[2:])
        assert int(metrics["skipped_blocks"]) == 0
    assert state.step == 3


# Every optimizer, depth and placement; not yet all of their combinations, which are for `make test-all`.
FEW = [("pinned", depth, name) for depth in (0, 4) for name in ("adam", "shampoo")]
FEW += [("pinned", 1, "adam"), ("pinned", 4, "adafactor"), ("shared", 1, "shampoo")]
ALL = [(placement, depth, name) for placement in PLACEMENTS for depth in (0, 1, 4) for name in OPTIMIZERS]
ALL = [case if case in FEW else pytest.param(*case, marks=pytest.mark.slow) for case in ALL]


@pytest.mark.parametrize(("placement", "depth", "optimizer"), ALL)
def test_float64_step_equals_the_oracle(placement, depth, optimizer, x64):
    assert_equals_oracle(lm(depth), OPTIMIZERS[optimizer], PLACEMENTS[placement]())


@pytest.mark.parametrize("placement", ["shared", slow("pinned")])
def test_float32_loss_and_gradients_equal_the_oracle(placement):
    for state, metrics, _, loss, grads in both(lm(4), recorded_gradients, PLACEMENTS[placement]()):
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
        ours = [slots[block.name] if slots else () for slots, block in zip(state.slots, lm(4), strict=True)]
        for actual, expected in zip(jax.tree.leaves(ours), jax.tree.leaves(grads), strict=True):
            difference = np.linalg.norm(np.asarray(actual) - np.asarray(expected))
            assert difference <= 1e-3 * np.linalg.norm(expected)


@pytest.mark.parametrize(("placement", "prefetch"), [("pinned", 0), slow("pinned", 3), slow("shared", 1)])
def test_standard_blocks(placement, prefetch, x64):
    assert_equals_oracle(standard_lm(2), optax.adam, PLACEMENTS[placement](), prefetch=prefetch)


def test_reversible_blocks_can_keep_their_inputs(x64):
    assert_equals_oracle(lm(2), optax.adam, Placement.pinned(), policy="recompute")


def mixed():
    """Standard blocks between reversible ones, a reversible block right before the loss, dropout."""
    half = HalfResidual(Serial(RMSNorm(), Dense(8), Dropout(0.1)))
    reversible = ReversibleSerial(half, ReversibleSwap(), half)
    return [
        Serial(Embedding(11, 8), Dup()),
        reversible,
        Serial(Dense(8)),  # changes only the first stream; the second rides along
        reversible,
        ReversibleSwap(),
        Serial(Dropout(0.1)),
        ReversibleConcatenatePair(),
        LossSerial(RMSNorm(), Dense(11), CrossEntropy()),
    ]


@pytest.mark.parametrize("placement", ["pinned", slow("shared")])
def test_standard_blocks_between_reversible_ones(placement, x64):
    assert_equals_oracle(mixed(), optax.adam, PLACEMENTS[placement]())


def test_one_block(x64):
    blocks = [LossSerial(Embedding(11, 8), Dropout(0.1), Dense(11), CrossEntropy())]
    assert_equals_oracle(blocks, optax.adam, Placement.pinned())


def test_placements_give_the_same_bits():
    def run(placement):
        trainer = Trainer(small_lm(2), optax.adam, placement=placement)
        state = trainer.init(jax.random.key(0), batch())
        for number in range(2):
            state, metrics = trainer.step(state, batch(number), 0.01)
        return jax.tree.map(np.asarray, (state.weights, state.slots, metrics))

    assert_trees_equal(run(Placement.shared()), run(Placement.pinned()))


def test_evaluate_and_predict_are_deterministic_and_agree():
    trainer = Trainer(lm(2), optax.adam, placement=Placement.pinned())
    state = trainer.init(jax.random.key(0), batch())
    metrics = trainer.evaluate(state, batch(1))
    assert_trees_equal(trainer.evaluate(state, batch(1)), metrics)
    tokens, targets, mask = batch(1)
    logits = np.asarray(trainer.predict(state, (tokens,)), np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = -np.take_along_axis(log_p, targets[..., None], -1)[..., 0][mask].mean()
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)
    np.testing.assert_allclose(metrics["accuracy"], (logits.argmax(-1) == targets)[mask].mean(), rtol=1e-6)
    assert int(metrics["weight"]) == mask.sum()


def test_the_callers_batch_is_never_written():
    # A reversible first block donates its inputs: they must not be the caller's memory.
    blocks = [ReversibleSerial(HalfResidual(Dense(16)), ReversibleSwap()), ReversibleConcatenatePair(),
              LossSerial(Dense(11), CrossEntropy())]  # fmt: skip
    generator = np.random.default_rng(0)
    x = [generator.normal(size=(2, 8, 16)).astype(np.float32) for _ in range(2)]
    images = (*x, *batch()[1:])
    kept = [a.copy() for a in images]
    for placement in (Placement.shared(), Placement.pinned()):
        trainer = Trainer(blocks, optax.sgd, placement=placement)
        state = trainer.init(jax.random.key(0), images)
        for given in (images, tuple(map(jnp.asarray, images))):
            state, _ = trainer.step(state, given, 0.1)
            assert_trees_equal(list(given), kept)


def test_a_consumed_state_says_so():
    trainer = Trainer(lm(1), optax.sgd)
    state = trainer.init(jax.random.key(0), batch())
    trainer.step(state, batch(), 0.1)
    with pytest.raises(ValueError, match="already consumed by step 1"):
        trainer.step(state, batch(), 0.1)
    with pytest.raises(ValueError, match="already consumed by step 1"):
        trainer.evaluate(state, batch())


def test_a_batch_without_weight_changes_nothing_and_is_counted():
    trainer = Trainer(lm(2), optax.adam, placement=Placement.pinned())
    state = trainer.init(jax.random.key(0), batch())
    before = jax.tree.map(np.asarray, (state.weights, state.slots))
    tokens, targets, mask = batch()
    state, metrics = trainer.step(state, (tokens, targets, np.zeros_like(mask)), 0.1)
    assert_trees_equal(jax.tree.map(np.asarray, (state.weights, state.slots)), before)
    assert int(metrics["skipped_blocks"]) == 4 and int(metrics["first_skipped_block"]) == 3
    assert float(metrics["loss"]) == 0.0


def test_non_finite_gradients_stop_the_update_of_that_block_and_all_below():
    trainer = Trainer(lm(2), optax.adam, placement=Placement.pinned())
    state = trainer.init(jax.random.key(0), batch())
    # Block 1's feed-forward overflows in its backward pass only: a huge kernel meets zeros in the forward pass.
    weights = jax.tree.map(np.array, state.weights[1])
    ff = weights["HalfResidual_2"]["Serial"]["FeedForward"]
    for path, x in jax.tree_util.tree_leaves_with_path(ff):
        x[...] = 3e38 if "down/kernel" in path_name(path) else 0.0
    state.weights[1] = trainer.placement.to_host(weights)
    before = jax.tree.map(np.asarray, (state.weights, state.slots))
    state, metrics = trainer.step(state, batch(), 0.1)
    after = jax.tree.map(np.asarray, (state.weights, state.slots))
    assert np.isfinite(metrics["loss"])
    assert int(metrics["skipped_blocks"]) == 2 and int(metrics["first_skipped_block"]) == 1
    for i in (0, 1):
        assert_trees_equal(after[0][i], before[0][i])
        assert_trees_equal(after[1][i], before[1][i])
    for i in (2, 3):
        with pytest.raises(AssertionError):
            assert_trees_equal(after[0][i], before[0][i])


# What is refused when the trainer is built or first used.


def global_clip(learning_rate):
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(learning_rate))


def test_optimizers_that_need_the_whole_tree_are_refused():
    with pytest.raises(ValueError, match="clip_global.*clip_per_block"):
        Trainer(lm(1), global_clip).init(jax.random.key(0), batch())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_global": 1.0}, "the norm of all gradients is known only after.*update='deferred'"),
        ({"clip_global": 1.0, "clip_per_block": 1.0, "update": "deferred"}, "exclude each other"),
        ({"clip_per_block": 0.0}, "expected a positive number"),
        ({"update": "fuse"}, "expected one of 'fused', 'deferred', got 'fuse'"),
        ({"policy": "store"}, "expected one of 'auto', 'keep', 'recompute', 'reverse', got 'store'"),
        ({"microbatches": 0}, "expected a whole number, 1 or more"),
        ({"non_finite": "ignore"}, "expected one of 'skip', 'raise'"),
        ({"compute_dtype": "int8"}, "expected a floating-point dtype"),
        ({"accelerator_memory": "16 apples"}, "expected bytes, as in 16GiB"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Trainer(lm(0), optax.sgd, **options)


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([], "blocks is empty"),
        ([Dense(3)], "the last block is Dense.*must be a LossLayer"),
        ([CrossEntropy(), CrossEntropy()], "block 0 of 2 is CrossEntropy"),
        ([Dense, CrossEntropy()], "block 0 must be a Layer"),
    ],
)
def test_lists_that_are_no_model_are_refused(blocks, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Trainer(blocks, optax.sgd)


def test_a_batch_that_does_not_fit_is_refused():
    trainer = Trainer(lm(1), optax.sgd)
    with pytest.raises(ValueError, match="the loss, block 2 LossSerial, takes 4 entries, but 3 are left"):
        trainer.plan(batch()[:2])
    with pytest.raises(TypeError, match="a batch is a tuple"):
        trainer.plan(list(batch()))
    with pytest.raises(ValueError, match=r"jax.random.key\(seed\)"):
        trainer.init(jax.random.PRNGKey(0), batch())


def widening(learning_rate):
    """Keeps bfloat16 slots, and returns float32 ones."""
    init = lambda weights: jax.tree.map(lambda w: jnp.zeros_like(w, jnp.bfloat16), weights)  # noqa: E731
    return optax.GradientTransformation(init, recorded_gradients(learning_rate).update)


def test_slots_that_change_are_refused():
    with pytest.raises(ValueError, match="must keep structure, shapes and dtypes of the slots.*bfloat16.*float32"):
        Trainer(lm(0), widening).init(jax.random.key(0), batch())


def test_a_state_of_another_optimizer_is_refused_and_stays_usable():
    trainer, other = Trainer(lm(0), optax.sgd), Trainer(lm(0), optax.adam)
    state = trainer.init(jax.random.key(0), batch())
    with pytest.raises(ValueError, match="slots of block 0 Serial are not this trainer's"):
        other.step(state, batch(), 0.1)
    trainer.step(state, batch(), 0.1)
