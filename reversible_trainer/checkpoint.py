"""Checkpoints: a `TrainState` in a folder, one safetensors file per block.

    step_000600/
      manifest.json              step, what the run is, package versions, a sha256 per file
      manifest.sha256            its own
      block_000.safetensors      weights/..., slots/..., states/... of block 0
      run.safetensors            the random key

A checkpoint is written under another name, synced and renamed, so a folder called `step_*`
is whole. Nothing is pickled, and no path is read from the manifest. `Writer` writes while
training goes on. `export_weights` makes one file of the weights alone.
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
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
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
_EXPORTED = ("weights", "states")
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


class SlotsError(ValueError):
    """A checkpoint's slots are those of another optimizer."""


def save(
    folder: str | os.PathLike[str],
    state: TrainState,
    description: Description,
    config: str = "",
    keep: int = 2,
    eval_loss: float | None = None,
    order: Sequence[int] | None = None,
    written: Callable[[int], None] = lambda block: None,
) -> Path:
    """Writes `state` as `folder/step_<step>` and removes all but the last `keep` checkpoints and the best one.

    Args:
      folder: Where the run's checkpoints are.
      state: Is read, not consumed.
      description: What it belongs to; `restore` compares.
      config: Text from which the run can be built again.
      keep: Checkpoints to keep. The one with the least `eval_loss` is kept besides.
      eval_loss: What an evaluation of this state has found, if there was one.
      order: In which blocks are written; by default the last one first.
      written: Is told the index of every block that has been.

    Raises:
      OSError: If it cannot be written, as on a full disk. The other checkpoints are as they were.
    """
    folder = Path(folder)
    target = folder / f"step_{state.step:06d}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left_over in folder.glob(".*.partial"):  # of a run that was killed while writing or removing
            shutil.rmtree(left_over)
        _save(target, state, description, config, eval_loss, order or range(len(state.weights))[::-1], written)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(_partial(target), ignore_errors=True)
        raise _not_written(target, error) from None
    kept = checkpoints(folder)
    best = best_of(kept)
    for old in kept[:-keep]:
        if old != best:
            _remove(old)
    return target


def _save(
    target: Path,
    state: TrainState,
    description: Description,
    config: str,
    eval_loss: float | None,
    order: Sequence[int],
    written: Callable[[int], None],
) -> None:
    partial = _partial(target)
    partial.mkdir()
    files = {}
    for i in order:
        files[_block_file(i)] = _write(partial / _block_file(i), {name: getattr(state, name)[i] for name in _PARTS})
        written(i)
    files["run.safetensors"] = _write(partial / "run.safetensors", {"key": state.key})
    versions = {name: importlib.metadata.version(name) for name in ("jax", "numpy", "optax", "safetensors")}
    manifest = {
        "format": _FORMAT,
        "step": state.step,
        "eval_loss": eval_loss,
        "key_impl": str(jax.random.key_impl(state.key)),
        "description": dataclasses.asdict(description),
        "config": config,
        "versions": versions,
        "sha256": dict(sorted(files.items())),
    }
    with open(partial / _MANIFEST, "w") as file:
        json.dump(manifest, file, indent=1)
    (partial / _MANIFEST_SUM).write_text(_sha256(partial / _MANIFEST))
    for path in (*partial.iterdir(), partial):
        _sync(path)
    if target.exists():
        _remove(target)
    partial.rename(target)
    _sync(target.parent)


def _not_written(target: Path, error: Exception) -> OSError:
    free = shutil.disk_usage(target.parent).free if target.parent.exists() else 0
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    last = checkpoints(target.parent)
    left = f"The last checkpoint is {last[-1]}" if last else "There is no checkpoint before it"
    return OSError(
        f"save: cannot write the checkpoint {target}: {reason}; {free:,} bytes are free there. {left}. Make room, or "
        "see to it that the folder can be written, and start the same command again."
    )


class Writer:
    """Writes a run's checkpoints in a thread, one at a time, while the next step is under way.

    It holds the arrays of the blocks that are still to be written, and no step replaces one of
    these before it has been: the host never holds a block twice.

    Args:
      folder: See `save`, like `description` and `keep`.
      description: What the checkpoints belong to.
      keep: Checkpoints to keep.

    Example:
      >>> from reversible_trainer import Trainer
      >>> def train(trainer: Trainer, state: TrainState, batch, writer: Writer):
      ...     writer.save(state, trainer.update_order)
      ...     return trainer.step(state, batch, 1e-3, before_update=writer.wait_for)
    """

    def __init__(self, folder: str | os.PathLike[str], description: Description, keep: int = 2):
        self._folder, self._description, self._keep = folder, description, keep
        self._written: dict[int, Future[None]] = {}
        self._done: Future[Path] | None = None

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: Any) -> None:
        """Waits for the thread, unless the process is to end at once."""
        if kind is None:
            self.finish()
        elif issubclass(kind, Exception):
            with contextlib.suppress(OSError):  # there is an error to tell of already
                self.finish()

    def save(
        self, state: TrainState, order: Sequence[int], config: str = "", eval_loss: float | None = None
    ) -> Future[Path]:
        """Begins to write a state, when the one before has been; arguments are those of the function `save`."""
        self.finish()
        state = state.copy()
        self._written = written = {i: Future() for i in range(len(state.weights))}
        self._done = done = Future()

        def let_go(block: int) -> None:
            for name in _PARTS:
                getattr(state, name)[block] = None
            written[block].set_result(None)

        def write() -> None:
            try:
                options = self._keep, eval_loss, order, let_go
                done.set_result(save(self._folder, state, self._description, config, *options))
            except BaseException as error:
                done.set_exception(error)
            for future in written.values():
                if not future.done():  # it has failed, and nobody may wait for ever
                    future.set_result(None)

        threading.Thread(target=write, name="reversible_trainer checkpoints", daemon=True).start()
        return done

    def wait_for(self, block: int) -> None:
        """Returns when a block has been written; `Trainer.step` calls it before it replaces one."""
        if block in self._written:
            self._written[block].result()

    def finish(self) -> None:
        """Waits until everything has been written. Raises `OSError` if that has failed."""
        done, self._done = self._done, None
        if done is not None:
            done.result()

    def check(self) -> None:
        """Raises `OSError` if writing has failed by now; does not wait."""
        if self._done is not None and self._done.done():
            self.finish()


def checkpoints(folder: str | os.PathLike[str]) -> list[Path]:
    """The checkpoints in `folder`, oldest first."""
    found = [path for path in Path(folder).glob("step_*") if re.fullmatch(r"step_\d{6,}", path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))


def best_of(paths: Sequence[Path]) -> Path | None:
    """The checkpoint whose evaluation found the least loss; None if there was no evaluation."""
    losses = {}
    for path in paths:
        with contextlib.suppress(ValueError):  # damaged: never the best
            losses[path] = read_manifest(path).get("eval_loss")
    evaluated = {path: loss for path, loss in losses.items() if loss is not None}
    return min(evaluated, key=lambda path: evaluated[path]) if evaluated else None


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

    Raises:
      DamagedError: If files are missing, or are not what was written.
      SlotsError: If the slots are not those of the run's optimizer.
      ValueError: If it belongs to another run.
    """
    manifest = read_manifest(path)
    check(path, manifest, description)
    read: dict[str, list[Tree]] = {name: [] for name in _PARTS}
    for i in range(len(expected.weights)):
        with _open(path / _block_file(i), manifest) as arrays:
            for name in _PARTS:
                entry = getattr(expected, name)[i]
                where = f"{name} of block {i} in {path}"
                if name in parts:
                    with _as_slots_error(name, manifest, description):
                        read[name].append(place(_read(arrays, name, entry, where, manifest["key_impl"])))
                else:
                    read[name].append(None)
    with _open(path / "run.safetensors", manifest) as arrays:
        key = jax.random.wrap_key_data(jnp.asarray(arrays.get_tensor("key")), impl=manifest["key_impl"])
    return TrainState(step=manifest["step"], key=place(key), **read)


@contextlib.contextmanager
def _as_slots_error(part: str, manifest: dict[str, Any], ours: Description) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        if part != "slots":
            raise ValueError(
                f"{error} The checkpoint belongs to another model; use the configuration it was made with."
            ) from None
        raise SlotsError(
            f"{error} They were written by {manifest['description'].optimizer!r}, this run uses {ours.optimizer!r}. "
            "Use the optimizer and options the run was made with, or start afresh in another output folder."
        ) from None


def _read(arrays: Any, part: str, expected: Tree, where: str, key_impl: str) -> Tree:
    """The arrays whose names begin with `part`, in the structure of `expected`."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(expected)
    wanted = {_name(part, path): x for path, x in leaves}
    stored = {name for name in arrays.keys() if name == part or name.startswith(f"{part}/")}
    for name in sorted(stored ^ wanted.keys()):
        got, want = ("nothing", describe(_data_signature(wanted[name]))) if name in wanted else ("an array", "nothing")
        raise ValueError(f"restore: {where}: expected {want} at {name!r}, got {got}.")
    values = []
    for name, x in wanted.items():
        array, want = arrays.get_tensor(name), _data_signature(x)
        if (array.shape, array.dtype) != (want.shape, want.dtype):
            raise ValueError(f"restore: {where}: expected {describe(want)} at {name!r}, got {describe(array)}.")
        values.append(jax.random.wrap_key_data(array, impl=key_impl) if _is_key(x) else array)
    return jax.tree.unflatten(structure, values)


def export_weights(path: str | os.PathLike[str], state: TrainState) -> None:
    """Writes weights and untrained state into one safetensors file.

    Arrays are called `block_003/weights/Dense/kernel`, `block_003/states/...`: the block, and
    the path in its entry of `state.weights`. Random keys are stored as their data.

    Raises:
      OSError: If it cannot be written. A file that was there before is as it was.
    """
    path = Path(path)
    arrays = {}
    for i in range(len(state.weights)):
        for part in _EXPORTED:
            arrays |= _named_arrays({f"block_{i:03d}": {part: getattr(state, part)[i]}})
    partial = _partial(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(arrays, partial, {"step": str(state.step), "key_impl": str(jax.random.key_impl(state.key))})
        _sync(partial)
        partial.replace(path)
    except (OSError, SafetensorError) as error:
        partial.unlink(missing_ok=True)
        raise OSError(f"export: cannot write {path}: {getattr(error, 'strerror', None) or error}.") from None


def import_weights(path: str | os.PathLike[str], expected: TrainState, place: Callable[[Tree], Tree]) -> TrainState:
    """Reads what `export_weights` has written, block by block.

    Args:
      path: The file.
      expected: See `restore`.
      place: See `restore`.

    Returns:
      A state of step 0 with the file's weights and untrained states; key and slots are None.

    Raises:
      ValueError: If the file cannot be read, or is not of this model.
    """
    read: dict[str, list[Tree]] = {name: [] for name in _EXPORTED}
    try:
        with safe_open(path, framework="numpy") as arrays:
            blocks = {name.split("/")[0] for name in arrays.keys()}
            key_impl = (arrays.metadata() or {}).get("key_impl", "")
            for i in range(len(expected.weights)):
                blocks.discard(f"block_{i:03d}")
                for part in _EXPORTED:
                    where, entry = f"{part} of block {i} in {path}", getattr(expected, part)[i]
                    read[part].append(place(_read(arrays, f"block_{i:03d}/{part}", entry, where, key_impl)))
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"import: {path} cannot be read as a safetensors file: {reason}.") from None
    if blocks:
        raise ValueError(f"import: {path} has {min(blocks)!r}, which is no block of this model.")
    return TrainState(0, None, slots=[None] * len(expected.weights), **read)  # type: ignore[arg-type]


def _write(path: Path, tree: Tree) -> str:
    """Writes the arrays of `tree`, each under its path, and returns the file's sha256."""
    save_file(_named_arrays(tree), path)
    return _sha256(path)


def _named_arrays(tree: Tree) -> dict[str, np.ndarray]:
    arrays = {}
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        data = jax.random.key_data(x) if _is_key(x) else x
        arrays[path_name(path)] = np.asarray(data, order="C")  # safetensors would store a transposed view wrongly
    return arrays


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
