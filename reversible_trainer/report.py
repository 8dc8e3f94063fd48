"""Plans as tables and as JSON."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

_WAITING = {
    "accelerator": "activations wait on the accelerator",
    "host": "saved inputs and, between the blocks, the stacks of several microbatches wait on the host",
}


def print_plan(plan: Any, console: Console) -> None:
    """Prints a `MemoryPlan`: a row for each run of equal blocks, in two tables that fit into 80 columns; the peaks."""
    groups = _groups(plan.blocks)
    table = _table("block", "layer", "policy", "weights", "bytes", "slots", "gradients", texts=3)
    for where, block in groups:
        sizes = block.weight_bytes, block.slot_bytes, block.gradient_bytes
        table.add_row(where, block.name, block.policy, f"{block.weights:,}", *map(_bytes, sizes))
    totals = (sum(getattr(b, name) for b in plan.blocks) for name in ("weights", "weight_bytes", "slot_bytes"))
    weights, *sizes = totals
    table.add_row("all", "", "", f"{weights:,}", *map(_bytes, sizes), style="bold")
    console.print(table)

    console.print("\nin a step, each block:", highlight=False)
    names = "temporary", "residuals", "inputs", "stack", "peak", "GFLOP", "sent", "fetched"
    table = _table("block", *names, texts=1)
    for where, block in groups:
        sizes = block.temporary_bytes, block.residual_bytes, block.saved_bytes, block.stack_bytes, block.peak_bytes
        copies = block.send_bytes, block.fetch_bytes
        table.add_row(where, *map(_bytes, sizes), _giga(block.flops), *map(_bytes, copies))
    sent, fetched = (sum(getattr(sweep, name) for sweep in plan.sweeps) for name in ("send_bytes", "fetch_bytes"))
    peaks = "", "", "", "", _bytes(plan.peak_accelerator_bytes)
    table.add_row("all", *peaks, _giga(plan.flops), _bytes(sent), _bytes(fetched), style="bold")
    console.print(table)
    console.print(
        "temporary: while its programs run; residuals, inputs: kept for its backward\n"
        "pass; stack: what it leaves to the next block; peak: all that is on the\n"
        "accelerator while it is at work. GFLOP of matrix products and convolutions.\n",
        highlight=False,
        style="dim",
    )

    reasons: dict[tuple[str, str], list[str]] = {}
    for where, block in groups:
        reasons.setdefault((block.policy, block.why), []).append(where)
    for (policy, why), places in reasons.items():
        _line(console, f"{policy} ({', '.join(places)}): {why}")
    count = f"{plan.microbatches} microbatch{'es' if plan.microbatches > 1 else ''}"
    _line(console, f"{count}, {_WAITING[plan.waiting]}: {plan.why}")
    peaks = f"accelerator {decimal(plan.peak_accelerator_bytes)}, host {decimal(plan.peak_host_bytes)}"
    _line(console, f"planned peak: {peaks}; a checkpoint takes {decimal(plan.checkpoint_bytes)}")


def print_added(added: Any, console: Console) -> None:
    """Prints what making the blocks added: a row for each of at most eight groups of neighbours."""
    table = _table("blocks made", "accelerator", "host", "process", texts=1)
    size = -(-len(added) // 8)
    for first in range(0, len(added), size):
        group = added[first : first + size]
        where = str(first) if len(group) == 1 else f"{first}-{first + len(group) - 1}"
        rise = sum(a.resident_bytes for a in group)
        largest = max(a.accelerator_bytes for a in group)
        process = f"{'-' if rise < 0 else '+'}{decimal(abs(rise))}"
        table.add_row(where, _bytes(largest), f"+{decimal(sum(a.host_bytes for a in group))}", process)
    console.print(table)


def print_floor(plan: Any, flops: float, link: float, console: Console) -> None:
    """Prints the least time of a step."""
    floor = plan.floor(flops, link)
    _line(
        console,
        f"floor of a step at {_rate(flops)}FLOP/s and {decimal(round(link))}/s: {_seconds(floor.step_seconds)} "
        f"(programs {_seconds(floor.compute_seconds)}, copies {_seconds(floor.link_seconds)}), "
        f"{plan.tokens / floor.step_seconds:,.0f} tokens/s",
    )
    if floor.hidden_from_tokens is not None:
        _line(
            console,
            f"the link is hidden from {floor.hidden_from_tokens:,} tokens per step on; here are {plan.tokens:,}",
        )


def print_limits(limits: Any, plan: Any, console: Console) -> None:
    """Prints what is needed and what is there."""
    for where, needed, limit in limits:
        fits = "fits" if needed(plan) <= limit else "does not fit"
        _line(console, f"{where}: {decimal(needed(plan))} needed, {decimal(limit)} there: {fits}")


def print_headroom(headroom: Any, console: Console) -> None:
    """Prints how much more would fit."""
    parts = {
        "blocks like the most frequent one": headroom.blocks,
        "microbatches": headroom.microbatches,
        "rows in the batch, or so": headroom.rows,
    }
    found = ", ".join(f"{'any number of' if n is None else f'{n:,}'} {what}" for what, n in parts.items())
    _line(console, f"would fit besides: {found} (one of these, not all)")


def plan_record(plan: Any) -> dict[str, Any]:
    """A plan for JSON, without its events."""
    found = dataclasses.asdict(dataclasses.replace(plan, events=()))
    del found["events"]
    return {**found, "peak": plan.peak._asdict(), "flops": plan.flops}


def _groups(blocks: Any) -> list[tuple[str, Any]]:
    """Runs of equal blocks: their numbers as text, and the one of them with the largest peak."""
    numbered = enumerate(blocks)
    found = []
    for _, run in itertools.groupby(numbered, lambda pair: dataclasses.replace(pair[1], peak_bytes=0, totals={})):
        members = list(run)
        first, last = members[0][0], members[-1][0]
        where = str(first) if first == last else f"{first}-{last}"
        found.append((where, max((block for _, block in members), key=lambda block: block.peak_bytes)))
    return found


def _table(*names: str, texts: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for i, name in enumerate(names):
        table.add_column(name, justify="left" if i < texts else "right", no_wrap=True)
    return table


def _line(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True)


def _bytes(nbytes: int) -> str:
    return decimal(nbytes) if nbytes else "-"


def _giga(flops: float) -> str:
    return "-" if not flops else f"{flops / 1e9:,.3g}" if flops < 1e12 else f"{flops / 1e9:,.0f}"


def _rate(number: float) -> str:
    scale, prefix = next(
        (s, p) for s, p in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")) if number >= s or s == 1e6
    )
    return f"{number / scale:.4g} {prefix}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
