"""The memory plan holds: against the ledger, within budgets, and by hand arithmetic for models of any size."""

import functools
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from training import ADAFACTOR, SHAMPOO, SIZES, batch, lm, small_lm, standard_lm

from reversible_trainer.layers import CrossEntropy, Dense, Embedding, FeedForward, Frozen, LossSerial, RMSNorm, Serial
from reversible_trainer.streaming import Placement, peaks
from reversible_trainer.trainer import OutOfMemoryError, Trainer
from reversible_trainer.tree import tree_bytes

BF16 = {"compute_dtype": "bfloat16"}
DEFERRED = {"update": "deferred"}
SETTINGS = [  # model, optimizer, placement, options
    (small_lm, optax.sgd, "pinned", {}),
    (small_lm, optax.sgd, "pinned", {"prefetch": 0}),
    (small_lm, optax.sgd, "pinned", {"prefetch": 2}),
    (small_lm, optax.sgd, "shared", {}),
    (small_lm, optax.sgd, "shared", {"prefetch": 2, "microbatches": 2}),
    (small_lm, optax.sgd, "disk", {"microbatches": 2}),
    (small_lm, optax.adam, "pinned", {"policy": "keep"}),
    (small_lm, optax.adam, "pinned", {"policy": "keep", "microbatches": 2}),
    (small_lm, optax.adam, "pinned", {"policy": "recompute"}),
    (small_lm, optax.adam, "pinned", {"policy": "recompute", "waiting": "host"}),
    (small_lm, optax.adam, "pinned", {"policy": "recompute", "waiting": "host", "microbatches": 2, "prefetch": 2}),
    (small_lm, optax.adam, "pinned", {"waiting": "host", "microbatches": 2}),
    (small_lm, optax.adam, "pinned", {"waiting": "host", "microbatches": 2, "prefetch": 0, **DEFERRED}),
    (small_lm, optax.adam, "pinned", {**DEFERRED, "clip_global": 1.0}),
    (small_lm, optax.adam, "pinned", {**DEFERRED, "prefetch": 2, "microbatches": 2}),
    (small_lm, optax.adam, "pinned", {"transactional": True}),
    (small_lm, optax.adam, "pinned", BF16),
    (small_lm, optax.adam, "pinned", {**BF16, "microbatches": 2, "prefetch": 2}),
    (small_lm, ADAFACTOR, "pinned", {"clip_per_block": 1.0}),
    pytest.param(small_lm, SHAMPOO, "pinned", {"prefetch": 2}, marks=pytest.mark.slow),
    ("standard", optax.sgd, "pinned", {}),
    ("standard", optax.sgd, "pinned", {"policy": "keep", "prefetch": 0}),
    ("standard", optax.sgd, "shared", {"microbatches": 2}),
    pytest.param(lm, optax.sgd, "pinned", {"microbatches": 2}, marks=pytest.mark.slow),
    pytest.param(standard_lm, optax.sgd, "pinned", {}, marks=pytest.mark.slow),
    ("frozen", optax.adam, "pinned", {}),
    ("frozen", optax.adam, "pinned", {"microbatches": 2, "prefetch": 2}),
]


HELD = 256  # bytes of the metrics of steps which nobody has read yet: the plan allows for eight


def frozen(depth):
    """Only the upper half of the blocks is trained."""
    model = small_lm(depth)
    return [*map(Frozen, model[: depth // 2]), *model[depth // 2 :]]


def standard(depth):
    """Without reversible blocks."""
    hidden = Serial(RMSNorm(), FeedForward(16))
    return [
        Embedding(SIZES["vocab_size"], 8),
        *[hidden] * depth,
        LossSerial(Dense(SIZES["vocab_size"]), CrossEntropy()),
    ]


def place(name, folder):
    return Placement.disk(str(folder)) if name == "disk" else getattr(Placement, name)()


@pytest.mark.parametrize(("model", "optimizer", "placement", "options"), SETTINGS)
def test_the_plan_covers_the_ledger_closely(model, optimizer, placement, options, tmp_path):
    """For the step, for each block and for each of its programs."""
    blocks = {"frozen": frozen, "standard": standard}.get(model, model)(4)
    trainer = Trainer(blocks, optimizer, placement=place(placement, tmp_path), **options)
    plan, events = trainer.plan(batch()), []
    trainer.ledger.watch = events.append
    state = trainer.init(jax.random.key(0), batch())
    for number in range(2):
        state, _ = trainer.step(state, batch(number), 0.01)
    jax.block_until_ready((state.weights, state.slots))
    assert trainer.ledger.peak_bytes <= plan.peak_accelerator_bytes <= 1.1 * trainer.ledger.peak_bytes
    assert trainer.ledger.peak_host_bytes <= plan.peak_host_bytes <= 1.1 * trainer.ledger.peak_host_bytes
    found = peaks(events)
    for i, block in enumerate(plan.blocks):
        assert max(found[i].values()) <= block.peak_bytes <= 1.1 * max(found[i].values()), i
        for name, total in found[i].items():
            assert total <= block.totals[name] <= 1.1 * total + HELD, (i, name)


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize(
    ("model", "options"),
    [(small_lm, {"policy": "recompute"}), (small_lm, {}), pytest.param(lm, {}, marks=pytest.mark.slow)],
)
def test_where_activations_wait_changes_no_number(model, options, microbatches):
    found = []
    for waiting in ("accelerator", "host"):
        settings = {"placement": Placement.pinned(), "microbatches": microbatches, "waiting": waiting, **options}
        trainer = Trainer(model(3), optax.adam, **settings)
        state = trainer.init(jax.random.key(0), batch())
        for number in range(2):
            state, metrics = trainer.step(state, batch(number), 0.01)
        found.append(jax.tree.map(np.asarray, (state.weights, state.slots, metrics)))
    jax.tree.map(np.testing.assert_array_equal, *found)


def test_saved_inputs_that_wait_on_the_host_leave_the_accelerator():
    def peak(depth, waiting):
        settings = {"placement": Placement.pinned(), "policy": "recompute", "waiting": waiting}
        return Trainer(small_lm(depth, 0.0), optax.sgd, **settings).plan(batch(length=64)).peak_accelerator_bytes

    assert peak(16, "host") == peak(8, "host")
    assert peak(16, "accelerator") > 1.3 * peak(8, "accelerator")


@pytest.mark.parametrize("prefetch", [2, 3])
def test_no_block_is_sent_before_what_it_is_sent_has_been_made(prefetch):
    """In the update sweep the first block needs the gradients of the visit before."""
    found = []
    for ahead in (0, prefetch):
        trainer = Trainer(small_lm(1), optax.sgd, placement=Placement.pinned(), prefetch=ahead, update="deferred")
        state = trainer.init(jax.random.key(0), batch())
        for number in range(2):
            state, _ = trainer.step(state, batch(number), 0.1)
        found.append(jax.tree.map(np.asarray, state.weights))
    jax.tree.map(np.testing.assert_array_equal, *found)


def budgets(count):
    """The plan of the least memory, that of all blocks keeping, and `count` budgets from one to the other."""
    make = functools.partial(Trainer, small_lm(8, 0.0), optax.sgd, placement=Placement.pinned())
    least, most = make().plan(batch()), make(policy="keep").plan(batch())
    sizes = np.linspace(least.peak_accelerator_bytes, most.peak_accelerator_bytes, count).astype(int).tolist()
    return make, least, most, sizes


def test_with_more_memory_less_is_computed_twice():
    make, least, most, sizes = budgets(8)
    plans = [make(accelerator_memory=size).plan(batch()) for size in sizes]
    assert all(p.peak_accelerator_bytes <= size for p, size in zip(plans, sizes, strict=True))
    peaks, flops = [p.peak_accelerator_bytes for p in plans], [p.flops for p in plans]
    assert peaks == sorted(peaks) and flops == sorted(flops, reverse=True)
    assert len(set(peaks)) >= 4 and (peaks[0], flops[-1]) == (least.peak_accelerator_bytes, most.flops)


def test_the_least_budget_is_kept_and_one_byte_less_refused():
    make, least, *_ = budgets(2)
    trainer = make(accelerator_memory=least.peak_accelerator_bytes)
    state = trainer.init(jax.random.key(0), batch())
    for number in range(2):
        state, _ = trainer.step(state, batch(number), 0.1)
    assert trainer.ledger.peak_bytes <= least.peak_accelerator_bytes
    lean = make(accelerator_memory=least.peak_accelerator_bytes - 1, waiting="accelerator")
    for refused in (lean.plan, functools.partial(lean.init, jax.random.key(0))):
        with pytest.raises(
            ValueError, match=r"needs [\d,]+ bytes of accelerator memory, and [\d,]+ are there"
        ) as error:
            refused(batch())
    assert "microbatches=2 saves" in str(error.value) and "prefetch=0 saves" in str(error.value)
    count = make(accelerator_memory=least.peak_accelerator_bytes - 1, microbatches="auto").plan(batch()).microbatches
    assert count == 2


def test_a_run_that_does_not_fit_the_host_is_refused(monkeypatch):
    trainer = Trainer(small_lm(2), optax.adam, placement=Placement.pinned(), transactional=True)
    plan = trainer.plan(batch())
    needed = plan.peak_host_bytes + plan.peak_accelerator_bytes  # on a CPU they are in the same memory
    for there, fits in ((needed, True), (needed - 1, False)):
        monkeypatch.setattr("reversible_trainer.streaming.placement.host_available", lambda there=there: there)
        if fits:
            trainer.check_memory(batch())
        else:
            with pytest.raises(
                ValueError, match=r"of host memory .*, and [\d,]+ are there.*disk\(folder\) saves .*slots saves"
            ):
                trainer.check_memory(batch())


def test_when_memory_runs_out_the_error_says_what_was_planned_and_what_was_there(monkeypatch):
    trainer = Trainer(small_lm(2), optax.adam, placement=Placement.pinned())
    state = trainer.init(jax.random.key(0), batch())
    execute = trainer.placement.execute

    def full(program, leaves):
        if program.name.startswith("loss"):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 12 bytes.")
        return execute(program, leaves)

    monkeypatch.setattr(trainer.placement, "execute", full)
    with pytest.raises(OutOfMemoryError, match="at block 3 LossSerial: RESOURCE_EXHAUSTED") as error:
        trainer.step(state, batch(), 0.1)
    planned = trainer.plan(batch()).peak_accelerator_bytes
    assert f"Planned were {planned:,} bytes" in str(error.value)
    assert "weights" in str(error.value) and "microbatches" in str(error.value)
    assert "go on from the last checkpoint" in str(error.value.__notes__)


def test_headroom_counts_what_still_fits(monkeypatch):
    make = functools.partial(Trainer, small_lm(4), optax.adam, placement=Placement.pinned())
    plan = make().plan(batch())
    deeper = Trainer(small_lm(5), optax.adam, placement=Placement.pinned()).plan(batch())
    assert deeper.peak_accelerator_bytes == plan.peak_accelerator_bytes
    block = deeper.peak_host_bytes - plan.peak_host_bytes
    there = plan.peak_host_bytes + plan.peak_accelerator_bytes + 5 * block
    monkeypatch.setattr("reversible_trainer.streaming.placement.host_available", lambda: there)
    found = make().headroom(batch())
    assert found.blocks == 5 and found.rows is not None and found.microbatches is not None


def test_init_says_what_each_block_added(caplog):
    trainer = Trainer(small_lm(2), optax.adam, placement=Placement.pinned())
    with caplog.at_level("INFO", "reversible_trainer"):
        state = trainer.init(jax.random.key(0), batch())
    sizes = [tree_bytes((w, s, t)) for w, s, t in zip(state.weights, state.slots, state.states, strict=True)]
    assert [added.host_bytes for added in trainer.added] == sizes
    assert all(added.accelerator_bytes >= size for added, size in zip(trainer.added, sizes, strict=True))
    assert len([r for r in caplog.records if r.message.startswith("init: block")]) == 4


@pytest.mark.parametrize(
    ("width", "depth", "heads", "ff_width", "billions"),
    [(4096, 32, 32, 16384, 6.8), pytest.param(8192, 80, 64, 32768, 65.2, marks=pytest.mark.slow)],
)
def test_counts_of_a_large_model_equal_hand_arithmetic(width, depth, heads, ff_width, billions):
    """In a process of its own, whose memory and time are measured."""
    script = f"""
import json, time
import jax, numpy as np, optax
from reversible_trainer.models import reversible_transformer_lm
from reversible_trainer.streaming import Placement
from reversible_trainer.trainer import Trainer
start = time.perf_counter()
blocks = reversible_transformer_lm(vocab_size=32000, width={width}, depth={depth}, heads={heads}, ff_width={ff_width})
trainer = Trainer(blocks, optax.adam, placement=Placement.pinned(), microbatches=2)
ints, mask = jax.ShapeDtypeStruct((2, 1024), np.int32), jax.ShapeDtypeStruct((2, 1024), bool)
plan = trainer.plan((ints, ints, mask))
found = dict(
    weights=sum(b.weights for b in plan.blocks), slots=sum(b.slot_bytes for b in plan.blocks), flops=plan.flops,
    sent=[s.send_bytes for s in plan.sweeps], checkpoint=plan.checkpoint_bytes,
    seconds=time.perf_counter() - start)
found["resident"] = 1024 * int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
print(json.dumps(found))
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    found = json.loads(result.stdout.splitlines()[-1])
    D, F, V, L, T = width, ff_width, 32000, depth, 1024
    matrices = 4 * D * D + 2 * D * F
    head = 2 * D * V
    # Embedding; blocks with two norms and the feed-forward layer's biases; final norm, logits.
    weights = V * D + L * (matrices + 2 * D + F + D) + 2 * D + head
    assert found["weights"] == weights and round(weights / 1e9, 1) == billions
    counts = L + 2  # one int32 per block
    assert found["slots"] == 2 * 4 * weights + 4 * counts
    assert found["checkpoint"] == 3 * 4 * weights + 4 * counts
    chunks = [(start, min(start + 128, T)) for start in range(0, T, 128)]
    attention = 2 * 2 * D * sum((end - start) * end for start, end in chunks)  # scores and their products with values
    # Of a sequence: forward, once more when reversing, and twice for the gradients.
    assert found["flops"] == 2 * (4 * L * (2 * T * matrices + attention) + 3 * 2 * T * head)
    assert found["sent"] == [4 * (weights - head - 2 * D), 3 * 4 * weights + 4 * counts]
    assert found["resident"] < 2e9


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--policy", "keep", "--blocks", "8", "--rows", "512"),
        ("--microbatches", "2"),
        (
            "--update",
            "deferred",
            "--optimizer",
            "adam",
            "--width",
            "256",
            "--ff-width",
            "2048",
            "--rows",
            "512",
            "--blocks",
            "80",
        ),
    ],
)
def test_resident_memory_rises_as_planned(arguments):
    """Each above 1 GB."""
    command = [sys.executable, "scripts/measure_rss.py", "--json", *arguments]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert found["planned_peak_bytes"] + found["planned_host_bytes"] > 1e9
    assert 0.85 <= found["ratio_to_plan"] <= 1.15, found


def test_flops_of_loops_and_branches():
    from reversible_trainer.streaming.programs import count_flops

    def count(function, *arguments):
        return count_flops(jax.make_jaxpr(function)(*arguments).jaxpr)

    a = jnp.ones((4, 4))
    assert count(lambda a: jax.lax.scan(lambda c, _: (c @ a, None), a, length=5)[0], a) == 5 * 2 * 64
    assert count(lambda a: jax.lax.cond(a[0, 0] > 0, lambda: a @ a, lambda: a), a) == 2 * 64
    x, kernel = jnp.ones((2, 8, 8, 3)), jnp.ones((3, 3, 3, 5))
    convolve = functools.partial(jax.lax.conv_general_dilated, window_strides=(1, 1), padding="VALID")
    numbers = ("NHWC", "HWIO", "NHWC")
    assert count(lambda x: convolve(x, kernel, dimension_numbers=numbers), x) == 2 * (2 * 6 * 6 * 5) * (3 * 3 * 3)
