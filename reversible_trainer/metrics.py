"""What a run tells: `metrics.jsonl`, TensorBoard events, a picture of the losses, progress on the terminal."""

from __future__ import annotations

import datetime
import json
import math
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich import progress
from rich.console import Console, RenderableType
from rich.filesize import decimal
from rich.text import Text
from tensorboardX import SummaryWriter

Record = dict[str, Any]  # {"step": 1, "loss": 5.5, ...}, one per step


class MetricsLog:
    """Writes a record per step to `folder/metrics.jsonl` and to TensorBoard.

    Args:
      folder: The run's output folder.
      step: Step of the checkpoint that the run continues from, or 0. Later records are
        dropped, so that no step is there twice.

    Attributes:
      records: All records so far, those of earlier processes included.
    """

    def __init__(self, folder: str | os.PathLike[str], step: int):
        self._path = Path(folder) / "metrics.jsonl"
        self.records = [record for record in _read(self._path) if record["step"] <= step]
        partial = self._path.with_suffix(".jsonl.partial")
        partial.write_text("".join(_line(record) for record in self.records))
        partial.replace(self._path)
        self._file = open(self._path, "a")
        self._board = SummaryWriter(str(Path(folder) / "tensorboard"), purge_step=step + 1 if step else None)

    def write(self, record: Record) -> None:
        """Appends the record of a step. What is not finite becomes null."""
        record = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        self.records.append(record)
        self._file.write(_line(record))
        self._file.flush()
        for name, value in record.items():
            if name != "step" and value is not None:
                self._board.add_scalar(name, value, record["step"])

    def sync(self) -> None:
        """Makes sure that everything written is on the disk, before a checkpoint counts on it."""
        os.fsync(self._file.fileno())
        self._board.flush()

    def close(self) -> None:
        """Closes the files."""
        self._file.close()
        self._board.close()


def _line(record: Record) -> str:
    return json.dumps(record) + "\n"


def _read(path: Path) -> list[Record]:
    """The records of a file, up to a line that was cut off when its process was killed."""
    records = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            break
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            break
        records.append(record)
    return records


class Rate:
    """Tokens per second of training; time outside `resume` .. `add` (evaluation, checkpoints) does not count.

    Attributes:
      seconds: Of training so far.

    Example:
      >>> rate = Rate()
      >>> rate.resume()
      >>> rate.add(100)
      >>> rate.per_second > 0
      True
    """

    def __init__(self):
        self._tokens, self.seconds, self._since = 0, 0.0, time.perf_counter()

    def resume(self) -> None:
        """Starts the clock."""
        self._since = time.perf_counter()

    def add(self, tokens: int) -> None:
        """Counts tokens, and the time since the last `resume` or `add`."""
        now = time.perf_counter()
        self._tokens, self.seconds, self._since = self._tokens + tokens, self.seconds + now - self._since, now

    @property
    def per_second(self) -> float | None:
        """The rate so far."""
        return self._tokens / self.seconds if self.seconds else None


def smooth(values: Sequence[float], width: int) -> np.ndarray:
    """Mean of the `width` values around each value, of fewer at the ends. Unlike an average of the past it has no lag.

    Example:
      >>> smooth([1.0, 2.0, 3.0, 7.0], width=3).tolist()
      [1.5, 2.0, 4.0, 5.0]
    """
    kernel = np.ones(max(1, min(width, len(values))))
    return np.convolve(values, kernel, "same") / np.convolve(np.ones(len(values)), kernel, "same")


def plot_losses(records: Sequence[Record], path: str | os.PathLike[str]) -> None:
    """Draws training loss, smoothed training loss and held-out loss over the steps, as a PNG."""
    from matplotlib.figure import Figure  # takes half a second to import

    train = [(r["step"], r["loss"]) for r in records if r.get("loss") is not None]
    held_out = [(r["step"], r["eval_loss"]) for r in records if r.get("eval_loss") is not None]
    if not train:
        return
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")  # no pyplot: no display, nothing global
    axes = figure.subplots()
    steps, losses = zip(*train, strict=True)
    axes.plot(steps, losses, color="#9ecae1", linewidth=0.8, label="training, each step")
    axes.plot(steps, smooth(losses, len(losses) // 30), color="#08519c", linewidth=1.8, label="training, smoothed")
    if held_out:
        x, y = zip(*held_out, strict=True)
        axes.plot(x, y, "o-", color="#d94801", markersize=5, linewidth=1.4, label="held out")
        axes.annotate(f"{y[-1]:.3f}", (x[-1], y[-1]), xytext=(-4, 8), textcoords="offset points", ha="right")
    axes.set(xlabel="step", ylabel="loss (nats)", xlim=(0, steps[-1] * 1.02))
    axes.grid(color="#e5e5e5", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    partial = Path(path).with_suffix(".partial.png")
    figure.savefig(partial)
    partial.replace(path)


class Progress(progress.Progress):
    """On a terminal a live bar with a line of figures below it, elsewhere that line now and then.

    Args:
      console: Where to.
      done: Steps done before.
      steps: Steps to reach.
      unit: What `show` is given the rate of.
    """

    def __init__(self, console: Console, done: int, steps: int, unit: str = "tokens"):
        columns = progress.TextColumn("step {task.completed}/{task.total}"), progress.BarColumn(None)
        self._unit, self._line, self._lines_at, self._first, self._start = unit, "", 0.0, done, time.monotonic()
        super().__init__(*columns, console=console, expand=True, refresh_per_second=4, disable=not console.is_terminal)
        self._task = self.add_task("training", completed=done, total=steps)

    def get_renderables(self) -> Iterable[RenderableType]:
        """What `rich` draws: the bar and the line."""
        yield from super().get_renderables()
        yield Text(self._line, style="dim", no_wrap=True)

    def show(self, step: int, loss: float, rate: float | None, accelerator_bytes: int) -> None:
        """Shows the figures of a step that is done."""
        steps, now = int(self.tasks[0].total or 0), time.monotonic()
        seconds_left = (now - self._start) / max(step - self._first, 1) * (steps - step)
        memory = f"accelerator {decimal(accelerator_bytes)}   host {decimal(psutil.Process().memory_info().rss)}"
        left = datetime.timedelta(seconds=round(seconds_left))
        self._line = f"loss {loss:.3f}   {rate or 0:,.0f} {self._unit}/s   {left} left   {memory}"
        self.update(self._task, completed=step)
        if self.disable and (now >= self._lines_at or step == steps):
            self.note(f"step {step}/{steps}   {self._line}")
            self._lines_at = now + 10  # seconds; enough to see that it lives, not enough to fill a log

    def note(self, text: str) -> None:
        """Prints a line of its own."""
        self.console.print(text, highlight=False, soft_wrap=True)
