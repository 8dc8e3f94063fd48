"""Pytrees of arrays: signatures, bytes, leaf paths; and `TrainState`, the value that is a run."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Tree = Any  # a pytree of arrays
Array = jax.Array


def signature(tree: Tree) -> Tree:
    """The tree with a `ShapeDtypeStruct` in place of every array.

    Example:
      >>> import numpy as np
      >>> signature({"kernel": np.zeros((2, 3), np.float32)})
      {'kernel': ShapeDtypeStruct(shape=(2, 3), dtype=float32)}
    """
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.result_type(x.dtype)), tree)


def leaf_bytes(x: Any) -> int:
    """Bytes of one array, `ShapeDtypeStruct` or random key."""
    return math.prod(x.shape) * x.dtype.itemsize


def tree_bytes(tree: Tree) -> int:
    """Bytes of all arrays of a tree.

    Example:
      >>> import numpy as np
      >>> tree_bytes({"kernel": np.zeros((2, 3), np.float32), "bias": np.zeros(3, np.float32)})
      36
    """
    return sum(leaf_bytes(x) for x in jax.tree.leaves(tree))


def tree_size(tree: Tree) -> int:
    """Number of elements of all arrays of a tree."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))


def path_name(path: tuple[Any, ...]) -> str:
    """A key path of `jax.tree_util` as text, its parts joined by `/`.

    Example:
      >>> import jax
      >>> [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path({"Dense": {"kernel": 1}})]
      ['Dense/kernel']
    """
    return jax.tree_util.keystr(path, simple=True, separator="/")


def total(tree: Tree, name: str) -> Array:
    """Sum of all leaves called `name`, which are int32 scalars.

    Example:
      >>> import jax.numpy as jnp
      >>> int(total({"a": {"failures": jnp.int32(2)}, "b": {"failures": jnp.int32(1), "x": jnp.int32(5)}}, "failures"))
      3
    """
    counts = [x for path, x in jax.tree_util.tree_leaves_with_path(tree) if path and path_name(path[-1:]) == name]
    return sum(counts, jnp.zeros((), jnp.int32))


def describe(tree: Tree) -> str:
    """Shapes and dtypes of a tree's arrays on one line.

    Example:
      >>> import numpy as np
      >>> describe((np.zeros((8, 128), np.float32), np.zeros(8, np.int32)))
      'float32[8,128], int32[8]'
    """
    return ", ".join(f"{x.dtype}[{','.join(map(str, x.shape))}]" for x in jax.tree.leaves(tree)) or "nothing"


def same_signature(a: Tree, b: Tree) -> bool:
    """Whether two trees have the same structure, shapes and dtypes."""
    return jax.tree.structure(a) == jax.tree.structure(b) and describe(a) == describe(b)


_FIELDS = ("step", "key", "weights", "slots", "states")


@dataclasses.dataclass(eq=False)
class TrainState:
    """A run, held on the host: what a step changes and a checkpoint stores.

    Attributes:
      step: Steps done so far.
      key: The run's random key; the keys of a step are folded from it and `step`.
      weights: One entry per block, the pytree that the block's `init` returned.
      slots: One entry per block, the optimizer's arrays for that block's weights.
      states: One entry per block, what its layers carry from step to step untrained.

    A step takes the entries out of the state it is given, so that host memory holds
    everything once. Using that state again raises `ValueError`.
    """

    step: int
    key: Array
    weights: list[Tree]
    slots: list[Tree]
    states: list[Tree]

    def copy(self) -> TrainState:
        """Another state with the same arrays, in lists of its own."""
        return TrainState(self.step, self.key, list(self.weights), list(self.slots), list(self.states))

    def consume(self) -> TrainState:
        """Moves everything into a new state and leaves this one unusable."""
        moved = TrainState(**{name: getattr(self, name) for name in _FIELDS})
        step = self.step
        for name in _FIELDS:
            delattr(self, name)
        self._consumed_by = step + 1
        return moved

    def __getattr__(self, name: str) -> Any:  # called only for what is missing
        if name in _FIELDS and "_consumed_by" in self.__dict__:
            raise ValueError(
                f"TrainState: already consumed by step {self.__dict__['_consumed_by']}; use the state that "
                "`Trainer.step` returned, as in `state, metrics = trainer.step(state, batch, learning_rate)`."
            )
        raise AttributeError(name)


class Resident(NamedTuple):
    """Weights and untrained states of all blocks on the accelerator, where inference need not send them."""

    weights: list[Tree]
    slots: list[None]
    states: list[Tree]
