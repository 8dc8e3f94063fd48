"""Different optimizers, and learning rates, for different weights, by path."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any, NamedTuple

import gin
import jax
import optax

from reversible_trainer.optimizers.common import Factory, Rate
from reversible_trainer.tree import Tree, path_name

_DEFAULT = "default"


class RouteSlots(NamedTuple):
    """Slots of `route`.

    Attributes:
      by_pattern: Pattern (or "default") to the slots of its optimizer, None where it matches nothing.
    """

    by_pattern: dict[str, Any]


@gin.configurable
def route(rules: Mapping[str, Factory], default: Factory | None = None) -> Factory:
    """A factory that gives every weight to the optimizer whose pattern matches its path.

    Each optimizer sees its own weights only, as a flat dict from path to weight.

    Args:
      rules: Maps a pattern to a factory, `learning_rate -> optax.GradientTransformation`.
        Paths are dict keys (or indices) joined by `/`; in a pattern `*` also stands for `/`.
      default: The factory for weights that no pattern matches.

    Returns:
      A factory, `learning_rate -> optax.GradientTransformation`. `ValueError` where a weight
      matches two patterns, or none and there is no default.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> factory = route({"*/scale": optax.sgd}, default=optax.adam)
      >>> slots = factory(0.1).init({"norm": {"scale": jnp.ones(2)}, "dense": {"kernel": jnp.ones((2, 2))}})
      >>> sorted(slots.by_pattern)
      ['*/scale', 'default']

    In gin: `route.rules = {'*/scale': @adam, '*/kernel': @muon}` and `run.optimizer = @route()`.
    """
    factories = dict(rules)
    if _DEFAULT in factories:
        raise ValueError("route: give the factory for all other weights as route.default, not as a rule.")
    if default is not None:
        factories[_DEFAULT] = default
    for pattern, factory in factories.items():
        if not callable(factory):
            raise TypeError(
                f"route: {pattern!r} must map to a factory, learning_rate -> GradientTransformation; got {factory!r}. "
                "Write optax.adam or functools.partial(optax.adamw, weight_decay=0.1), in gin @adam without ()."
            )

    def routed(learning_rate: Rate) -> optax.GradientTransformationExtraArgs:
        optimizers = {
            pattern: optax.with_extra_args_support(factory(learning_rate)) for pattern, factory in factories.items()
        }

        def init(params: Tree) -> RouteSlots:
            parts = _split(params, _assign(params, factories))
            return RouteSlots({p: optimizers[p].init(parts[p]) if p in parts else None for p in factories})

        def update(updates: Tree, state: Any, params: Tree | None = None, **extra: Any) -> tuple[Tree, RouteSlots]:
            slots: RouteSlots = state
            owners = _assign(updates, factories)
            gradients = _split(updates, owners)
            weights = _split(params, owners) if params is not None else dict.fromkeys(gradients)
            new: dict[str, Any] = {}
            new_slots = dict(slots.by_pattern)
            for pattern, g in gradients.items():
                optimizer = optimizers[pattern]
                part: Any
                part, new_slots[pattern] = optimizer.update(g, slots.by_pattern[pattern], weights[pattern], **extra)
                new |= part
            return jax.tree.map_with_path(lambda path, _: new[path_name(path)], updates), RouteSlots(new_slots)

        return optax.GradientTransformationExtraArgs(init, update)

    return routed


def unmatched(slots: Tree) -> list[str]:
    """The patterns of `route` that match none of the weights whose slots a tree holds.

    Args:
      slots: Of all blocks of a model, or their signatures.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> optimizer = route({"*/scale": optax.sgd, "*/kernl": optax.adam}, default=optax.adam)(0.1)
      >>> unmatched([optimizer.init({"norm": {"scale": jnp.ones(2)}}), optimizer.init({"kernel": jnp.ones(2)})])
      ['*/kernl']
    """
    leaves = jax.tree.leaves(slots, is_leaf=lambda x: isinstance(x, RouteSlots))
    rules = [rule for routed in leaves if isinstance(routed, RouteSlots) for rule in routed.by_pattern.items()]
    matched = {pattern for pattern, part in rules if part is not None}
    return [pattern for pattern in dict(rules) if pattern not in matched and pattern != _DEFAULT]


@gin.configurable
def scaled(optimizer: Factory, by: float) -> Factory:
    """A factory of `optimizer` at `by` times the learning rate, for optimizers that share a schedule.

    Args:
      optimizer: A factory.
      by: Factor of the learning rate.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> optimizer = scaled(optax.sgd, by=5.0)(0.1)
      >>> optimizer.update(jnp.ones(()), optimizer.init(jnp.ones(())))[0].tolist()
      -0.5
    """

    def factory(learning_rate: Rate) -> optax.GradientTransformation:
        if not callable(learning_rate):
            return optimizer(by * learning_rate)
        schedule: Any = learning_rate
        return optimizer(lambda step: by * schedule(step))

    return factory


def _assign(tree: Tree, factories: Mapping[str, Factory]) -> dict[str, str]:
    """Path of every weight -> the pattern it belongs to."""
    owners, doubly, unmatched = {}, [], []
    for key_path, _ in jax.tree.leaves_with_path(tree):
        path = path_name(key_path)
        matches = [p for p in factories if p != _DEFAULT and fnmatch.fnmatchcase(path, p)]
        if len(matches) > 1:
            doubly.append(f"{path!r} by {' and '.join(map(repr, matches))}")
        elif not matches and _DEFAULT not in factories:
            unmatched.append(repr(path))
        owners[path] = matches[0] if matches else _DEFAULT
    if doubly:
        raise ValueError(
            f"route: every weight must match one pattern; matched by two: {'; '.join(doubly)}. "
            "Make the patterns narrower; the order of rules does not matter."
        )
    if unmatched:
        raise ValueError(
            f"route: no pattern matches the weights at {', '.join(unmatched)}; the patterns are "
            f"{', '.join(map(repr, factories)) or '(none)'}. Add a rule for them, or set route.default."
        )
    return owners


def _split(tree: Tree, owners: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Pattern -> its leaves, as a flat dict from path to leaf."""
    parts: dict[str, dict[str, Any]] = {}
    for key_path, leaf in jax.tree.leaves_with_path(tree):
        path = path_name(key_path)
        parts.setdefault(owners[path], {})[path] = leaf
    return parts
