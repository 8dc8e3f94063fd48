"""Profiles training steps of any model from Python: memory, programs and copies as a picture, JSON, CSV and a trace.

    python scripts/profile_memory.py [--placement pinned] [--steps 2] [--output DIR] [--json]

For your own model import `reversible_trainer.profiling.profile`, which takes any `Trainer`, state and batch; `main`
below shows how. With a gin configuration, `reversible-trainer profile --config FILE` does the same.
"""

import argparse
import json
from pathlib import Path

import jax
import numpy as np

from reversible_trainer.models import reversible_transformer_lm
from reversible_trainer.optimizers import shampoo
from reversible_trainer.profiling import profile
from reversible_trainer.streaming import Placement
from reversible_trainer.trainer import Trainer


def adam_shampoo(learning_rate):
    return shampoo(learning_rate, graft_type="adam")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=8, help="reversible blocks (default 8)")
    parser.add_argument("--width", type=int, default=128, help="of the residual streams (default 128)")
    parser.add_argument("--length", type=int, default=128, help="tokens of each of 16 sequences (default 128)")
    parser.add_argument("--microbatches", type=int, default=1, help="(default 1)")
    parser.add_argument("--placement", choices=("pinned", "shared"), default="pinned", help="(default pinned)")
    parser.add_argument("--steps", type=int, default=2, help="recorded steps (default 2)")
    parser.add_argument("--output", type=Path, default=Path("profiles/profile_memory"), help="folder for the results")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args()

    blocks = reversible_transformer_lm(
        256, width=options.width, depth=options.depth, heads=4, ff_width=4 * options.width
    )
    placement = getattr(Placement, options.placement)()
    trainer = Trainer(blocks, adam_shampoo, microbatches=options.microbatches, placement=placement)
    tokens, targets = np.random.default_rng(0).integers(0, 256, (2, 16, options.length)).astype(np.int32)
    batch = (tokens, targets, np.ones((16, options.length), bool))
    state = trainer.init(jax.random.key(0), batch)
    _, found = profile(trainer, state, batch, 1e-3, options.steps, trace=options.output)
    found.save(options.output)
    if options.json:
        print(json.dumps(found.summary()))
        return
    for name, value in found.summary().items():
        print(f"{name:28} {value:,.6g}" if value is not None else f"{name:28} -")
    print(f"written: {options.output}/profile.png, profile.json, blocks.csv, spans.csv, memory.csv, and a trace")


if __name__ == "__main__":
    main()
