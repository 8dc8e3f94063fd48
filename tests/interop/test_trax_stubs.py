"""trax on stubs trains as it should, and leaves nothing behind that others could stumble over."""

import functools
import importlib.util
import sys

import jax
import numpy as np
import pytest

from reversible_trainer.interop.trax_stubs import import_trax

needs_trax = pytest.mark.skipif(not importlib.util.find_spec("trax"), reason="needs trax: `make trax`")


def surroundings():
    """What others could notice."""
    names = ("tensorflow", "tensorflow_datasets")
    present = [name for name in (*names, "trax.tf_numpy") if name in sys.modules]
    return sys.meta_path.copy(), dict(jax.config.values), [importlib.util.find_spec(name) for name in names], present


@pytest.fixture(scope="module")
def imported():
    before = surroundings()
    return import_trax(), before, surroundings()


@pytest.fixture
def trax(imported):
    return imported[0]


def test_an_absent_trax_is_said_to_be_absent_and_how_to_get_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "trax", raising=False)
    with pytest.raises(ImportError, match="trax is not installed. `make trax`"):
        import_trax.__wrapped__()


@needs_trax
@pytest.mark.filterwarnings("ignore:backend and device argument on jit", "ignore:Some donated buffers were not usable")
def test_both_trainers_descend(trax):
    tl, key = trax.layers, trax.fastmath.random.get_prng(0)
    tokens = np.random.default_rng(0).integers(0, 7, (2, 8)).astype(np.int32)
    batch = (tokens, tokens, np.ones((2, 8), np.float32))
    half = tl.ReversibleHalfResidual(tl.Dense(4))
    head = (tl.Concatenate(), tl.Dense(7), tl.WeightedCategoryCrossEntropy())
    model = tl.Serial(tl.Embedding(7, 4), tl.Dup(), tl.ReversibleSerial(half, tl.ReversibleSwap()), *head)
    blocks, loss = trax.optimizers.trainer.extract_reversible_blocks(model)
    optimizer = trax.optimizers.SGD(0.1)
    with jax.numpy_dtype_promotion("standard"):
        model.init(trax.shapes.signature(batch), rng=key)
        optimizer.tree_init(model.weights)
        plain = trax.optimizers.Trainer(model, optimizer, n_devices=1)
        first, _ = plain.one_step(batch, key)
        make_sgd = functools.partial(trax.optimizers.SGD, 0.1)
        streaming = trax.optimizers.ReversibleSerialTrainer(blocks, loss, make_sgd, n_devices=1)
        second, _ = streaming.one_step(batch, key)  # of the same layers, which `plain` has updated
        third, _ = streaming.one_step(batch, key)
    assert float(first) > float(second) > float(third)


@needs_trax
def test_what_needs_tensorflow_says_so(trax):
    with pytest.raises(NotImplementedError, match=r"tensorflow\.io\.gfile\.GFile was called"):
        trax.layers.Dense(2).init_from_file("weights")


@needs_trax
def test_nothing_else_changes(imported):
    _, before, after = imported
    assert before == after
