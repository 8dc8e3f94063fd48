"""Tasks whose data are made up: what a model must do is known exactly, and there is no end of examples."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import gin
import numpy as np

from reversible_trainer.data.base import Batch, generator, needed

_FEWEST = 16  # symbols that a curriculum begins with
_HELD_OUT = 1  # the generator's stream for evaluation; training has stream 0


@dataclasses.dataclass(frozen=True)
class CopyTask:
    """Sequences `0 w 0 w`, w being random; only what comes second is weighed, as it can be known.

    Attributes:
      symbols: w is made of 1 ... symbols; 0 stands before it.
      eval_sequences: Sequences to evaluate on.
      grows_for: Steps in which w grows from 16 symbols to the half that it may fill.

    Example:
      >>> tokens, targets, mask = CopyTask(9, 4).batch(seed=0, step=7, batch_size=1, length=8)
      >>> tokens.tolist(), targets.tolist()
      ([[0, 6, 1, 9, 0, 6, 1, 9]], [[6, 1, 9, 0, 6, 1, 9, 0]])
      >>> mask.astype(int).tolist()
      [[0, 0, 0, 0, 1, 1, 1, 0]]
    """

    symbols: int
    eval_sequences: int
    grows_for: int = 0

    @property
    def vocab_size(self) -> int:
        """The symbols and 0."""
        return self.symbols + 1

    def batch(self, seed: int, step: int, batch_size: int, length: int | None) -> Batch:
        """The batch of a step: sequences of `length` tokens, drawn anew."""
        part = 1.0 if step >= self.grows_for else step / self.grows_for
        return self._sequences(generator(seed, step), batch_size, length, part)

    def eval_batches(self, batch_size: int, length: int | None) -> Iterator[Batch]:
        """Batches of other sequences, the same for every seed; what is too many in the last one is masked."""
        random = generator(0, 0, _HELD_OUT)
        for start in range(0, self.eval_sequences, batch_size):
            tokens, targets, mask = self._sequences(random, batch_size, length)
            yield tokens, targets, mask & (np.arange(start, start + batch_size) < self.eval_sequences)[:, None]

    def _sequences(self, random: np.random.Generator, batch_size: int, length: int | None, part: float = 1.0) -> Batch:
        length = needed("copy_task", length)
        if length < 4 or length % 2:
            raise ValueError(f"copy_task: 0 w 0 w has an even number of tokens, at least 4; got run.length = {length}.")
        half = random.integers(1, self.symbols + 1, size=(batch_size, length // 2), dtype=np.int32)
        most = length // 2 - 1
        fewest = min(_FEWEST, most)
        symbols = round(fewest * (most / fewest) ** part)
        half[:, 0] = half[:, 1 + symbols :] = 0
        tokens = np.tile(half, 2)
        targets = np.roll(tokens, -1, axis=1)  # the last one, 0 again, is not weighed
        mask = (np.arange(length) >= length // 2) & (np.arange(length) < length // 2 + symbols)
        return tokens, targets, np.tile(mask, (batch_size, 1))


@gin.configurable
def copy_task(symbols: int = 127, eval_sequences: int = 256, grows_for: int = 0) -> CopyTask:
    """The task on which LSH attention is usually tried: say again what came half a sequence before.

    `run.length` gives the length of the sequences. The accuracy of a model, in training and
    evaluation, is that of the second copy.

    Args:
      symbols: Number of different symbols in what is to be copied; a model needs a
        `vocab_size` of one more.
      eval_sequences: Sequences to evaluate on; training never draws from their stream.
      grows_for: A curriculum for long sequences: for so many steps of training w grows, from 16
        symbols to all that there is room for, by the same factor in every step. What is left
        of each half holds zeros.

    Source: Kitaev et al. 2020, section 5.1 (https://arxiv.org/abs/2001.04451).
    """
    for name, number in {"symbols": symbols, "eval_sequences": eval_sequences}.items():
        if type(number) is not int or number < 1:
            raise ValueError(f"copy_task: {name} must be a whole number, at least 1; got {number!r}.")
    if type(grows_for) is not int or grows_for < 0:
        raise ValueError(f"copy_task: grows_for must be a whole number of steps, 0 or more; got {grows_for!r}.")
    return CopyTask(symbols, eval_sequences, grows_for)
