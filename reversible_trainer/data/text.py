"""Text as bytes: a stateless sampler for training, one pass without gaps for evaluation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from reversible_trainer.data.base import Batch, generator, needed

_FIRST = ord("\n")  # what stands before the first token of the held-out part


@dataclasses.dataclass(frozen=True, eq=False)  # eq: arrays do not compare to one truth value
class TextData:
    """A training part and a held-out part, one token per byte.

    Attributes:
      train: uint8 [N].
      held_out: uint8 [M]. No training window reaches into it.

    Example:
      >>> data = TextData(np.arange(100, dtype=np.uint8), np.arange(5, dtype=np.uint8))
      >>> tokens, targets, mask = data.batch(seed=0, step=7, batch_size=2, length=4)
      >>> (targets - tokens).tolist(), bool(mask.all())
      ([[1, 1, 1, 1], [1, 1, 1, 1]], True)
      >>> [targets[mask].tolist() for _, targets, mask in data.eval_batches(batch_size=1, length=3)]
      [[0, 1, 2], [3, 4]]
    """

    train: np.ndarray
    held_out: np.ndarray

    @property
    def vocab_size(self) -> int:
        """Number of different tokens."""
        return 256

    @property
    def bytes_per_token(self) -> float:
        """A token is a byte."""
        return 1.0

    def batch(self, seed: int, step: int, batch_size: int, length: int | None) -> Batch:
        """The batch of a step: windows at random places."""
        length = needed("TextData", length)
        if length >= len(self.train):
            raise ValueError(
                f"TextData.batch: a window of length + 1 = {length + 1} tokens does not fit into a training part "
                f"of {len(self.train)}. Set a smaller length."
            )
        starts = generator(seed, step).integers(len(self.train) - length, size=(batch_size, 1))
        windows = self.train[starts + np.arange(length + 1)].astype(np.int32)
        return windows[:, :-1], windows[:, 1:], np.ones((batch_size, length), bool)

    def eval_batches(self, batch_size: int, length: int | None) -> Iterator[Batch]:
        """Batches in which every token of the held-out part is a target exactly once.

        Windows do not overlap; what fills up the last ones is masked.
        """
        length = needed("TextData", length)
        size = batch_size * length
        count = -(-len(self.held_out) // size)
        targets = np.zeros(count * size, np.int32)
        targets[: len(self.held_out)] = self.held_out
        tokens = np.concatenate([[_FIRST], targets])[:-1].astype(np.int32)
        mask = np.arange(len(targets)) < len(self.held_out)
        shape = (count, batch_size, length)
        yield from zip(tokens.reshape(shape), targets.reshape(shape), mask.reshape(shape), strict=True)

    def encode(self, text: str) -> np.ndarray:
        """Text to tokens, int32 [T]."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Tokens to text; bytes that are no UTF-8 become U+FFFD."""
        return np.asarray(tokens, np.uint8).tobytes().decode(errors="replace")
