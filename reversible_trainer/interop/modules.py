"""What layers made of other libraries' modules have in common: hyper-parameters, what the call takes, dtypes."""
# ruff: noqa: D102  (the methods are those of layers/base.py)

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from reversible_trainer.layers.base import Layer, Stack, check_by_value
from reversible_trainer.layers.core import as_outputs
from reversible_trainer.tree import Array, Tree, path_name

_OWN = ("n_in", "n_out", "train_argument")
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class ModuleLayer(Layer):
    """A module of another library as a layer: its class and hyper-parameters, from which each pass makes it.

    Subclasses say which classes they take, and define `_init` and `_run`; under these, dtypes are
    promoted as JAX does by default, since other libraries rely on it.
    """

    module_class: Any
    hyper_parameters: tuple[tuple[str, Any], ...]
    n_in: int = 1  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType]
    n_out: int = 1  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType]
    train_argument: str | None = None

    takes: ClassVar[Mapping[str, type]]  # base classes of the modules
    switches: ClassVar[Mapping[str, bool]]  # arguments that tell training from evaluation: value in training
    call_gives: ClassVar[tuple[str, ...]]  # arguments of the call that `_run` gives, besides inputs and switches

    def __init__(
        self,
        module_class: Any,
        /,
        *,
        n_in: int | None = None,
        n_out: int = 1,
        train_argument: str | None = None,
        **hyper_parameters: Any,
    ) -> None:
        who = type(self).__name__
        if not (isinstance(module_class, type) and issubclass(module_class, tuple(self.takes.values()))):
            raise TypeError(
                f"{who}: expected a class that derives from {' or '.join(self.takes)}, and its hyper-parameters, as in "
                f"{who}(Dense, features=8); got {module_class!r}."
            )
        set_field = object.__setattr__  # the dataclass is frozen
        set_field(self, "module_class", module_class)
        set_field(self, "hyper_parameters", tuple(sorted(hyper_parameters.items())))
        set_field(self, "train_argument", train_argument)
        set_field(self, "n_out", n_out)
        call = parameters(module_class.__call__)
        ours = (*self.switches, *self.call_gives, train_argument)
        inputs = [p for p in call.values() if p.kind in _POSITIONAL and p.default is p.empty and p.name not in ours]
        set_field(self, "n_in", max(1, len(inputs)) if n_in is None else n_in)
        self._check_hyper_parameters(hyper_parameters)
        self._check_call(call)
        self.__post_init__()

    @property
    def name(self) -> str:
        return self.module_class.__name__

    def __repr__(self) -> str:
        own = [f"{name}={getattr(self, name)!r}" for name in _OWN if getattr(self, name) not in (1, None)]
        given = [f"{name}={value!r}" for name, value in self.hyper_parameters]
        return f"{type(self).__name__}({', '.join([self.name, *given, *own])})"

    def init(self, key, inputs):
        with jax.numpy_dtype_promotion("standard"):
            return self._init(key, inputs)

    def forward(self, weights, state, inputs, key, memo=None):
        dtypes = [w.dtype for w in jax.tree.leaves(weights)]
        with jax.numpy_dtype_promotion("standard"):
            seen = inputs
            if dtypes:
                seen = tuple(x.astype(jnp.result_type(*dtypes)) if _is_float(x) else x for x in inputs)
            result, new_state = self._run(weights, state, seen, key)
        outputs = as_outputs(result, self.n_out)
        if inputs and _is_float(inputs[0]):
            outputs = tuple(y.astype(inputs[0].dtype) if _is_float(y) else y for y in outputs)
        if jax.tree.structure(new_state) != jax.tree.structure(state):
            raise ValueError(
                f"the module's state must stay the same arrays from step to step; expected ({_paths(state)}), got "
                f"({_paths(new_state)}). Make all that it carries when it is made, and sow nothing else."
            )
        # flax's batch statistics start as float32, and would become float64 of such inputs.
        return outputs, jax.tree.map(lambda new, old: new.astype(old.dtype), new_state, state), None

    def _constructor_gives(self) -> tuple[str, ...]:
        """Arguments of the constructor that are no hyper-parameters."""
        raise NotImplementedError

    def _init(self, key: Array, inputs: Stack) -> tuple[Tree, Tree]:
        """`(weights, state)` of a new module."""
        raise NotImplementedError

    def _run(self, weights: Tree, state: Tree, inputs: Stack, key: Array | None) -> tuple[Any, Tree]:
        """`(what the module returns, new_state)`."""
        raise NotImplementedError

    def _switched(self, names: Collection[str], training: bool) -> dict[str, bool]:
        """Those of `names` that tell training from evaluation, and are no hyper-parameters."""
        fixed = dict(self.hyper_parameters)
        return {k: v == training for k, v in self.switches.items() if k in names and k not in fixed}

    def _call_switches(self, training: bool) -> dict[str, bool]:
        own = {} if self.train_argument is None else {self.train_argument: training}
        return self._switched(parameters(self.module_class.__call__), training) | own

    def _check_hyper_parameters(self, given: dict[str, Any]) -> None:
        for name, value in given.items():
            if any(isinstance(x, jax.Array | np.ndarray) for x in jax.tree.leaves(value)):
                raise TypeError(
                    f"{self!r}: hyper-parameters hold no arrays, since weights belong to the run and not to the layer; "
                    f"got {name!r}, a {type(value).__name__}. Make it inside of the module."
                )
            check_by_value(self, name, value)
        gives = self._constructor_gives()
        known = {k: p for k, p in parameters(self.module_class.__init__).items() if k not in gives}
        if clash := [name for name in _OWN if name in known]:
            raise ValueError(
                f"{type(self).__name__}({self.name}): the layer has arguments of its own called {', '.join(_OWN)}, so "
                f"a module's cannot be set: got {', '.join(clash)}. Rename them in a subclass."
            )
        try:
            inspect.Signature(list(known.values())).bind(**given)
        except TypeError as error:
            raise TypeError(
                f"{type(self).__name__}({self.name}): {error}. Its hyper-parameters are {', '.join(known) or 'none'}; "
                f"given were {', '.join(given) or 'none'}."
                + "".join(f" '{name}' is given by the layer." for name in gives if name in given)
            ) from None

    def _check_call(self, call: dict[str, inspect.Parameter]) -> None:
        given = [*self._call_switches(True), *(name for name in self.call_gives if name in call)]
        try:
            inspect.Signature(list(call.values())).bind(*range(self.n_in), **dict.fromkeys(given))
        except TypeError as error:
            raise TypeError(
                f"{type(self).__name__}({self.name}): {error}. Its call takes ({', '.join(map(str, call.values()))}); "
                f"expected n_in = {self.n_in} inputs and {', '.join(given) or 'nothing else'}. Set n_in, or "
                "train_argument='...' for one that is true in training, or wrap the module in one with such a call."
            ) from None


def parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """A method's parameters without `self`."""
    return dict(list(inspect.signature(function).parameters.items())[1:])


def _paths(tree: Tree) -> str:
    return ", ".join(path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)) or "nothing"


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)
