"""What reversing does to the streams, and what exactness costs.

    python scripts/bench_reversal.py [--part exact|drift|cost|all] [--json] [--png FILE]

* `exact`: 48 blocks on fixed-point streams, 200 steps of Adam at a learning rate that moves the weights far, in float32
  and in bfloat16. Every block's reconstruction is compared with the real inputs by checksums in every step; every
  50 steps the gradients of all weights are compared, bit by bit, with those of `policy="recompute"`, which has the
  true inputs, and of `policy="keep"`, which has them too and computes nothing twice.
* `drift`: how far off reconstructed floating-point streams are at the first block, by depth, after 30 steps of Adam;
  fixed-point streams beside them.
* `cost`: the step time of fixed-point streams over that of float32 streams, and of verification over none, the runs
  taking turns (6 blocks of width 256, 4 sequences of 512, Adam).
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from reversible_trainer.models import reversible_transformer_lm
from reversible_trainer.trainer import Trainer
from reversible_trainer.tree import TrainState

VOCAB = 64
DTYPES = (None, "bfloat16")  # that the blocks compute in; None is float32


def random_batch(rows: int, length: int, seed: int = 0) -> tuple:
    generator = np.random.default_rng(seed)
    tokens = generator.integers(0, VOCAB, (rows, length)).astype(np.int32)
    return tokens, np.roll(tokens, 3, axis=1), np.ones((rows, length), bool)


def make(depth: int, width: int, arithmetic: str, optimizer=optax.adam, **settings) -> Trainer:
    sizes = {"width": width, "depth": depth, "heads": 4, "ff_width": 4 * width}
    return Trainer(reversible_transformer_lm(VOCAB, **sizes, arithmetic=arithmetic), optimizer, **settings)


def recorded(learning_rate):
    """No update; the slots are the gradients."""
    return optax.GradientTransformation(
        lambda weights: jax.tree.map(jnp.zeros_like, weights),
        lambda grads, slots, weights=None: (jax.tree.map(jnp.zeros_like, grads), grads),
    )


def gradients(trainer: Trainer, state: TrainState, batch: tuple) -> list:
    copies = jax.tree.map(lambda x: jnp.array(x, copy=True), (state.weights, state.weights, state.states))
    slots = [
        jax.tree.map(jnp.zeros_like, {b.name: w}) if jax.tree.leaves(w) else ()
        for b, w in zip(trainer.blocks, copies[1], strict=True)
    ]
    new, _ = trainer.step(TrainState(state.step, state.key, copies[0], slots, copies[2]), batch, 0.0)
    return [np.asarray(x) for x in jax.tree.leaves(new.slots)]


def exact(depth: int, steps: int, width: int = 64, learning_rate: float = 1e-2) -> list[dict]:
    rows = []
    for dtype in DTYPES:
        trainer = make(depth, width, "fixed_point", verify_reversal=True, compute_dtype=dtype)
        by = {
            p: make(depth, width, "fixed_point", recorded, policy=p, compute_dtype=dtype)
            for p in ("reverse", "recompute", "keep")
        }
        state = trainer.init(jax.random.key(0), random_batch(2, 32))
        start = [np.asarray(x) for x in jax.tree.leaves(state.weights)]
        mismatched, compared, unequal, losses = 0, 0, {"recompute": 0, "keep": 0}, []
        for step in range(steps):
            batch = random_batch(2, 32, step)
            state, metrics = trainer.step(state, batch, learning_rate)
            mismatched += int(metrics["mismatched_blocks"])
            losses.append(float(metrics["loss"]))
            if step == 0 or (step + 1) % 50 == 0:
                ours = gradients(by["reverse"], state, batch)
                compared += len(ours)
                for policy in unequal:
                    theirs = gradients(by[policy], state, batch)
                    unequal[policy] += sum(not np.array_equal(x, y) for x, y in zip(ours, theirs, strict=True))
        end = [np.asarray(x) for x in jax.tree.leaves(state.weights)]
        moved = sum(float(np.square(e - s).sum()) for e, s in zip(end, start, strict=True))
        norm = sum(float(np.square(s).sum()) for s in start)
        rows.append(
            {
                "compute_dtype": dtype or "float32",
                "blocks": depth,
                "steps": steps,
                "mismatched_blocks": mismatched,
                "gradients_compared": compared,
                **{f"unequal_to_{policy}": count for policy, count in unequal.items()},
                "moved": (moved / norm) ** 0.5,
                "first_loss": losses[0],
                "last_loss": losses[-1],
            }
        )
    return rows


def drift(depths: list[int], steps: int = 30, width: int = 32, learning_rate: float = 3e-3) -> list[dict]:
    rows = []
    for dtype in DTYPES:
        for arithmetic in ("float32", "fixed_point"):
            for depth in depths:
                settings = {"verify_reversal": True, "drift_limit": None, "compute_dtype": dtype}
                trainer = make(depth, width, arithmetic, **settings)
                state = trainer.init(jax.random.key(0), random_batch(2, 32))
                found = []
                for step in range(steps):
                    state, metrics = trainer.step(state, random_batch(2, 32, step), learning_rate)
                    name = "drift" if arithmetic == "float32" else "mismatched_blocks"
                    found.append(float(metrics[name]))
                rows.append(
                    {
                        "compute_dtype": dtype or "float32",
                        "arithmetic": arithmetic,
                        "depth": depth,
                        "first": found[0],
                        "last": found[-1],
                        "largest": max(found),
                    }
                )
    return rows


def cost(repeats: int, depth: int = 6, width: int = 256, length: int = 512) -> dict:
    batch = random_batch(4, length)
    runs = {
        "float32": make(depth, width, "float32"),
        "float32 verified": make(depth, width, "float32", verify_reversal=True),
        "fixed_point": make(depth, width, "fixed_point"),
        "fixed_point verified": make(depth, width, "fixed_point", verify_reversal=True),
    }
    states, seconds = {}, {name: [] for name in runs}
    for name, trainer in runs.items():
        states[name] = trainer.init(jax.random.key(0), batch)
    for repeat in range(repeats + 1):
        for name, trainer in runs.items():
            start = time.perf_counter()
            states[name], metrics = trainer.step(states[name], batch, 1e-3)
            jax.block_until_ready((states[name].weights, metrics))
            if repeat:  # the first compiles
                seconds[name].append(time.perf_counter() - start)
    ratios = {}
    for over, under in (
        ("fixed_point", "float32"),
        ("fixed_point verified", "fixed_point"),
        ("float32 verified", "float32"),
    ):
        pairs = zip(seconds[over], seconds[under], strict=True)
        ratios[f"{over} / {under}"] = statistics.median(a / b for a, b in pairs)
    return {"median_seconds": {name: statistics.median(s) for name, s in seconds.items()}, "ratios": ratios}


def draw(rows: list[dict], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5, 3.6), dpi=120, layout="constrained")
    axes = figure.subplots()
    colors = {"float32": "#08519c", "bfloat16": "#d94801"}
    for dtype, color in colors.items():
        these = [r for r in rows if r["compute_dtype"] == dtype and r["arithmetic"] == "float32"]
        depths = [r["depth"] for r in these]
        axes.plot(depths, [r["largest"] for r in these], "o-", color=color, label=f"float32 streams, {dtype} blocks")
    lost = sum(r["largest"] for r in rows if r["arithmetic"] == "fixed_point")
    axes.set(yscale="log", xscale="log", xlabel="reversible blocks", ylabel="difference / largest value")
    axes.set_xticks(depths, depths)
    axes.minorticks_off()
    axes.set_title(
        "Reconstructed inputs of the first block, largest of 30 steps\n"
        f"(fixed-point streams: {lost:.0f} blocks differ in any bit)",
        fontsize=10,
    )
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["exact", "drift", "cost", "all"], default="all")
    parser.add_argument("--blocks", type=int, default=48, help="of `exact` (default 48)")
    parser.add_argument("--steps", type=int, default=200, help="of `exact` (default 200)")
    parser.add_argument("--depths", type=int, nargs="+", default=[2, 6, 12, 24, 48], help="of `drift`")
    parser.add_argument("--repeats", type=int, default=9, help="of `cost` (default 9)")
    parser.add_argument("--png", type=Path, help="draw `drift` into this file")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args()
    found: dict = {}
    if options.part in ("exact", "all"):
        found["exact"] = exact(options.blocks, options.steps)
    if options.part in ("drift", "all"):
        found["drift"] = drift(options.depths)
        if options.png:
            draw(found["drift"], options.png)
    if options.part in ("cost", "all"):
        found["cost"] = cost(options.repeats)
    if options.json:
        print(json.dumps(found))
        return
    for row in [*found.get("exact", []), *found.get("drift", [])]:
        print("  ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
    for name, ratio in found.get("cost", {}).get("ratios", {}).items():
        print(f"step time, {name}: {ratio:.3f}")


if __name__ == "__main__":
    main()
