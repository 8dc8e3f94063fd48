"""Ways to take a step: microbatches, deferred updates, clipping, policies, frozen blocks, bfloat16, failures."""

import functools

import jax
import numpy as np
import optax
import oracle
import pytest
from helpers import assert_trees_close, assert_trees_equal, slow
from training import OPTIMIZERS, SIZES, batch, recorded_gradients, standard_lm
from training import small_lm as lm

from reversible_trainer import schedule
from reversible_trainer.layers import Frozen
from reversible_trainer.models import transformer_route
from reversible_trainer.optimizers import muon, soap
from reversible_trainer.streaming import Placement
from reversible_trainer.trainer import NonFiniteError, Trainer
from reversible_trainer.tree import tree_bytes


def big_batch(seed=0):
    """Four sequences, padded unevenly."""
    generator = np.random.default_rng(seed)
    tokens, targets = generator.integers(0, SIZES["vocab_size"], (2, 4, 8)).astype(np.int32)
    mask = np.arange(8) < np.array([8, 3, 5, 1])[:, None]
    return tokens, targets, mask


def as_numpy(*trees):
    return jax.tree.map(np.array, trees)


def run(blocks, optimizer, steps=2, rate=0.1, data=big_batch, **options):
    """`(state, metrics of each step)` after a few steps, as numpy arrays."""
    trainer = Trainer(blocks, optimizer, **options)
    state, seen = trainer.init(jax.random.key(3), data()), []
    for number in range(steps):
        state, metrics = trainer.step(state, data(number), rate)
        seen.append(as_numpy(metrics)[0])
    return as_numpy(state.weights, state.slots), seen


MUON = transformer_route(functools.partial(muon, matmul_precision="highest"), optax.sgd)
SOAP = transformer_route(functools.partial(soap, precondition_frequency=2), optax.sgd)
EXACT = {name: OPTIMIZERS[name] for name in ("sgd", "adam", "adafactor")}
MATRIX = {"shampoo": OPTIMIZERS["shampoo"], "muon": MUON, "soap": SOAP}


@pytest.mark.parametrize("name", [n if n in ("sgd", "shampoo") else slow(n) for n in (*EXACT, *MATRIX)])
def test_microbatches_give_the_same_step(name, x64):
    optimizer, initial = (EXACT | MATRIX)[name], run(lm(1, 0.0), optax.sgd, steps=0)[0][0]
    (weights, slots), metrics = run(lm(1, 0.0), optimizer)
    for n, placement in ((2, Placement.pinned()), (4, Placement.shared())) if name in EXACT else ((4, None),):
        (ours, our_slots), our_metrics = run(lm(1, 0.0), optimizer, microbatches=n, placement=placement)
        np.testing.assert_allclose([m["loss"] for m in our_metrics], [m["loss"] for m in metrics], rtol=1e-10)
        if name in EXACT:
            assert_trees_close((ours, our_slots), (weights, slots))
        for new, whole, old in zip(*map(jax.tree.leaves, (ours, weights, initial)), strict=True):
            assert np.abs(new - whole).max() <= 1e-6 * np.abs(whole - old).max()


@pytest.mark.parametrize("options", [{}, {"microbatches": 2}, {"microbatches": 2, "update": "deferred"}])
def test_microbatches_with_dropout_repeat_their_masks(options, x64):
    """The oracle: one gradient per microbatch, each with keys of its own, added up."""
    blocks, n = lm(1), options.get("microbatches", 1)
    trainer = Trainer(blocks, recorded_gradients, placement=Placement.pinned(), **options)
    state = trainer.init(jax.random.key(3), big_batch())
    weights, states = oracle.copy((state.weights, state.states))
    state, _ = trainer.step(state, big_batch(), 0.1)
    key = jax.random.fold_in(jax.random.key(3), 0)

    def summed_loss(weights, m):
        stack = tuple(x[m * 4 // n : (m + 1) * 4 // n] for x in big_batch())
        for i, block in enumerate(blocks):
            inputs, rest = stack[: block.n_in], stack[block.n_in :]
            outputs, _, _ = block.forward(weights[i], states[i], inputs, oracle.pass_key(key, i, m))
            stack = (*outputs, *rest)
        return stack[0]

    grads = [jax.jit(jax.grad(summed_loss), static_argnums=1)(weights, m) for m in range(n)]
    expected = jax.tree.map(lambda *g: sum(g) / float(big_batch()[2].sum()), *grads)
    ours = [slots[block.name] for slots, block in zip(state.slots, blocks, strict=True)]
    assert_trees_close(ours, expected)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_global_clipping_is_optax_on_the_whole_tree(microbatches):
    largest = 0.05
    options = {"update": "deferred", "microbatches": microbatches, "placement": Placement.pinned()}
    (_, slots), metrics = run(lm(1, 0.0), recorded_gradients, steps=1, clip_global=largest, **options)
    (_, whole), _ = run(lm(1, 0.0), recorded_gradients, steps=1)
    assert optax.tree.norm(whole) > 2 * largest
    expected, _ = optax.clip_by_global_norm(largest).update(whole, None)
    np.testing.assert_allclose(optax.tree.norm(slots), largest, rtol=1e-6)
    for ours, theirs in zip(jax.tree.leaves(slots), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6 * largest)


@pytest.mark.parametrize("options", [{}, {"microbatches": 2}, {"update": "deferred"}])
def test_clipping_per_block_clips_the_mean_gradient_of_each(options):
    (_, slots), _ = run(lm(1, 0.0), recorded_gradients, steps=1, clip_per_block=0.01, **options)
    (_, whole), _ = run(lm(1, 0.0), recorded_gradients, steps=1)
    for ours, theirs in zip(slots, whole, strict=True):
        expected, _ = optax.clip_by_global_norm(0.01).update(theirs, None)
        assert_trees_close(ours, expected, factor=10)


@pytest.mark.parametrize(
    ("model", "options"), [slow(lm, {"microbatches": 2}), (lm, {"update": "deferred"}), slow(standard_lm, {})]
)
def test_keeping_gives_the_same_step(model, options, x64):
    (weights, slots), metrics = run(model(1), optax.adam, **options)
    (kept, kept_slots), kept_metrics = run(model(1), optax.adam, policy="keep", placement=Placement.pinned(), **options)
    assert_trees_close((kept, kept_slots), (weights, slots))
    assert_trees_close(kept_metrics, metrics)


@pytest.mark.parametrize("placement", [slow(Placement.pinned), Placement.shared])
def test_updates_beside_the_next_backward_pass_give_the_same_step(placement, monkeypatch, x64):
    """What large blocks do on a CPU."""
    together, metrics = run(lm(2), optax.adam, steps=3, placement=placement())
    monkeypatch.setattr(schedule, "LARGE", 1)
    apart, apart_metrics = run(lm(2), optax.adam, steps=3, placement=placement())
    assert_trees_close(apart, together)  # other programs round differently
    assert_trees_close(apart_metrics, metrics)


def test_policies_mix_block_by_block(x64):
    """The lowest block that keeps must also save its inputs, from which the one below reverses."""
    (weights, slots), _ = run(lm(4), optax.adam)
    for policies in (
        {3: "keep", 4: "keep"},
        {2: "keep"},
        {1: "keep", 3: "recompute"},
        {0: "keep", 2: "recompute", 3: "keep"},
    ):
        (ours, our_slots), _ = run(lm(4), optax.adam, policy=lambda i, _, p=policies: p.get(i))
        assert_trees_close((ours, our_slots), (weights, slots))


def test_a_block_cannot_be_told_to_reverse_what_it_cannot():
    with pytest.raises(ValueError, match="block 0 Serial cannot be 'reverse': it is no ReversibleLayer"):
        Trainer(lm(1), optax.sgd, policy=lambda i, layer: "reverse").plan(batch())


@pytest.mark.usefixtures("optimized")
def test_residuals_hold_no_weights():
    """The kernels of a block of width 32 are 12 x 32 x 32 numbers; its residuals for one token are fewer than that."""
    from reversible_trainer.models import reversible_transformer_lm

    blocks = reversible_transformer_lm(11, width=32, depth=1, heads=2, ff_width=128)
    trainer = Trainer(blocks, optax.sgd, policy="keep", placement=Placement.pinned())
    one = (np.zeros((1, 1), np.int32),) * 2 + (np.ones((1, 1), bool),)
    state, seen = trainer.init(jax.random.key(0), one), []
    trainer.ledger.watch = lambda event: seen.append(event.arrays.get("residuals", 0))
    trainer.step(state, one, 0.1)
    kernels = 4 * 12 * 32 * 32
    assert 0 < max(seen) < 0.25 * kernels


@pytest.mark.slow
def test_auto_keeps_as_many_blocks_as_fit():
    needed = Trainer(lm(4), optax.sgd, placement=Placement.pinned()).plan(batch()).peak_accelerator_bytes
    everything = Trainer(lm(4), optax.sgd, policy="keep", placement=Placement.pinned()).plan(batch())
    counts = []
    for memory in (needed, (needed + everything.peak_accelerator_bytes) // 2, everything.peak_accelerator_bytes):
        trainer = Trainer(lm(4), optax.sgd, accelerator_memory=memory, placement=Placement.pinned())
        plan = trainer.plan(batch())
        assert plan.peak_accelerator_bytes <= memory
        policies = [block.policy for block in plan.blocks]
        counts.append(policies.count("keep"))
        assert policies[5 - counts[-1] : 5] == ["keep"] * counts[-1]  # the last ones
    assert counts[0] < counts[1] < counts[2] == 5
    with pytest.raises(
        ValueError, match=r"needs [\d,]+ bytes of accelerator memory, and [\d,]+ are there. What would help most: micro"
    ):
        Trainer(lm(4), optax.sgd, accelerator_memory=needed // 2, placement=Placement.pinned()).plan(batch())


def frozen(model, trained):
    """The model with only the blocks of these indices trained."""
    return [block if i in trained else Frozen(block) for i, block in enumerate(model)]


@pytest.mark.parametrize(
    ("trained", "options"),
    [
        ({3, 4, 5}, {}),
        slow({2, 4}, {}),
        slow({5}, {}),
        slow({2, 4}, {"microbatches": 2}),
        ({2, 4}, {"update": "deferred"}),
        slow({2, 4}, {"policy": "keep"}),
    ],
)
def test_frozen_blocks_stay_and_the_others_train_as_ever(trained, options, x64):
    blocks = lm(4)
    initial = run(blocks, optax.sgd, steps=0)[0][0]
    (_, grads), _ = run(blocks, recorded_gradients, steps=1)
    options = options | {"placement": Placement.pinned()}
    (weights, slots), metrics = run(frozen(blocks, trained), recorded_gradients, steps=1, **options)
    assert int(metrics[0]["skipped_blocks"]) == 0
    for i, block in enumerate(blocks):
        if i not in trained:
            assert slots[i] == ()
            assert_trees_equal(weights[i], initial[i])
        elif not options.get("microbatches"):  # their dropout masks are others
            assert_trees_close(slots[i], grads[i])
            expected = jax.tree.map(lambda w, g: w - 0.1 * g, initial[i], grads[i][block.name])
            assert_trees_close(weights[i], expected)


def test_frozen_blocks_cost_only_what_they_must():
    """Training the last quarter: no slots and no write-back for the others, no backward pass below the lowest."""
    blocks = frozen(lm(8), {7, 8, 9})
    trainer = Trainer(blocks, optax.adam, placement=Placement.pinned())
    state, seen = trainer.init(jax.random.key(0), batch()), []
    trainer.ledger.watch = lambda event: seen.append((event.name, event.block))
    sent = []
    send = trainer.placement.send
    trainer.placement.send = lambda tree, keep=False: sent.append(tree_bytes(tree)) or send(tree, keep)
    weight_bytes, trained_bytes = tree_bytes(state.weights), tree_bytes(state.weights[7:])
    slot_bytes = tree_bytes(state.slots)
    fetched = []
    fetch = trainer.placement.fetch
    trainer.placement.fetch = lambda tree: fetched.append(tree_bytes(tree)) or fetch(tree)
    trainer.step(state, batch(), 0.1)
    assert [block for name, block in seen if name.startswith("backward")] == [8, 7]
    assert slot_bytes == 2 * trained_bytes + 4 * 3  # two moments, and a count per block
    head = tree_bytes(trainer.init_signature(batch()).weights[9])
    assert sum(sent) == weight_bytes - head + trained_bytes + slot_bytes
    assert sum(fetched) == trained_bytes + slot_bytes


def test_at_least_one_block_is_trained():
    with pytest.raises(ValueError, match="every block is Frozen"):
        Trainer([Frozen(block) for block in lm(1)], optax.sgd).plan(batch())


def test_weights_in_two_blocks_are_refused():
    trainer = Trainer(lm(2), optax.sgd)
    state = trainer.init(jax.random.key(0), batch())
    state.weights[1] = state.weights[2]
    with pytest.raises(ValueError, match="blocks 1 and 2 have an array of weights in common"):
        trainer.step(state, batch(), 0.1)


# What is not finite, and what fails.


def poisoned(trainer, block=1):
    """A state whose gradients overflow in one block's backward pass only: a huge kernel meets zeros going forward."""
    state = trainer.init(jax.random.key(0), batch())
    weights = jax.tree.map(np.array, state.weights[block])
    ff = weights["HalfResidual"]["Serial"]["FeedForward"]
    for name, value in (("up", 0.0), ("down", 3e38)):
        for x in ff[name].values():
            x[...] = 0.0 if x.ndim == 1 else value
    state.weights[block] = trainer.placement.to_host(weights)
    return state


@pytest.mark.parametrize("microbatches", [1, 2])
def test_deferred_updates_nothing_when_one_gradient_is_not_finite(microbatches):
    trainer = Trainer(lm(2), optax.adam, update="deferred", microbatches=microbatches, placement=Placement.pinned())
    state = poisoned(trainer)
    before = as_numpy(state.weights, state.slots)
    state, metrics = trainer.step(state, batch(), 0.1)
    assert np.isfinite(metrics["loss"])
    assert_trees_equal(as_numpy(state.weights, state.slots), before)
    assert int(metrics["skipped_blocks"]) == 4 and int(metrics["first_skipped_block"]) == 1


@pytest.mark.parametrize("options", [{}, {"microbatches": 2}, {"policy": "keep"}])
def test_fused_updates_stop_at_the_block_whose_gradient_is_not_finite(options):
    trainer = Trainer(lm(2), optax.adam, placement=Placement.pinned(), **options)
    state = poisoned(trainer)
    before = as_numpy(state.weights, state.slots)
    state, metrics = trainer.step(state, batch(), 0.1)
    after = as_numpy(state.weights, state.slots)
    assert int(metrics["skipped_blocks"]) == 2 and int(metrics["first_skipped_block"]) == 1
    for part in (0, 1):
        assert_trees_equal(after[part][:2], before[part][:2])
        assert not np.array_equal(jax.tree.leaves(after[part][2])[-1], jax.tree.leaves(before[part][2])[-1])


def test_raising_says_what_was_skipped_and_loses_nothing():
    trainer = Trainer(lm(2), optax.adam, non_finite="raise")
    state = trainer.init(jax.random.key(0), batch())
    state, _ = trainer.step(state, batch(), 0.01)
    tokens, targets, mask = batch()
    with pytest.raises(NonFiniteError, match="step 2 left 4 of 4 blocks as they were.*block 3 LossSerial") as caught:
        trainer.step(state, (tokens, targets, np.zeros_like(mask)), 0.01)
    state, metrics = trainer.step(caught.value.state, batch(), 0.01)
    assert state.step == 3 and int(metrics["skipped_blocks"]) == 0


@pytest.mark.parametrize(
    ("placement", "options"),
    [
        (Placement.pinned, {}),
        (Placement.pinned, {"update": "deferred"}),
        (Placement.shared, {}),
        (Placement.shared, {"compute_dtype": "bfloat16"}),
    ],
)
def test_a_transaction_that_fails_changes_nothing(placement, options, monkeypatch):
    trainer = Trainer(lm(2), optax.adam, placement=placement(), transactional=True, **options)
    state = trainer.init(jax.random.key(0), batch())
    state, _ = trainer.step(state, batch(), 0.1)
    before, execute, calls = as_numpy(state.weights, state.slots), trainer.placement.execute, [0]

    def failing(program, leaves):
        calls[0] += 1
        if calls[0] == 6:  # in the backward sweep
            raise RuntimeError("out of luck")
        return execute(program, leaves)

    monkeypatch.setattr(trainer.placement, "execute", failing)
    with pytest.raises(RuntimeError, match="out of luck"):
        trainer.step(state, batch(1), 0.1)
    assert_trees_equal(as_numpy(state.weights, state.slots), before)
    calls[0] = 100
    expected, _ = trainer.step(state, batch(1), 0.1)
    with pytest.raises(ValueError, match="already consumed by step 2"):
        trainer.step(state, batch(1), 0.1)
    plain = Trainer(lm(2), optax.adam, placement=placement(), **options)
    again = plain.init(jax.random.key(0), batch())
    for number in (0, 1):
        again, _ = plain.step(again, batch(number), 0.1)
    assert_trees_equal(as_numpy(again.weights, again.slots), as_numpy(expected.weights, expected.slots))


def test_a_step_that_fails_says_that_its_state_is_gone_and_the_trainer_goes_on(monkeypatch):
    trainer = Trainer(lm(2), optax.adam, placement=Placement.pinned())
    state = trainer.init(jax.random.key(0), batch())
    execute = trainer.placement.execute
    monkeypatch.setattr(trainer.placement, "execute", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError) as caught:
        trainer.step(state, batch(), 0.1)
    assert "had consumed its state: go on from the last checkpoint" in caught.value.__notes__[0]
    monkeypatch.setattr(trainer.placement, "execute", execute)
    trainer.step(trainer.init(jax.random.key(0), batch()), batch(), 0.1)


# bfloat16.


@pytest.mark.parametrize("options", [{}, {"microbatches": 2, "update": "deferred"}, {"policy": "keep"}])
def test_bfloat16_computes_in_bfloat16_and_keeps_everything_else(options):
    settings = {"placement": Placement.pinned(), "data": batch, **options}
    (weights, slots), metrics = run(lm(2, 0.0), recorded_gradients, compute_dtype="bfloat16", **settings)
    (_, whole), exact = run(lm(2, 0.0), recorded_gradients, **settings)
    assert {x.dtype for x in jax.tree.leaves((weights, slots))} == {np.dtype("float32")}
    np.testing.assert_allclose(metrics[0]["loss"], exact[0]["loss"], rtol=2e-2)
    assert metrics[0]["loss"] != exact[0]["loss"]
    for ours, theirs in zip(slots, whole, strict=True):
        difference = jax.tree.map(np.subtract, ours, theirs)
        assert optax.tree.norm(difference) <= 0.2 * optax.tree.norm(theirs)


def test_bfloat16_sends_half_the_bytes_forward():
    def sent(dtype):
        trainer = Trainer(lm(4), optax.sgd, compute_dtype=dtype, placement=Placement.pinned())
        state = trainer.init(jax.random.key(0), batch())
        state, _ = trainer.step(state, batch(), 0.1)  # a new state's copies are made first
        send, sizes = trainer.placement.send, []
        trainer.placement.send = lambda tree, keep=False: sizes.append(tree_bytes(tree)) or send(tree, keep)
        trainer.step(state, batch(), 0.1)
        return sum(sizes), tree_bytes(trainer.init_signature(batch()).weights[:-1])

    (whole, weights), (half, _) = sent(None), sent("bfloat16")
    assert whole - half == weights // 2


def test_bfloat16_copies_follow_a_state_from_elsewhere():
    """A state that is not the last step's, as after a restore, has no copies yet."""

    def train(restored):
        trainer = Trainer(lm(1), optax.sgd, compute_dtype="bfloat16")
        state = trainer.init(jax.random.key(0), batch())
        for number in range(3):
            if restored:
                trainer = Trainer(lm(1), optax.sgd, compute_dtype="bfloat16")
            state, _ = trainer.step(state, batch(number), 0.1)
        return as_numpy(state.weights)

    assert_trees_equal(train(True), train(False))
