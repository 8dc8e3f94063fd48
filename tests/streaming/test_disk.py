"""Weights and slots on a disk: the same bits, room made beforehand, nothing left behind."""

import errno
import os
import time

import jax
import numpy as np
import optax
import pytest
from helpers import assert_trees_equal, slow
from training import batch, recorded_gradients, small_lm

from reversible_trainer import checkpoint
from reversible_trainer.streaming import Placement, Recorder, peaks
from reversible_trainer.trainer import Trainer


def train(placement, steps=3, **options):
    trainer = Trainer(small_lm(3), optax.adam, placement=placement, **options)
    state = trainer.init(jax.random.key(0), batch())
    for number in range(steps):
        state, metrics = trainer.step(state, batch(number), 0.01)
    return trainer, state, (metrics, trainer.evaluate(state, batch()))


@pytest.mark.parametrize(
    "options",
    [{}, slow({"prefetch": 0}), {"update": "deferred"}, slow({"compute_dtype": "bfloat16"}), {"transactional": True}],
)
def test_the_disk_gives_the_same_bits(options, tmp_path):
    trainer, state, metrics = train(Placement.disk(str(tmp_path)), **options)
    _, expected, expected_metrics = train(Placement.pinned(), **options)
    assert_trees_equal(
        jax.tree.map(np.asarray, (state.weights, state.slots, metrics)),
        jax.tree.map(np.asarray, (expected.weights, expected.slots, expected_metrics)),
    )
    assert trainer.ledger.peak_bytes <= trainer.plan(batch()).peak_accelerator_bytes
    assert os.listdir(tmp_path) == []  # the file has no name: nothing can be left of it


@pytest.mark.parametrize("placement", ["disk", "pinned"])
def test_a_step_is_recorded_by_threads_that_come_late(placement, tmp_path, monkeypatch):
    """What they wait for must not be given away before they have, and not be held for longer."""
    add = Recorder.add

    def late(self, lane, name, visit, amount, start, wait, ready=None):
        def wait_late():
            time.sleep(0.2 if lane == "fetch" else 0.02)
            wait()

        return add(self, lane, name, visit, amount, start, wait_late, ready)

    monkeypatch.setattr(Recorder, "add", late)
    trainer, state, _ = train(Placement.disk(str(tmp_path)) if placement == "disk" else Placement.pinned(), steps=1)
    with trainer.recording() as recorder:
        trainer.step(state, batch(), 0.01)
    assert 0 < recorder.hidden_link_fraction <= 1
    found = peaks(sample.event for sample in recorder.samples)
    for i, block in enumerate(trainer.plan(batch()).blocks):
        for name, total in found[i].items():
            assert total <= block.totals[name], (i, name)


def test_the_file_holds_the_state_and_a_few_blocks_more(tmp_path):
    trainer, state, _ = train(Placement.disk(str(tmp_path)), steps=1)
    end = trainer.placement._file._end
    for number in range(3):
        state, _ = trainer.step(state, batch(number), 0.01)
    assert trainer.placement._file._end == end


@pytest.mark.parametrize("options", [{}, {"update": "deferred"}, {"compute_dtype": "bfloat16"}])
def test_a_full_disk_is_noticed_before_a_state_is_consumed(options, tmp_path, monkeypatch):
    trainer = Trainer(small_lm(3), recorded_gradients, placement=Placement.disk(str(tmp_path)), **options)
    state = trainer.init(jax.random.key(0), batch())
    before = jax.tree.map(np.asarray, (state.weights, state.slots))
    fallocate = os.posix_fallocate

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"No space left on device; [\d,]+ bytes are needed.*Nothing was overwritten"):
        trainer.step(state, batch(), 0.1)
    assert_trees_equal(jax.tree.map(np.asarray, (state.weights, state.slots)), before)
    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    state, _ = trainer.step(state, batch(), 0.1)
    monkeypatch.setattr(os, "posix_fallocate", full)
    trainer.step(state, batch(), 0.1)  # the room of the first step is used again


def test_a_folder_that_cannot_be_used_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"Placement.disk\('.*file/x'\): cannot make a file there"):
        Placement.disk(str(tmp_path / "file" / "x"))


def test_checkpoints_of_a_state_on_the_disk(tmp_path):
    trainer, state, _ = train(Placement.disk(str(tmp_path / "tier")), steps=1)
    description = checkpoint.Description.of(trainer.blocks, optax.adam, 0)
    saved = checkpoint.save(tmp_path / "checkpoints", state, description)
    expected = trainer.init_signature(batch())
    restored = checkpoint.restore(saved, expected, trainer.placement.to_host, description)
    assert_trees_equal(
        jax.tree.map(np.asarray, (restored.weights, restored.slots)),
        jax.tree.map(np.asarray, (state.weights, state.slots)),
    )
    trainer.step(restored, batch(), 0.01)


def test_fetches_of_different_sizes_have_room_at_the_same_time(tmp_path):
    """Both sizes are one page, so they share a list of free places."""
    placement = Placement.disk(str(tmp_path))
    placement.reserve({100: 1, 200: 2})
    assert placement._file._end == 3 * 4096
