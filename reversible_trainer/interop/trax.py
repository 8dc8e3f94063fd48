"""Our trainer behind the face of trax's `ReversibleSerialTrainer`; and trax's models as blocks of ours."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from reversible_trainer.interop.trax_layers import Shared, TraxLoss, TraxReversible, trax
from reversible_trainer.interop.trax_models import (
    block_of,
    check_initialized,
    check_unshared,
    from_trax,
    grouped,
    held_state,
    made,
    members,
    state_from_trax,
)
from reversible_trainer.layers import LossSerial
from reversible_trainer.layers.base import Layer
from reversible_trainer.passes import Optimizer
from reversible_trainer.trainer import Trainer
from reversible_trainer.tree import Tree, describe, same_signature, signature

__all__ = ["ReversibleSerialTrainer", "from_trax", "state_from_trax"]

tl = trax.layers
_STATS = ("gradients_l2", "weights_l2")


class _Slots(NamedTuple):
    """An optimizer's arrays for one block.

    Attributes:
      slots: trax's, one entry per array of weights.
      stats: What trax's optimizer told of the last step by name; NaN if there was none.
    """

    slots: Tree
    stats: dict[str, Any]


class ReversibleSerialTrainer:
    """trax's class of this name, done by our `Trainer`: the same arguments, results, keys and numbers.

    Weights, states and slots are the trainer's, and are what the trax layers' `.weights` and
    `.state` and this object's `slots` show between steps (in pinned host memory on a GPU:
    `np.asarray` reads them). A step gives the arrays that it replaces away, so copy what is to
    be kept. What is set on a layer, or by `slots`, is copied and goes on from there.

    Unlike in trax:

    * A block may have no reversible layers, or no standard ones.
    * An optimizer's `clip_grad_norm` always means the norm of all gradients, as in trax's
      `Trainer`: gradients then wait on the host and blocks are updated in a sweep of their own.
      `gradients_l2` is the norm after that.
    * If loss or gradients are not finite, blocks keep weights and slots; their stats are NaN.
    * Programs are shared by layers of which everything is equal, not of which the names are.

    Args:
      blocks: Pairs of a list of standard layers and a list of reversible layers, initialized.
      loss_layer: The last layer, initialized; its output is one number.
      optimizer_fn: Makes a trax optimizer; called once.
      n_devices: 1, or None where there is one device.
      memoize_jit: Whether equal layers share programs.
      free_accelerators_on_step: Nothing is left there between steps, and so there is nothing to free.
      adasum: Must be False.

    Attributes:
      trainer: The `Trainer` that does it; `trainer.ledger.peak_bytes` is the most that there has
        been on the accelerator.

    Raises:
      NotImplementedError: For several devices and Adasum.
    """

    def __init__(
        self,
        blocks: Sequence[tuple[Any, Any]],
        loss_layer: Any,
        optimizer_fn: Callable[[], Any],
        n_devices: int | None = None,
        memoize_jit: bool = True,
        free_accelerators_on_step: bool = False,
        adasum: bool = False,
    ):
        if (n_devices or trax.fastmath.local_device_count()) != 1:
            raise NotImplementedError(
                f"ReversibleSerialTrainer(n_devices={n_devices}): expected 1 device, and there are "
                f"{trax.fastmath.local_device_count()}. Give n_devices=1; several devices are for trax's own trainers."
            )
        if adasum:
            raise NotImplementedError("ReversibleSerialTrainer(adasum=True): it is for several devices; leave it out.")
        pairs = [_checked(i, block) for i, block in enumerate(blocks)]
        if not isinstance(loss_layer, tl.base.Layer) or loss_layer.n_out != 1:
            raise TypeError(
                f"ReversibleSerialTrainer(loss_layer={loss_layer!r}): expected a trax layer with one output, the loss."
            )
        self._blocks = [(tl.Serial(std), rev) for std, rev in pairs]
        self._loss_layer, self._optimizer_fn = loss_layer, optimizer_fn
        check_unshared("ReversibleSerialTrainer", self.all_layers)
        optimizer = optimizer_fn()
        if not isinstance(optimizer, trax.optimizers.base.Optimizer):
            raise TypeError(f"ReversibleSerialTrainer: optimizer_fn must make a trax optimizer; got {optimizer!r}.")
        self._learning_rate = optimizer.opt_params["learning_rate"]

        layers = [made(x, by_value=memoize_jit) for x in self.all_layers[:-1]]
        # An empty series of standard layers is no block, and its key remains unused.
        used = [i for i, x in enumerate(layers) if isinstance(x, TraxReversible) or x.train.layer.sublayers]
        made_blocks: list[Layer] = [block_of(group) for group in grouped([layers[i] for i in used], anywhere=True)]
        made_blocks.append(LossSerial(TraxLoss(Shared(loss_layer, memoize_jit))))
        self._rows = np.array([*used, len(layers)])
        clip = optimizer._clip_grad_norm
        settings: dict[str, Any] = {} if clip is None else {"update": "deferred", "clip_global": float(clip)}
        self.trainer = Trainer(made_blocks, _factory(optimizer), **settings)
        self._state = held_state(self.trainer, jax.random.key(0))  # keys come with the batches
        self._places = [  # of each layer, its block and its name there
            (layer, i, name) for i, block in enumerate(self.trainer.blocks) for name, layer in members(block)
        ]
        self._show()

    @property
    def loss_layer(self) -> Any:
        """The last layer."""
        return self._loss_layer

    @property
    def all_layers(self) -> list[Any]:
        """All trax layers in order, the standard ones of each block as one."""
        return [x for std, rev in self._blocks for x in (std, *rev)] + [self._loss_layer]

    @property
    def optimizer_fn(self) -> Callable[[], Any]:
        """What made the optimizer."""
        return self._optimizer_fn

    @property
    def slots(self) -> list[Any]:
        """The optimizer's slots: a pair for each block, of its standard layers' and a list, and those of the loss."""
        pairs: list[Any] = [(self._slots_of(std), [self._slots_of(x) for x in rev]) for std, rev in self._blocks]
        return [*pairs, self._slots_of(self._loss_layer)]

    @slots.setter
    def slots(self, slots: Sequence[Any]) -> None:
        if not same_signature(slots := list(slots), self.slots):
            raise ValueError(
                f"ReversibleSerialTrainer.slots: expected ({describe(self.slots)}) in the structure of what `slots` "
                f"returns, got ({describe(slots)}). Set what was read from a trainer of the same layers and optimizer."
            )
        flat = [x for std, rev in slots[:-1] for x in (std, *rev)] + [slots[-1]]
        new = {id(layer): x for layer, x in zip(self.all_layers, flat, strict=True)}
        for layer, i, _ in self._places:
            if jax.tree.leaves(layer.weights):
                placed = self.trainer.placement.to_host(new[id(layer)])
                self._state.slots[i] = self._state.slots[i]._replace(slots=placed)

    def one_step(self, batch: Any, rng: Any, step: int = 0, learning_rate: Any = None) -> tuple[Any, dict[str, Any]]:
        """One training step; returns as soon as it is enqueued.

        Args:
          batch: Tuple of arrays.
          rng: Random key, of which trax makes one for each layer.
          step: Number of the step, for the optimizer.
          learning_rate: For this step and those after it; None leaves it as it is.

        Returns:
          `(loss, stats)`: stats have the names `layer<number>/<what>` that trax's have.
        """
        batch = tuple(map(_canonical, batch if isinstance(batch, list | tuple) else (batch,)))
        rate = self._learning_rate if learning_rate is None else learning_rate
        self._take_up()
        state = self._state
        state.step = int(step)
        keys = jax.random.split(rng, len(self.all_layers))
        keys = jax.random.key_data(keys) if jnp.issubdtype(keys.dtype, jax.dtypes.prng_key) else keys
        if not self.trainer.placement.same_memory:
            self._show(signature)  # the host must not hold twice what the step replaces
        try:
            self._state, metrics = self.trainer.step(state, (keys[self._rows], *batch), rate)
        except Exception:
            if "weights" in vars(state):  # nothing has been done yet
                self._show()
            raise
        self._learning_rate = rate
        self._show()
        return metrics["loss"], {**self._stats(), f"layer{len(keys) - 1}/loss": metrics["loss"]}

    def _stats(self) -> dict[str, Any]:
        """What the optimizer told of the last step; taken out of the slots, which the next step gives away."""
        state, found = self._state, {}
        for i, slots in enumerate(state.slots):
            if slots:
                found[i] = slots.stats
                state.slots[i] = slots._replace(stats=self.trainer.placement.to_host(_no_stats()))
        numbers = {id(layer): number for number, layer in enumerate(self.all_layers)}
        return {
            f"layer{numbers[id(layer)]}/{name}": value
            for layer, i, name_in_block in self._places
            if jax.tree.leaves(state.weights[i][name_in_block])
            for name, value in found[i].items()
        }

    def _slots_of(self, layer: Any) -> Tree:
        """A layer's slots; a block has one layer with weights."""
        found = [self._state.slots[i].slots for x, i, _ in self._places if x is layer and jax.tree.leaves(x.weights)]
        return found[0] if found else ()

    def _show(self, seen: Callable[[Tree], Tree] = lambda arrays: arrays) -> None:
        """Lets the trax layers show what the trainer holds, or what `seen` makes of it."""
        for layer, i, name in self._places:
            weights, layer_state = self._state.weights[i][name], self._state.states[i][name]
            if jax.tree.leaves(weights):
                layer.weights = seen(weights)
            if jax.tree.leaves(layer_state):
                layer.state = seen(layer_state)

    def _take_up(self) -> None:
        """Takes what somebody has set on the trax layers since it was shown."""
        check_initialized("ReversibleSerialTrainer.one_step", self.all_layers)
        state, changed = self._state.copy(), False
        for layer, i, name in self._places:
            for part, entries in ((layer.weights, state.weights), (layer.state, state.states)):
                mine = entries[i][name]
                if not _same_arrays(part, mine):
                    entries[i] = {**entries[i], name: self.trainer.placement.to_host(part)}
                    changed = True
        if changed:
            self._state = state  # the trainer checks one that it has not returned itself


def _checked(i: int, block: Any) -> tuple[list[Any], list[Any]]:
    """A block as two lists of trax layers."""
    if isinstance(block, tuple | list) and len(block) == 2:
        std, rev = ([part] if isinstance(part, tl.base.Layer) else list(part) for part in block)
        if all(isinstance(x, tl.base.Layer) for x in std) and all(isinstance(x, tl.ReversibleLayer) for x in rev):
            return std, rev
    raise TypeError(
        f"ReversibleSerialTrainer: block {i} must be a pair of a list of trax layers and a list of reversible ones; "
        f"got {block!r}. trax.optimizers.trainer.extract_reversible_blocks makes such blocks of a model."
    )


def _canonical(x: Any) -> Any:
    """An array of a dtype that JAX has: trax's batches are often int64."""
    return x if isinstance(x, jax.Array) else np.asarray(x, jax.dtypes.canonicalize_dtype(np.asarray(x).dtype))


def _same_arrays(a: Tree, b: Tree) -> bool:
    xs, ys = jax.tree.leaves(a), jax.tree.leaves(b)
    return len(xs) == len(ys) and all(x is y for x, y in zip(xs, ys, strict=True))


def _no_stats() -> dict[str, Any]:
    return dict.fromkeys(_STATS, np.float32(np.nan))


def _factory(trax_optimizer: Any) -> Optimizer:
    """A trax optimizer as a factory of ours. It sees one block at a time, so it must not clip."""
    optimizer = copy.copy(trax_optimizer)
    optimizer._clip_grad_norm = None
    settings = {name: np.asarray(value) for name, value in optimizer.opt_params.items()}

    def init(params: Any) -> Any:
        return _Slots(tuple(map(optimizer.init, jax.tree.leaves(params))), jax.tree.map(jnp.asarray, _no_stats()))

    def factory(learning_rate: Any) -> optax.GradientTransformationExtraArgs:
        def update(updates: Any, state: Any, params: Any = None, *, step: Any = 0, **_: Any) -> tuple[Any, Any]:
            leaves, structure = jax.tree.flatten(params)
            new, new_slots, stats = optimizer.tree_update(
                *(step, jax.tree.leaves(updates), leaves, state.slots, {**settings, "learning_rate": learning_rate}),
                store_slots=False,
            )
            changes = [(x - old).astype(old.dtype) for x, old in zip(new, leaves, strict=True)]
            stats = {name: stats[name].astype(np.float32) for name in _STATS}
            return jax.tree.unflatten(structure, changes), _Slots(tuple(new_slots), stats)

        return optax.GradientTransformationExtraArgs(init, update)

    return factory
