"""Checks plan and ledger against the operating system: the rise of a process's peak RSS over one training run.

    python scripts/measure_rss.py [--blocks 16] [--policy keep] [--microbatches 2] [--update deferred] [--json]
    python scripts/measure_rss.py --disk DIR --optimizer adam --blocks 48 --width 512 --ff-width 2048 --rows 16
    python scripts/measure_rss.py --save DIR --optimizer adam --blocks 40 --width 512 --ff-width 2048 --rows 256

A fresh process with a small malloc mmap threshold (so that freed memory really goes back) trains a stack of
reversible blocks whose temporaries are large, and compares the rise of its peak RSS with what was planned for
accelerator and host, and with what the ledger says was there. On a CPU both are this process's memory.

With --save, a checkpoint is written into a folder while the last two steps run, and the peak RSS is compared with that
of two steps before.

With --disk, weights and slots (of Adam) wait in a file: the peak of the anonymous memory is compared with their bytes.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time

THRESHOLD = {"MALLOC_MMAP_THRESHOLD_": str(128 * 1024), "MALLOC_TRIM_THRESHOLD_": str(128 * 1024)}


def anonymous_bytes() -> int:
    """Of this process: what is no page of a file."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Trains three steps in this process. Sizes in bytes."""
    import jax
    import numpy as np
    import optax
    import psutil

    from reversible_trainer import checkpoint
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
        Serial,
    )
    from reversible_trainer.streaming import Placement
    from reversible_trainer.trainer import Trainer

    width, rows, disk = options.width, options.rows, options.disk
    half = HalfResidual(FeedForward(options.ff_width))
    model = [
        Serial(Embedding(64, width), Dup()),
        *[ReversibleSerial(half, ReversibleSwap())] * options.blocks,
        LossSerial(ReversibleConcatenatePair(), Dense(64), CrossEntropy()),
    ]
    tokens = np.zeros((options.microbatches, rows), np.int32)
    batch = (tokens, tokens, np.ones(tokens.shape, bool))
    placement = Placement.disk(disk) if disk else Placement.pinned()
    settings = {"policy": options.policy, "microbatches": options.microbatches, "update": options.update}
    trainer = Trainer(model, getattr(optax, options.optimizer), placement=placement, **settings)
    plan = trainer.plan(batch)  # compiles everything: the compiler's own memory is no part of the comparison
    state = trainer.init(jax.random.key(0), batch)
    state, metrics = trainer.step(state, batch, 1e-3)  # once, so that thread pools and code are in memory
    jax.block_until_ready((state.weights, metrics))  # the loss is there before the backward sweep is done
    host_bytes = trainer.ledger.host_bytes
    trainer.ledger.peak_bytes = 0
    process = psutil.Process()
    resident = anonymous_bytes if disk else lambda: process.memory_info().rss
    before = resident() - (0 if disk else host_bytes)

    def peak_of_two_steps(state, writer=None):
        peak, done = [0], threading.Event()

        def watch() -> None:
            while not done.wait(0.0005):
                peak[0] = max(peak[0], resident())

        watcher = threading.Thread(target=watch)
        watcher.start()
        for _ in range(2):
            hook = () if writer is None else (writer.wait_for,)
            state, metrics = trainer.step(state, batch, 1e-3, *hook)
        jax.block_until_ready((state.weights, metrics))  # the loss is there before the backward sweep is done
        done.set()
        watcher.join()
        return state, peak[0]

    state, peak = peak_of_two_steps(state)
    if options.save:
        with checkpoint.Writer(options.save, checkpoint.Description.of(model, optax.sgd, 0), keep=1) as writer:
            start, times = time.perf_counter(), []
            written = writer.save(state, trainer.update_order)
            written.add_done_callback(lambda _: times.append(time.perf_counter() - start))
            state, saving = peak_of_two_steps(state, writer)
        return {
            "host_bytes": host_bytes,
            "rss_peak_bytes": peak,
            "rss_peak_saving_bytes": saving,
            "seconds_to_save": times[0],
            "ratio": saving / peak,
        }
    rise, ledger = peak - before, trainer.ledger
    if disk:
        return {
            "blocks": options.blocks,
            "disk_bytes": host_bytes,
            "ledger_peak_bytes": ledger.peak_bytes,
            "anonymous_rise_bytes": rise,
            "anonymous_bytes": peak,
            "ratio": rise / host_bytes,
        }
    return {
        "blocks": options.blocks,
        "temporary_bytes": max(p.temporary_bytes for p in trainer.programs),
        "ledger_peak_bytes": ledger.peak_bytes,
        "planned_peak_bytes": plan.peak_accelerator_bytes,
        "planned_host_bytes": plan.peak_host_bytes,
        "host_bytes": ledger.peak_host_bytes,
        "rss_rise_bytes": rise,
        "ratio": rise / (ledger.peak_bytes + ledger.peak_host_bytes),
        "ratio_to_plan": rise / (plan.peak_accelerator_bytes + plan.peak_host_bytes),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=16, help="reversible blocks (default 16)")
    parser.add_argument("--width", type=int, default=32, help="width of each residual stream (default 32)")
    parser.add_argument("--ff-width", type=int, default=16384, help="width of the feed-forward layers (default 16384)")
    parser.add_argument("--rows", type=int, default=4096, help="tokens (default 4096)")
    parser.add_argument("--policy", default="auto", help="of the blocks: auto, keep, recompute (default auto)")
    parser.add_argument("--microbatches", type=int, default=1, help="of so many tokens each (default 1)")
    parser.add_argument("--update", default="fused", help="fused or deferred (default fused)")
    parser.add_argument("--optimizer", default="sgd", help="name of one of optax's (default sgd)")
    parser.add_argument("--disk", metavar="DIR", help="keep weights and slots in a file in this folder")
    parser.add_argument("--save", metavar="DIR", help="compare with steps during which a checkpoint is written here")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    arguments = parser.parse_args()
    if not set(THRESHOLD) <= os.environ.keys():  # malloc reads its settings when the process starts
        sys.exit(subprocess.run([sys.executable, *sys.argv], env={**os.environ, **THRESHOLD}).returncode)
    result = measure(arguments)
    if arguments.json:
        print(json.dumps(result))
    else:
        print(
            "\n".join(
                f"{k:20} {v / 2**20:10.1f} MiB" if "bytes" in k else f"{k:20} {v:10.3f}" for k, v in result.items()
            )
        )


if __name__ == "__main__":
    main()
