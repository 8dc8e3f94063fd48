"""Weights and slots in a file: for models that do not fit the host's memory either."""
# ruff: noqa: D102  (the methods are those of streaming/placement.py)

from __future__ import annotations

import concurrent.futures
import errno
import os
import tempfile
import threading
import weakref
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from reversible_trainer.streaming.placement import Device, OnDevice, Pending, Placeholder
from reversible_trainer.tree import Tree, leaf_bytes, tree_bytes

_ALIGNMENT = 4096  # bytes


class Region:
    """A place in the file, free for others when it is garbage."""

    def __init__(self, offset: int):
        self.offset = offset
        self.written: concurrent.futures.Future[None] | None = None  # fails if writing did


class DiskArray:
    """An array of which only shape and dtype are in memory. `np.asarray` reads it.

    Attributes:
      shape: Of the array.
      dtype: Likewise.
    """

    __slots__ = ("__weakref__", "_file", "_offset", "_region", "dtype", "shape")

    def __init__(self, file: _File, region: Region, offset: int, like: Any):
        self._file, self._region, self._offset = file, region, offset
        self.shape, self.dtype = tuple(like.shape), np.dtype(like.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        self.block_until_ready()
        array = self._file.read(self._region.offset + self._offset, self.shape, self.dtype)
        return array if dtype is None else array.astype(dtype, copy=False)

    def block_until_ready(self) -> DiskArray:
        """Waits until it has been written; raises if that has failed."""
        if self._region.written is not None:
            self._region.written.result()
        return self


class _File:
    """A file of regions. It has no name from the start, so that nothing is left of it whatever ends the process."""

    def __init__(self, folder: str):
        self.folder = folder
        try:
            os.makedirs(folder, exist_ok=True)
            self._descriptor, path = tempfile.mkstemp(dir=folder)
            os.unlink(path)
        except OSError as error:
            raise ValueError(f"Placement.disk({folder!r}): cannot make a file there: {error.strerror}.") from None
        weakref.finalize(self, os.close, self._descriptor)
        self._free: dict[int, list[int]] = {}  # bytes -> offsets
        self._end, self._lock = 0, threading.Lock()

    def allocate(self, nbytes: int) -> Region:
        """A region that the disk is known to have room for."""
        nbytes = -(-max(nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            offsets = self._free.setdefault(nbytes, [])
            if not offsets:
                try:
                    # Writing into memory-mapped files would kill the process when the disk is full.
                    os.posix_fallocate(self._descriptor, self._end, nbytes)
                except OSError as error:
                    if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
                        raise
                    free = self._free_bytes()
                    raise OSError(
                        error.errno,
                        f"Placement.disk({self.folder!r}): {error.strerror}; {nbytes:,} bytes are needed for one more "
                        f"block, {free:,} are free and {self._end:,} are in use. Nothing was overwritten. Use another "
                        "folder, or a smaller model",
                    ) from None
                offsets.append(self._end)
                self._end += nbytes
            region = Region(offsets.pop())
        weakref.finalize(region, self._release, nbytes, region.offset)
        return region

    def _free_bytes(self) -> int:
        found = os.statvfs(self.folder)
        return found.f_bavail * found.f_frsize

    def available(self) -> int:
        """Bytes that may still be written: free ones of the disk, and of the file."""
        return self._free_bytes() + sum(nbytes * len(offsets) for nbytes, offsets in list(self._free.items()))

    def _release(self, nbytes: int, offset: int) -> None:
        self._free[nbytes].append(offset)  # atomic: this may run while the lock is held

    def reserve(self, sizes: Mapping[int, int]) -> None:
        """Makes sure that so many regions of each size can be had, all at once: several sizes may share a list."""
        held = [self.allocate(nbytes) for nbytes, count in sizes.items() for _ in range(count)]
        del held

    def write(self, offset: int, array: np.ndarray) -> None:
        view = _bytes(np.ascontiguousarray(array))
        while view:
            written = os.pwrite(self._descriptor, view, offset)
            view, offset = view[written:], offset + written

    def read(self, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        array = np.empty(shape, dtype)
        view = _bytes(array)
        while view:
            count = os.preadv(self._descriptor, [view], offset)
            if not count:
                raise OSError(f"Placement.disk({self.folder!r}): the file ends too early; something has cut it.")
            view, offset = view[count:], offset + count
        return array


def _bytes(array: np.ndarray) -> memoryview:
    flat: Any = array.reshape(-1).view(np.uint8)
    return memoryview(flat)


class Disk(OnDevice):
    """`Placement.disk`: one thread reads and one writes, so that the disk works while the blocks run."""

    def __init__(self, folder: str, device: Device):
        super().__init__(device)
        self._file = _File(folder)
        self._reader, self._writer = (
            concurrent.futures.ThreadPoolExecutor(1, f"reversible_trainer {name}") for name in ("reads", "writes")
        )

    def send(self, tree: Tree, keep: bool = False) -> Pending:
        def read() -> Tree:
            return jax.device_put(jax.tree.map(np.asarray, tree), self.accelerator)

        return _Reading(self._reader.submit(read), tree)

    def fetch(self, tree: Tree) -> Pending:
        leaves, structure = jax.tree.flatten(tree)
        region, offset, places = self._file.allocate(tree_bytes(tree)), 0, []
        for leaf in leaves:
            places.append(DiskArray(self._file, region, offset, leaf))
            offset += leaf_bytes(leaf)
        start = region.offset

        def write() -> None:
            position = start
            for leaf in leaves:
                self._file.write(position, np.asarray(leaf))
                position += leaf_bytes(leaf)

        region.written = self._writer.submit(write)
        return _Writing(jax.tree.unflatten(structure, places), tree, region.written)

    def to_host(self, tree: Tree) -> Tree:
        if all(jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in jax.tree.leaves(tree)):
            return self.to_accelerator(tree)  # a key is no array of numbers
        return self.fetch(jax.tree.map(np.array, tree)).arrays()

    def room(self) -> tuple[str, int, bool]:
        return f"room in {self._file.folder}", self._file.available(), False

    def reserve(self, sizes: Mapping[int, int]) -> None:
        self._file.reserve(sizes)


class _Reading(Pending):
    """On its way from the disk; until it is asked for, placeholders stand for what will be on the accelerator."""

    def __init__(self, future: concurrent.futures.Future[Tree], source: Tree):
        super().__init__(None, source)
        self._future = future
        self._placeholders = jax.tree.map(Placeholder, source)

    def tracked(self) -> Tree:
        return self._placeholders

    def arrays(self) -> Tree:
        if self._placeholders is not None:
            self._arrays, self._placeholders, self._source = self._future.result(), None, None
            del self._future
        return self._arrays

    def block(self) -> None:
        jax.block_until_ready(self._future.result())


class _Writing(Pending):
    def __init__(self, arrays: Tree, source: Tree, future: concurrent.futures.Future[None]):
        super().__init__(arrays, source)
        self._future = future

    def block(self) -> None:
        self._future.result()
