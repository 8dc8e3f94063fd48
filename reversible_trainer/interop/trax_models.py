"""trax's models as blocks of ours."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import gin
import jax
import numpy as np

from reversible_trainer.interop.trax_layers import (
    Path,
    Shared,
    TraxKeys,
    TraxLayer,
    TraxLoss,
    TraxReversible,
    sublayers,
    trax,
)
from reversible_trainer.layers import LossSerial, ReversibleSerial, Serial
from reversible_trainer.layers.base import Layer
from reversible_trainer.trainer import Trainer
from reversible_trainer.tree import TrainState

tl = trax.layers


@gin.configurable
def from_trax(model_with_loss: Any, eval_model_with_loss: Any = None, accuracy: Any = None) -> list[Layer]:
    """Blocks that compute what a trax model computes, with the keys that trax's `Trainer` would give its layers.

    Serial combinators are taken apart, as `extract_reversible_blocks` does. A reversible layer
    becomes a reversible block, together with those without weights that follow. Standard
    layers become blocks of one layer with weights and those without around it, cut where no
    more activations are on the stack than before and after, so not within a residual. The
    last layer of `model_with_loss` is the loss, and is not taken apart; what it is given first
    is the prediction.

    Args:
      model_with_loss: A trax layer, `Serial(model, loss)` as a rule, or a list of layers. Its
        outputs are one number, the mean loss. Its weights are not used: the trainer's
        `init` makes new ones, and `state_from_trax` takes those that it has.
      eval_model_with_loss: The same model made with `mode="eval"`, which `evaluate` and `predict` need.
      accuracy: A trax layer with the loss's inputs that gives one number, reported as `accuracy`.

    Example:
      >>> model = tl.Serial(tl.Embedding(7, 4), tl.Dense(7)), tl.WeightedCategoryCrossEntropy()
      >>> [block.n_in for block in from_trax(model)]
      [0, 2, 4]
    """
    layers, paths = _taken_apart(model_with_loss)
    twins: list[Any] = [None] * len(layers)
    if eval_model_with_loss is not None:
        twins, _ = _taken_apart(eval_model_with_loss)
        kinds, eval_kinds = ([(type(x), x.n_in, x.n_out) for x in found] for found in (layers, twins))
        if kinds != eval_kinds:
            raise ValueError(
                f"from_trax: eval_model_with_loss must have the layers of model_with_loss, {_names(layers)}; got "
                f"{_names(twins)}. Make both by one function, with mode='train' and mode='eval'."
            )
    check_unshared("from_trax", layers)
    *layers, loss = layers
    *twins, eval_loss = twins
    groups = grouped([made(layer, twin) for layer, twin in zip(layers, twins, strict=True)])
    head = groups.pop() if groups and not isinstance(groups[-1][0], TraxReversible) else []
    last = TraxLoss(Shared(loss), _shared(eval_loss), _shared(accuracy))
    return [TraxKeys(paths, eval_loss is not None), *map(block_of, groups), LossSerial(*head, last)]


@gin.configurable
def shifting_lm(model: Any, loss: Any) -> Any:
    """A trax language model, which shifts its inputs itself, and its loss, for batches (tokens, targets, mask).

    The model is given the targets: it predicts each from those before.
    """
    return tl.Serial(tl.Select([1, 1], n_in=2), model, loss)


def state_from_trax(trainer: Trainer, key: jax.Array) -> TrainState:
    """A new run with the weights and states that the trax layers of the trainer's blocks have now.

    Args:
      trainer: Of blocks that `from_trax` made of a model that has been initialized.
      key: The run's random key, `jax.random.key(seed)`.
    """
    check_initialized("state_from_trax", [layer for block in trainer.blocks for _, layer in members(block)])
    return held_state(trainer, key)


def held_state(trainer: Trainer, key: jax.Array) -> TrainState:
    """`state_from_trax` of layers that may have no weights."""
    state = TrainState(0, trainer.placement.to_host(key), [], [], [])
    for block in trainer.blocks:
        named, host = members(block), trainer.placement.to_host
        # NumPy's, wherever they are: arrays of pinned memory cannot be computed with.
        weights = jax.tree.map(np.asarray, {name: layer.weights for name, layer in named}) if named else ()
        trained = bool(jax.tree.leaves(weights))
        state.weights.append(host(weights))
        state.slots.append(host(trainer.optimizer(0.0).init({block.name: weights})) if trained else ())
        state.states.append(host({name: layer.state for name, layer in named}) if named else ())
    return state


def check_initialized(where: str, layers: Iterable[Any]) -> None:
    """Refuses trax layers none of which has weights, or whose weights are elsewhere."""
    leaves = jax.tree.leaves([layer.weights for layer in layers])
    if not leaves or any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
        raise ValueError(f"{where}: the layers have no weights yet. Make them first: model.init(signature, rng=key).")


def _taken_apart(model: Any) -> tuple[list[Any], tuple[Path, ...]]:
    """The layers of a model, the last one its loss, and their paths."""
    model = tl.Serial(*model) if isinstance(model, list | tuple) else model
    if not isinstance(model, tl.base.Layer):
        raise TypeError(f"from_trax: expected a trax layer or a list of them, as Serial(model, loss); got {model!r}.")
    path: Path = ()
    while type(model) is tl.Serial and len(model.sublayers) == 1:
        model, path = model.sublayers[0], (*path, (1, 0))
    if not isinstance(model, tl.Serial) or isinstance(model, tl.ReversibleLayer) or not model.sublayers:
        raise ValueError(f"from_trax: expected Serial(model, loss), whose last layer is the loss; got {model}.")
    n = len(model.sublayers)
    *parts, loss = model.sublayers
    if loss.n_out != 1 or isinstance(loss, tl.ReversibleLayer):
        raise ValueError(
            f"from_trax: the last layer must give one number, the mean loss; got {loss} with {loss.n_out} outputs. "
            "Add one, as in Serial(model, tl.CrossEntropyLoss())."
        )
    found = [pair for i, part in enumerate(parts) for pair in _leaves(part, (*path, (n, i)))]
    layers, paths = zip(*found, (loss, (*path, (n, n - 1))), strict=True)
    return list(layers), paths


def _names(layers: Sequence[Any]) -> str:
    return ", ".join(layer.name for layer in layers)


def _leaves(layer: Any, path: Path) -> Iterator[tuple[Any, Path]]:
    """The layers that a layer is a series of, with their paths; of an empty series none."""
    if not isinstance(layer, tl.Serial):
        yield layer, path
    for i, part in enumerate(layer.sublayers if isinstance(layer, tl.Serial) else ()):
        yield from _leaves(part, (*path, (len(layer.sublayers), i)))


def made(layer: Any, twin: Any = None, by_value: bool = True) -> TraxLayer:
    """A trax layer as one of ours, `twin` for evaluation."""
    kind = TraxReversible if isinstance(layer, tl.ReversibleLayer) else TraxLayer
    return kind(Shared(layer, by_value), _shared(twin))


def _shared(layer: Any) -> Shared | None:
    return None if layer is None else Shared(layer)


def grouped(layers: Sequence[TraxLayer], anywhere: bool = False) -> list[list[TraxLayer]]:
    """Layers in groups that will be blocks: one with weights, and those without that follow.

    Args:
      layers: In order.
      anywhere: Whether cuts may be where more activations are on the stack than before or after.
    """
    heights = [0]
    for layer in layers:
        heights.append(heights[-1] + layer.n_out - layer.n_in)
    groups: list[list[TraxLayer]] = []
    pieces: list[list[TraxLayer]] = []  # that are not cut
    for i, layer in enumerate(layers):
        low = heights[i] <= heights[i + 1] and (i == 0 or heights[i] <= heights[i - 1])
        if not pieces or anywhere or low or {type(layer), type(layers[i - 1])} != {TraxLayer}:
            pieces.append([])
        pieces[-1].append(layer)
    for piece in pieces:
        same = bool(groups) and type(groups[-1][0]) is type(piece[0])
        if same and not (any(map(has_weights, groups[-1])) and any(map(has_weights, piece))):
            groups[-1] += piece
        else:
            groups.append(piece)
    return groups


def block_of(group: Sequence[TraxLayer]) -> Serial:
    """A group as one block."""
    return (ReversibleSerial if isinstance(group[0], TraxReversible) else Serial)(*group)


def members(block: Any) -> list[tuple[str, Any]]:
    """Names and trax layers of a block's layers."""
    if not isinstance(block, Serial):
        return []  # TraxKeys
    return [(name, layer.train.layer) for name, layer, _, _ in block._parts(None)]


def has_weights(layer: TraxLayer) -> bool:
    """Whether it may have weights."""
    return any(map(_may_have_weights, sublayers(layer.train.layer)))


def _may_have_weights(layer: Any) -> bool:
    if layer.sublayers or isinstance(layer, tl.Dropout):
        return False
    return type(layer).init_weights_and_state is not tl.base.Layer.init_weights_and_state


def check_unshared(where: str, layers: Sequence[Any]) -> None:
    """Refuses layers that have a layer with weights in common."""
    owners: dict[int, Any] = {}
    for layer in layers:
        arrays = [id(x) for x in jax.tree.leaves(layer.weights)]  # where trax knows of a second use, it has none there
        parts = {id(x): x for x in sublayers(layer) if _may_have_weights(x)}
        shared = [f"{part} is in {owners[i].name} too" for i, part in parts.items() if i in owners]
        if shared or len(set(arrays)) < len(arrays):
            raise ValueError(
                f"{where}: {layer.name} shares weights: {', '.join(shared) or 'a layer is in it twice'}. Shared "
                "weights are not supported between blocks, each of which is updated by itself, or between the layers "
                "of a list. Give each its own layer."
            )
        owners |= dict.fromkeys(parts, layer)
