"""What is asked of the trainer's settings, blocks and batches, and what is said when they cannot be used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from reversible_trainer.layers.base import Layer, LossLayer


def whole(name: str, value: Any, least: int) -> None:
    """Refuses what is no whole number of at least `least`."""
    if type(value) is not int or value < least:
        raise ValueError(f"Trainer({name}={value!r}): expected a whole number, {least} or more.")


def choice(name: str, value: Any, known: Sequence[Any]) -> None:
    """Refuses what is not known."""
    if value not in known:
        where = name if " " in name else f"Trainer({name}={value!r})"
        raise ValueError(f"{where}: expected one of {', '.join(map(repr, known))}, got {value!r}.")


def clipping(update: str, clip_per_block: Any, clip_global: Any) -> None:
    """Refuses clipping that cannot be had."""
    for name, value in {"clip_per_block": clip_per_block, "clip_global": clip_global}.items():
        if value is not None and not (isinstance(value, int | float) and 0 < value < float("inf")):
            raise ValueError(f"Trainer({name}={value!r}): expected a positive number, the largest norm, or None.")
    if clip_global is not None and update == "fused":
        raise ValueError(
            f"Trainer(clip_global={clip_global}): the norm of all gradients is known only after the whole backward "
            "sweep, and update='fused' has updated the blocks by then. Set update='deferred' (gradients wait on the "
            "host, one sweep more), or clip each block by itself with clip_per_block."
        )
    if clip_global is not None and clip_per_block is not None:
        raise ValueError("Trainer: clip_global and clip_per_block exclude each other; set one of them.")


def dtype(given: Any) -> Any:
    """The floating-point dtype of that name."""
    if given is None:
        return None
    try:
        found = jnp.dtype(given)
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating):
        raise ValueError(f"Trainer(compute_dtype={given!r}): expected a floating-point dtype, as 'bfloat16', or None.")
    return found


def stack(batch: Any) -> None:
    """Refuses what is no batch."""
    if not isinstance(batch, tuple) or not all(hasattr(x, "shape") and hasattr(x, "dtype") for x in batch):
        kinds = ", ".join(type(x).__name__ for x in batch) if isinstance(batch, tuple) else ""
        got = f"a tuple of ({kinds})" if kinds else f"a {type(batch).__name__}"
        raise TypeError(f"Trainer: a batch is a tuple of arrays, the first stack; got {got}.")


def blocks(given: Sequence[Layer]) -> tuple[Layer, ...]:
    """The blocks, if they are layers with a loss at the end."""
    for i, block in enumerate(given):
        if not isinstance(block, Layer):
            raise TypeError(f"Trainer: block {i} must be a Layer, got {block!r} ({type(block).__name__}).")
        if isinstance(block, LossLayer) != (i == len(given) - 1):
            place = "the last block" if i == len(given) - 1 else f"block {i} of {len(given)}"
            raise ValueError(
                f"Trainer: {place} is {block.name}. The last block, and no other, must be a LossLayer "
                "such as CrossEntropy() or LossSerial(..., CrossEntropy())."
            )
    if not given:
        raise ValueError("Trainer: blocks is empty; the least is one LossLayer.")
    return tuple(given)
