"""Modules of equinox as layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import equinox
import jax

from reversible_trainer.interop.modules import ModuleLayer, parameters
from reversible_trainer.layers.base import Stack
from reversible_trainer.tree import Array, Tree, path_name


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class EquinoxLayer(ModuleLayer):
    """An equinox module: a block, or the f of a `HalfResidual`.

    The module works on one example. It is mapped over the first axis of all inputs and outputs,
    which is called "batch": `BatchNorm(..., axis_name="batch")`. Over other axes, such as time,
    it maps its own layers.

    Args:
      module_class: Class that derives from `equinox.Module`.
      n_in: Inputs of its call; by default as many as the call has positional arguments
        without a default value, those below not counted.
      n_out: Outputs: one array, or a tuple of so many.
      train_argument: The call's argument that is true in training, if its name is not one of
        those below.
      **hyper_parameters: The constructor's arguments, compared by value: no arrays, lists,
        lambdas or modules. Not `key`.

    Training is told from evaluation (`key=None`) by all attributes `inference`, as
    `equinox.nn.inference_mode` sets them, and by the call's arguments `inference`, `train`,
    `training` or `is_training`. One that is given as a hyper-parameter stays what it is. A call that
    takes `key` gets one per example, `jax.random.split(key, B)`, in evaluation None. A call that
    takes `state`, an `equinox.nn.State`, returns `(outputs, state)`.

    Weights are the floating-point arrays, called after the class and their place: `MLP/layers/0/weight`.
    Other arrays are state, beside the `equinox.nn.State`.

    Inputs are cast to the dtype of the weights and outputs to that of the first input
    (floating-point ones), as in our own layers.

    Raises:
      TypeError: When it is built, for hyper-parameters or a call that do not fit.

    Example:
      >>> import equinox, jax
      >>> from reversible_trainer.layers import HalfResidual
      >>> layer = HalfResidual(EquinoxLayer(equinox.nn.MLP, in_size=4, out_size=4, width_size=8, depth=1))
      >>> x = jax.ShapeDtypeStruct((2, 4), "float32")
      >>> weights, _ = layer.init(jax.random.key(0), (x, x))
      >>> weights["MLP"]["layers/0/weight"].shape
      (8, 4)
    """

    takes = {"equinox.Module": equinox.Module}
    switches = dict(train=True, training=True, is_training=True, inference=False)
    call_gives = ("key", "state")

    def _constructor_gives(self) -> tuple[str, ...]:
        return ("key",)

    def _init(self, key: Array, inputs: Stack) -> tuple[Tree, Tree]:
        module, state = self._make(key)
        weights, rest = equinox.partition(module, equinox.is_inexact_array)
        arrays = equinox.filter(rest, equinox.is_array)
        return _by_path(weights), {"arrays": _by_path(arrays), "state": _by_path(state)}

    def _run(self, weights: Tree, state: Tree, inputs: Stack, key: Array | None) -> tuple[Any, Tree]:
        module, carried = equinox.filter_eval_shape(self._make, jax.random.key(0))
        module = _filled(module, {**weights, **state["arrays"]})
        if "inference" not in dict(self.hyper_parameters):
            module = equinox.nn.inference_mode(module, key is None)
        switches, takes = self._call_switches(key is not None), parameters(self.module_class.__call__)

        def one(state: Any, key: Array | None, *inputs: Array) -> tuple[Any, Any]:
            given = {k: v for k, v in {"key": key, "state": state}.items() if k in takes}
            result = module(*inputs, **switches, **given)
            return result if "state" in takes else (result, state)

        keys = None if key is None else jax.random.split(key, inputs[0].shape[0])
        axes = (None, *[0] * (1 + len(inputs)))
        mapped = jax.vmap(one, axes, out_axes=(0, None), axis_name="batch")
        outputs, carried = mapped(_filled(carried, state["state"]), keys, *inputs)
        return outputs, {**state, "state": _by_path(carried)}

    def _make(self, key: Array) -> tuple[Any, equinox.nn.State]:
        given = {"key": key} if "key" in parameters(self.module_class.__init__) else {}
        return equinox.nn.make_with_state(self.module_class)(**dict(self.hyper_parameters), **given)


def _by_path(tree: Any) -> dict[str, Array]:
    return {path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def _filled(tree: Any, named: Mapping[str, Array]) -> Any:
    """The tree with arrays in the places that `_by_path` has named."""
    return jax.tree_util.tree_map_with_path(lambda path, x: named.get(path_name(path), x), tree)
