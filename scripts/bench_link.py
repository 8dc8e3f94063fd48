"""When is the link hidden? Step time over the bandwidth of a simulated link, against the formula.

    python scripts/bench_link.py [--json] [--png FILE]

Host and accelerator are the same memory here, and a thread per direction sleeps as long as a link of the given
bandwidth would take, outside the interpreter's lock. The blocks' own time is measured with a link that takes none.
With blocks of equal size the formula is, per sweep, max(compute, link) with `prefetch=1` and their sum with
`prefetch=0`. It takes as much time to send a block forward as to run it at the break-even bandwidth; one half and
twice that are measured too.
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


class Link(Placement):
    """A link that is simulated by sleeping; `bandwidth` in bytes per second each way."""

    def __init__(self, bandwidth: float):
        self.bandwidth = bandwidth
        self._in, self._out = (concurrent.futures.ThreadPoolExecutor(1) for _ in range(2))

    def _take(self, nbytes: int) -> None:
        if self.bandwidth < float("inf"):
            time.sleep(nbytes / self.bandwidth)

    def send(self, tree: Tree, keep: bool = False) -> Pending:
        return _Travelling(tree, self._in.submit(self._take, tree_bytes(tree)), arrives=True)

    def fetch(self, tree: Tree) -> Pending:
        nbytes = tree_bytes(tree)

        def leave() -> None:
            jax.block_until_ready(tree)
            self._take(nbytes)

        return _Travelling(tree, self._out.submit(leave), arrives=False)

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

    def wait(self) -> None:
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
        self.turn, self.event = 0.0, self.trainer.ledger.event
        self.trainer.ledger.event = self._event

    def _event(self, name: str) -> None:
        self.event(name)
        if name.startswith("loss"):  # the program of the loss has been started
            self.turn = time.perf_counter()

    def step(self, bandwidth: float) -> tuple[float, float]:
        """Seconds of the forward and of the backward sweep, to the arrival of the last block at the host."""
        self.link.bandwidth = bandwidth
        start = time.perf_counter()
        self.state, metrics = self.trainer.step(self.state, self.batch, 1e-3)
        jax.block_until_ready((self.state.weights, metrics))
        self.link.wait_for_all()
        end = time.perf_counter()
        return self.turn - start, end - self.turn

    def link_bytes(self) -> tuple[int, int]:
        """Bytes that are sent in each sweep."""
        state = self.trainer.init_signature(self.batch)
        return tree_bytes(state.weights[:-1]), tree_bytes((state.weights, state.slots))


def measure(depth: int, width: int, tokens: int, repeats: int) -> list[dict]:
    """A row for each bandwidth and prefetch; all take turns, and the medians count."""
    runs = {prefetch: Run(depth, width, tokens, prefetch) for prefetch in (0, 1)}
    free = float("inf")
    compute = [statistics.median(x) for x in zip(*[runs[1].step(free) for _ in range(repeats + 2)][2:], strict=True)]
    sent = runs[1].link_bytes()
    settings = [
        (sweep, factor, factor * nbytes / seconds, prefetch)
        for sweep, nbytes, seconds in zip(("forward", "backward"), sent, compute, strict=True)
        for factor in (0.5, 1.0, 2.0)
        for prefetch in (0, 1)
    ]
    seen: dict[tuple, list[float]] = {setting: [] for setting in settings}
    alone: list[tuple[float, float]] = []
    for number in range(repeats):
        print(f"round {number + 1} of {repeats}", file=sys.stderr)
        for setting in settings:
            alone.append(runs[1].step(free))  # beside each measurement: the machine may be busy for a while
            seen[setting].append(sum(runs[setting[3]].step(setting[2])))
    compute = [statistics.median(x) for x in zip(*alone, strict=True)]
    rows = []
    for (sweep, factor, bandwidth, prefetch), seconds in seen.items():
        link = [nbytes / bandwidth for nbytes in sent]
        combined = [max(c, t) if prefetch else c + t for c, t in zip(compute, link, strict=True)]
        rows.append(
            {
                "break_even_of": sweep,
                "bandwidth_over_break_even": factor,
                "bytes_per_second": bandwidth,
                "prefetch": prefetch,
                "compute_seconds": sum(compute),
                "link_seconds": sum(link),
                "seconds": statistics.median(seconds),
                "formula_seconds": sum(combined),
                "ratio": statistics.median(seconds) / sum(combined),
            }
        )
    return rows


def draw(rows: list[dict], path: Path) -> None:
    """Step time over bandwidth, measured and by the formula, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), dpi=120, layout="constrained")
    axes = figure.subplots()
    for prefetch, color in ((0, "#d94801"), (1, "#08519c")):
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
    parser.add_argument("--depth", type=int, default=16, help="reversible blocks (default 16)")
    parser.add_argument("--width", type=int, default=256, help="of the residual streams (default 256)")
    parser.add_argument("--rows", type=int, default=512, help="tokens per step (default 512)")
    parser.add_argument("--repeats", type=int, default=7, help="measured steps of each (default 7)")
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
