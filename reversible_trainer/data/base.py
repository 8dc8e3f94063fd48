"""What the training loop asks of a data set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

# What the model reads [B, ...], int32 targets and their mask, bool, both [B, T] for sequences and [B] for images.
Batch = tuple[np.ndarray, np.ndarray, np.ndarray]


@runtime_checkable
class DataSet(Protocol):
    """Gives a training batch for every step, and batches to evaluate on. It holds no place in the data.

    In both methods `length` is `run.length`, in tokens. Data without a length of that kind
    refuse any but None, the others refuse None.
    """

    @property
    def vocab_size(self) -> int:
        """Number of different targets: tokens, or classes."""
        ...

    def batch(self, seed: int, step: int, batch_size: int, length: int | None) -> Batch:
        """The batch of a step: a function of `seed` and `step` alone.

        So a resumed run needs no reader's state, and any batch can be looked at again.
        """
        ...

    def eval_batches(self, batch_size: int, length: int | None) -> Iterator[Batch]:
        """Batches of one shape in which everything held out is weighed exactly once."""
        ...


@runtime_checkable
class Text(DataSet, Protocol):
    """Data whose tokens are text, which a model can continue."""

    @property
    def bytes_per_token(self) -> float:
        """Mean number of bytes that a token of the held-out part stands for."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Text to tokens, int32 [T]."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Tokens to text."""
        ...


def generator(seed: int, step: int, stream: int = 0) -> np.random.Generator:
    """Random numbers that depend on the arguments and nothing else; streams are independent of each other."""
    # The counter's highest word: 2^192 numbers would have to be drawn before streams meet.
    counter = np.array([0, 0, 0, stream], np.uint64)
    return np.random.Generator(np.random.Philox(counter=counter, key=np.array([seed, step], np.uint64)))


def needed(name: str, length: int | None) -> int:
    """`length`; refuses None for data that are cut to a length."""
    if length is None:
        raise ValueError(f"{name} must be told how many tokens a sequence has; set run.length.")
    return length
