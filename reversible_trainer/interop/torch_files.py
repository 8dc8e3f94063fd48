"""Tensors from files that `torch.save` wrote, without torch and without running what a pickle asks for."""

from __future__ import annotations

import collections
import io
import math
import pickle
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import jax.numpy as jnp
import numpy as np


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a state dict, by name.

    Args:
      path: A file of either form: a zip archive, or, before torch 1.6, pickles followed by bytes.

    Raises:
      ValueError: If it is damaged, or holds anything but a dictionary of plain tensors.
    """
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                tensors = _from_archive(archive)
        else:
            with open(path, "rb") as file:
                tensors = _from_pickles(file)
        if not isinstance(tensors, dict) or not all(isinstance(x, np.ndarray) for x in tensors.values()):
            raise pickle.UnpicklingError("it is no dictionary of tensors")
        return dict(tensors)
    except Exception as error:  # a damaged pickle may lead to any
        raise ValueError(f"{type(error).__name__}: {error}") from None


def _from_archive(archive: zipfile.ZipFile) -> Any:
    (pickled,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
    root = pickled.removesuffix("data.pkl")
    if f"{root}byteorder" in archive.namelist() and archive.read(f"{root}byteorder") != b"little":
        raise ValueError("its numbers are big-endian")
    unpickler = _Unpickler(io.BytesIO(archive.read(pickled)))
    tensors = unpickler.load()
    for key, storage in unpickler.storages.items():
        _fill(storage, archive.read(f"{root}data/{key}"))
    return tensors


def _from_pickles(file: BinaryIO) -> Any:
    magic, version, system = (_Unpickler(file).load() for _ in range(3))
    if magic != 0x1950A86A20F9469CFC6C or version != 1001 or not system["little_endian"]:  # as torch/serialization.py
        raise ValueError("it is no file that torch writes on usual machines")
    unpickler = _Unpickler(file)
    tensors = unpickler.load()
    for key in _Unpickler(file).load():
        size = int.from_bytes(file.read(8), "little")
        _fill(unpickler.storages[key], file.read(size * unpickler.storages[key].itemsize))
    return tensors


def _fill(storage: np.ndarray, data: bytes) -> None:
    if len(data) != storage.nbytes:
        raise ValueError(f"a storage has {len(data)} bytes, and its tensors expect {storage.nbytes}")
    storage[:] = np.frombuffer(data, storage.dtype)


_STORAGES = {
    "DoubleStorage": np.dtype(np.float64),
    "FloatStorage": np.dtype(np.float32),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(jnp.bfloat16),
    "LongStorage": np.dtype(np.int64),
}


class _Unpickler(pickle.Unpickler):
    """Reads dictionaries of tensors and nothing else, so that no pickle can run code.

    Attributes:
      storages: What the tensors are views of, by key; to be filled by who has the bytes.
    """

    def __init__(self, file: BinaryIO):
        super().__init__(file)
        self.storages: dict[str, np.ndarray] = {}

    def find_class(self, module: str, name: str) -> Any:
        known: dict[tuple[str, str], Any] = {
            ("collections", "OrderedDict"): collections.OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): _tensor,
            ("torch._utils", "_rebuild_parameter"): lambda tensor, *_: tensor,
            **{("torch", storage): dtype for storage, dtype in _STORAGES.items()},
        }
        if (module, name) not in known:
            raise pickle.UnpicklingError(f"it holds a {module}.{name}, and not only tensors")
        return known[module, name]

    def persistent_load(self, pid: Any) -> np.ndarray:
        kind, dtype, key, _device, size, *view = pid
        if kind != "storage" or any(view):
            raise pickle.UnpicklingError(f"it holds a {kind!r} of an unknown form")
        return self.storages.setdefault(key, np.empty(size, dtype))


def _tensor(storage: np.ndarray, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any) -> np.ndarray:
    last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    if min(offset, *shape, *strides, 0) < 0 or (math.prod(shape) and last >= len(storage)):
        raise pickle.UnpicklingError("a tensor reaches beyond its storage")
    steps = [stride * storage.itemsize for stride in strides]
    return np.lib.stride_tricks.as_strided(storage[offset:], shape, steps, writeable=False)
