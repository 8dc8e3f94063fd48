"""Memory against recomputation: what a step keeps, and what it computes twice, under growing memory budgets.

    python scripts/bench_memory.py [--budgets 8] [--json] [--png FILE]

The least budget is what a step needs that keeps nothing; the largest lets all blocks keep what their backward pass
needs. Between them `Trainer(accelerator_memory=...)` chooses. Each is run: the table gives the plan's peak, the
ledger's, the floating-point operations of the step's matrix products, and the measured time, medians of steps that
take turns.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import jax
import numpy as np
import optax

from reversible_trainer.models import reversible_transformer_lm
from reversible_trainer.streaming import Placement
from reversible_trainer.trainer import Trainer


def measure(count: int, depth: int, width: int, repeats: int) -> list[dict]:
    """One row per budget."""
    blocks = reversible_transformer_lm(256, width=width, depth=depth, heads=4, ff_width=4 * width)
    tokens, targets = np.random.default_rng(0).integers(0, 256, (2, 4, 256)).astype(np.int32)
    batch = (tokens, targets, np.ones((4, 256), bool))

    def make(**settings) -> Trainer:
        return Trainer(blocks, optax.adam, placement=Placement.pinned(), **settings)

    least, most = (make(policy=policy).plan(batch).peak_accelerator_bytes for policy in ("auto", "keep"))
    runs = []
    for budget in np.linspace(least, most, count).astype(int).tolist():
        print(f"compiling for {budget / 1e6:.1f} MB", file=sys.stderr)
        trainer = make(accelerator_memory=budget)
        plan, state = trainer.plan(batch), trainer.init(jax.random.key(0), batch)
        state, metrics = trainer.step(state, batch, 1e-3)
        jax.block_until_ready((state.weights, state.slots, metrics))
        runs.append([budget, trainer, plan, state, []])
    for number in range(repeats):
        print(f"round {number + 1} of {repeats}", file=sys.stderr)
        for run in runs:
            start = time.perf_counter()
            run[3], metrics = run[1].step(run[3], batch, 1e-3)
            jax.block_until_ready((run[3].weights, run[3].slots, metrics))
            run[4].append(time.perf_counter() - start)
    return [
        {
            "budget_bytes": budget,
            "planned_bytes": plan.peak_accelerator_bytes,
            "ledger_bytes": trainer.ledger.peak_bytes,
            "keep": sum(block.policy == "keep" for block in plan.blocks),
            "flops": plan.flops,
            "seconds": statistics.median(seconds),
        }
        for budget, trainer, plan, _, seconds in runs
    ]


def draw(rows: list[dict], path: Path) -> None:
    """Operations and time over memory, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), dpi=120, layout="constrained")
    axes = figure.subplots()
    memory = [row["planned_bytes"] / 1e6 for row in rows]
    axes.step(memory, [row["flops"] / 1e9 for row in rows], "o-", where="post", color="#08519c")
    for row, x in zip(rows, memory, strict=True):
        label = f"{row['keep']} keep"
        axes.annotate(label, (x, row["flops"] / 1e9), xytext=(3, 5), textcoords="offset points", fontsize=8)
    axes.set(
        xlabel="accelerator memory of a step, MB",
        ylabel="GFLOP per step",
        ylim=(0, 1.1e-9 * max(row["flops"] for row in rows)),
    )
    axes.set_title("More memory, less computed twice", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budgets", type=int, default=8, help="how many (default 8)")
    parser.add_argument("--depth", type=int, default=12, help="reversible blocks (default 12)")
    parser.add_argument("--width", type=int, default=128, help="of the residual streams (default 128)")
    parser.add_argument("--repeats", type=int, default=5, help="measured steps of each (default 5)")
    parser.add_argument("--png", type=Path, help="draw the result into this file")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args()
    rows = measure(options.budgets, options.depth, options.width, options.repeats)
    if options.png:
        draw(rows, options.png)
    if options.json:
        print(json.dumps(rows))
        return
    print("   budget      planned       ledger   blocks that keep      GFLOP   seconds")
    for row in rows:
        sizes = (f"{row[name] / 1e6:9.2f} MB" for name in ("budget_bytes", "planned_bytes", "ledger_bytes"))
        print(" ".join(sizes), f"{row['keep']:18} {row['flops'] / 1e9:10.2f} {row['seconds']:9.3f}")


if __name__ == "__main__":
    main()
