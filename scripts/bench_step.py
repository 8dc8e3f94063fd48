"""Time of a training step: the streamed trainer beside whole-model JAX programs of the very same blocks, and trax.

    python scripts/bench_step.py [--size wide|deep|both] [--json] [--png FILE]

Rivals, all with Adam, all in one process, taking turns:

* `storing`: the loss of the whole model differentiated at once, activations stored.
* `scan`: `lax.scan` over `jax.checkpoint`ed blocks, which stores the inputs of blocks only.
* `reversible`: a whole-model `custom_vjp` that stores nothing and reverses.
* `trax` and `trax streaming`: trax 1.4.1's `Trainer` (all of the model in one program, reversing) and its
  `ReversibleSerialTrainer` (layer by layer). Left out unless `make trax` has installed it.
* `trax as it comes` and `trax streaming as it comes`: the same in a process of their own without the settings of
  malloc that all others get here, and which our command line makes: what users of trax have.
* `trax drop-in`: our `ReversibleSerialTrainer` in place of trax's, on the same trax layers.
* ours: `reverse` and `keep`, with shared memory (nothing is copied) and with pinned (weights and slots are copied to
  the accelerator and back; on a CPU these copies use the same cores, so their own time is given too).

A model of width 256, 6 layers (12 half residuals), and one of width 128, 24 layers; 4 sequences of 512. glibc's malloc
keeps its memory (see README). Making a rival and its first two steps are not measured, but give the compile time.

trax's model is made of trax's layers: the same sizes, half residuals and order, norms that are not centred, the same
approximate gelu, no dropout, the loss over the same tokens. What differs: sines added to the embedding in place of
rotary positions (less work), biases in attention and unused ones in the norms (0.2 % more weights in "wide", 0.4 % in
"deep"), attention over all keys with a mask, epsilons and initial values. Attention is `CausalAttention`, with which
trax's streaming trainer was faster than with `SelfAttention` or with rotary positions (at width 256). Its trainers
also compute the norms of weights and gradients in every step; that cannot be turned off.
"""

import argparse
import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**32 - 1)}
SIZES = {"wide": {"depth": 6, "width": 256}, "deep": {"depth": 24, "width": 128}}
VOCAB, BATCH = 256, 4
AS_IT_COMES = ("reverse", "trax streaming as it comes")


def trax_rivals(depth: int, width: int, batch: tuple) -> dict:
    """Makers of a step of trax's two trainers, and of ours behind the face of the second, on trax layers."""
    import jax
    import numpy as np

    from reversible_trainer.interop.trax import ReversibleSerialTrainer
    from reversible_trainer.interop.trax_layers import trax

    tl, optimizers, key = trax.layers, trax.optimizers, trax.fastmath.random.get_prng(0)
    tokens, targets, mask = batch
    batch = (tokens, targets, mask.astype(np.float32))
    signature = trax.shapes.signature(batch)

    def norm():
        return tl.LayerNorm(center=False)

    def model():
        halves = []
        for _ in range(depth):
            attention = tl.CausalAttention(width, n_heads=width // 64)
            feed_forward = (tl.Dense(4 * width), tl.FastGelu(), tl.Dense(width))
            halves += [tl.ReversibleHalfResidual(norm(), attention_layer=attention), tl.ReversibleSwap()]
            halves += [tl.ReversibleHalfResidual(norm(), *feed_forward), tl.ReversibleSwap()]
        # In its other mode the positions start at random.
        embedding = (tl.Embedding(VOCAB, width), tl.SinCosPositionalEncoding(mode="eval"), tl.Dup())
        head = (tl.Concatenate(), norm(), tl.Dense(VOCAB, use_bias=False), tl.WeightedCategoryCrossEntropy())
        return tl.Serial(*embedding, tl.ReversibleSerial(*halves), *head)

    def adam():
        return optimizers.Adam(1e-3, weight_decay_rate=0.0)

    def steps(trainer, layers):
        count = itertools.count()

        def once():
            value, _ = trainer.one_step(batch, key, step=next(count))
            jax.block_until_ready((value, [layer.weights for layer in layers], trainer.slots))

        return once

    def whole():
        serial, optimizer = model(), adam()
        serial.init(signature, rng=key)
        optimizer.tree_init(serial.weights)
        return steps(optimizers.Trainer(serial, optimizer, n_devices=1), [serial])

    def streaming(trainer_class):
        blocks, loss = optimizers.trainer.extract_reversible_blocks(model())
        optimizers.trainer.init_reversible_blocks(blocks, loss, signature, key)
        trainer = trainer_class(blocks, loss, adam, n_devices=1)
        return steps(trainer, trainer.all_layers)

    return {
        "trax": whole,
        "trax streaming": functools.partial(streaming, optimizers.ReversibleSerialTrainer),
        "trax drop-in": functools.partial(streaming, ReversibleSerialTrainer),
    }


def random_batch(length: int) -> tuple:
    import numpy as np

    tokens, targets = np.random.default_rng(0).integers(0, VOCAB, (2, BATCH, length)).astype(np.int32)
    return tokens, targets, np.ones((BATCH, length), bool)


def serve(size: str, length: int, name: str) -> None:
    """In a process of its own: makes a rival, then does a step for each line of the standard input."""
    once = trax_rivals(**SIZES[size], batch=random_batch(length))[name]()
    for _ in sys.stdin:
        once()
        print("done", flush=True)


def served(size: str, length: int, name: str):
    """A step of a rival that runs in another process, with malloc as it comes."""
    environment = {key: value for key, value in os.environ.items() if key not in MALLOC}
    command = [sys.executable, __file__, "--serve", name, "--size", size, "--length", str(length)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)

    def once():
        process.stdin.write("step\n")
        process.stdin.flush()
        if process.stdout.readline() != "done\n":
            raise RuntimeError(f"{name}: its process has failed")

    return once


def run(size: str, length: int, repeats: int, only: list[str] | None) -> dict:
    """One row per rival."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    from reversible_trainer.layers.base import put, take
    from reversible_trainer.models import reversible_transformer_lm
    from reversible_trainer.streaming import Placement
    from reversible_trainer.trainer import Trainer
    from reversible_trainer.tree import TrainState

    width, depth = SIZES[size]["width"], SIZES[size]["depth"]
    blocks = reversible_transformer_lm(
        VOCAB, width=width, depth=depth, heads=width // 64, ff_width=4 * width, arithmetic="float32"
    )
    first, block, loss = blocks[0], blocks[1], blocks[-1]
    batch = random_batch(length)
    key, optimizer = jax.random.key(0), optax.adam(1e-3)

    def middle_storing(weights, stack):
        for w in weights:
            inputs, rest = take(stack, 2)
            stack = put(rest, block.forward(w, state, inputs, key)[0])
        return stack

    def middle_scan(weights, stack):
        inputs, rest = take(stack, 2)
        body = jax.checkpoint(lambda x, w: (block.forward(w, state, x, key)[0], None))
        return put(rest, jax.lax.scan(body, inputs, weights)[0])

    @jax.custom_vjp
    def reversing(weights, streams):
        for w in weights:
            streams = block.forward(w, state, streams, key)[0]
        return streams

    def forward(weights, streams):
        outputs = reversing(weights, streams)
        return outputs, (weights, outputs)

    def backward(kept, cts):
        weights, streams = kept
        grads = []
        for w in reversed(weights):
            streams, (cts, g) = block.reverse_and_grad(w, state, streams, cts, key)
            grads.append(g)
        return grads[::-1], cts

    reversing.defvjp(forward, backward)

    def middle_reversible(weights, stack):
        inputs, rest = take(stack, 2)
        return put(rest, reversing(weights, inputs))

    def plain(middle):
        def mean(weights, batch):
            inputs, rest = take(batch, 1)
            stack = put(rest, first.forward(weights[0], states[0], inputs, key)[0])
            sums = loss.forward(weights[2], states[-1], middle(weights[1], stack), key)[0]
            return sums[0] / sums[1]

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(weights, slots, batch):
            value, grads = jax.value_and_grad(mean)(weights, batch)
            with jax.numpy_dtype_promotion("standard"):
                updates, slots = optimizer.update(grads, slots, weights)
            return optax.apply_updates(weights, updates), slots, value

        return step

    made = Trainer(blocks, optax.adam).init(key, batch)
    state, states = made.states[1], made.states
    copy = functools.partial(jax.tree.map, lambda x: jnp.array(np.array(x)))

    def whole(middle, stacked=False):
        weights = [copy(made.weights[0]), copy(made.weights[1:-1]), copy(made.weights[-1])]
        if stacked:
            weights[1] = jax.tree.map(lambda *x: jnp.stack(x), *weights[1])
        held = [weights, optimizer.init(weights)]
        step = plain(middle)

        def once():
            *held[:], value = step(*held, batch)
            jax.block_until_ready((held, value))

        return once

    def ours(policy, placement):
        trainer = Trainer(blocks, optax.adam, policy=policy, placement=placement)
        host = functools.partial(map, placement.to_host)  # not init: the rivals do not compile that either
        parts = (list(host(part)) for part in (made.weights, made.slots, made.states))
        held = [TrainState(0, placement.to_host(key), *parts)]

        def once():
            held[0], metrics = trainer.step(held[0], batch, 1e-3)
            jax.block_until_ready((held[0].weights, held[0].slots, metrics))

        return once

    def copies():
        """Only the copies of a step with pinned memory: weights in; weights and slots in and out."""
        placement = Placement.pinned()
        weights, slots = placement.to_host(made.weights), placement.to_host(made.slots)

        def once():
            for w in weights:
                placement.send(w).wait()
            for w, s in zip(weights, slots, strict=True):
                pending = placement.send((w, s))
                pending.wait()
                placement.fetch(pending.arrays()).wait()

        return once

    makers = {
        "storing": lambda: whole(middle_storing),
        "scan": lambda: whole(middle_scan, stacked=True),
        "reversible": lambda: whole(middle_reversible),
        "reverse, shared": lambda: ours("auto", Placement.shared()),
        "keep, shared": lambda: ours("keep", Placement.shared()),
        "reverse, pinned": lambda: ours("auto", Placement.pinned()),
        "keep, pinned": lambda: ours("keep", Placement.pinned()),
        "copies of pinned": copies,
    }
    if not only or any(name.startswith("trax") for name in only):
        try:
            makers |= trax_rivals(depth, width, batch)
            for name in ("trax", "trax streaming"):
                makers[f"{name} as it comes"] = functools.partial(served, size, length, name)
        except ImportError as error:
            print(f"{size}: without the rivals from trax. {error}", file=sys.stderr)
    steps, firsts = {}, {}
    for name, make in makers.items():
        if only and name not in only:
            continue
        print(f"{size}: compiling {name}", file=sys.stderr)
        start = time.perf_counter()
        steps[name] = make()
        for _ in range(2):  # trax's programs compile again for what their first step returned
            steps[name]()
        firsts[name] = time.perf_counter() - start
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(repeats):
        print(f"{size}: round {number + 1} of {repeats}", file=sys.stderr)
        for name, once in steps.items():
            start = time.perf_counter()
            once()
            seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    rows = {
        name: {
            "seconds": medians[name],
            "least": min(seconds[name]),
            "compile_seconds": firsts[name] - 2 * medians[name],
        }
        for name in steps
    }
    return {"size": size, **SIZES[size], "length": length, "batch": BATCH, "rows": rows, "ratios": ratios(medians)}


def ratios(medians: dict[str, float]) -> dict[str, float]:
    """What is claimed: ours over the rival of its kind; for pinned memory also less the time of its copies."""
    found = {}
    for ours, rival in (("reverse", "reversible"), ("keep", "storing"), ("reverse", "trax streaming"), AS_IT_COMES):
        for placement in ("shared", "pinned"):
            mine = medians.get(f"{ours}, {placement}")
            if mine is None or rival not in medians:
                continue
            found[f"{ours}, {placement} / {rival}"] = mine / medians[rival]
            if placement == "pinned" and "copies of pinned" in medians:
                less = (mine - medians["copies of pinned"]) / medians[rival]
                found[f"({ours}, {placement} - copies) / {rival}"] = less
    if medians.keys() >= {"trax drop-in", "trax streaming"}:
        found["trax drop-in / trax streaming"] = medians["trax drop-in"] / medians["trax streaming"]
    return found


def draw(found: list[dict], path: Path) -> None:
    """Bars of the step times, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), dpi=120, layout="constrained")
    for axes, result in zip(figure.subplots(1, len(found), squeeze=False)[0], found, strict=True):
        rows = {name: row for name, row in result["rows"].items() if name != "copies of pinned"}
        colors = ["#08519c" if "," in name else "#969696" for name in rows]
        bars = axes.barh(list(rows), [row["seconds"] for row in rows.values()], color=colors)
        axes.bar_label(bars, fmt=" %.2f s", fontsize=8)
        axes.invert_yaxis()
        axes.set_title(
            f"{result['depth']} layers of width {result['width']}, {BATCH} x {result['length']} tokens", fontsize=10
        )
        axes.set_xlabel("seconds per step")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=[*SIZES, "both"], default="both")
    parser.add_argument("--length", type=int, default=512, help="tokens of each of 4 sequences (default 512)")
    parser.add_argument("--repeats", type=int, default=7, help="measured steps of each rival (default 7)")
    parser.add_argument("--only", nargs="+", help="only these rivals, by name")
    parser.add_argument("--png", type=Path, help="draw the step times into this file")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.size, options.length, options.serve)
        return
    if not MALLOC.keys() <= os.environ.keys():  # malloc reads its settings when the process starts
        sys.exit(subprocess.run([sys.executable, *sys.argv], env={**MALLOC, **os.environ}).returncode)
    sizes = list(SIZES) if options.size == "both" else [options.size]
    found = [run(size, options.length, options.repeats, options.only) for size in sizes]
    if options.png:
        draw(found, options.png)
    if options.json:
        print(json.dumps(found))
        return
    for result in found:
        print(f"{result['depth']} layers of width {result['width']}, {result['batch']} x {result['length']} tokens")
        for name, row in result["rows"].items():
            print(f"  {name:26} {row['seconds']:.3f} s a step, {row['compile_seconds']:6.1f} s to compile")
        for name, ratio in result["ratios"].items():
            print(f"  {name:54} {ratio:.3f}")


if __name__ == "__main__":
    main()
