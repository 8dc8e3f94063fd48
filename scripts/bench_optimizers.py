"""What the matrix optimizers cost: inverse roots, updates, compilation, slots.

    python scripts/bench_optimizers.py [--json] [--png FILE]

* roots: inverse 4th roots of float32 statistics on one thread, ours against the published loop as it stands, side by
  side: a function of matrices and exponents, mapped with `vmap`, every statistic padded to the largest. Compiled with
  constant exponents it need not compute all powers of which one is wanted: the second figure.
  Statistics of full rank, and such as training makes them: a moving average of gradients of low rank with a decaying
  spectrum. The errors are those against float64, over the largest entry.
* updates: a whole update of a transformer block's weights, over Adam's; roots and bases every tenth update, so the time
  is the mean over ten.
* compilation: time to trace and compile an update of 64 equal weights over that for 4.
* slots: bytes per weight.
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SETS = {
    "8x128": [(8, 128)],
    "8x256": [(8, 256)],
    "8x512": [(8, 512)],
    "8x64 + 8x128 + 2x256": [(8, 64), (8, 128), (2, 256)],
}
KINDS = ("of full rank", "as in training")
BLOCK = {
    "query": (256, 256),
    "key": (256, 256),
    "value": (256, 256),
    "out": (256, 256),
    "up": (256, 1024),
    "down": (1024, 256),
}


def seconds_of(function: Callable[..., Any], *arguments: Any) -> float:
    """Seconds of one call."""
    import jax

    start = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    return time.perf_counter() - start


def literal_root(s, p, epsilon=1e-6):
    """The published coupled Newton loop for one matrix `[n, n]` and an exponent that is an array."""
    import jax
    import jax.numpy as jnp

    mm = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    eye = jnp.eye(s.shape[0], dtype=s.dtype)

    def power_step(c):
        i, v, _, value, _ = c
        v = v / jnp.linalg.norm(v)
        w = mm(s, v)
        new = mm(v, w)
        return i + 1, w, new, new, jnp.abs(new - value) > 1e-6

    v = jax.random.uniform(jax.random.key(0), (s.shape[0],), s.dtype, -1, 1)
    zero = jnp.zeros((), s.dtype)
    largest = jax.lax.while_loop(lambda c: (c[0] < 100) & c[4], power_step, (0, v, zero, zero, True))[3]

    def squares(n):
        def power(t):
            for _ in range(n):
                t = mm(t, t)
            return t

        return power

    def step(c):
        i, m, h, _, error, _ = c
        t = (1 + 1 / p) * eye - m / p
        exponent = jnp.round(jnp.log2(p)).astype(jnp.int32)
        new_m = mm(jax.lax.switch(exponent, [squares(n) for n in range(4)], t), m)
        new = jnp.max(jnp.abs(new_m - eye))
        return i + 1, new_m, mm(h, t), h, new, new < 1.2 * error

    a = s + epsilon * jnp.maximum(largest, 1e-16) * eye
    z = (1 + p) / (2 * jnp.linalg.norm(a))
    m, h = z * a, z ** (1 / p) * eye
    start = (0, m, h, h, jnp.max(jnp.abs(m - eye)), True)
    _, _, h, old, _, run = jax.lax.while_loop(lambda c: (c[0] < 100) & (c[4] > 1e-6) & c[5], step, start)
    return jnp.where(run, h, old)


def statistics_of(kind: str, count: int, n: int):
    """Float32 statistics `[count, n, n]`."""
    import numpy as np

    generator = np.random.default_rng(n)
    if kind == "of full rank":
        g = generator.normal(size=(count, n, 2 * n))
    else:
        g = generator.normal(size=(count, n, n // 4)) * np.logspace(0, -2, n // 4)
    return (g @ g.swapaxes(1, 2) / g.shape[-1] + 1e-6 * np.eye(n)).astype(np.float32)


def bench_roots(repeats: int) -> list[dict]:
    """One row per set and kind of matrices."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from reversible_trainer.optimizers import matrix

    def literal(stacks, exponents):
        pad = max(s.shape[-1] for s in stacks)
        padded = [jnp.tile(jnp.eye(pad), (len(s), 1, 1)).at[:, : s.shape[1], : s.shape[1]].set(s) for s in stacks]
        roots = jax.vmap(literal_root)(jnp.concatenate(padded), exponents)
        ends = np.cumsum([len(s) for s in stacks])[:-1]
        return [r[:, : s.shape[1], : s.shape[1]] for r, s in zip(jnp.split(roots, ends), stacks, strict=True)]

    def ours(stacks):
        return [matrix.inverse_root(s, 4, 1e-6)[0] for s in stacks]

    def error(found, stacks):
        worst = 0.0
        for root, s in zip(found, stacks, strict=True):
            values, v = np.linalg.eigh(np.float64(s))
            exact = (v * ((np.maximum(values, 0) + 1e-6 * values[:, -1:]) ** -0.25)[:, None]) @ v.swapaxes(1, 2)
            worst = max(worst, float(np.max(np.abs(np.float64(root) - exact)) / np.max(np.abs(exact))))
        return worst

    rows = []
    for name, sizes in SETS.items():
        for kind in KINDS:
            stacks = [jnp.asarray(statistics_of(kind, *size)) for size in sizes]
            exponents = jnp.full(sum(len(s) for s in stacks), 4.0)
            argument = jax.jit(literal).lower(stacks, exponents).compile()
            constant = jax.jit(lambda stacks, p=exponents: literal(stacks, p)).lower(stacks).compile()
            compiled = jax.jit(ours).lower(stacks).compile()
            errors = [error(argument(stacks, exponents), stacks), error(compiled(stacks), stacks)]
            calls = [(argument, stacks, exponents), (constant, stacks), (compiled, stacks)]
            rounds = [[seconds_of(*call) for call in calls] for _ in range(repeats)]  # they take turns
            literal_seconds, constant_seconds, our_seconds = (min(times) for times in zip(*rounds, strict=True))
            rows.append(
                {
                    "matrices": name,
                    "kind": kind,
                    "literal_seconds": literal_seconds,
                    "literal_seconds_constant_exponents": constant_seconds,
                    "our_seconds": our_seconds,
                    "speedup": literal_seconds / our_seconds,
                    "speedup_constant_exponents": constant_seconds / our_seconds,
                    "literal_error": errors[0],
                    "our_error": errors[1],
                }
            )
    return rows


def bench_updates(repeats: int) -> list[dict]:
    """One row per optimizer: cost of an update, of compilation, of slots."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    from reversible_trainer.optimizers import muon, shampoo, slot_bytes_per_weight, soap

    factories = {
        "Adam": optax.adam,
        "Muon": muon,
        "Muon, float32": functools.partial(muon, matmul_precision="highest"),
        "SOAP": soap,
        "Shampoo": functools.partial(shampoo, graft_type="adam", preconditioning_compute_steps=10),
    }
    generator = np.random.default_rng(0)
    weights = {name: jnp.asarray(generator.normal(size=shape), jnp.float32) for name, shape in BLOCK.items()}
    gradients = {name: jnp.asarray(generator.normal(size=shape), jnp.float32) for name, shape in BLOCK.items()}

    def compiled(factory, weights):
        optimizer = factory(1e-3)
        slots = jax.jit(optimizer.init)(weights)
        start = time.perf_counter()
        update = jax.jit(optimizer.update).lower(weights, slots, weights).compile()
        return update, slots, time.perf_counter() - start

    def compile_seconds(factory, count):
        return compiled(factory, {str(i): jnp.ones((64, 64)) for i in range(count)})[2]

    with jax.numpy_dtype_promotion("standard"):
        programs = {name: compiled(factory, weights)[:2] for name, factory in factories.items()}
        seconds: dict[str, list[float]] = {name: [] for name in programs}
        for _ in range(repeats):  # they take turns
            for name, (update, slots) in programs.items():
                start = time.perf_counter()
                for _ in range(10):
                    _, slots = update(gradients, slots, weights)
                jax.block_until_ready(slots)
                seconds[name].append((time.perf_counter() - start) / 10)
                programs[name] = update, slots
        rows = []
        for name, factory in factories.items():
            few, many = (statistics.median(compile_seconds(factory, n) for _ in range(3)) for n in (4, 64))
            rows.append(
                {
                    "optimizer": name,
                    "seconds": min(seconds[name]),
                    "over_adam": min(seconds[name]) / min(seconds["Adam"]),
                    "compile_seconds_4": few,
                    "compile_seconds_64": many,
                    "compile_ratio": many / few,
                    "slot_bytes_per_weight": slot_bytes_per_weight(factory, weights),
                }
            )
    return rows


def tables(found: dict) -> str:
    """The results as Markdown tables."""
    lines = [
        "| statistics | | published loop (constant exponents) | ours | faster | its error | our error |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found["roots"]:
        loop = f"{row['literal_seconds'] * 1e3:.0f} ({row['literal_seconds_constant_exponents'] * 1e3:.0f}) ms"
        faster = f"{row['speedup']:.1f} ({row['speedup_constant_exponents']:.1f}) x"
        times = f"{loop} | {row['our_seconds'] * 1e3:.0f} ms | {faster}"
        lines.append(
            f"| {row['matrices']} | {row['kind']} | {times} | {row['literal_error']:.0e} | {row['our_error']:.0e} |"
        )
    lines += [
        "",
        "| optimizer | an update, over Adam's | compiling 64 weights, over 4 | bytes of slots per weight |",
        "|---|---|---|---|",
    ]
    for row in found["updates"]:
        figures = f"{row['over_adam']:.1f} x | {row['compile_ratio']:.2f} x | {row['slot_bytes_per_weight']:.0f}"
        lines.append(f"| {row['optimizer']} | {figures} |")
    return "\n".join(lines)


def draw(found: dict, path: Path) -> None:
    """Speed of the roots, and cost of the updates, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    names = list(SETS)
    for offset, kind, color in zip((-0.2, 0.2), KINDS, ("#9ecae1", "#08519c"), strict=True):
        speedups = [row["speedup"] for row in found["roots"] if row["kind"] == kind]
        bars = left.bar(
            [i + offset for i in range(len(names))], speedups, 0.38, color=color, label=f"statistics {kind}"
        )
        left.bar_label(bars, fmt="%.1f", fontsize=8)
    left.axhline(1, color="#525252", linewidth=0.8, linestyle="--")
    left.set_xticks(range(len(names)), names, fontsize=8)
    left.set(title="inverse roots: times as fast as the published loop\n(one thread)", yscale="log")
    left.legend(frameon=False, fontsize=8)
    rows = found["updates"]
    bars = right.bar([row["optimizer"] for row in rows], [row["over_adam"] for row in rows], color="#d94801")
    right.bar_label(bars, fmt="%.1f", fontsize=8)
    right.set_title("an update of a transformer block, over Adam's\n(width 256; roots and bases every 10)")
    right.tick_params(axis="x", labelsize=8)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each, the best counts (default 5)")
    parser.add_argument("--part", choices=["roots", "updates"], help="only this one")
    parser.add_argument("--png", type=Path, help="draw the results into this file")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args()
    if options.part == "roots":
        # Before jax starts its threads: one processor, so one thread for either.
        os.environ["OPENBLAS_NUM_THREADS"] = "1"
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        found = {"roots": bench_roots(options.repeats)}
    elif options.part == "updates":
        found = {"updates": bench_updates(options.repeats)}
    else:
        found = {}
        for part in ("roots", "updates"):  # in processes of their own, as one of them has but one thread
            command = [sys.executable, __file__, "--part", part, "--repeats", str(options.repeats), "--json"]
            print(f"{part} ...", file=sys.stderr)
            finished = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            if finished.returncode:
                sys.exit(finished.returncode)
            found |= json.loads(finished.stdout)
    if options.png and len(found) == 2:
        draw(found, options.png)
    print(json.dumps(found) if options.json else tables({"roots": [], "updates": []} | found))


if __name__ == "__main__":
    main()
