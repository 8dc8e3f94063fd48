"""What happened when in a step: copies and programs as spans of time, memory at every event."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import psutil

from reversible_trainer.streaming.ledger import Event

Lane = Literal["send", "run", "fetch"]
LANES: tuple[Lane, ...] = get_args(Lane)
Interval = tuple[float, float]


class Span(NamedTuple):
    """One copy, or one run of a program.

    Attributes:
      lane: "send", "run" or "fetch".
      name: Of the program, or what is copied.
      visit: What was done there: "forward", "loss", "backward", "update"; None outside the sweeps.
      block: With which block.
      start: Seconds since the recording began.
      end: Likewise.
      amount: Bytes that were copied, or floating-point operations of a program.
    """

    lane: Lane
    name: str
    visit: str | None
    block: int | None
    start: float
    end: float
    amount: float


class Sample(NamedTuple):
    """Memory at one event: seconds since the recording began, the ledger's event, the process's resident bytes."""

    time: float
    event: Event
    resident_bytes: int


class Recorder:
    """Notes the spans and samples of steps; made by `Trainer.recording`.

    A thread per lane waits for what is under way, so that times are those of the end of the work and not of
    its start by Python. A program counts from its start, or from the end of the one before it if that is later.

    Attributes:
      spans: In the order of their ends, lane by lane.
      samples: In order.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.samples: list[Sample] = []
        self._threads = {lane: concurrent.futures.ThreadPoolExecutor(1, f"recorded {lane}") for lane in LANES}
        self._ends = dict.fromkeys(LANES, 0.0)
        self._process, self._began = psutil.Process(), time.perf_counter()

    def now(self) -> float:
        """Seconds since the recording began."""
        return time.perf_counter() - self._began

    def watch(self, event: Event) -> None:
        """Takes a sample."""
        self.samples.append(Sample(self.now(), event, self._process.memory_info().rss))

    def add(
        self,
        lane: Lane,
        name: str,
        visit: tuple[str | None, int | None],
        amount: float,
        start: float,
        wait: Callable[[], Any],
        ready: Callable[[], Any] | None = None,
    ) -> concurrent.futures.Future[None] | None:
        """Notes a span from `start` to the return of `wait`, which is called in a thread of its lane.

        If there is a `ready`, the span starts with its return: what is copied must have been computed.
        """

        waits = [wait] if ready is None else [wait, ready]
        del wait, ready  # with them go the arrays they wait for, when the future is done and not a moment later

        def finish() -> None:
            begin = start
            if len(waits) > 1:
                waits.pop()()
                begin = self.now()
            waits.pop()()
            end, begin = self.now(), max(begin, self._ends[lane])
            self._ends[lane] = end
            self.spans.append(Span(lane, name, *visit, begin, end, amount))

        return self._threads[lane].submit(finish)

    def close(self) -> None:
        """Returns when everything noted has ended."""
        for thread in self._threads.values():
            thread.shutdown()

    def seconds(self, *lanes: Lane) -> float:
        """Time during which anything in these lanes was under way."""
        return _length(_union(self._intervals(lanes)))

    @property
    def exposed_link_seconds(self) -> float:
        """Time during which something was copied and no program ran."""
        return self.seconds(*LANES) - self.seconds("run")

    @property
    def hidden_link_fraction(self) -> float | None:
        """The part of the time of all copies during which programs ran; None if nothing was copied."""
        link = self.seconds("send", "fetch")
        return 1 - self.exposed_link_seconds / link if link else None

    def _intervals(self, lanes: Sequence[Lane]) -> Iterable[Interval]:
        return ((span.start, span.end) for span in self.spans if span.lane in lanes)


class Tally:
    """Stands for a recorder when steps are planned: amounts without times.

    Attributes:
      spans: As they come.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def now(self) -> float:
        """No time passes."""
        return 0.0

    def add(self, lane: Lane, name: str, visit: tuple[str | None, int | None], amount: float, *_: Any) -> None:
        """Notes the amount."""
        self.spans.append(Span(lane, name, *visit, 0.0, 0.0, amount))


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint intervals that cover the same time, in order."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)
