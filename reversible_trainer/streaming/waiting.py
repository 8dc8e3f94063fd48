"""Activations between the passes of a step: where they wait."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from reversible_trainer.streaming.accelerator import Accelerator, Arrival
from reversible_trainer.tree import Tree

Stack = tuple[Tree, ...]


class Waiting:
    """Stacks that wait on the accelerator, or on the host, from where they are sent one pass ahead.

    Args:
      accelerator: Copies and accounts.
      moves: Tells which entries of a stack go to the host. The others (tokens, targets,
        masks) are small and stay.
    """

    def __init__(self, accelerator: Accelerator, moves: Callable[[Any], bool]):
        self._accelerator, self._moves = accelerator, moves
        self._here: dict[Hashable, Stack] = {}
        self._there: dict[Hashable, tuple[str, Stack]] = {}
        self._coming: dict[Hashable, Arrival] = {}

    def put(self, key: Hashable, tag: str, stack: Stack, on_host: bool = False) -> None:
        """Lets a stack wait; None among its entries stays None."""
        if on_host:
            goes = [x is not None and self._moves(x) for x in stack]
            going = tuple(x if g else None for x, g in zip(stack, goes, strict=True))
            self._there[key] = tag, self._accelerator.fetch(going, tag)
            stack = tuple(None if g else x for x, g in zip(stack, goes, strict=True))
        self._here[key] = stack

    def send(self, key: Hashable) -> None:
        """Starts sending what waits on the host under this key, if anything does."""
        if key in self._there:
            tag, stack = self._there.pop(key)
            self._coming[key] = self._accelerator.send({tag: stack}, moved=True)

    def take(self, key: Hashable) -> Stack:
        """The stack, on the accelerator; it waits here no longer."""
        self.send(key)
        stack = self._here.pop(key)
        if key not in self._coming:
            return stack
        arrival = self._coming.pop(key)
        (arrived,) = arrival.arrays()
        self._accelerator.ledger.host(-arrival.moved_bytes)
        return tuple(mine if other is None else other for mine, other in zip(stack, arrived, strict=True))
