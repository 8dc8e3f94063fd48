"""Plans: a schedule's sweeps run over a ledger without arrays; the choice of a schedule that fits; what would help."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from reversible_trainer import sweeps
from reversible_trainer.layers.base import Layer, Stack
from reversible_trainer.schedule import Schedule, ScheduledBlock, clock_signature
from reversible_trainer.streaming import (
    Accelerator,
    BlockPlan,
    Event,
    Ledger,
    MemoryPlan,
    Placement,
    Span,
    SweepPlan,
    Tally,
    peaks,
)
from reversible_trainer.tree import tree_bytes, tree_size

_HELD_METRICS = 8  # steps whose metrics the plan lets a caller hold unread
_SWEEPS = {"forward": ("forward",), "backward": ("loss", "backward"), "update": ("update",)}


def plan(schedule: Schedule, placement: Placement, prefetch: int, transactional: bool) -> MemoryPlan:
    """What `init` and steps will need; nothing is allocated.

    Args:
      schedule: Of the blocks.
      placement: Where arrays would live.
      prefetch: Blocks sent ahead.
      transactional: Whether a step leaves the state it was given.
    """
    ledger = Ledger()
    events: list[Event] = []
    ledger.watch = events.append
    clock = clock_signature()
    accelerator = Accelerator(Placement.planned(placement), ledger, prefetch, transactional)
    state, _ = sweeps.init(accelerator, schedule, accelerator.placement.to_host(clock.key))
    copies = sweeps.cast(accelerator, schedule, state) if schedule.casts else None
    batches, tally = [schedule.batch] * schedule.microbatches, Tally()
    clock = accelerator.placement.to_host(clock)
    before = state.copy()  # what a transactional step leaves to the caller
    metrics, _ = sweeps.train(accelerator, schedule, state, copies, batches, clock)
    del before
    held = [accelerator.placement.to_accelerator(metrics) for _ in range(_HELD_METRICS)]
    ledger.track("metrics", held)
    # A second step begins while the last program of the first still runs.
    begin, accelerator.recorder = len(events), tally
    sweeps.train(accelerator, schedule, state, copies, batches, clock)
    totals = peaks(events)
    assert ledger.peak is not None
    return MemoryPlan(
        blocks=tuple(_block_plan(schedule, b, totals[b.index], tally.spans) for b in schedule.blocks),
        sweeps=tuple(
            SweepPlan(name, *_amounts(span for span in tally.spans if span.visit in visits))
            for name, visits in _SWEEPS.items()
            if name != "update" or schedule.deferred
        ),
        peak_accelerator_bytes=ledger.peak_bytes,
        peak_host_bytes=ledger.peak_host_bytes,
        checkpoint_bytes=schedule.host_bytes,
        peak=ledger.peak,
        events=tuple(events[begin:]),
        microbatches=schedule.microbatches,
        waiting="host" if schedule.on_host else "accelerator",
        why="as set",
        tokens=tree_size(schedule.batch[0]) * schedule.microbatches,
    )


def _amounts(spans: Iterable[Span]) -> tuple[float, int, int]:
    """Floating-point operations, bytes sent and bytes fetched."""
    sums: collections.Counter[str] = collections.Counter()
    for span in spans:
        sums[span.lane] += span.amount  # type: ignore  (floating-point operations may exceed an int's exact range)
    return float(sums["run"]), int(sums["send"]), int(sums["fetch"])


def _block_plan(schedule: Schedule, block: ScheduledBlock, totals: dict[str, int], spans: Sequence[Span]) -> BlockPlan:
    programs = {kind: schedule.program(kind, block.index) for kind in schedule.kinds(block.index)}
    forward = programs.get("forward")
    others = [program.bytes for kind, program in programs.items() if kind != "forward"]
    flops, sent, fetched = _amounts(span for span in spans if span.block == block.index)
    weight_bytes = tree_bytes(block.weights)
    return BlockPlan(
        name=block.layer.name,
        policy=block.policy,
        why=block.why,
        weights=tree_size(block.weights),
        weight_bytes=weight_bytes,
        slot_bytes=tree_bytes(block.slots),
        gradient_bytes=weight_bytes if block.layer.trains else 0,
        temporary_bytes=max(program.temporary_bytes for program in programs.values()),
        residual_bytes=schedule.microbatches * _residual_bytes(block, schedule),
        saved_bytes=schedule.microbatches * (tree_bytes(block.inputs) if block.saves_inputs else 0),
        stack_bytes=schedule.microbatches * tree_bytes(block.stack),
        forward_bytes=forward.bytes if forward else 0,
        backward_bytes=max(others, default=0),
        flops=flops,
        send_bytes=sent,
        fetch_bytes=fetched,
        peak_bytes=max(totals.values()),
        totals=totals,
    )


def _residual_bytes(block: ScheduledBlock, schedule: Schedule) -> int:
    if block.policy in ("loss", "frozen"):
        return 0
    forward = schedule.program("forward", block.index)
    return sum(
        tree_bytes(part)
        for tag, part in zip(forward.tags, forward.out_tree.unflatten(forward.outputs[:-1]), strict=True)
        if tag == "residuals"
    )


# The choice.


def microbatch_counts(batch: Stack) -> list[int]:
    """Into how many microbatches of the same size such a batch can be cut."""
    rows = min((x.shape[0] if x.shape else 1) for x in batch)
    return [count for count in range(1, rows + 1) if rows % count == 0]


def keep_what_fits(
    schedule: Schedule, keeping: Callable[[frozenset[int]], Schedule], fits: Callable[[Schedule], bool]
) -> Schedule:
    """The schedule with as many blocks that keep their residuals as fit, the last ones first: theirs live shortest.

    Args:
      schedule: That fits.
      keeping: Makes another one in which the blocks with these indices keep.
      fits: Tells whether it does.
    """
    places = [block.index for block in schedule.blocks if block.policy in ("reverse", "recompute")]
    best, low, high = schedule, 0, len(places)
    while low < high:  # the peak rises with the number of blocks that keep
        middle = (low + high + 1) // 2
        candidate = keeping(frozenset(places[len(places) - middle :]))
        if fits(candidate):
            best, low = candidate, middle
        else:
            high = middle - 1
    return best


# What would help.


def savings(
    settings: dict[str, Any],
    microbatches: int,
    on_host: bool,
    batch: Stack,
    needed: int,
    measure: Callable[[dict[str, Any]], int],
    others: dict[str, int],
) -> list[str]:
    """The three settings that would save most of what is too much, each with its number.

    Args:
      settings: The trainer's.
      microbatches: How many there are.
      on_host: Whether activations wait there.
      batch: Its signature or a batch.
      needed: Bytes now.
      measure: Bytes with other settings; may raise `ValueError` if they cannot be had.
      others: What else would save how much.
    """
    found = {name: (saved, f"{name} saves {saved:,}") for name, saved in others.items()}  # the best of each setting
    for name, value in _alternatives(settings, microbatches, on_host, batch):
        try:
            saved = needed - measure({name: value})
        except (ValueError, TypeError):
            continue
        found[name] = max(found.get(name, (0, "")), (saved, f"{name}={value!r} saves {saved:,}"))
    best = sorted((saving for saving in found.values() if saving[0] > 0), reverse=True)[:3]
    return [text for _, text in best]


def _alternatives(
    settings: dict[str, Any], microbatches: int, on_host: bool, batch: Stack
) -> Iterator[tuple[str, Any]]:
    """Settings with values that may need less memory."""
    more = [count for count in microbatch_counts(batch) if count > microbatches]
    for count in {*more[:1], *more[-1:]}:
        yield "microbatches", count
    yield "compute_dtype", "bfloat16" if settings["compute_dtype"] is None else None
    leanest = {"prefetch": 0, "policy": "auto", "transactional": False}
    if settings["clip_global"] is None:
        leanest["update"] = "fused"
    for name, value in leanest.items():
        if settings[name] != value:
            yield name, value
    if not on_host:
        yield "waiting", "host"


def leaner(settings: dict[str, Any], plan: MemoryPlan) -> list[str]:
    """Settings that may be made to need less memory, by name; nothing is planned."""
    found = ["microbatches (more)"]
    if settings["prefetch"]:
        found.append("prefetch (0)")
    if plan.waiting == "accelerator" and (plan.microbatches > 1 or any(b.saved_bytes for b in plan.blocks)):
        found.append("waiting ('host')")
    if any(block.policy == "keep" for block in plan.blocks):
        found.append("policy ('reverse')")
    return [*found, "accelerator_memory (what there really is)", "placement (Placement.disk)"]


class Headroom(NamedTuple):
    """How much more would fit; None: nothing of it takes memory that is limited.

    Attributes:
      blocks: More blocks like the most frequent one.
      microbatches: More microbatches of the same size.
      rows: More rows of the batch's first axis, by what a batch of twice the size takes.
    """

    blocks: int | None
    microbatches: int | None
    rows: int | None


def headroom(
    blocks: Sequence[Layer],
    batch: Stack,
    limits: Sequence[tuple[Callable[[MemoryPlan], int], int]],
    planned: Callable[[dict[str, Any], Stack], MemoryPlan],
) -> Headroom:
    """How many more blocks, microbatches or rows would fit.

    Args:
      blocks: Of the model.
      batch: Its signature or a batch.
      limits: What of a plan is limited, and to what.
      planned: The plan with other settings and another batch.
    """
    now = planned({}, batch)
    count, rows = now.microbatches, batch[0].shape[0]

    def fits(first: MemoryPlan, second: MemoryPlan, units: int = 1) -> int | None:
        """How many units fit after `first`, if `second` has `units` more."""
        found = []
        for measure, limit in limits:
            if (more := measure(second) - measure(first)) > 0:
                found.append(max(limit - measure(first), 0) * units // more)
        return min(found) if found else None

    def of_rows(number: int) -> Stack:
        return tuple(jax.ShapeDtypeStruct((number, *x.shape[1:]), x.dtype) for x in batch)

    frequent = collections.Counter(blocks[:-1]).most_common(1)
    place = blocks.index(frequent[0][0]) if frequent else 0
    deeper = planned({"blocks": [*blocks[:place], *frequent[0][:1], *blocks[place:]]}, batch) if frequent else now
    least, part = max(count, 2), rows // count  # a second microbatch brings other programs, and a third only itself
    several, one_more = (planned({"microbatches": n}, of_rows(n * part)) for n in (least, least + 1))
    microbatches = fits(several, one_more)
    if microbatches is not None:
        held = all(measure(several) <= limit for measure, limit in limits)
        microbatches = microbatches + least - count if held else 0
    return Headroom(fits(now, deeper), microbatches, fits(now, planned({}, of_rows(2 * rows)), rows))
