"""Claims about memory and compiled programs: they do not grow with depth, and are known beforehand."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from helpers import compilations, slow
from training import SHAMPOO, batch, lm, standard_lm

from reversible_trainer.layers import CrossEntropy, Dense, Dropout, Embedding, LossSerial, Serial
from reversible_trainer.streaming import Placement
from reversible_trainer.trainer import Trainer
from reversible_trainer.tree import leaf_bytes, tree_bytes

pytestmark = pytest.mark.usefixtures("optimized")
DEPTHS = (4, 64)


def live_bytes(kind):
    """Bytes of all arrays of a memory kind, known to JAX and not to the ledger."""
    return sum(leaf_bytes(x) for x in jax.live_arrays() if x.sharding.memory_kind == kind)


def run(trainer, steps=2, watch=None):
    """Trains a few steps and returns the last state; `watch` sees the ledger's events of all steps."""
    state = trainer.init(jax.random.key(0), batch())
    trainer.ledger.watch = watch
    for number in range(steps):
        state, _ = trainer.step(state, batch(number), 0.01)
    trainer.ledger.watch = None
    return state


@pytest.mark.parametrize(
    ("placement", "optimizer"), [("pinned", SHAMPOO), pytest.param("shared", optax.adam, marks=pytest.mark.slow)]
)
def test_peak_and_programs_do_not_grow_with_depth_and_are_planned(placement, optimizer):
    peaks, programs = [], []
    for depth in DEPTHS:
        trainer = Trainer(lm(depth), optimizer, placement=getattr(Placement, placement)())
        plan = trainer.plan(batch())
        run(trainer)
        peaks.append(trainer.ledger.peak_bytes)
        programs.append(len(trainer.programs))
        assert trainer.ledger.peak_bytes <= plan.peak_accelerator_bytes <= 1.1 * trainer.ledger.peak_bytes
        assert trainer.ledger.peak_host_bytes <= plan.peak_host_bytes <= 1.1 * trainer.ledger.peak_host_bytes
        assert max(b.peak_bytes for b in plan.blocks) <= plan.peak_accelerator_bytes
    assert max(peaks) <= 1.01 * min(peaks)
    assert len(set(programs)) == 1


@pytest.mark.parametrize(
    ("prefetch", "model"),
    [(1, standard_lm), (2, lm), slow(0, standard_lm), slow(0, lm), slow(1, lm), slow(2, standard_lm)],
)
def test_the_ledger_agrees_with_jax_at_every_event(model, prefetch):
    trainer = Trainer(model(16), optax.adam, placement=Placement.pinned(), prefetch=prefetch)
    events = []
    before = live_bytes("device")
    run(trainer, watch=lambda event: events.append((event, live_bytes("device") - before)))
    assert len(events) > 2 * 2 * 17
    for event, live in events:
        assert sum(event.arrays.values()) == live, event
        assert event.bytes >= live, event


def test_host_memory_holds_weights_and_slots_once():
    trainer = Trainer(lm(16), optax.adam, placement=Placement.pinned())
    before, seen = live_bytes("pinned_host"), []
    state = run(trainer, watch=lambda _: seen.append(live_bytes("pinned_host") - before))
    assert max(seen) <= 1.15 * tree_bytes((state.weights, state.slots))


def test_back_pressure_bounds_what_is_on_its_way():
    """The most weights on the accelerator at once, counted by JAX in units of a block."""
    for prefetch in (0, 2):
        trainer = Trainer(lm(16), optax.sgd, placement=Placement.pinned(), prefetch=prefetch)
        before, seen = live_bytes("device"), []
        state = run(trainer, watch=lambda _: seen.append(live_bytes("device") - before))  # noqa: B023
        block = tree_bytes(state.weights[1])
        activations = 6 * tree_bytes(batch()[0]) * 8  # streams, cotangents and what replaces them
        assert max(seen) <= (2 * prefetch + 2) * block + activations


def test_write_back_never_waits_for_the_program_just_enqueued(monkeypatch):
    trainer = Trainer(lm(4), optax.adam, placement=Placement.pinned())
    state = trainer.init(jax.random.key(0), batch())
    state, _ = trainer.step(state, batch(), 0.1)
    enqueued, waits = [0], []
    execute, fetch = trainer.placement.execute, trainer.placement.fetch

    def counting(program, leaves):
        enqueued[0] += 1
        return execute(program, leaves)

    def fetching(tree):
        pending, at = fetch(tree), enqueued[0]
        wait = pending.wait
        pending.wait = lambda: (waits.append(enqueued[0] - at), wait())
        return pending

    monkeypatch.setattr(trainer.placement, "execute", counting)
    monkeypatch.setattr(trainer.placement, "fetch", fetching)
    trainer.step(state, batch(), 0.1)
    assert len(waits) == 4  # six blocks come back, two of them are under way when the step returns
    assert min(waits) >= 1


def test_blocks_that_differ_only_in_a_dropout_rate_get_different_programs():
    def programs(*rates):
        hidden = [Serial(Dense(8), Dropout(rate)) for rate in rates]
        blocks = [Serial(Embedding(11, 8)), *hidden, LossSerial(Dense(11), CrossEntropy())]
        trainer = Trainer(blocks, optax.sgd)
        run(trainer, steps=1)
        return len(trainer.programs)

    assert programs(0.2, 0.2) + 3 == programs(0.2, 0.9)  # init, forward and backward of the other block


def test_the_second_step_compiles_nothing():
    trainer = Trainer(lm(4), SHAMPOO, placement=Placement.pinned())
    state = trainer.init(jax.random.key(0), batch())
    state, _ = trainer.step(state, batch(0), 0.1)
    programs = len(trainer.programs)
    with compilations() as compiled:
        state, _ = trainer.step(state, batch(1), 0.2)
        state, _ = trainer.step(state, batch(2), np.float32(0.3))
    assert compiled == [] and len(trainer.programs) == programs


def test_the_plan_describes_every_block():
    trainer = Trainer(lm(2), optax.adam, placement=Placement.pinned())
    plan = trainer.plan(batch())
    state = trainer.init(jax.random.key(0), batch())
    assert [b.policy for b in plan.blocks] == ["recompute", "reverse", "reverse", "loss"]
    for block, weights, slots in zip(plan.blocks, state.weights, state.slots, strict=True):
        assert (block.weight_bytes, block.slot_bytes) == (tree_bytes(weights), tree_bytes(slots))
        assert block.weights == tree_bytes(weights) // 4
        assert block.backward_bytes > 0 and block.why
        assert all(getattr(block, field.name) is not None for field in dataclasses.fields(block))
    assert plan.peak.bytes == plan.peak_accelerator_bytes
