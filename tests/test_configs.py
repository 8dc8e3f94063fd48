"""Every configuration builds, trains one tiny step and says how it is used."""

import importlib.util
from pathlib import Path

import gin
import jax
import numpy as np
import pytest
from helpers import slow

from reversible_trainer import __main__ as command_line
from reversible_trainer.trainer import Trainer

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.gin"))
SLOW = ("copy_1024", "shakespeare_reformer", "trax_reformer")  # much like others
SMALL = {
    "run": {"batch_size": 2, "length": 8},
    "reversible_transformer_lm": {"width": 8, "ff_width": 16, "depth": 1},
    "reformer_lm": {"width": 8, "heads": 2, "ff_width": 16, "depth": 1, "max_length": 8, "axial_widths": None},
    "ReformerLM": {"d_model": 8, "d_ff": 16, "n_heads": 2, "n_layers": 1, "max_len": 8},
    "rev_net": {"width": 2, "depth": 1, "stages": 1},
}


@pytest.mark.parametrize("path", [slow(p) if p.stem in SLOW else p for p in CONFIGS], ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_a_config_takes_one_tiny_step(path):
    of_trax = path.stem.startswith("trax")
    if of_trax and not importlib.util.find_spec("trax"):
        pytest.skip("needs trax: `make trax`")
    bindings = (f"{name}.{key} = {value}" for name, values in SMALL.items() for key, value in values.items())
    given = path.read_text()
    loop, _ = command_line._configure(str(path), [line for line in bindings if line.split(" ")[0] in given])
    settings = gin.get_bindings(loop.run)
    trainer = Trainer(settings["blocks"], settings["optimizer"])
    batch = settings["data"].batch(0, 0, settings["batch_size"], settings.get("length"))
    with jax.numpy_dtype_promotion("standard" if of_trax else "strict"):
        state = trainer.init(jax.random.key(0), batch)
        _, metrics = trainer.step(state, batch, settings["learning_rate"](0))
    assert np.isfinite(metrics["loss"]) and int(metrics["skipped_blocks"]) == 0


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_begins_with_command_time_and_result(path):
    header = [line for line in path.read_text().splitlines() if line.startswith("#")]
    for word in ("command", "expected time", "expected result"):
        assert any(line[1:].strip().startswith(word) for line in header), word
