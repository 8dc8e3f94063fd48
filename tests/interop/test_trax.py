"""trax's models and its streaming trainer, done by our trainer, give the numbers that trax's own trainers give."""

import contextlib
import functools
import importlib
import importlib.util
import sys
import types
import unittest

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if not importlib.util.find_spec("trax"):
    pytest.skip("needs trax: `make trax`", allow_module_level=True)

from reversible_trainer.interop.trax import ReversibleSerialTrainer, from_trax, state_from_trax  # noqa: E402
from reversible_trainer.interop.trax_layers import Shared, trax  # noqa: E402

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


@pytest.mark.parametrize("name", TRAX_TESTS)
def test_trax_s_own_trainer_test(trainer_test, name):
    result = unittest.TestResult()
    trainer_test(name).run(result)
    assert result.testsRun == 1 and not result.skipped
    assert not result.failures + result.errors, (result.failures + result.errors)[0][1]
