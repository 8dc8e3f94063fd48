"""What a layer is: the protocol, the stack algebra, and differentiation.

A layer is a frozen dataclass of hyper-parameters with pure methods. Activations travel
on a *stack*, a tuple whose first entry is the top: a layer takes its `n_in` top entries
and puts `n_out` back; what lies deeper rides along.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp

from reversible_trainer.layers.fixed_point import FixedPoint, bare, carried
from reversible_trainer.tree import Array, Tree, describe

Stack = tuple[Any, ...]
Pullback = Callable[[Stack], tuple[Stack, Tree]]


class LayerError(ValueError):
    """A layer failed while it was built or traced: which, created where, given what."""


def _located(method: Callable[..., Any]) -> Callable[..., Any]:
    """`method`, its exceptions turned into a `LayerError` that says where."""

    @functools.wraps(method)
    def wrapped(self: Layer, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except (LayerError, NotImplementedError):
            raise
        except Exception as error:
            place = 1 if method.__name__ == "init" else 2  # (key, inputs) or (weights, state, inputs, ...)
            given = describe(args[place]) if len(args) > place else "keyword arguments"
            where = f"{self!r}, created at {self.created_at}, {method.__name__} of ({given})"
            raise LayerError(f"{where}: {error}") from error

    return wrapped


@dataclasses.dataclass(frozen=True)
class Layer:
    """A pure function of weights and activations, described by its hyper-parameters.

    Subclasses are frozen dataclasses whose fields compare by value: equal layers share
    one compiled program *because* they are equal. They define `init` and `forward`, and
    `n_in` / `n_out` where these are not 1. An exception in any of their methods is raised
    again as a `LayerError` that names the innermost layer.

    Example:
      >>> import dataclasses, jax.numpy as jnp
      >>> @dataclasses.dataclass(frozen=True)
      ... class Scale(Layer):
      ...     factor: float
      ...     def forward(self, weights, state, inputs, key, memo=None):
      ...         return (self.factor * inputs[0],), state, None
      >>> outputs, _, _ = Scale(2.0).forward((), (), (jnp.ones(2),), None)
      >>> outputs[0].tolist()
      [2.0, 2.0]
    """

    created_at: ClassVar[str] = "an unknown place"  # set per object; no part of its value

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Remembers where the layer was created, for error messages."""
        self = object.__new__(cls)
        object.__setattr__(self, "created_at", _caller())
        return self

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for method in ("init", "forward", "reverse", "reverse_and_grad", "predict"):
            if method in cls.__dict__:
                setattr(cls, method, _located(cls.__dict__[method]))

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            check_by_value(self, field.name, getattr(self, field.name))

    @property
    def name(self) -> str:
        """The layer's name in weight paths."""
        return type(self).__name__

    @property
    def trains(self) -> bool:
        """Whether its weights are trained; not so in `Frozen` layers."""
        return True

    @property
    def n_in(self) -> int:
        """Entries that the layer takes from the stack."""
        return 1

    @property
    def n_out(self) -> int:
        """Entries that it puts back."""
        return 1

    def init(self, key: Array, inputs: Stack) -> tuple[Tree, Tree]:
        """Makes the layer's arrays.

        Args:
          key: Random key.
          inputs: Tuple of `n_in` `ShapeDtypeStruct`.

        Returns:
          `(weights, state)`: floating-point arrays to train, and what the layer carries
          from step to step untrained. By default both are empty.
        """
        return (), ()

    def forward(
        self, weights: Tree, state: Tree, inputs: Stack, key: Array | None, memo: Tree = None
    ) -> tuple[Stack, Tree, Tree]:
        """Runs the layer.

        Args:
          weights: As `init` made them.
          state: Likewise.
          inputs: Tuple of `n_in` arrays.
          key: Random key, or None for a deterministic pass (evaluation, no dropout).
          memo: What an earlier pass over the same inputs returned; its decisions are
            repeated.

        Returns:
          `(outputs, new_state, memo)`: a tuple of `n_out` arrays, the state after this
          pass, and what the backward pass must know of this one (None if nothing).
        """
        raise NotImplementedError(f"{self.name} does not define forward")


@dataclasses.dataclass(frozen=True)
class ReversibleLayer(Layer):
    """A layer whose inputs can be computed from its outputs. Subclasses define `reverse` too."""

    def reverse(self, weights: Tree, state: Tree, outputs: Stack, key: Array | None, memo: Tree = None) -> Stack:
        """Reconstructs `inputs` from `outputs`; the other arguments are those of the forward pass."""
        raise NotImplementedError(f"{self.name} does not define reverse")

    def reverse_and_grad(
        self, weights: Tree, state: Tree, outputs: Stack, cotangents: Stack, key: Array | None, memo: Tree = None
    ) -> tuple[Stack, tuple[Stack, Tree]]:
        """Reconstructs the inputs and pulls the outputs' cotangents back through the layer.

        Returns:
          `(inputs, (input_cotangents, weight_grads))`. Integer entries have the cotangent None.
        """
        inputs = self.reverse(weights, state, outputs, key, memo)
        _, _, _, pullback = differentiate(self, weights, state, inputs, key, memo)
        return inputs, pullback(cotangents)


@dataclasses.dataclass(frozen=True)
class LossLayer(Layer):
    """The last block of a model. Its outputs are sums: `(loss_sum, weight_sum, *metric_sums)`.

    The trainer divides by `weight_sum`, so padding, microbatches and data parallelism all
    give the mean over whatever is weighed (tokens, as a rule).
    """

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of the sums after the second."""
        return ()

    @property
    def n_out(self) -> int:
        """Loss, weight and the metrics."""
        return 2 + len(self.metric_names)

    def predict(self, weights: Tree, state: Tree, inputs: Stack, key: Array | None = None) -> Array:
        """The logits that the loss would be taken of; `inputs` may lack targets and mask."""
        raise NotImplementedError(f"{self.name} does not define predict")


# The stack algebra.


def take(stack: Stack, n: int) -> tuple[Stack, Stack]:
    """Splits off the `n` top entries: `(taken, rest)`."""
    if len(stack) < n:
        raise ValueError(f"expected {n} entries on the stack, got {len(stack)}: ({describe(stack)})")
    return stack[:n], stack[n:]


def put(stack: Stack, entries: Stack) -> Stack:
    """Puts `entries` on top of `stack`.

    Example:
      >>> put(("c",), ("a", "b"))
      ('a', 'b', 'c')
    """
    return (*entries, *stack)


def arity(layers: Iterable[Layer]) -> tuple[int, int]:
    """`(n_in, n_out)` of layers run one after the other.

    Example:
      >>> from reversible_trainer.layers import Dup, HalfResidual, Gelu
      >>> arity([Dup(), HalfResidual(Gelu())])
      (1, 2)
    """
    n_in, height = 0, 0
    for layer in layers:
        n_in, height = n_in + max(0, layer.n_in - height), max(height, layer.n_in)
        height += layer.n_out - layer.n_in
    return n_in, height


def unique_names(layers: Sequence[Layer]) -> list[str]:
    """Names for the entries of a container's weights: a second `Dense` is `Dense_2`."""
    seen: dict[str, int] = {}
    names = []
    for layer in layers:
        seen[layer.name] = seen.get(layer.name, 0) + 1
        names.append(layer.name if seen[layer.name] == 1 else f"{layer.name}_{seen[layer.name]}")
    return names


def fold_key(key: Array | None, i: int) -> Array | None:
    """The key of the `i`-th sublayer; None stays None."""
    return None if key is None else jax.random.fold_in(key, i)


def output_signature(layer: Layer, weights: Tree, state: Tree, inputs: Stack) -> Stack:
    """Shapes and dtypes of `layer`'s outputs, nothing computed; all arguments may be signatures."""
    run = lambda w, s, x: tuple(map(bare, layer.forward(w, s, x, None)[0]))  # noqa: E731
    return jax.eval_shape(run, weights, state, inputs)


# Differentiation.


def is_differentiable(x: Any) -> bool:
    """Whether a stack entry has a cotangent."""
    return isinstance(x, FixedPoint) or jnp.issubdtype(x.dtype, jnp.inexact)


def cotangent_signature(x: Any) -> jax.ShapeDtypeStruct | None:
    """Of a stack entry's cotangent: its own, float32 for a fixed-point stream, None for integers."""
    if not is_differentiable(x):
        return None
    return jax.ShapeDtypeStruct(x.shape, jnp.float32 if isinstance(x, FixedPoint) else x.dtype)


def differentiate(
    layer: Layer, weights: Tree, state: Tree, inputs: Stack, key: Array | None, memo: Tree = None
) -> tuple[Stack, Tree, Tree, Pullback]:
    """Runs `layer.forward` and prepares its vjp.

    Returns:
      `(outputs, new_state, memo, pullback)`, where `pullback(cotangents)` gives
      `(input_cotangents, weight_grads)`. A cotangent has the dtype of its entry, is float32
      for a fixed-point stream and None for integers; None given for an output means zero.
    """
    outputs, new_state, new_memo, vjp = linearize(layer, weights, state, inputs, key, memo)
    return outputs, new_state, new_memo, functools.partial(pull, vjp, inputs, outputs)


def linearize(
    layer: Layer, weights: Tree, state: Tree, inputs: Stack, key: Array | None, memo: Tree = None
) -> tuple[Stack, Tree, Tree, Any]:
    """`(outputs, new_state, memo, vjp)`; the last is what `jax.vjp` returns for `(weights, moving inputs)`.

    What moves is floating-point: arrays, and the carriers of fixed-point streams.
    """
    inputs = tuple(carried(x) if isinstance(x, FixedPoint) else x for x in inputs)

    def forward(weights: Tree, moving: Stack) -> tuple[Stack, tuple[Stack, Tree, Tree]]:
        rest = iter(moving)
        entries = tuple(_with_moving(x, next(rest)) if is_differentiable(x) else x for x in inputs)
        outputs, new_state, new_memo = layer.forward(weights, state, entries, key, memo)
        return _moving(outputs), (tuple(map(bare, outputs)), new_state, new_memo)

    _, vjp, (outputs, new_state, new_memo) = jax.vjp(forward, weights, _moving(inputs), has_aux=True)
    return outputs, new_state, new_memo, vjp


def _moving(stack: Stack) -> Stack:
    return tuple(x.carrier if isinstance(x, FixedPoint) else x for x in stack if is_differentiable(x))


def _with_moving(x: Any, moving: Array) -> Any:
    return dataclasses.replace(x, carrier=moving) if isinstance(x, FixedPoint) else moving


def pull(vjp: Any, inputs: Stack, outputs: Stack, cotangents: Stack) -> tuple[Stack, Tree]:
    """`(input_cotangents, weight_grads)` by the `vjp` of `linearize`; inputs and outputs may be signatures."""
    pairs = [(cotangent_signature(y), ct) for y, ct in zip(outputs, cotangents, strict=True)]
    cts = tuple(jnp.zeros(y.shape, y.dtype) if ct is None else ct for y, ct in pairs if y is not None)
    weight_grads, float_cts = vjp(cts)
    rest = iter(float_cts)
    return tuple(next(rest) if is_differentiable(x) else None for x in inputs), weight_grads


# Where a layer was created, and what its fields may be.


def _caller() -> str:
    """File and line outside of gin and the standard library that called the constructor."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and ("/gin/" in frame.f_code.co_filename or "dataclasses" in frame.f_code.co_filename):
        frame = frame.f_back
    return f"{os.path.relpath(frame.f_code.co_filename)}:{frame.f_lineno}" if frame else "an unknown place"


def check_by_value(layer: Layer, field: str, value: Any) -> None:
    """Refuses field values that cannot be hashed, or whose equality is identity."""
    try:
        hash(value)
    except TypeError:
        raise TypeError(
            f"{layer.name}({field}={value!r}): hyper-parameters must be hashable, since equal layers share one "
            f"compiled program; got a {type(value).__name__}. Use a tuple for a list, a frozen dataclass for a dict."
        ) from None
    if value != value:
        raise ValueError(f"{layer.name}({field}={value!r}): a hyper-parameter must equal itself.")
    local = isinstance(value, types.FunctionType) and (
        "<lambda>" in value.__qualname__ or "<locals>" in value.__qualname__
    )
    if local or isinstance(value, functools.partial):
        raise TypeError(
            f"{layer.name}({field}={value!r}): hyper-parameters must compare by value, and lambdas, local functions "
            "and partials do not. Use a function defined at module level, or a frozen dataclass with __call__."
        )
    for item in value if isinstance(value, tuple) else ():
        check_by_value(layer, field, item)
