"""trax's models and its streaming trainer, done by our trainer, give the numbers that trax's own trainers give."""

import functools
import importlib
import importlib.util
import sys
import types
import unittest

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_trees_equal, slow

if not importlib.util.find_spec("trax"):
    pytest.skip("needs trax: `make trax`", allow_module_level=True)

from reversible_trainer.interop.trax import ReversibleSerialTrainer, from_trax, state_from_trax
from reversible_trainer.interop.trax_layers import Shared, trax
from reversible_trainer.passes import Clock
from reversible_trainer.streaming import Placement
from reversible_trainer.trainer import Trainer

tl = trax.layers
pytestmark = [
    pytest.mark.filterwarnings("ignore:Some donated buffers were not usable"),
    pytest.mark.filterwarnings("ignore:backend and device argument on jit"),
]
NEED_DEVICES = {  # trax's own tests that return at once on one device
    "test_run_sharded_terraformer",
    "test_run_reversible_large_weights",
    "test_run_reversible_weights_trainsfer_xprof",
}


@pytest.fixture(autouse=True)
def promotion():
    """trax relies on it."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def trainer_test():
    """trax's own trainer_test.py, with our class in place of trax's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(
            sys.modules, "jax.test_util", types.ModuleType("jax.test_util")
        )  # which it names and does not use
        config = types.ModuleType("jax.config")
        config.config = jax.config
        patch.setitem(sys.modules, "jax.config", config)
        patch.setattr(jax, "test_util", sys.modules["jax.test_util"], raising=False)
        module = importlib.import_module("trax.optimizers.trainer_test")
    ours = types.SimpleNamespace(**vars(trax.optimizers))
    ours.ReversibleSerialTrainer = ReversibleSerialTrainer
    module.optimizers = ours
    return module.TrainerTest


TRAX_TESTS = [
    "test_run_simple_task",
    "test_run_reversible_slots",
    "test_run_reversible_same_as_default_basic",
    "test_run_reversible_same_as_default_extended",
    "test_run_reversible_same_as_default_terraformer",
]


@pytest.mark.parametrize("name", [slow(n) if "terraformer" in n else n for n in TRAX_TESTS])
def test_trax_s_own_trainer_test(trainer_test, name):
    result = unittest.TestResult()
    trainer_test(name).run(result)
    assert result.testsRun == 1 and not result.skipped
    assert not result.failures + result.errors, (result.failures + result.errors)[0][1]


def test_no_other_of_trax_s_tests_says_anything_on_one_device(trainer_test):
    assert set(unittest.TestLoader().getTestCaseNames(trainer_test)) == {*TRAX_TESTS, *NEED_DEVICES}


# Models, and three steps of them by trax's trainers and by ours.

VOCAB, BATCH, LENGTH = 11, 2, 8
SIZES = {"d_model": 8, "d_ff": 16, "n_heads": 2, "n_layers": 2, "max_len": LENGTH}


def reformer(attention, depth=2):
    sizes = {**SIZES, "n_layers": depth, "d_attention_key": 4, "d_attention_value": 4}
    model = trax.models.ReformerLM(VOCAB, **sizes, attention_type=attention, dropout=0.2)
    return tl.Serial(model, tl.WeightedCategoryCrossEntropy())


def lsh():
    attention = functools.partial(tl.LSHSelfAttention, n_heads=2, d_qk=4, d_v=4, chunk_len=2, n_hashes=2, n_buckets=4)
    return reformer(attention)


def transformer():
    return tl.Serial(trax.models.TransformerLM(VOCAB, **SIZES, dropout=0.2), tl.WeightedCategoryCrossEntropy())


def flat(mode="train"):
    """Reversible layers between standard ones, twice."""

    def half():
        return tl.ReversibleHalfResidual(tl.LayerNorm(), tl.Dense(8), tl.Dropout(0.3, mode=mode)), tl.ReversibleSwap()

    middle = (tl.Concatenate(), tl.Dense(8), tl.Dup())
    first = (tl.Embedding(VOCAB, 8), tl.Dropout(0.5, mode=mode), tl.Dup())
    last = (tl.Concatenate(), tl.Dense(VOCAB), tl.WeightedCategoryCrossEntropy())
    return tl.Serial(*first, *half(), *half(), *middle, *half(), *last)


MODELS = {
    "reformer self": functools.partial(reformer, tl.SelfAttention, depth=1),
    "reformer causal": functools.partial(reformer, tl.CausalAttention),
    "reformer lsh": lsh,
    "transformer": transformer,
    "flat": flat,
}


def batches(n=3):
    for seed in range(n):
        tokens = np.random.default_rng(seed).integers(1, VOCAB, (BATCH, LENGTH)).astype(np.int32)
        yield tokens, tokens, np.ones((BATCH, LENGTH), np.float32)


def initialized(model):
    model.init(trax.shapes.signature(next(batches())), rng=trax.fastmath.random.get_prng(3))
    return model


def sgd():
    return trax.optimizers.SGD(0.5)


def adam():
    return trax.optimizers.Adam(0.01)


def keys():
    """Of the steps: those that our trainer gives the layers, when trax's are made of its."""
    clocks = (Clock(jax.random.key(7), np.int32(step), 0.0) for step in range(3))
    return [jax.random.key_data(clock.pass_key(np.int32(0), np.int32(0))) for clock in clocks]


def by_trax(model, optimizer_fn=sgd):
    optimizer = optimizer_fn()
    optimizer.tree_init(model.weights)
    trainer = trax.optimizers.Trainer(model, optimizer, n_devices=1)
    return [float(trainer.one_step(b, k, step=i)[0]) for i, (b, k) in enumerate(zip(batches(), keys(), strict=True))]


def by_class(trainer_class, model, optimizer_fn=sgd, **settings):
    """Losses and statistics by trax's streaming trainer, or by what takes its place."""
    blocks, loss = trax.optimizers.trainer.extract_reversible_blocks(model)
    trainer = trainer_class(blocks, loss, optimizer_fn, n_devices=1, **settings)
    steps = [trainer.one_step(b, k, step=i) for i, (b, k) in enumerate(zip(batches(), keys(), strict=True))]
    return [float(value) for value, _ in steps], [stats for _, stats in steps], trainer


def by_blocks(model, **settings):
    trainer = Trainer(from_trax(model), optax.sgd, **settings)
    state, losses = state_from_trax(trainer, jax.random.key(7)), []
    for batch in batches():
        state, metrics = trainer.step(state, batch, 0.5)
        losses.append(float(metrics["loss"]))
    return losses, trainer, state


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6)  # what the brief asks for


@pytest.mark.parametrize("name", [n if n in ("reformer self", "flat") else slow(n) for n in MODELS])
def test_from_trax_gives_the_losses_of_trax_s_trainer(name):
    model = MODELS[name]()
    losses, _, _ = by_blocks(initialized(model))
    close(losses, by_trax(initialized(model)))


@pytest.mark.parametrize("name", [n if n == "flat" else slow(n) for n in MODELS])
def test_the_drop_in_gives_losses_and_statistics_of_trax_s_streaming_trainer(name):
    model = MODELS[name]()
    losses, stats, _ = by_class(ReversibleSerialTrainer, initialized(model), adam)
    expected, expected_stats, _ = by_class(trax.optimizers.ReversibleSerialTrainer, initialized(model), adam)
    close(losses, expected)
    assert [s.keys() for s in stats] == [s.keys() for s in expected_stats]
    for ours, theirs in zip(stats, expected_stats, strict=True):
        for name, value in theirs.items():
            np.testing.assert_allclose(ours[name], value, rtol=1e-4, err_msg=name)


def test_the_policy_changes_no_loss():
    """`keep` and `recompute` differentiate trax's forward pass, `reverse` calls its `reverse_and_grad`."""
    model = flat()
    expected, _, _ = by_blocks(initialized(model))
    for policy in ("keep", "recompute"):
        close(by_blocks(initialized(model), policy=policy)[0], expected)


def half_residuals(depth, width=64, rate=0.0):
    """Blocks for trax's streaming trainer: `depth` half residuals of which all but the rate is equal."""
    halves = [tl.ReversibleHalfResidual(tl.Dense(width), tl.Dropout(rate)) for _ in range(depth)]
    rev = [layer for half in halves for layer in (half, tl.ReversibleSwap())]
    std = [tl.Embedding(VOCAB, width), tl.Dup()]
    loss = tl.Serial(tl.Concatenate(), tl.Dense(VOCAB), tl.WeightedCategoryCrossEntropy())
    trax.optimizers.trainer.init_reversible_blocks(
        [(std, rev)], loss, trax.shapes.signature(next(batches())), trax.fastmath.random.get_prng(0)
    )
    return [(std, rev)], loss


def test_depth_costs_no_accelerator_memory_and_no_programs():
    found = []
    for depth in (4, 12):
        trainer = ReversibleSerialTrainer(*half_residuals(depth), adam)
        trainer.one_step(next(batches()), keys()[0])
        found.append((trainer.trainer.ledger.peak_bytes, len(trainer.trainer.programs)))
    (shallow, programs), (deep, more_programs) = found
    # What grows is the array of keys, 8 bytes for each layer: on the stack, saved for the first block, and in programs.
    assert deep - shallow <= 3 * 8 * 16 and shallow > 4 * 3 * 64 * 64
    assert programs == more_programs


def test_slots_are_donated_and_can_be_read_and_set():
    trainer = ReversibleSerialTrainer(*half_residuals(1), adam)
    kept = jax.tree.map(np.array, (trainer.slots, trainer.loss_layer.weights))
    old = jax.tree.leaves(trainer.slots)
    trainer.one_step(next(batches()), keys()[0])
    assert old and all(x.is_deleted() for x in old)
    after = jax.tree.map(np.array, trainer.slots)
    with pytest.raises(AssertionError):
        assert_trees_equal(after, kept[0])
    trainer.slots, trainer.loss_layer.weights = kept
    assert_trees_equal(jax.tree.map(np.array, (trainer.slots, trainer.loss_layer.weights)), kept)
    with pytest.raises(ValueError, match=r"slots: expected .* got \(nothing\). Set what was read"):
        trainer.slots = ()


def test_with_host_memory_apart_it_is_the_same(monkeypatch):
    def two_steps():
        trainer = ReversibleSerialTrainer(*half_residuals(1), adam)
        losses = []
        for step in range(2):
            losses.append(trainer.one_step(next(batches()), keys()[0], step)[0])
            trainer.slots, trainer.loss_layer.weights = trainer.slots, trainer.loss_layer.weights
        return jax.tree.map(np.asarray, (losses, [layer.weights for layer in trainer.all_layers]))

    expected = two_steps()
    monkeypatch.setattr(Placement, "default", staticmethod(Placement.pinned))
    assert_trees_equal(two_steps(), expected)


def test_what_is_set_between_steps_counts():
    def losses(resets):
        trainer = ReversibleSerialTrainer(*half_residuals(1, rate=0.5), adam)
        layers = trainer.all_layers
        kept = jax.tree.map(np.array, (trainer.slots, [layer.weights for layer in layers]))
        found = [trainer.one_step(next(batches()), keys()[0])[0]]
        if resets:
            trainer.slots, weights = kept
            for layer, w in zip(layers, weights, strict=True):
                if w:
                    layer.weights = w
        return [*map(float, found), float(trainer.one_step(next(batches()), keys()[0])[0])]

    first, second = losses(resets=False)
    assert second < first
    assert losses(resets=True) == [first, first]


def test_dropouts_of_different_rates_do_not_share_a_program():
    losses = []
    for trainer_class, memoize in ((ReversibleSerialTrainer, True), (trax.optimizers.ReversibleSerialTrainer, False)):
        half = [tl.ReversibleHalfResidual(tl.Dense(8), tl.Dropout(rate)) for rate in (0.2, 0.9)]
        assert repr(half[0]) == repr(half[1])
        head = (tl.Concatenate(), tl.Dense(VOCAB), tl.WeightedCategoryCrossEntropy())
        model = tl.Serial(tl.Embedding(VOCAB, 8), tl.Dup(), *half, tl.ReversibleSwap(), *head)
        losses.append(by_class(trainer_class, initialized(model), memoize_jit=memoize)[0])
    close(*losses)


def test_a_block_may_lack_reversible_or_standard_layers():
    def parts():
        first = [tl.Embedding(VOCAB, 8), tl.Dense(8), tl.Dropout(0.2)]
        second = [tl.Dropout(0.5), tl.Dup()]
        rev = [tl.ReversibleHalfResidual(tl.Dense(8)), tl.ReversibleSwap()]
        loss = tl.Serial(tl.Concatenate(), tl.Dense(VOCAB), tl.WeightedCategoryCrossEntropy())
        model = initialized(tl.Serial(tl.Serial(first), tl.Serial(second), rev, tl.Serial(), [], loss))
        return [(first, []), (second, rev[:1]), ([], rev[1:]), ([tl.Serial()], [])], loss, model

    blocks, loss, model = parts()
    # In the whole model an empty series stands where the third block has one of standard layers.
    whole = tl.Serial(*model.sublayers[:3], tl.Serial(), model.sublayers[3], tl.Serial(), loss)
    expected = by_trax(initialized(whole))
    initialized(whole)
    trainer = ReversibleSerialTrainer(blocks, loss, sgd)
    close([float(trainer.one_step(b, k)[0]) for b, k in zip(batches(), keys(), strict=True)], expected)


def test_clipping_is_by_the_norm_of_all_gradients_as_in_trax_s_trainer():
    clipped = functools.partial(trax.optimizers.SGD, 0.5, clip_grad_norm=0.1)
    blocks, loss = half_residuals(2)
    model = tl.Serial(tl.Serial(blocks[0][0]), *blocks[0][1], loss)
    expected = by_trax(initialized(model), clipped)
    initialized(model)
    trainer = ReversibleSerialTrainer(blocks, loss, clipped)
    losses = [float(trainer.one_step(b, k, i)[0]) for i, (b, k) in enumerate(zip(batches(), keys(), strict=True))]
    close(losses, expected)


def test_evaluation_is_by_the_model_made_for_it():
    accuracy = tl.WeightedCategoryAccuracy()
    trainer = Trainer(from_trax(flat(), flat("eval"), accuracy), optax.sgd)
    state = trainer.init(jax.random.key(0), next(batches()))
    found = trainer.evaluate(state, next(batches()))
    assert trainer.evaluate(state, next(batches())) == found
    logits = trainer.predict(state, next(batches())[:1])
    assert logits.shape == (BATCH, LENGTH, VOCAB)
    close(found["accuracy"], accuracy((logits, *next(batches())[1:])))
    close(found["loss"], tl.WeightedCategoryCrossEntropy()((logits, *next(batches())[1:])))
    state, metrics = trainer.step(state, next(batches()), 0.0)
    assert metrics["loss"] != found["loss"]
    trainer = Trainer(from_trax(flat()), optax.sgd)
    state = trainer.init(jax.random.key(0), next(batches()))
    with pytest.raises(ValueError, match="evaluation needs the model as it is without dropout. Give from_trax another"):
        trainer.evaluate(state, next(batches()))


def test_layers_are_equal_if_all_they_compute_with_is():
    def scaled(by):
        return tl.Fn("Scaled", lambda x: by * x)

    array = jnp.ones(2)
    for make, equal, other in (
        (lambda: tl.Dropout(0.2), True, tl.Dropout(0.9)),
        (lambda: tl.Serial(tl.Dense(3), tl.Relu()), True, tl.Serial(tl.Dense(3), tl.Gelu())),
        (lambda: tl.ReversibleHalfResidual(tl.Dense(3)), True, tl.ReversibleHalfResidual(tl.Dense(4))),
        (lambda: scaled(2), True, scaled(2.0)),
        (lambda: scaled(functools.partial(max, 1)), True, scaled(functools.partial(max, 2))),
        (lambda: scaled(np.ones(2)), True, scaled(np.zeros(2))),
        (lambda: scaled(array), True, scaled(jnp.ones(2))),
        (lambda: scaled(jnp.ones(2)), False, scaled(jnp.ones(2))),
        (lambda: tl.CausalAttention(4, n_heads=2), True, tl.CausalAttention(4, n_heads=1)),
    ):
        assert (Shared(make()) == Shared(make())) is equal
        assert Shared(make()) != Shared(other)
        assert Shared(make(), by_value=False) != Shared(make(), by_value=False)
    layer = tl.Dense(3)
    assert Shared(tl.Serial(layer, layer)) != Shared(tl.Serial(layer, tl.Dense(3)))


def bad_models():
    dense, loss = tl.Dense(3), tl.WeightedCategoryCrossEntropy()
    yield TypeError, "expected a trax layer or a list of them, as Serial.model, loss.; got 3", lambda: from_trax(3)
    yield (
        ValueError,
        "expected Serial.model, loss., whose last layer is the loss; got Dense_3",
        lambda: from_trax(dense),
    )
    yield ValueError, "last layer must give one number.* 2 outputs. Add one", lambda: from_trax([dense, tl.Dup()])
    yield ValueError, "Dense_3 shares weights: Dense_3 is in Dense_3 too", lambda: from_trax([dense, dense, loss])
    yield (
        ValueError,
        "eval_model_with_loss must have the layers of model_with_loss, Dense_3, .*; got .*mode='eval'",
        lambda: from_trax([dense, loss], [tl.Dropout(), loss]),
    )
    yield (
        ValueError,
        r"the layers have no weights yet. Make them first: model.init",
        lambda: state_from_trax(Trainer(from_trax([dense, loss]), optax.sgd), jax.random.key(0)),
    )


def bad_blocks():
    blocks, loss = half_residuals(1)
    std, rev = blocks[0]
    yield NotImplementedError, "n_devices=2.: expected 1 device", (blocks, loss, sgd, 2)
    yield NotImplementedError, "adasum=True.: it is for several devices", (blocks, loss, sgd, 1, True, False, True)
    yield TypeError, "block 0 must be a pair of a list of trax layers and a list of reversible", ([std], loss, sgd)
    yield TypeError, "block 0 must be a pair", ([(rev, std)], loss, sgd)
    yield TypeError, "loss_layer=.*expected a trax layer with one output, the loss", (blocks, tl.Dup(), sgd)
    yield TypeError, "optimizer_fn must make a trax optimizer; got", (blocks, loss, lambda: optax.sgd(0.1))
    yield (
        ValueError,
        "ReversibleHalfResidual shares weights: .* is in ReversibleHalf",
        ([(std, [rev[0]] * 2)], loss, sgd),
    )
    yield ValueError, "Serial shares weights: a layer is in it twice", ([([*std, std[0]], rev)], loss, sgd)


def test_what_cannot_be_taken_over_is_refused_with_what_to_do():
    for error, message, call in bad_models():
        with pytest.raises(error, match=message):
            call()
    for error, message, arguments in bad_blocks():
        with pytest.raises(error, match=message):
            ReversibleSerialTrainer(*arguments)


def test_a_step_that_is_refused_leaves_everything_as_it_was():
    blocks, loss = half_residuals(1)
    trainer = ReversibleSerialTrainer(blocks, loss, sgd)
    with pytest.raises(ValueError, match="must be one number"):
        trainer.one_step(next(batches()), keys()[0], learning_rate=[1.0, 2.0])
    with pytest.raises(ValueError, match="the loss, block 2 LossSerial, takes"):
        trainer.one_step(next(batches())[:2], keys()[0])
    trainer.one_step(next(batches()), keys()[0])
    blocks, _ = half_residuals(1)
    blocks[0][0][0].weights = np.zeros((3, 3), np.float32)
    trainer = ReversibleSerialTrainer(blocks, loss, sgd)
    with pytest.raises(ValueError, match=r"weights of block 0 .* expected \(float32\[11,64\]\), got"):
        trainer.one_step(next(batches()), keys()[0])
    fresh = ReversibleSerialTrainer([([tl.Dense(3)], [])], tl.Serial(tl.L2Loss()), sgd)
    with pytest.raises(ValueError, match="one_step: the layers have no weights yet. Make them first"):
        fresh.one_step((np.ones((1, 3), np.float32),) * 3, keys()[0])
