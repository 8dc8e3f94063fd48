"""Checkpoints: a `TrainState` in a folder, one safetensors file per block.

    step_000600/
      manifest.json              step, what the run is, package versions, a sha256 per file
      manifest.sha256            its own
      block_000.safetensors      weights/..., slots/..., states/... of block 0
      run.safetensors            the random key

A checkpoint is written under another name, synced and renamed, so a folder called `step_*`
is whole. Nothing is pickled, and no path is read from the manifest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from reversible_trainer.tree import TrainState, Tree, describe, path_name

_FORMAT = 1
_PARTS = ("weights", "slots", "states")
_MANIFEST = "manifest.json"
_MANIFEST_SUM = "manifest.sha256"


class DamagedError(ValueError):
    """A checkpoint is not what was written."""


@dataclasses.dataclass(frozen=True)
class Description:
    """What a checkpoint belongs to.

    Attributes:
      blocks: `repr` of every block, without memory addresses.
      optimizer: Name of the optimizer; for messages only.
      seed: The seed of the data.
    """

    blocks: tuple[str, ...]
    optimizer: str
    seed: int

    @classmethod
    def of(cls, blocks: Sequence[Any], optimizer: Callable[..., Any], seed: int) -> Description:
        """Describes a run about to start."""
        reprs = tuple(re.sub(r" at 0x[0-9a-f]+", "", repr(block)) for block in blocks)
        return cls(reprs, getattr(optimizer, "__name__", type(optimizer).__name__), seed)


def save(
    folder: str | os.PathLike[str], state: TrainState, description: Description, config: str = "", keep: int = 2
) -> Path:
    """Writes `state` as `folder/step_<step>` and removes all but the last `keep` checkpoints.

    Args:
      folder: Where the run's checkpoints are.
      state: Is read, not consumed.
      description: What it belongs to; `restore` compares.
      config: Text from which the run can be built again.
      keep: Checkpoints to keep.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for left_over in folder.glob(".*.partial"):  # of a run that was killed while writing or removing
        shutil.rmtree(left_over)
    target = folder / f"step_{state.step:06d}"
    partial = _partial(target)
    partial.mkdir()
    files = {}
    for i in range(len(state.weights)):
        parts = {name: getattr(state, name)[i] for name in _PARTS}
        files[_block_file(i)] = _write(partial / _block_file(i), parts)
    files["run.safetensors"] = _write(partial / "run.safetensors", {"key": state.key})
    versions = {name: importlib.metadata.version(name) for name in ("jax", "numpy", "optax", "safetensors")}
    manifest = {
        "format": _FORMAT,
        "step": state.step,
        "key_impl": str(jax.random.key_impl(state.key)),
        "description": dataclasses.asdict(description),
        "config": config,
        "versions": versions,
        "sha256": files,
    }
    with open(partial / _MANIFEST, "w") as file:
        json.dump(manifest, file, indent=1)
    (partial / _MANIFEST_SUM).write_text(_sha256(partial / _MANIFEST))
    for path in (*partial.iterdir(), partial):
        _sync(path)
    if target.exists():
        _remove(target)
    partial.rename(target)
    _sync(folder)
    for old in checkpoints(folder)[:-keep]:
        _remove(old)
    return target


def checkpoints(folder: str | os.PathLike[str]) -> list[Path]:
    """The checkpoints in `folder`, oldest first."""
    found = [path for path in Path(folder).glob("step_*") if re.fullmatch(r"step_\d{6,}", path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))


def newest(paths: Sequence[Path], read: Callable[[Path], Any], say: Callable[[str], None]) -> tuple[Path, Any]:
    """The newest checkpoint that is not damaged, and what `read` makes of it.

    Args:
      paths: Oldest first.
      read: Raises `DamagedError`, as `read_manifest` and `restore` do.
      say: Is told of each that is damaged.
    """
    for path in reversed(paths[1:]):
        try:
            return path, read(path)
        except DamagedError as error:
            say(f"{error} Trying the checkpoint before it.")
    try:
        return paths[0], read(paths[0])
    except DamagedError as error:
        raise DamagedError(f"{error} There is none before it: start afresh in another output folder.") from None


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of the checkpoint `path`, its description as `Description`."""
    try:
        expected, found = (path / _MANIFEST_SUM).read_text(), _sha256(path / _MANIFEST)
        if found != expected:
            raise TypeError(f"expected sha256 {expected!r}, got {found}")
        manifest = json.loads((path / _MANIFEST).read_text())
        if manifest["format"] != _FORMAT:
            raise ValueError(
                f"restore: {path} has checkpoint format {manifest['format']}, this version of reversible_trainer "
                f"reads {_FORMAT}. Use the version that wrote it."
            )
        kinds = {"step": int, "key_impl": str, "config": str, "sha256": dict}
        for name, kind in kinds.items():
            if not isinstance(manifest[name], kind):
                raise TypeError(f"{name} is {manifest[name]!r}")
        fields = manifest["description"]
        manifest["description"] = Description(tuple(fields["blocks"]), fields["optimizer"], fields["seed"])
    except (OSError, KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DamagedError(f"restore: {path / _MANIFEST} is missing or damaged ({error}).") from None
    return manifest


def check(path: Path, manifest: dict[str, Any], description: Description) -> None:
    """Raises `ValueError` unless `path` was written by the run of `description`."""
    stored = manifest["description"]
    advice = "Continue it with the configuration it was made with, or start afresh in another output folder."
    if len(stored.blocks) != len(description.blocks):
        raise ValueError(
            f"restore: {path} belongs to another model: it has {len(stored.blocks)} blocks, "
            f"this one has {len(description.blocks)}. {advice}"
        )
    for i, (theirs, ours) in enumerate(zip(stored.blocks, description.blocks, strict=True)):
        if theirs != ours:
            theirs, ours = _difference(theirs, ours)
            raise ValueError(
                f"restore: {path} belongs to another model: its block {i} says {theirs!r} where this one "
                f"says {ours!r}. {advice}"
            )
    if stored.seed != description.seed:
        raise ValueError(
            f"restore: {path} was made with seed {stored.seed}, this run has seed {description.seed}. {advice}"
        )


def restore(
    path: Path,
    expected: TrainState,
    place: Callable[[Tree], Tree],
    description: Description,
    parts: Sequence[str] = _PARTS,
) -> TrainState:
    """Reads a checkpoint, block by block.

    Args:
      path: A checkpoint's folder.
      expected: The state's structure, with a `ShapeDtypeStruct` for every array.
      place: Puts a tree of arrays where the state's entries live.
      description: The run that asks.
      parts: What to read; entries of other parts are None. Sampling needs no slots.

    Returns:
      The state, equal to the one saved in every bit.
    """
    manifest = read_manifest(path)
    check(path, manifest, description)
    read: dict[str, list[Tree]] = {name: [] for name in _PARTS}
    for i in range(len(expected.weights)):
        with _open(path / _block_file(i), manifest) as arrays:
            for name in _PARTS:
                entry = getattr(expected, name)[i]
                where = f"{name} of block {i} in {path}"
                entry = _read(arrays, name, entry, where, manifest, description) if name in parts else None
                read[name].append(None if entry is None else place(entry))
    with _open(path / "run.safetensors", manifest) as arrays:
        key = jax.random.wrap_key_data(jnp.asarray(arrays.get_tensor("key")), impl=manifest["key_impl"])
    return TrainState(step=manifest["step"], key=place(key), **read)


def _read(arrays: Any, part: str, expected: Tree, where: str, manifest: dict[str, Any], ours: Description) -> Tree:
    """The arrays of one part of one block, in the structure of `expected`."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(expected)
    wanted = {_name(part, path): x for path, x in leaves}
    stored = {name for name in arrays.keys() if name.split("/")[0] == part}
    if part == "slots":
        advice = (
            f"They were written by {manifest['description'].optimizer!r}, this run uses {ours.optimizer!r}. "
            "Use the optimizer and options the run was made with, or start afresh in another output folder."
        )
    else:
        advice = "The checkpoint belongs to another model; use the configuration it was made with."
    for name in sorted(stored ^ wanted.keys()):
        got, want = ("nothing", describe(_data_signature(wanted[name]))) if name in wanted else ("an array", "nothing")
        raise ValueError(f"restore: {where}: expected {want} at {name!r}, got {got}. {advice}")
    values = []
    for name, x in wanted.items():
        array, want = arrays.get_tensor(name), _data_signature(x)
        if (array.shape, array.dtype) != (want.shape, want.dtype):
            got = describe(array)
            raise ValueError(f"restore: {where}: expected {describe(want)} at {name!r}, got {got}. {advice}")
        values.append(jax.random.wrap_key_data(array, impl=manifest["key_impl"]) if _is_key(x) else array)
    return jax.tree.unflatten(structure, values)


def _write(path: Path, tree: Tree) -> str:
    """Writes the arrays of `tree`, each under its path, and returns the file's sha256."""
    arrays = {}
    for leaf_path, x in jax.tree_util.tree_leaves_with_path(tree):
        data = jax.random.key_data(x) if _is_key(x) else x
        arrays[path_name(leaf_path)] = np.asarray(data, order="C")  # safetensors would store a transposed view wrongly
    save_file(arrays, path)
    return _sha256(path)


@contextlib.contextmanager
def _open(path: Path, manifest: dict[str, Any]) -> Iterator[Any]:
    expected = manifest["sha256"].get(path.name)
    found = _sha256(path) if path.exists() else "no file"
    if found != expected:
        raise DamagedError(f"restore: {path} is damaged: expected sha256 {expected}, got {found}.")
    try:
        with safe_open(path, framework="numpy") as arrays:
            yield arrays
    except SafetensorError as error:
        raise DamagedError(f"restore: {path} cannot be read: {error}.") from None


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _data_signature(x: Any) -> Any:
    """Shape and dtype under which `x` is stored: a random key as its data."""
    return jax.eval_shape(jax.random.key_data, x) if _is_key(x) else x


def _name(part: str, path: tuple[Any, ...]) -> str:
    return f"{part}/{path_name(path)}" if path else part


def _block_file(i: int) -> str:
    return f"block_{i:03d}.safetensors"


def _difference(a: str, b: str) -> tuple[str, str]:
    """The first words in which two descriptions differ.

    Example:
      >>> _difference("Dense(features=8, bias=True)", "Dense(features=9, bias=True)")
      ('features=8', 'features=9')
    """
    pairs = zip(re.split(r"[(), ]+", a), re.split(r"[(), ]+", b), strict=False)
    return next(((x, y) for x, y in pairs if x != y), (a, b))


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def _remove(path: Path) -> None:
    """Removes a checkpoint; renamed first, so that half a folder is never taken for one."""
    doomed = path.with_name(f".{path.name}.removed.partial")
    path.rename(doomed)
    shutil.rmtree(doomed)


def _sync(path: Path) -> None:
    """Makes sure that a file or a folder's list of names is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
