"""Steps to AdamW's best loss: how many fewer do Shampoo, SOAP and Muon need on the built-in corpus?

    python scripts/bench_steps_to_loss.py [--json] [--png FILE]

A small reversible language model on Shakespeare, the same batches for every optimizer. One learning rate for all
weights: the matrix optimizers take the blocks' matrices, AdamW the rest, and their updates have the length of
AdamW's (Shampoo's graft is Adam, with a tenth of the rate as its heavy ball sums up steps; Muon's scale is 0.2).

1. AdamW's learning rate is swept over `--steps` steps of a cosine schedule, on the first seed.
2. Each other optimizer's learning rate is swept over 0.75 times as many steps, then its schedule is made shorter, or
   longer, until it just reaches AdamW's loss at that seed, at that learning rate.
3. The other seeds. A seed that misses its target is given the next longer schedule.
4. What a step costs, measured side by side.

The held-out loss is that of the same part of the held-out plays each time. A result is the first evaluation at
which the loss is at most AdamW's best with the same seed, over AdamW's steps.
"""

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import optax
from rich import progress
from rich.console import Console

from reversible_trainer.data import shakespeare
from reversible_trainer.loop import evaluate
from reversible_trainer.models import reversible_transformer_lm, transformer_route
from reversible_trainer.optimizers import Factory, muon, scaled, shampoo, soap
from reversible_trainer.trainer import Trainer

BATCH, LENGTH, EVAL_BATCHES = 16, 128, 6
FRACTIONS = [0.4, 0.5, 0.6, 0.75, 0.85, 1.0]  # of AdamW's steps: the schedules that may be tried
START = 0.75
RATES = {  # the sweeps; all but Muon's go on beyond the best value found
    "adamw": [4e-3, 8e-3, 12e-3, 16e-3, 24e-3, 32e-3],
    "shampoo": [8e-3, 12e-3, 16e-3, 24e-3, 32e-3],
    "soap": [8e-3, 12e-3, 16e-3, 24e-3, 32e-3],
    "muon": [8e-3, 12e-3, 16e-3, 24e-3, 32e-3],
}
ADAMW = functools.partial(optax.adamw, b2=0.95, weight_decay=0.1)
MATRICES: dict[str, Factory] = {
    "adamw": ADAMW,
    # By a tenth of the learning rate, so ten times the decay.
    "shampoo": scaled(
        functools.partial(
            shampoo,
            beta2=0.95,
            graft_type="adam",
            weight_decay=1.0,
            weight_decay_method="decoupled",
            preconditioning_compute_steps=10,
            stagger=True,
        ),
        by=0.1,
    ),
    "soap": functools.partial(soap, betas=(0.9, 0.95, 0.95), weight_decay=0.1),
    "muon": functools.partial(muon, nesterov=True, weight_decay=0.1, extra_scale=0.2),
}
COLORS = {"adamw": "#525252", "shampoo": "#08519c", "soap": "#d94801", "muon": "#238b45"}
NAMES = {"adamw": "AdamW", "shampoo": "Shampoo", "soap": "SOAP", "muon": "Muon"}

Curve = list[tuple[int, float]]  # steps done, held-out loss


class Bench:
    """One trainer per optimizer, and the runs done so far."""

    def __init__(self, steps: int, every: int, log: Callable[[str], None]):
        self.steps, self.every, self.log = steps, every, log
        self.data = shakespeare()
        generator = np.random.default_rng(0)
        size = BATCH * LENGTH
        starts = generator.choice(len(self.data.held_out) // size, EVAL_BATCHES, replace=False) * size
        held_out = np.concatenate([self.data.held_out[start : start + size] for start in sorted(starts)])
        self.held_out = list(type(self.data)(self.data.train, held_out).eval_batches(BATCH, LENGTH))
        blocks = reversible_transformer_lm(256, width=128, depth=2, heads=4, ff_width=512)
        self.trainers = {name: Trainer(blocks, transformer_route(m, ADAMW)) for name, m in MATRICES.items()}
        self.runs: list[dict] = []

    def run(self, optimizer: str, rate: float, seed: int, fraction: float) -> Curve:
        """Trains over `fraction` of the steps; the held-out losses on the way."""
        steps, trainer = round(fraction * self.steps), self.trainers[optimizer]
        schedule = optax.warmup_cosine_decay_schedule(0.0, rate, steps // 10, steps, rate / 50)
        start = time.perf_counter()
        state = trainer.init(jax.random.key(seed), self.data.batch(seed, 0, BATCH, LENGTH))
        curve = []
        for step in range(1, steps + 1):
            batch = self.data.batch(seed, step - 1, BATCH, LENGTH)
            state, _ = trainer.step(state, batch, schedule(step - 1))
            if step % self.every == 0 or step == steps:
                curve.append((step, evaluate(trainer, state, self.held_out)["eval_loss"]))
        seconds = time.perf_counter() - start
        self.runs.append(
            {
                "optimizer": optimizer,
                "rate": rate,
                "seed": seed,
                "fraction": fraction,
                "seconds": seconds,
                "curve": curve,
            }
        )
        self.log(
            f"{NAMES[optimizer]:8} rate {rate:<6g} seed {seed}  {steps} steps  loss {best(curve):.4f}  {seconds:.0f} s"
        )
        return curve

    def step_seconds(self, rounds: int = 8) -> dict[str, float]:
        """Seconds per step: the optimizers take turns with ten steps each, a cycle of refreshes; the medians."""
        batch = self.data.batch(0, 0, BATCH, LENGTH)
        states = {name: trainer.init(jax.random.key(0), batch) for name, trainer in self.trainers.items()}
        seconds = {name: [] for name in self.trainers}
        for _ in range(rounds):
            for name, trainer in self.trainers.items():
                start = time.perf_counter()
                for _ in range(10):
                    states[name], metrics = trainer.step(states[name], batch, 1e-3)
                jax.block_until_ready((states[name].weights, metrics))
                seconds[name].append((time.perf_counter() - start) / 10)
        return {name: statistics.median(values[1:]) for name, values in seconds.items()}


def best(curve: Curve) -> float:
    """The lowest loss; infinite if it was never finite."""
    return min((loss for _, loss in curve if np.isfinite(loss)), default=float("inf"))


def reached(curve: Curve, target: float) -> int | None:
    """Steps until the loss was at most `target`."""
    return next((step for step, loss in curve if loss <= target), None)


def swept(bench: Bench, optimizer: str, fraction: float) -> tuple[float, dict[float, Curve]]:
    """The best learning rate, and the curve of each."""
    curves = {rate: bench.run(optimizer, rate, 0, fraction) for rate in RATES[optimizer]}
    return min(curves, key=lambda rate: best(curves[rate])), curves


def shortest(bench: Bench, optimizer: str, rate: float, seed: int, target: float, known: dict[float, Curve], at: float):
    """The curve of the shortest schedule that reaches the target, searched from `at` up or down; None if none does."""
    place, found = FRACTIONS.index(at), None
    while 0 <= place < len(FRACTIONS):
        fraction = FRACTIONS[place]
        if fraction not in known:
            known[fraction] = bench.run(optimizer, rate, seed, fraction)
        ok = reached(known[fraction], target) is not None
        if ok:
            found = fraction, known[fraction]
        if ok and fraction > at or not ok and fraction < at:
            break  # the shortest was just found on the way up, or passed on the way down
        place += -1 if ok else 1
        if ok and place >= 0 and FRACTIONS[place] in known:
            break  # that one has missed
    return found


def measure(steps: int, every: int, seeds: int, log: Callable[[str], None]) -> dict:
    """Everything in the docstring above."""
    bench = Bench(steps, every, log)
    rate, curves = swept(bench, "adamw", 1.0)
    baseline = [curves[rate], *(bench.run("adamw", rate, seed, 1.0) for seed in range(1, seeds))]
    targets = [best(curve) for curve in baseline]
    results = {"adamw": {"rate": rate, "losses": targets, "curves": baseline}}
    for optimizer in list(MATRICES)[1:]:
        rate, curves = swept(bench, optimizer, START)
        found = [shortest(bench, optimizer, rate, 0, targets[0], {START: curves[rate]}, START)]
        at = found[0][0] if found[0] else FRACTIONS[-1]
        for seed in range(1, seeds):
            found.append(shortest(bench, optimizer, rate, seed, targets[seed], {}, at))
        steps_needed = [None if f is None else reached(f[1], t) for f, t in zip(found, targets, strict=True)]
        results[optimizer] = {
            "rate": rate,
            "fractions": [f and f[0] for f in found],
            "steps": steps_needed,
            "step_ratios": [s and s / steps for s in steps_needed],
            "curves": [f and f[1] for f in found],
        }
    seconds = bench.step_seconds()
    for optimizer, result in results.items():
        result["seconds_per_step"] = seconds[optimizer]
        if optimizer != "adamw":
            cost = seconds[optimizer] / seconds["adamw"]
            result["time_ratios"] = [r and r * cost for r in result["step_ratios"]]
    return {
        "steps": steps,
        "seeds": seeds,
        "results": results,
        "longest_run_seconds": max(run["seconds"] for run in bench.runs),
        "runs": bench.runs,
    }


def table(found: dict) -> list[str]:
    """The result as lines of a Markdown table."""
    lines = [
        "| optimizer | learning rate | steps to AdamW's loss, over AdamW's | time of a step | time to that loss |",
        "|---|---|---|---|---|",
    ]
    results, one = found["results"], found["results"]["adamw"]["seconds_per_step"]
    for optimizer, result in results.items():
        ratios = result.get("step_ratios", [1.0]), result.get("time_ratios", [1.0])
        steps, times = (_spread(values) if optimizer != "adamw" else "1" for values in ratios)
        cost = f"{result['seconds_per_step'] / one:.2f}"
        lines.append(f"| {NAMES[optimizer]} | {result['rate']:g} | {steps} | {cost} | {times} |")
    losses = results["adamw"]["losses"]
    lines.append("")
    lines.append(
        f"AdamW's loss after {found['steps']} steps: {_spread(losses, 3)}, {found['seeds']} seeds. Longest run "
        f"{found['longest_run_seconds']:.0f} s."
    )
    return lines


def _spread(values: list[float | None], digits: int = 2) -> str:
    """Mean, least and largest."""
    if None in values:
        return f"not reached by {values.count(None)} of {len(values)} seeds"
    return f"{np.mean(values):.{digits}f} ({min(values):.{digits}f} - {max(values):.{digits}f})"


def draw(found: dict, path: Path) -> None:
    """Held-out losses over the steps, and both ratios per optimizer, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    results = found["results"]
    for optimizer, result in results.items():
        for curve in filter(None, result["curves"]):
            first = curve is next(filter(None, result["curves"]))
            label = f"{NAMES[optimizer]}, rate {result['rate']:g}" if first else None
            left.plot(*zip(*curve, strict=True), color=COLORS[optimizer], linewidth=1.3, label=label)
    target = float(np.mean(results["adamw"]["losses"]))
    left.axhline(target, color=COLORS["adamw"], linewidth=0.8, linestyle="--")
    left.annotate(f"AdamW's best, {target:.3f}", (0, target), xytext=(2, -11), textcoords="offset points", fontsize=8)
    left.set(
        xlabel="step",
        ylabel="held-out loss (nats per byte)",
        xlim=(0, found["steps"]),
        ylim=(target - 0.1, target + 0.9),
    )
    left.legend(frameon=False)
    names = list(results)[1:]
    for offset, key, alpha in ((-0.19, "step_ratios", 1.0), (0.19, "time_ratios", 0.45)):
        for i, name in enumerate(names):
            values = [v for v in results[name][key] if v is not None]
            if values:
                mean = float(np.mean(values))
                spread = [[mean - min(values)], [max(values) - mean]]
                right.bar(i + offset, mean, 0.36, color=COLORS[name], alpha=alpha)
                right.errorbar(i + offset, mean, spread, color="black", capsize=3, linewidth=1)
                right.annotate(f"{mean:.2f}", (i + offset, 0.02), ha="center", color="white", fontsize=9)
    right.axhline(1, color=COLORS["adamw"], linewidth=0.8, linestyle="--")
    right.set_xticks(range(len(names)), [NAMES[name] for name in names])
    right.set(title="to reach AdamW's best loss, over AdamW\n(dark: steps, light: time; bars: seeds)")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=320, help="of AdamW (default 320: about a minute on two cores)")
    parser.add_argument("--every", type=int, default=10, help="steps between evaluations (default 10)")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of weights and batches (default 3)")
    parser.add_argument("--optimizers", nargs="+", choices=list(MATRICES)[1:], help="beside AdamW (default all)")
    parser.add_argument("--png", type=Path, help="draw the result into this file")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args()
    for name in set(MATRICES) - {"adamw", *(options.optimizers or MATRICES)}:
        del MATRICES[name]
    runs = len(RATES["adamw"]) + options.seeds - 1 + sum(len(RATES[n]) + 2 + options.seeds for n in list(MATRICES)[1:])
    columns = progress.TextColumn("run {task.completed} of about {task.total}"), progress.BarColumn()
    console = Console(stderr=True)
    with progress.Progress(
        *columns, progress.TimeRemainingColumn(), console=console, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("runs", total=runs)

        def log(line: str) -> None:
            bar.advance(task)
            console.print(line, highlight=False)

        found = measure(options.steps, options.every, options.seeds, log)
    if options.png:
        draw(found, options.png)
    print(json.dumps(found) if options.json else "\n".join(table(found)))


if __name__ == "__main__":
    main()
