"""What depth costs: accelerator peak, host bytes, compilation and step time of the same model at several depths.

    python scripts/bench_depth.py [--depths 4 16 64] [--json] [--png FILE]

The depths take turns, so that a noisy machine treats them alike. The last line gives the slope of the step
time between the two larger depths over that between the two smaller ones: 1.0 means linear in depth.
"""

import argparse
import functools
import json
import statistics
import time
from pathlib import Path

import jax
import numpy as np
import optax

from reversible_trainer.models import reversible_transformer_lm
from reversible_trainer.optimizers import shampoo
from reversible_trainer.streaming import Placement
from reversible_trainer.trainer import Trainer

OPTIMIZERS = {
    "sgd": optax.sgd,
    "adam": optax.adam,
    "shampoo": functools.partial(shampoo, graft_type="adam", preconditioning_compute_steps=10, stagger=True),
}


def measure(depths: list[int], optimizer: str, placement: str, width: int, length: int, repeats: int) -> dict:
    """One entry per depth, and the ratio of slopes between the last three."""
    generator = np.random.default_rng(0)
    tokens, targets = generator.integers(0, 64, (2, 8, length)).astype(np.int32)
    batch = (tokens, targets, np.ones((8, length), bool))
    runs = []
    for depth in depths:
        blocks = reversible_transformer_lm(64, width=width, depth=depth, heads=4, ff_width=4 * width)
        trainer = Trainer(blocks, OPTIMIZERS[optimizer], placement=getattr(Placement, placement)())
        start = time.perf_counter()
        trainer.plan(batch)  # compiles everything
        compilation = time.perf_counter() - start
        state = trainer.init(jax.random.key(0), batch)
        state, metrics = trainer.step(state, batch, 1e-3)
        jax.block_until_ready((state.weights, metrics))
        runs.append([trainer, state, [], compilation])
    for _ in range(repeats):
        for run in runs:
            trainer, state, seconds, _ = run
            start = time.perf_counter()
            run[1], metrics = trainer.step(state, batch, 1e-3)
            jax.block_until_ready((run[1].weights, metrics))
            seconds.append(time.perf_counter() - start)
    rows = [
        {
            "depth": depth,
            "peak_accelerator_bytes": trainer.ledger.peak_bytes,
            "peak_host_bytes": trainer.ledger.peak_host_bytes,
            "programs": len(trainer.programs),
            "median_seconds": statistics.median(seconds),
            "least_seconds": min(seconds),
            "compile_seconds": compilation,
        }
        for depth, (trainer, _, seconds, compilation) in zip(depths, runs, strict=True)
    ]
    (a, ta), (b, tb), (c, tc) = [(row["depth"], row["least_seconds"]) for row in rows[-3:]]
    return {"rows": rows, "slope_ratio": ((tc - tb) / (c - b)) / ((tb - ta) / (b - a))}


def draw(rows: list[dict], path: Path) -> None:
    """Memory, step time and compilation over depth, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.6), dpi=120, layout="constrained")
    memory, step, compilation = figure.subplots(1, 3)
    depths = [row["depth"] for row in rows]
    for key, label, color in (
        ("peak_accelerator_bytes", "accelerator, peak", "#d94801"),
        ("peak_host_bytes", "host: weights and slots", "#969696"),
    ):
        memory.plot(depths, [row[key] / 1e6 for row in rows], "o-", color=color, label=label)
    memory.legend(frameon=False)
    step.plot(depths, [row["median_seconds"] for row in rows], "o-", color="#08519c")
    compilation.plot(depths, [row["compile_seconds"] for row in rows], "o-", color="#08519c")
    titles = {memory: "MB", step: "seconds per step", compilation: "seconds to compile"}
    for axes, title in titles.items():
        axes.set(title=title, xlabel="reversible blocks", xscale="log", ylim=(0, None))
        axes.set_xticks(depths, depths)
        axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", type=int, nargs="+", default=[4, 16, 64], help="three or more (default 4 16 64)")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adam")
    parser.add_argument("--placement", choices=["pinned", "shared"], default="pinned")
    parser.add_argument("--width", type=int, default=64, help="of the residual streams (default 64)")
    parser.add_argument("--length", type=int, default=64, help="tokens of each of 8 sequences (default 64)")
    parser.add_argument("--repeats", type=int, default=9, help="measured steps per depth (default 9)")
    parser.add_argument("--png", type=Path, help="draw the result into this file")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = vars(parser.parse_args())
    as_json, png = options.pop("json"), options.pop("png")
    if len(options["depths"]) < 3:
        parser.error("--depths needs at least three")
    result = measure(**options)
    if png:
        draw(result["rows"], png)
    if as_json:
        print(json.dumps(result))
        return
    for row in result["rows"]:
        print(
            "  ".join(
                f"{name} {value:,.3f}" if isinstance(value, float) else f"{name} {value:,}"
                for name, value in row.items()
            )
        )
    print(f"slope ratio {result['slope_ratio']:.3f}")


if __name__ == "__main__":
    main()
