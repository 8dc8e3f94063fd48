"""trax's layers as layers of ours: weights and state are passed in, and the keys are those of trax's trainers.

The keys travel as data: the top entry of the stack is an array of trax's keys, one row for each
layer still to come. A layer uses the first row and moves it to the end. So equal layers at other
places of a model share their programs, and a reversible layer gives the array back as it was.
"""
# ruff: noqa: D102  (the methods are those of layers/base.py)

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from reversible_trainer.interop.trax_stubs import import_trax
from reversible_trainer.layers.base import Layer, LossLayer, ReversibleLayer, Stack, is_differentiable
from reversible_trainer.tree import Array, Tree, signature

trax = import_trax()

# What a trax layer has by chance of its place and history, and not by what it computes.
_HISTORY = {"_weights", "_state", "_rng", "_rng_seed_int", "_caller", "_init_cached", "_jit_cache"}
Path = tuple[tuple[int, int], ...]  # of a layer in a model: of how many it is which, from the outside in


class Shared:
    """Holds a trax layer and makes it comparable.

    Two are equal if they hold the same layer, or, with `by_value`, layers of which everything is
    the same: their types and all their attributes but for weights, state, keys and where they
    were created. Functions are the same if their code and all that they have captured are; what
    else cannot be compared by value is the same only as the same object.

    Example:
      >>> a, b, c = (Shared(trax.layers.Dropout(rate)) for rate in (0.2, 0.2, 0.9))
      >>> a == b, a == c
      (True, False)
    """

    def __init__(self, layer: Any, by_value: bool = True):
        self.layer = layer
        self._objects: list[Any] = []  # held, so that their addresses stay theirs
        self._key = _value(layer, {}, self._objects) if by_value else id(layer)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shared) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return " ".join(repr(self.layer).split())


def _value(x: Any, seen: dict[int, int], objects: list[Any]) -> Any:
    """Nested tuples that are equal for what computes the same; `seen` numbers the objects met so far."""
    if x is None or isinstance(x, bool | int | float | complex | str | bytes | np.generic | np.dtype):
        return type(x), repr(x)
    if id(x) in seen:
        return "seen", seen[id(x)]
    seen[id(x)] = len(seen)
    objects.append(x)
    value = functools.partial(_value, seen=seen, objects=objects)
    if isinstance(x, trax.layers.base.Layer):
        return type(x), tuple((k, value(v)) for k, v in sorted(vars(x).items()) if k not in _HISTORY)
    if type(x) in (tuple, list):
        return type(x), tuple(map(value, x))
    if type(x) is dict:
        return dict, tuple((value(k), value(v)) for k, v in x.items())
    if isinstance(x, np.ndarray) and not x.dtype.hasobject:
        return x.shape, x.dtype.str, x.tobytes()
    if isinstance(x, types.MethodType):
        return types.MethodType, value(x.__func__), value(x.__self__)
    if isinstance(x, functools.partial):
        return functools.partial, value(x.func), value(x.args), value(x.keywords)
    if isinstance(x, types.FunctionType):
        try:
            captured = tuple(value(cell.cell_contents) for cell in x.__closure__ or ())
        except ValueError:  # not filled yet
            return id(x)
        return x.__code__, id(x.__globals__), captured, value(x.__defaults__), value(x.__kwdefaults__)
    return id(x)


@dataclasses.dataclass(frozen=True)
class TraxLayer(Layer):
    """A trax layer on a stack with keys on top: `(keys, *inputs) -> (keys, *outputs)`.

    Args:
      train: The layer.
      evaluation: One of the same weights for deterministic passes, made with trax's `mode="eval"`.
    """

    train: Shared
    evaluation: Shared | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        made = self.train.layer._caller
        object.__setattr__(self, "created_at", f"{made['filename']}:{made['lineno']}")

    @property
    def name(self) -> str:
        return self.train.layer.name

    @property
    def n_in(self) -> int:
        return 1 + self.train.layer.n_in

    @property
    def n_out(self) -> int:
        return 1 + self.train.layer.n_out

    def init(self, key, inputs):
        layer, xs = self.train.layer, tuple(map(trax.shapes.signature, inputs[1:]))
        before = layer.weights, layer.state
        weights, state = layer.init(_packed(xs), rng=jax.random.key_data(key))
        # The layer keeps its own arrays; without any, shapes stand for those that it is given from now on.
        fits = jax.tree.structure(before) == jax.tree.structure((weights, state))
        layer.weights, layer.state = before if fits else signature((weights, state))
        for part in sublayers(layer):
            part._rng = None
        return weights, state

    def forward(self, weights, state, inputs, key, memo=None):
        keys, *xs = inputs
        outputs, new_state = self._run(weights, state, xs, keys[0], key is None)
        return (jnp.roll(keys, -1, axis=0), *outputs), new_state, None

    def _run(self, weights: Tree, state: Tree, xs: list[Any], rng: Array, deterministic: bool) -> tuple[Stack, Tree]:
        shared = self.evaluation if deterministic and self.evaluation else self.train
        layer = shared.layer
        if jax.tree.structure((layer.weights, layer.state)) != jax.tree.structure((weights, state)):
            layer.weights, layer.state = signature((weights, state))  # trax puts back what was there before
        outputs, new_state = layer.pure_fn(_packed(tuple(xs)), weights, state, rng)
        return _unpacked(outputs, layer.n_out), _reshaped(new_state, state)


@dataclasses.dataclass(frozen=True)
class TraxReversible(TraxLayer, ReversibleLayer):
    """A reversible one. What it leaves as its state is its memo too, which trax's `reverse_and_grad` asks for."""

    def forward(self, weights, state, inputs, key, memo=None):
        outputs, new_state, _ = super().forward(weights, state, inputs, key)
        return outputs, new_state, new_state

    def reverse(self, weights, state, outputs, key, memo=None):
        none = (None,) * len(outputs)  # trax's half residual can only do both; what nobody needs is not computed
        return self.reverse_and_grad(weights, state, outputs, none, key, memo)[0]

    def reverse_and_grad(self, weights, state, outputs, cotangents, key, memo=None):
        keys, layer = jnp.roll(outputs[0], 1, axis=0), self.train.layer
        ys, cts = outputs[1:], tuple(map(_trax_cotangent, outputs[1:], cotangents[1:]))
        inputs, (input_cts, weight_grads) = layer.reverse_and_grad(
            _packed(ys), _packed(cts), weights, state, memo, rng=keys[0]
        )
        inputs, input_cts = (_unpacked(x, layer.n_in) for x in (inputs, input_cts))
        cts = (ct if is_differentiable(x) else None for x, ct in zip(inputs, input_cts, strict=True))
        grads = jax.tree.unflatten(jax.tree.structure(weights), jax.tree.leaves(weight_grads))
        return (keys, *inputs), ((None, *cts), grads)


@dataclasses.dataclass(frozen=True)
class TraxLoss(TraxLayer, LossLayer):
    """A layer with one output, the mean loss: `(keys, *inputs) -> (loss, 1, *metrics)`.

    trax's losses do not tell their weights' sum. So a batch counts as one, and of several
    microbatches the mean of their means is taken.

    Args:
      accuracy: A layer with the same inputs, such as `WeightedCategoryAccuracy`.
    """

    accuracy: Shared | None = None

    @property
    def metric_names(self) -> tuple[str, ...]:
        return ("accuracy",) if self.accuracy else ()

    @property
    def n_out(self) -> int:
        return 2 + len(self.metric_names)

    def forward(self, weights, state, inputs, key, memo=None):
        keys, *xs = inputs
        (loss, *more), new_state = self._run(weights, state, xs, keys[0], key is None)
        if more or loss.shape or not is_differentiable(loss):
            raise ValueError(f"the last layer must give one number, the mean loss; got {[loss, *more]}")
        metrics = ()
        if self.accuracy:
            metric = self.accuracy.layer
            metrics = (metric.pure_fn(_packed(tuple(xs[: metric.n_in])), (), (), keys[0])[0].astype(loss.dtype),)
        return (loss, jnp.ones_like(loss), *metrics), new_state, None

    def predict(self, weights, state, inputs, key=None):
        return inputs[1]


@dataclasses.dataclass(frozen=True)
class TraxKeys(Layer):
    """Puts the keys that trax's `Trainer` gives the layers at `paths` on top of the stack; needs no inputs.

    Its own key is the one that `Trainer.one_step` of trax would be given.

    Args:
      paths: Of the layers, in order.
      evaluates: Whether the layers can do without keys; they are zero then.
    """

    paths: tuple[Path, ...]
    evaluates: bool

    @property
    def trains(self) -> bool:
        return False

    @property
    def n_in(self) -> int:
        return 0

    def forward(self, weights, state, inputs, key, memo=None):
        if key is None and not self.evaluates:
            raise ValueError(
                "evaluation needs the model as it is without dropout. Give from_trax another one with mode='eval', as "
                "in from_trax(model_with_loss, eval_model_with_loss)"
            )
        if key is None:
            return (jnp.zeros((len(self.paths), 2), jnp.uint32),), state, None
        root = jax.random.key_data(key)
        return (jnp.stack([functools.reduce(_sublayer_key, path, root) for path in self.paths]),), state, None


def _reshaped(new_state: Tree, state: Tree) -> Tree:
    """The new state in the shapes of the old one: some layers mark their first run by an axis of size 1."""
    if jax.tree.structure(new_state) != jax.tree.structure(state):
        return new_state
    return jax.tree.map(lambda x, old: jnp.reshape(x, old.shape) if jnp.size(x) == old.size else x, new_state, state)


def _sublayer_key(key: Array, place: tuple[int, int]) -> Array:
    n, i = place
    return jax.random.split(key, n)[i]  # a key of the old kind, which trax uses


def sublayers(layer: Any) -> Iterator[Any]:
    """The trax layer and all layers in it."""
    yield layer
    for part in layer.sublayers:
        yield from sublayers(part)


# trax hands over a single activation bare, several as a tuple, and zeros of type float0 as cotangents of integers.


def _packed(xs: tuple[Any, ...]) -> Any:
    return xs[0] if len(xs) == 1 else xs


def _unpacked(xs: Any, n: int) -> tuple[Any, ...]:
    return (xs,) if n == 1 and not isinstance(xs, tuple | list) else tuple(xs)


def _trax_cotangent(y: Any, ct: Any) -> Any:
    if not is_differentiable(y):
        return np.zeros(y.shape, jax.dtypes.float0)
    return jnp.zeros(y.shape, y.dtype) if ct is None else ct
