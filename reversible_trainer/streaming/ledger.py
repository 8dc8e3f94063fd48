"""The ledger: what is on the accelerator, by tag, at every event of a step."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax

from reversible_trainer.tree import Tree, leaf_bytes


class Event(NamedTuple):
    """The accelerator at one moment.

    Attributes:
      name: What just happened: `send`, or the name of the program that was started.
      block: Index of the block at work.
      bytes: Everything, the running program's temporaries included.
      arrays: Bytes of the arrays by tag.
      host_bytes: Bytes of weights, slots and states on the host, copies under way included.
    """

    name: str
    block: int | None
    bytes: int
    arrays: dict[str, int]
    host_bytes: int


def peaks(events: Iterable[Event]) -> dict[int | None, dict[str, int]]:
    """The largest total at the events of each name while each block was at work."""
    found: dict[int | None, dict[str, int]] = {}
    for event in events:
        names = found.setdefault(event.block, {})
        names[event.name] = max(names.get(event.name, 0), event.bytes)
    return found


class _Entry(weakref.ref):
    """A weak reference that knows what it stood for when the array is gone."""

    __slots__ = ("address", "nbytes", "tag")
    address: int
    tag: str
    nbytes: int


class Ledger:
    """Bytes on the accelerator, by the lifetimes of its arrays and the figures of its programs.

    Arrays count from `track` until they are deleted or donated. A program counts with
    argument + output - alias + temporary bytes from its dispatch to its successor's.

    Attributes:
      arrays: Bytes of live arrays by tag.
      peak_bytes: The largest total so far.
      peak: The event at which it was reached.
      host_bytes: Bytes of weights, slots and states on the host now.
      peak_host_bytes: The largest of them so far.
      block: Index of the block at work, for the events.
      watch: Called with every `Event`, if not None.
    """

    def __init__(self) -> None:
        self.arrays: dict[str, int] = {}
        self.peak_bytes = 0
        self.peak: Event | None = None
        self.host_bytes = 0
        self.peak_host_bytes = 0
        self.block: int | None = None
        self.watch: Callable[[Event], None] | None = None
        self._entries: dict[int, _Entry] = {}
        self._gone: collections.deque[_Entry] = collections.deque()  # filled by whatever thread drops an array
        self._program_bytes = 0
        self._program_addresses: set[int] = set()  # its arguments and outputs, which its own figure covers
        self._outside_bytes = 0  # arrays that the running program neither reads nor writes

    @property
    def array_bytes(self) -> int:
        """Bytes of all live arrays."""
        self._settle()
        return sum(self.arrays.values())

    @property
    def bytes(self) -> int:
        """Bytes on the accelerator now."""
        self._settle()
        return self._program_bytes + self._outside_bytes

    def track(self, tag: str, tree: Tree) -> None:
        """Counts the arrays of `tree` under `tag` from now on; those counted already stay as they are."""
        self._settle()
        for array in jax.tree.leaves(tree):
            address = id(array)
            if address in self._entries:
                continue
            entry = _Entry(array, self._gone.append)
            entry.address, entry.tag, entry.nbytes = address, tag, leaf_bytes(array)
            self._entries[address] = entry
            self.arrays[tag] = self.arrays.get(tag, 0) + entry.nbytes
            self._outside_bytes += entry.nbytes

    def forget(self, tree: Tree) -> None:
        """Stops counting arrays that outlive their stay on the accelerator, or were donated."""
        self._settle()
        for array in jax.tree.leaves(tree):
            entry = self._entries.get(id(array))
            if entry is not None:
                self._remove(entry)

    def dispatch(self, program_bytes: int, arguments: list[Any], outputs: list[Any]) -> None:
        """A program starts: its figure covers its arguments and outputs, and replaces its predecessor's."""
        self._settle()
        self._program_bytes = program_bytes
        self._program_addresses = {id(x) for x in (*arguments, *outputs)} & self._entries.keys()
        covered = sum(self._entries[address].nbytes for address in self._program_addresses)
        self._outside_bytes = self.array_bytes - covered

    def host(self, change: int) -> None:
        """Adds `change` to the bytes on the host."""
        self.host_bytes += change
        self.peak_host_bytes = max(self.peak_host_bytes, self.host_bytes)

    def event(self, name: str) -> None:
        """Notes the total, and shows it to whoever watches."""
        if self.bytes > self.peak_bytes or self.watch:
            event = Event(name, self.block, self.bytes, dict(self.arrays), self.host_bytes)
            if event.bytes > self.peak_bytes:
                self.peak_bytes, self.peak = event.bytes, event
            if self.watch:
                self.watch(event)

    def _settle(self) -> None:
        while self._gone:
            self._remove(self._gone.popleft())

    def _remove(self, entry: _Entry) -> None:
        if self._entries.get(entry.address) is not entry:
            return
        del self._entries[entry.address]
        self.arrays[entry.tag] -= entry.nbytes
        if entry.address in self._program_addresses:  # its memory is the program's until the next dispatch
            self._program_addresses.discard(entry.address)
        else:
            self._outside_bytes -= entry.nbytes
