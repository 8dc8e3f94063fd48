"""Batches made ahead of time, in a thread, while the steps before them run."""

from __future__ import annotations

import collections
import concurrent.futures
import time
from types import TracebackType

from reversible_trainer.data.base import Batch, DataSet

_AHEAD = 2  # batches


class DataError(ValueError):
    """A data set could not make a batch."""


class BatchesAhead:
    """The batches of a range of steps, in order.

    Args:
      data: Makes them, in a thread of its own.
      seed: See `DataSet.batch`, like `batch_size` and `length`.
      batch_size: Sequences, or images.
      length: Tokens per sequence, or None.
      steps: The range.

    Attributes:
      waited: Seconds that `next` has waited for batches that were not ready.

    Example:
      >>> from reversible_trainer.data import copy_task
      >>> with BatchesAhead(copy_task(), seed=0, batch_size=2, length=8, steps=range(3)) as batches:
      ...     [len(batches.next()[0]) for _ in range(3)]
      [2, 2, 2]
    """

    def __init__(self, data: DataSet, seed: int, batch_size: int, length: int | None, steps: range):
        self._data, self._arguments, self._steps = data, (batch_size, length), iter(steps)
        self._seed, self.waited = seed, 0.0
        self._coming: collections.deque[tuple[int, concurrent.futures.Future[Batch]]] = collections.deque()
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "reversible_trainer data")

    def __enter__(self) -> BatchesAhead:
        self._order()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def next(self) -> Batch:
        """The batch of the next step. Raises `DataError`, which names data set and step, if it could not be made."""
        step, future = self._coming.popleft()
        start = time.perf_counter()
        try:
            batch = future.result()
        except Exception as error:
            reason = f"{error.strerror}: {error.filename}" if isinstance(error, OSError) and error.filename else error
            raise DataError(
                f"run.data: {type(self._data).__name__} could not make the batch of step {step + 1}: {reason}"
            ) from error
        self.waited += time.perf_counter() - start
        self._order()
        return batch

    def _order(self) -> None:
        while len(self._coming) < _AHEAD and (step := next(self._steps, None)) is not None:
            self._coming.append((step, self._thread.submit(self._data.batch, self._seed, step, *self._arguments)))
