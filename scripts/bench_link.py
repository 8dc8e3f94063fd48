"""When is the link hidden? Step time over the bandwidth of a simulated link, against the formula.

    python scripts/bench_link.py [--json] [--png FILE]

Host and accelerator are the same memory here, and a thread per direction sleeps as long as a link of the given
bandwidth would take, outside the interpreter's lock. What has not left the accelerator yet is sent again only when
it has. Programs run one after the other, as on the accelerators that have a link.

With blocks of equal size the formula is, per sweep, max(compute, link) with `prefetch` of 1 or 2 and their sum
with `prefetch=0`; compute is what the programs of a sweep take with a link that takes no time, measured just before
each measurement. Measured is the mean of two steps in a row, to the arrival of the last block at the host. At the
break-even bandwidth sending the blocks of a sweep takes as long as running them; one half and twice that are
measured too, for both sweeps. The ratios are medians over the rounds.
"""

# ruff: noqa: D102  (the methods are those of streaming/placement.py)

import argparse
import concurrent.futures
import json
import statistics
import sys
import time
from pathlib import Path

import jax
import numpy as np
import optax

from reversible_trainer.layers import (
    CrossEntropy,
    Dense,
    Dup,
    Embedding,
    FeedForward,
    HalfResidual,
    LossSerial,
    ReversibleConcatenatePair,
    ReversibleSerial,
    ReversibleSwap,
    RMSNorm,
    Serial,
)
from reversible_trainer.streaming import Pending, Placement
from reversible_trainer.streaming.placement import private_copy
from reversible_trainer.trainer import Trainer
from reversible_trainer.tree import Tree, tree_bytes

PREFETCH = 0, 1, 2


class Link(Placement):
    """A link that is simulated by sleeping; `bandwidth` in bytes per second each way."""

    side_by_side = False

    def __init__(self, bandwidth: float):
        self.bandwidth = bandwidth
        self._in, self._out = (concurrent.futures.ThreadPoolExecutor(1) for _ in range(2))
        self._leaving: dict[int, concurrent.futures.Future[None]] = {}  # by the array's address

    def _take(self, nbytes: int) -> None:
        if self.bandwidth < float("inf"):
            time.sleep(nbytes / self.bandwidth)

    def send(self, tree: Tree, keep: bool = False) -> Pending:
        nbytes = tree_bytes(tree)
        leaving = {self._leaving[id(x)] for x in jax.tree.leaves(tree) if id(x) in self._leaving}

        def arrive() -> None:
            concurrent.futures.wait(leaving)
            self._take(nbytes)

        return _Travelling(tree, self._in.submit(arrive), arrives=True)

    def fetch(self, tree: Tree) -> Pending:
        nbytes, leaves, left = tree_bytes(tree), jax.tree.leaves(tree), concurrent.futures.Future()

        def leave() -> None:
            jax.block_until_ready(leaves)
            self._take(nbytes)
            for leaf in leaves:
                del self._leaving[id(leaf)]
            left.set_result(None)

        self._leaving.update({id(x): left for x in leaves})
        self._out.submit(leave)
        return _Travelling(tree, left, arrives=False)

    def to_accelerator(self, tree: Tree) -> Tree:
        return private_copy(tree)

    to_host = to_accelerator

    def wait_for_all(self) -> None:
        """Returns when nothing is on its way any longer."""
        for thread in (self._in, self._out):
            thread.submit(lambda: None).result()


class _Travelling(Pending):
    def __init__(self, tree: Tree, future: concurrent.futures.Future[None], arrives: bool):
        super().__init__(tree, None)
        self._future, self._arrives = future, arrives

    def arrays(self) -> Tree:
        if self._arrives:
            self._future.result()
        return self._arrays

    def block(self) -> None:
        self._future.result()


class Run:
    """A stack of equal reversible blocks on a simulated link whose bandwidth may change from step to step."""

    def __init__(self, depth: int, width: int, rows: int, prefetch: int):
        half = HalfResidual(Serial(RMSNorm(), FeedForward(4 * width)))
        blocks = [
            Serial(Embedding(64, width), Dup()),
            *[ReversibleSerial(half, ReversibleSwap())] * depth,
            LossSerial(ReversibleConcatenatePair(), Dense(64), CrossEntropy()),
        ]
        tokens = np.zeros((1, rows), np.int32)
        self.batch = (tokens, tokens, np.ones((1, rows), bool))
        self.link = Link(float("inf"))
        self.trainer = Trainer(blocks, optax.adam, placement=self.link, prefetch=prefetch)
        self.state = self.trainer.init(jax.random.key(0), self.batch)
        self.seconds(float("inf"))  # compiles

    def seconds(self, bandwidth: float) -> float:
        """Of a step, to the arrival of the last block at the host: the mean of two in a row."""
        self.link.bandwidth = bandwidth
        start = time.perf_counter()
        for _ in range(2):
            self.state, metrics = self.trainer.step(self.state, self.batch, 1e-3)
        jax.block_until_ready((self.state.weights, metrics))
        self.link.wait_for_all()
        return (time.perf_counter() - start) / 2

    def compute(self) -> tuple[float, float]:
        """Seconds that the programs of the forward and of the backward sweep take."""
        self.link.bandwidth = float("inf")
        with self.trainer.recording() as recorder:
            self.state, _ = self.trainer.step(self.state, self.batch, 1e-3)
        seconds = [0.0, 0.0]
        for span in recorder.spans:
            if span.lane == "run":
                seconds[span.visit != "forward"] += span.end - span.start
        return seconds[0], seconds[1]

    def link_bytes(self) -> tuple[int, int]:
        """Bytes that are sent in each sweep."""
        state = self.trainer.init_signature(self.batch)
        return tree_bytes(state.weights[:-1]), tree_bytes((state.weights, state.slots))


def measure(depth: int, width: int, tokens: int, repeats: int) -> list[dict]:
    """A row for each bandwidth and prefetch; all take turns."""
    runs = {prefetch: Run(depth, width, tokens, prefetch) for prefetch in PREFETCH}
    compute = [statistics.median(x) for x in zip(*[runs[1].compute() for _ in range(5)], strict=True)]
    sent = runs[1].link_bytes()
    settings = [
        (sweep, factor, factor * nbytes / seconds, prefetch)
        for sweep, nbytes, seconds in zip(("forward", "backward"), sent, compute, strict=True)
        for factor in (0.5, 1.0, 2.0)
        for prefetch in PREFETCH
    ]
    seen: dict[tuple, list[tuple[float, float, float]]] = {setting: [] for setting in settings}
    for number in range(repeats):
        print(f"round {number + 1} of {repeats}", file=sys.stderr)
        for setting in settings:
            *_, bandwidth, prefetch = setting
            alone = runs[prefetch].compute()
            times = zip(alone, (nbytes / bandwidth for nbytes in sent), strict=True)
            formula = sum(max(times_of_sweep) if prefetch else sum(times_of_sweep) for times_of_sweep in times)
            seen[setting].append((sum(alone), formula, runs[prefetch].seconds(bandwidth)))
    rows = []
    for (sweep, factor, bandwidth, prefetch), found in seen.items():
        alone, formula, seconds = (statistics.median(x) for x in zip(*found, strict=True))
        rows.append(
            {
                "break_even_of": sweep,
                "bandwidth_over_break_even": factor,
                "bytes_per_second": bandwidth,
                "prefetch": prefetch,
                "compute_seconds": alone,
                "link_seconds": sum(sent) / bandwidth,
                "seconds": seconds,
                "formula_seconds": formula,
                "ratio": statistics.median(measured / expected for _, expected, measured in found),
            }
        )
    return rows


def draw(rows: list[dict], path: Path) -> None:
    """Step time over bandwidth, measured and by the formula, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), dpi=120, layout="constrained")
    axes = figure.subplots()
    for prefetch, color in zip(PREFETCH, ("#d94801", "#6baed6", "#08519c"), strict=True):
        chosen = sorted(
            (r["bytes_per_second"] / 1e9, r["seconds"], r["formula_seconds"]) for r in rows if r["prefetch"] == prefetch
        )
        x, measured, formula = zip(*chosen, strict=True)
        axes.plot(x, formula, color=color, linewidth=1, linestyle="--")
        name = "max(compute, link) per sweep" if prefetch else "their sum"
        axes.plot(x, measured, "o", color=color, label=f"prefetch={prefetch}; dashed: {name}")
    axes.axhline(rows[0]["compute_seconds"], color="#969696", linewidth=0.8)
    axes.annotate(
        "compute alone",
        (x[-1], rows[0]["compute_seconds"]),
        xytext=(0, 3),
        textcoords="offset points",
        ha="right",
        fontsize=8,
    )
    axes.set(xlabel="bandwidth of the link, GB/s each way", ylabel="seconds per step", xscale="log", ylim=(0, None))
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=40, help="reversible blocks (default 40)")
    parser.add_argument("--width", type=int, default=512, help="of the residual streams (default 512)")
    parser.add_argument("--rows", type=int, default=512, help="tokens per step (default 512)")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each, of two steps (default 3)")
    parser.add_argument("--png", type=Path, help="draw the result into this file")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args()
    rows = measure(options.depth, options.width, options.rows, options.repeats)
    if options.png:
        draw(rows, options.png)
    if options.json:
        print(json.dumps(rows))
        return
    print("bandwidth   over break-even   prefetch    measured    formula    ratio")
    for row in rows:
        over = f"{row['bandwidth_over_break_even']:g} x {row['break_even_of']}"
        times = f"{row['seconds']:8.3f} s {row['formula_seconds']:8.3f} s {row['ratio']:8.2f}"
        print(f"{row['bytes_per_second'] / 1e9:6.2f} GB/s {over:>17} {row['prefetch']:10} {times}")


if __name__ == "__main__":
    main()
