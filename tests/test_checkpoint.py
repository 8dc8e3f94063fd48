import hashlib
import json
import threading
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_trees_equal
from training import batch, small_lm

from reversible_trainer import Trainer, checkpoint
from reversible_trainer.checkpoint import Description
from reversible_trainer.streaming import Placement
from reversible_trainer.tree import TrainState, path_name, tree_bytes

OURS = Description(("Embedding(features=4)", "Loss(heads=2, rate=0.1)"), "adam", 0)


class Slots(NamedTuple):
    count: Any
    momentum: Any
    nothing: Any


def make_state(step=3, width=4):
    kernel = np.arange(2.0 * width, dtype=np.float32).reshape(2, width)
    weights = [{"Dense": {"kernel": jnp.asarray(kernel)}}, (jnp.ones(3, jnp.bfloat16) / 3, ())]
    slots = [
        (Slots(jnp.int32(7), {"Dense": {"kernel": jnp.asarray(kernel.T)}}, None), ()),
        Slots(jnp.zeros(()), (), None),
    ]
    states = [(), {"running": jnp.array([True, False]), "key": jax.random.key(5)}]
    return TrainState(step, jax.random.key(2), weights, slots, states)


def signature(state):
    parts = jax.eval_shape(lambda: (state.key, state.weights, state.slots, state.states))
    return TrainState(0, *parts)


def place(tree):
    return jax.tree.map(jnp.asarray, tree)


def restore(path, state=None, description=OURS, **options):
    return checkpoint.restore(path, signature(state or make_state()), place, description, **options)


def leaves(state):
    tree = [state.key, state.weights, state.slots, state.states]
    flat = jax.tree_util.tree_leaves_with_path(tree)
    data = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x  # noqa: E731
    return {path_name(path): np.asarray(data(x)) for path, x in flat}


def test_what_is_restored_equals_what_was_saved(tmp_path):
    state = make_state()
    path = checkpoint.save(tmp_path, state, OURS)
    assert path.name == "step_000003"
    restored = restore(path)
    assert restored.step == 3
    assert jax.tree.structure(restored.slots) == jax.tree.structure(state.slots)
    before, after = leaves(state), leaves(restored)
    assert before.keys() == after.keys()
    for name in before:
        assert before[name].dtype == after[name].dtype, name
        np.testing.assert_array_equal(before[name], after[name], name)
    assert jax.random.bits(restored.key) == jax.random.bits(state.key)
    assert restored.states[1]["key"].dtype == state.states[1]["key"].dtype


def test_parts_can_be_left_out(tmp_path):
    restored = restore(checkpoint.save(tmp_path, make_state(), OURS), parts=("weights", "states"))
    assert restored.slots == [None, None] and restored.weights[0]["Dense"]["kernel"].shape == (2, 4)


def test_the_last_ones_are_kept(tmp_path):
    for step in (1, 2, 999_999, 1_000_000):
        checkpoint.save(tmp_path, make_state(step), OURS, keep=2)
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["step_999999", "step_1000000"]
    assert len(list(tmp_path.iterdir())) == 2


def test_the_manifest_says_what_it_is(tmp_path):
    path = checkpoint.save(tmp_path, make_state(), OURS, config="run.steps = 3")
    manifest = checkpoint.read_manifest(path)
    assert manifest["description"] == OURS and manifest["step"] == 3 and manifest["config"] == "run.steps = 3"
    assert manifest["versions"]["jax"] == jax.__version__
    assert set(manifest["sha256"]) | {"manifest.json", "manifest.sha256"} == {file.name for file in path.iterdir()}


def test_a_failure_while_writing_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, make_state(1), OURS)

    def full(arrays, path):
        if path.name == "block_001.safetensors":
            raise OSError("no space left on device")
        path.touch()

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "save_file", full)
        with pytest.raises(OSError, match="no space left"):
            checkpoint.save(tmp_path, make_state(2), OURS)
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["step_000001"]
    checkpoint.save(tmp_path, make_state(2), OURS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000001", "step_000002"]


def test_a_damaged_checkpoint_is_replaced_when_its_step_comes_again(tmp_path):
    path = checkpoint.save(tmp_path, make_state(), OURS)
    (path / "block_000.safetensors").write_bytes(b"")
    restore(checkpoint.save(tmp_path, make_state(), OURS))


@pytest.mark.parametrize("name", ["block_000.safetensors", "block_001.safetensors", "run.safetensors"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damage_is_found_and_named(tmp_path, name, damage):
    file = checkpoint.save(tmp_path, make_state(), OURS) / name
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    {"flip": lambda: file.write_bytes(content), "cut": lambda: file.write_bytes(content[:50]), "remove": file.unlink}[
        damage
    ]()
    with pytest.raises(ValueError, match=f"{name} is damaged: expected sha256"):
        restore(file.parent)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 1}', '{"format": 1, "description": {}}'])
def test_a_damaged_manifest_is_named(tmp_path, content):
    path = checkpoint.save(tmp_path, make_state(), OURS)
    (path / "manifest.json").write_text(content)
    with pytest.raises(ValueError, match="manifest.json is missing or damaged"):
        restore(path)


@pytest.mark.parametrize("name", ["manifest.json", "manifest.sha256", "block_001.safetensors", "run.safetensors"])
def test_wherever_a_file_is_cut_or_a_bit_flipped_the_checkpoint_before_is_taken(tmp_path, name):
    before, path = (checkpoint.save(tmp_path, make_state(step), OURS) for step in (2, 3))
    whole, said, random = (path / name).read_bytes(), [], np.random.default_rng(0)
    damaged = [whole[: random.integers(len(whole))] for _ in range(20)]
    for place, bit in zip(random.integers(len(whole), size=20), random.integers(8, size=20), strict=True):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << bit
        damaged.append(bytes(flipped))
    for content in damaged:
        (path / name).write_bytes(content)
        found, state = checkpoint.newest([before, path], restore, said.append)
        assert found == before and state.step == 2
    assert len(said) == 40 and all("damaged" in line and str(path) in line for line in said)
    with pytest.raises(checkpoint.DamagedError, match="There is none before it: start afresh"):
        checkpoint.newest([path], restore, said.append)


def test_another_format_is_refused(tmp_path):
    path = checkpoint.save(tmp_path, make_state(), OURS)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))
    (path / "manifest.sha256").write_text(hashlib.sha256((path / "manifest.json").read_bytes()).hexdigest())
    with pytest.raises(ValueError, match="checkpoint format 99, this version .* reads 1"):
        restore(path)


@pytest.mark.parametrize(
    "description, message",
    [
        (Description(OURS.blocks[:1], "adam", 0), "another model: it has 2 blocks, this one has 1"),
        (
            Description((OURS.blocks[0], "Loss(heads=4, rate=0.1)"), "adam", 0),
            "another model: its block 1 says 'heads=2' where this one says 'heads=4'",
        ),
        (Description(OURS.blocks, "adam", 1), "made with seed 0, this run has seed 1"),
    ],
)
def test_the_checkpoint_of_another_run_is_refused(tmp_path, description, message):
    path = checkpoint.save(tmp_path, make_state(), OURS)
    with pytest.raises(ValueError, match=message):
        restore(path, description=description)


def test_weights_of_another_shape_are_refused(tmp_path):
    path = checkpoint.save(tmp_path, make_state(), OURS)
    with pytest.raises(
        ValueError, match=r"weights of block 0 .* expected float32\[2,5\] at 'weights/Dense/kernel', got float32\[2,4\]"
    ):
        restore(path, make_state(width=5))


def test_slots_of_another_optimizer_are_refused(tmp_path):
    path = checkpoint.save(tmp_path, make_state(), OURS)
    other = make_state()
    other.slots[0] = (jnp.zeros(()), ())
    with pytest.raises(checkpoint.SlotsError, match="slots of block 0 .* written by 'adam', this run uses 'sgd'"):
        restore(path, other, Description(OURS.blocks, "sgd", 0))


def test_a_description_has_no_addresses_in_it():
    class Block:
        pass

    def sgd(learning_rate):
        return learning_rate

    description = Description.of([Block(), sgd], sgd, 0)
    assert description == Description.of([Block(), sgd], sgd, 0) and description.optimizer == "sgd"
    assert "0x" not in repr(description)


def trained(placement, **options):
    trainer = Trainer(small_lm(12), optax.adam, placement=placement, **options)
    return trainer, trainer.init(jax.random.key(0), batch())


@pytest.mark.parametrize("update", ["fused", "deferred"])
@pytest.mark.parametrize("kind", ["shared", "pinned", "disk"])
def test_writing_in_the_background_gives_the_state_as_it_was(tmp_path, kind, update, monkeypatch):
    """The next step is begun while blocks are written slowly: none is replaced before it has been, or held twice."""
    placement = Placement.disk(str(tmp_path / "tier")) if kind == "disk" else getattr(Placement, kind)()
    trainer, state = trained(placement, update=update)
    state, _ = trainer.step(state, batch(), 1e-3)
    before = checkpoint.save(tmp_path / "before", state, OURS)
    write, order, host_bytes = checkpoint._write, [], []
    may_write = threading.Semaphore(0)

    def slow(path, tree):
        may_write.acquire()
        if kind == "pinned":
            host = [x for x in jax.live_arrays() if x.sharding.memory_kind == "pinned_host"]
            host_bytes.append(tree_bytes(host))
        order.append(path.name)
        return write(path, tree)

    monkeypatch.setattr(checkpoint, "_write", slow)
    replaced = []

    def before_update(block):
        may_write.release(2)
        writer.wait_for(block)
        assert f"block_{block:03d}.safetensors" in order
        replaced.append(block)

    whole = tree_bytes((state.weights, state.slots, state.states))
    with checkpoint.Writer(tmp_path / "during", OURS) as writer:
        future = writer.save(state, trainer.update_order)
        state, _ = trainer.step(state, batch(1), 1e-3, before_update)
        may_write.release(20)
    assert replaced == list(trainer.update_order)[::1] and order[0] == f"block_{replaced[0]:03d}.safetensors"
    sums = [checkpoint.read_manifest(path)["sha256"] for path in (before, future.result())]
    assert sums[0] == sums[1]
    gradients = tree_bytes(state.weights) if update == "deferred" else 0
    assert all(nbytes <= 1.4 * whole + gradients for nbytes in host_bytes)  # of 14 blocks 4 may be on their way


def test_a_writer_tells_of_its_failure_before_the_next_step(tmp_path, monkeypatch):
    def full(path, tree):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "_write", full)
    writer = checkpoint.Writer(tmp_path, OURS)
    future = writer.save(make_state(), range(2))
    writer.wait_for(1)
    with pytest.raises(OSError, match="cannot write the checkpoint .*No space left .*bytes are free.*Make room"):
        future.result()
    with pytest.raises(OSError, match="No space left"):
        writer.check()
    assert not list(tmp_path.iterdir())


def test_the_best_one_is_kept_too(tmp_path):
    for step, loss in enumerate([3.0, None, 2.0, 2.5, None, 4.0]):
        checkpoint.save(tmp_path, make_state(step), OURS, keep=2, eval_loss=loss)
    found = checkpoint.checkpoints(tmp_path)
    assert [path.name[-1] for path in found] == ["2", "4", "5"] and checkpoint.best_of(found) == found[0]
    (found[0] / "manifest.json").write_text("")  # damaged
    assert checkpoint.best_of(found) == found[2]


def test_exported_weights_are_imported(tmp_path):
    state = make_state()
    checkpoint.export_weights(tmp_path / "sub" / "weights.safetensors", state)
    found = checkpoint.import_weights(tmp_path / "sub" / "weights.safetensors", signature(state), place)
    assert found.step == 0 and found.slots == [None, None]
    assert_trees_equal(found.weights, state.weights)
    assert jax.random.bits(found.states[1]["key"]) == jax.random.bits(state.states[1]["key"])
    with checkpoint.safe_open(tmp_path / "sub" / "weights.safetensors", framework="numpy") as arrays:
        assert "block_000/weights/Dense/kernel" in arrays.keys()
    assert [path.name for path in (tmp_path / "sub").iterdir()] == ["weights.safetensors"]


def test_weights_of_another_model_are_not_imported(tmp_path):
    path = tmp_path / "weights.safetensors"
    checkpoint.export_weights(path, make_state())
    with pytest.raises(ValueError, match=r"expected float32\[2,5\] at 'block_000/weights/Dense/kernel', got float32"):
        checkpoint.import_weights(path, signature(make_state(width=5)), place)
    fewer = make_state()
    del fewer.weights[1], fewer.slots[1], fewer.states[1]
    with pytest.raises(ValueError, match="has 'block_001', which is no block of this model"):
        checkpoint.import_weights(path, signature(fewer), place)
    for content in (b"", b"garbage" * 9, path.read_bytes()[:-1]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="cannot be read as a safetensors file"):
            checkpoint.import_weights(path, signature(make_state()), place)
    with pytest.raises(ValueError, match="nowhere cannot be read"):
        checkpoint.import_weights(tmp_path / "nowhere", signature(make_state()), place)
