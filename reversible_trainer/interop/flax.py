"""Modules of flax, linen and nnx, as layers."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from flax import errors, linen, nnx

from reversible_trainer.interop.modules import ModuleLayer, parameters
from reversible_trainer.layers.base import Stack
from reversible_trainer.tree import Array, Tree, signature

# What an nnx module carries from step to step: not what it trains, draws or shows.
_CARRIED = nnx.Not(nnx.Any(nnx.Param, nnx.RngState, nnx.Intermediate))


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class FlaxLayer(ModuleLayer):
    """A flax module, linen or nnx: a block, or the f of a `HalfResidual`.

    Args:
      module_class: Class that derives from `flax.linen.Module` or `flax.nnx.Module`.
      n_in: Inputs of its call; by default as many as the call has positional arguments
        without a default value, those below not counted.
      n_out: Outputs: one array, or a tuple of so many.
      train_argument: The call's argument that is true in training, if its name is not one of
        those below.
      **hyper_parameters: The constructor's arguments, compared by value: no arrays, lists,
        lambdas or modules of nnx. Not `rngs`, `name`, `parent`.

    Training is told from evaluation (`key=None`) by the call's arguments `train`, `training`,
    `is_training`, `deterministic` or `use_running_average`; in linen, by the constructor's if the
    call has none of that name; in nnx, also by the attributes that `Module.train()` sets. One
    that is given as a hyper-parameter stays what it is.

    Weights are linen's collection `params`, or nnx's `Param`s, called as there after the
    class: `Mlp/Dense_0/kernel`. All other collections, or variables, are state. Random
    numbers come from the pass's key: linen's streams `params` and `dropout` are
    `jax.random.split(key)`, others fall back on `params`; each of nnx's gets a key of its own.

    Inputs are cast to the dtype of the weights and outputs to that of the first input
    (floating-point ones), as in our own layers.

    Raises:
      TypeError: When it is built, for hyper-parameters or a call that do not fit.

    Example:
      >>> import jax
      >>> from flax import linen
      >>> from reversible_trainer.layers import HalfResidual
      >>> layer = HalfResidual(FlaxLayer(linen.Dense, features=4))
      >>> x = jax.ShapeDtypeStruct((2, 4), "float32")
      >>> weights, _ = layer.init(jax.random.key(0), (x, x))
      >>> weights["Dense"]["kernel"].shape
      (4, 4)
    """

    takes = {"flax.linen.Module": linen.Module, "flax.nnx.Module": nnx.Module}
    switches = dict(train=True, training=True, is_training=True, deterministic=False, use_running_average=False)
    call_gives = ("rngs",)

    @property
    def _is_linen(self) -> bool:
        return issubclass(self.module_class, linen.Module)

    def _constructor_gives(self) -> tuple[str, ...]:
        return ("name", "parent") if self._is_linen else ("rngs",)

    def _init(self, key: Array, inputs: Stack) -> tuple[Tree, Tree]:
        if self._is_linen:
            call = self._call_switches(training=True)
            try:
                variables = linen.unbox(self._linen(True).lazy_init(_streams(key), *signature(inputs), **call))
            except errors.LazyInitError as error:
                raise ValueError(
                    "variables of the module depend on the values of its inputs, which are not known when it is made: "
                    f"{error} Sow only into 'intermediates', and make all variables from shapes."
                ) from error
            return variables.pop("params", {}), variables
        _, weights, _, state = nnx.split(self._nnx(key), nnx.Param, nnx.RngState, ...)
        return nnx.to_pure_dict(weights), nnx.to_pure_dict(state)

    def _run(self, weights: Tree, state: Tree, inputs: Stack, key: Array | None) -> tuple[Any, Tree]:
        training = key is not None
        call: dict[str, Any] = self._call_switches(training)
        if self._is_linen:
            variables, rngs = {"params": weights, **state}, _streams(key) if training else {}
            return self._linen(training).apply(variables, *inputs, rngs=rngs, mutable=list(state), **call)
        abstract = nnx.eval_shape(lambda: self._nnx(jax.random.key(0)))
        graph, params, rngs, carried = nnx.split(abstract, nnx.Param, nnx.RngState, ...)
        nnx.replace_by_pure_dict(params, weights)
        nnx.replace_by_pure_dict(carried, state)
        key = key if training else jax.random.key(0)  # nothing is drawn, but modules hold keys
        module = nnx.merge(graph, params, _drawn(rngs, key), carried)
        held = self._switched(("deterministic", "use_running_average"), training)
        module.set_attributes(raise_if_not_found=False, **held)
        if "rngs" in parameters(self.module_class.__call__):
            call["rngs"] = nnx.Rngs(key)
        outputs = module(*inputs, **call)
        return outputs, nnx.to_pure_dict(nnx.state(module, _CARRIED))

    def _linen(self, training: bool) -> Any:
        call = parameters(self.module_class.__call__)
        fields = [name for name in parameters(self.module_class.__init__) if name not in call]
        return self.module_class(**dict(self.hyper_parameters), **self._switched(fields, training))

    def _nnx(self, key: Array) -> Any:
        given = {"rngs": nnx.Rngs(key)} if "rngs" in parameters(self.module_class.__init__) else {}
        return self.module_class(**dict(self.hyper_parameters), **given)


def _streams(key: Array) -> dict[str, Array]:
    return dict(zip(("params", "dropout"), jax.random.split(key), strict=True))


def _drawn(rngs: Any, key: Array) -> Any:
    """An nnx module's random state at the start of a pass: keys folded from `key`, counters at zero."""
    leaves, tree = jax.tree.flatten(rngs)
    for i, x in enumerate(leaves):
        is_key = jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)
        draw = jax.random.fold_in(key, i)
        leaves[i] = jax.random.split(draw, x.shape) if is_key else jax.numpy.zeros(x.shape, x.dtype)
    return jax.tree.unflatten(tree, leaves)
