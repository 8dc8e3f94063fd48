"""What a step really did: memory, time and copies as a picture, JSON, CSV and a trace."""

from __future__ import annotations

import collections
import csv
import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from reversible_trainer.layers.base import Stack
from reversible_trainer.streaming import Event, MemoryPlan, Recorder, Sample, peaks
from reversible_trainer.trainer import Trainer
from reversible_trainer.tree import TrainState

_TAGS = (  # of the ledger, in the order in which they are stacked in the picture
    *("weights", "slots", "gradients", "states", "activations", "cotangents", "residuals", "batch", "metrics"),
    "temporaries",
)
_COLORS = dict(
    zip(
        _TAGS,
        ("#08519c", "#6baed6", "#31a354", "#a1d99b", "#d94801", "#fdae6b", "#756bb1", "#bdbdbd", "#636363", "#fee391"),
        strict=True,
    )
)
_VISITS = {"forward": "#6baed6", "loss": "#31a354", "backward": "#d94801", "update": "#756bb1", None: "#bdbdbd"}


@dataclasses.dataclass(frozen=True)
class Profile:
    """Recorded steps.

    Attributes:
      steps: How many.
      plan: What was planned for one.
      recorder: What happened.
      peak_bytes: The ledger's largest total on the accelerator.
      device_peak_bytes: What the device says of itself, None if it says nothing (as a CPU).
    """

    steps: int
    plan: MemoryPlan
    recorder: Recorder
    peak_bytes: int
    device_peak_bytes: int | None

    def summary(self) -> dict[str, Any]:
        """The figures of a step: times in seconds, memory in bytes."""
        recorder, steps = self.recorder, self.steps
        ends = [span.end for span in recorder.spans]
        begins = [span.start for span in recorder.spans]
        resident = [sample.resident_bytes for sample in recorder.samples]
        return {
            "steps": steps,
            "step_seconds": (max(ends) - min(begins)) / steps,
            "program_seconds": recorder.seconds("run") / steps,
            "link_seconds": recorder.seconds("send", "fetch") / steps,
            "exposed_link_seconds": recorder.exposed_link_seconds / steps,
            "hidden_link_fraction": recorder.hidden_link_fraction,
            "sent_bytes": self._amount("send"),
            "fetched_bytes": self._amount("fetch"),
            "flops": self._amount("run"),
            "peak_accelerator_bytes": self.peak_bytes,
            "planned_accelerator_bytes": self.plan.peak_accelerator_bytes,
            "device_peak_bytes": self.device_peak_bytes,
            "peak_host_bytes": max(sample.event.host_bytes for sample in recorder.samples),
            "planned_host_bytes": self.plan.peak_host_bytes,
            "resident_bytes": max(resident),
            "resident_rise_bytes": max(resident) - resident[0],
        }

    def blocks(self) -> list[dict[str, Any]]:
        """A row for each block: seconds per step by visit, of its programs; bytes; peak beside plan."""
        seconds: dict[tuple[int | None, str | None], float] = collections.defaultdict(float)
        copied: dict[tuple[int | None, str], float] = collections.defaultdict(float)
        for span in self.recorder.spans:
            if span.lane == "run":
                seconds[span.block, span.visit] += span.end - span.start
            else:
                copied[span.block, span.lane] += span.amount
        totals = peaks(sample.event for sample in self.recorder.samples)
        return [
            {
                "block": i,
                "name": block.name,
                "policy": block.policy,
                **{f"{v}_seconds": seconds[i, v] / self.steps for v in _VISITS if v},
                **{f"{lane}_bytes": round(copied[i, lane] / self.steps) for lane in ("send", "fetch")},
                "peak_bytes": max(totals.get(i, {}).values(), default=0),
                "planned_peak_bytes": block.peak_bytes,
            }
            for i, block in enumerate(self.plan.blocks)
        ]

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes `profile.png`, `profile.json`, `blocks.csv`, `spans.csv` and `memory.csv`."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        spans = [span._asdict() for span in sorted(self.recorder.spans, key=lambda span: span.start)]
        memory = [_row(sample) for sample in self.recorder.samples]
        found = {"summary": self.summary(), "blocks": self.blocks(), "spans": spans, "memory": memory}
        (folder / "profile.json").write_text(json.dumps(found))
        for name in ("blocks", "spans", "memory"):
            with open(folder / f"{name}.csv", "w", newline="") as file:
                writer = csv.DictWriter(file, list(found[name][0]))
                writer.writeheader()
                writer.writerows(found[name])
        draw(self, folder / "profile.png")

    def _amount(self, lane: str) -> float:
        return sum(span.amount for span in self.recorder.spans if span.lane == lane) / self.steps


def profile(
    trainer: Trainer,
    state: TrainState,
    batch: Stack,
    learning_rate: Any,
    steps: int = 1,
    trace: str | os.PathLike[str] | None = None,
) -> tuple[TrainState, Profile]:
    """Records real steps, after one that is not recorded.

    Args:
      trainer: Of any model.
      state: Is consumed, as by `Trainer.step`.
      batch: For all steps.
      learning_rate: Likewise.
      steps: That are recorded.
      trace: Folder for a trace by `jax.profiler`, with the name of each program and copy and
        its block; `perfetto_trace.json.gz` in it opens at https://ui.perfetto.dev.

    Returns:
      The state after the steps, and what was recorded.
    """
    plan = trainer.plan(batch)
    state, metrics = trainer.step(state, batch, learning_rate)
    jax.block_until_ready((metrics, state.weights, state.slots))
    before, trainer.ledger.peak_bytes = trainer.ledger.peak_bytes, 0
    if trace is not None:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # a hundred thousand calls would hide the blocks
        jax.profiler.start_trace(trace, create_perfetto_trace=True, profiler_options=options)
    try:
        with trainer.recording() as recorder:
            for _ in range(steps):
                state, metrics = trainer.step(state, batch, learning_rate)
            jax.block_until_ready((metrics, state.weights, state.slots))
    finally:
        if trace is not None:
            jax.profiler.stop_trace()
    peak = trainer.ledger.peak_bytes
    trainer.ledger.peak_bytes = max(before, peak)
    device = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return state, Profile(steps, plan, recorder, peak, device)


def _row(sample: Sample) -> dict[str, Any]:
    event = sample.event
    tags = {tag: event.arrays.get(tag, 0) for tag in _TAGS[:-1]}
    return {
        "time": sample.time,
        "event": event.name,
        "block": event.block,
        **tags,
        "temporaries": event.bytes - sum(event.arrays.values()),
        "accelerator": event.bytes,
        "host": event.host_bytes,
        "resident": sample.resident_bytes,
    }


def _planned_over(samples: Sequence[Sample], events: Sequence[Event]) -> tuple[list[float], list[int]]:
    """The plan's totals at the times at which the same things happened: the n-th send, the n-th program."""
    times: dict[bool, list[float]] = {True: [], False: []}
    for sample in samples:
        times[sample.event.name == "send"].append(sample.time)
    counts: collections.Counter[bool] = collections.Counter()
    found = []
    while len(found) < len(samples):
        for event in events:
            kind = event.name == "send"
            if counts[kind] >= len(times[kind]):
                return _columns(found)
            found.append((times[kind][counts[kind]], event.bytes))
            counts[kind] += 1
    return _columns(found)


def _columns(rows: list[tuple[float, int]]) -> tuple[list[float], list[int]]:
    times, values = zip(*sorted(rows), strict=True)
    return list(times), list(values)


def draw(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Accelerator and host memory, copies and programs over time, and the time of each block, as a PNG."""
    from matplotlib.figure import Figure

    recorder, summary = profile.recorder, profile.summary()
    figure = Figure(figsize=(11, 10), dpi=110, layout="constrained")
    memory, host, lanes, blocks = figure.subplots(4, 1, height_ratios=(3, 1.6, 1.6, 2))
    rows = [_row(sample) for sample in recorder.samples]
    times = [row["time"] * 1e3 for row in rows]
    scale, unit = _unit(summary["peak_accelerator_bytes"])
    used = [tag for tag in _TAGS if any(row[tag] > 0 for row in rows)]
    memory.stackplot(
        times,
        [[row[tag] / scale for row in rows] for tag in used],
        labels=used,
        colors=[_COLORS[tag] for tag in used],
        step="post",
    )
    planned_times, planned = _planned_over(recorder.samples, profile.plan.events)
    memory.step(
        [t * 1e3 for t in planned_times],
        [b / scale for b in planned],
        where="post",
        color="black",
        linewidth=0.9,
        linestyle="--",
        label="planned",
    )
    memory.set(ylabel=f"accelerator, {unit}", title=_title(summary))
    memory.legend(ncols=6, fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0, -0.3))

    scale, unit = _unit(max(summary["peak_host_bytes"], summary["resident_rise_bytes"]))
    host.step(times, [row["host"] / scale for row in rows], where="post", color="#08519c", label="weights, slots, ...")
    rise = [(row["resident"] - rows[0]["resident"]) / scale for row in rows]
    host.step(times, rise, where="post", color="#969696", label="rise of the process's resident memory (psutil)")
    host.axhline(summary["planned_host_bytes"] / scale, color="black", linestyle="--", linewidth=0.9, label="planned")
    host.set(ylabel=f"host, {unit}")
    host.legend(ncols=3, fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0, -0.45))

    for y, lane in enumerate(("fetch", "run", "send")):
        for visit, color in _VISITS.items():
            bars = [
                (span.start * 1e3, (span.end - span.start) * 1e3)
                for span in recorder.spans
                if span.lane == lane and span.visit == visit
            ]
            lanes.broken_barh(bars, (y - 0.38, 0.76), facecolor=color, edgecolor="white", linewidth=0.3)
    for visit, color in _VISITS.items():
        if visit and any(span.visit == visit for span in recorder.spans):
            lanes.barh(0, 0, color=color, label=visit)
    lanes.set(yticks=(0, 1, 2), yticklabels=("fetches", "programs", "sends"), xlabel="milliseconds")
    lanes.legend(ncols=4, fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0, -0.62))
    limits = (0, max([span.end * 1e3 for span in recorder.spans] + times))
    for axes in (memory, host, lanes):
        axes.set_xlim(limits)

    found = profile.blocks()
    bottom = [0.0] * len(found)
    for visit, color in _VISITS.items():
        if visit and any(block[f"{visit}_seconds"] for block in found):
            seconds = [block[f"{visit}_seconds"] * 1e3 for block in found]
            blocks.bar(range(len(found)), seconds, bottom=bottom, color=color, width=0.8, label=visit)
            bottom = [b + s for b, s in zip(bottom, seconds, strict=True)]
    blocks.set(xlabel="block", ylabel="milliseconds\nof its programs", xlim=(-0.6, len(found) - 0.4))
    for axes in (memory, host, lanes, blocks):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def _title(summary: dict[str, Any]) -> str:
    text = (
        f"a step of {summary['step_seconds'] * 1e3:,.0f} ms: programs {summary['program_seconds'] * 1e3:,.0f} ms, "
        f"copies {summary['link_seconds'] * 1e3:,.0f} ms"
    )
    hidden = summary["hidden_link_fraction"]
    return text if hidden is None else f"{text}, of which {hidden:.0%} hidden behind programs"


def _unit(nbytes: float) -> tuple[float, str]:
    return next((s, u) for s, u in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "bytes")) if nbytes >= s or s == 1)
