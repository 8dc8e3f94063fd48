"""What a token costs in a long sequence: time and temporaries of local and hashed attention, forward and backward.

    python scripts/bench_attention.py [--lengths 1024 2048 ...] [--width 64] [--heads 2] [--chunk 64] [--json]

The lengths take turns, so that a noisy machine treats them alike; in each round all have equally many tokens. Times
are medians: `elapsed`, and `processor`, that of all cores, which other programs disturb less. `growth` is the cost of
a token over that at the first length: 1.0 means linear, and the aim is at most 1.2. glibc's malloc keeps its memory,
or the system would have to zero the temporaries of a long sequence, and of no short one, at each call.
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time

import jax

from reversible_trainer.layers import LocalAttention, LSHAttention
from reversible_trainer.layers.base import differentiate

# One arena: others give what does not fit into 64 MiB back to the system whatever the other two say.
MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**32 - 1), "MALLOC_ARENA_MAX": "1"}


@functools.partial(jax.jit, static_argnums=0)
def there_and_back(layer, weights, x, key):
    """(layer, weights, x, key) -> (cotangent of x, gradients of the weights)."""
    (y,), _, _, pullback = differentiate(layer, weights, (), (x,), key)
    return pullback((y,))


def measure(lengths: list[int], width: int, heads: int, chunk: int, hashes: int, repeats: int) -> list[dict]:
    """One entry for each layer and length."""
    key, runs = jax.random.key(0), []
    layers = {"local": LocalAttention(heads, chunk), "lsh": LSHAttention(heads, chunk, hashes=hashes)}
    for name, layer in layers.items():
        for length in lengths:
            x = jax.random.normal(key, (1, length, width))
            weights, _ = layer.init(key, (x,))
            program = there_and_back.lower(layer, weights, x, key).compile()
            jax.block_until_ready(program(weights, x, key))
            runs.append((name, length, program, (weights, x, key), []))
    for _ in range(repeats):
        for _, length, program, arguments, times in runs:
            calls = max(lengths) // length
            start, start_processor = time.perf_counter(), time.process_time()
            for _ in range(calls):
                jax.block_until_ready(program(*arguments))
            elapsed, processor = time.perf_counter() - start, time.process_time() - start_processor
            times.append((elapsed / (calls * length), processor / (calls * length)))
    rows = []
    for name, length, program, _, times in runs:
        elapsed, processor = (statistics.median(seconds) for seconds in zip(*times, strict=True))
        temporaries = program.memory_analysis().temp_size_in_bytes / length
        rows.append(
            {
                "layer": name,
                "length": length,
                "elapsed_seconds_per_token": elapsed,
                "processor_seconds_per_token": processor,
                "temporary_bytes_per_token": temporaries,
            }
        )
        first = next(row for row in rows if row["layer"] == name)
        for cost in ("elapsed_seconds", "processor_seconds", "temporary_bytes"):
            rows[-1][f"{cost}_growth"] = rows[-1][f"{cost}_per_token"] / first[f"{cost}_per_token"]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024 * 2**i for i in range(6)])
    parser.add_argument("--width", type=int, default=64, help="of the layer (default 64)")
    parser.add_argument("--heads", type=int, default=2, help="default 2")
    parser.add_argument("--chunk", type=int, default=64, help="positions of a chunk (default 64)")
    parser.add_argument("--hashes", type=int, default=1, help="rounds of hashing (default 1)")
    parser.add_argument("--repeats", type=int, default=9, help="rounds of measurement (default 9)")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = vars(parser.parse_args())
    if not MALLOC.keys() <= os.environ.keys():  # malloc reads its settings when the process starts
        sys.exit(subprocess.run([sys.executable, *sys.argv], env={**MALLOC, **os.environ}).returncode)
    as_json = options.pop("json")
    rows = measure(**options)
    if as_json:
        print(json.dumps(rows))
        return
    print("per token      elapsed  growth    processor  growth    temporaries  growth")
    for row in rows:
        print(
            f"{row['layer']:5} {row['length']:7,}"
            f"  {row['elapsed_seconds_per_token'] * 1e9:6,.0f} ns  {row['elapsed_seconds_growth']:5.2f}"
            f"  {row['processor_seconds_per_token'] * 1e9:9,.0f} ns  {row['processor_seconds_growth']:5.2f}"
            f"  {row['temporary_bytes_per_token']:10,.0f} B  {row['temporary_bytes_growth']:5.2f}"
        )


if __name__ == "__main__":
    main()
