"""What the optimizer families share besides linear algebra: stacks of equal weights, hyper-parameters, failure counts.

Weights of one shape are *stacked* into one array `[N, *shape]`: the compiled program then has
one copy of the update rule per shape, not per weight, and slots are few and large.
"""

from __future__ import annotations

import fnmatch
import functools
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from reversible_trainer.tree import Array, Tree, path_name, total, tree_bytes, tree_size

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
Rate = Any  # a float, a (traced) scalar, or a schedule: a function of the updates done so far
Factory = Callable[..., optax.GradientTransformation]  # learning_rate -> GradientTransformation


def slot_dtype(dtype: Any) -> Any:
    """The dtype of statistics and momentum for weights of a dtype: at least float32."""
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"optimizers update floating point weights; got {dtype}. Keep other arrays in a layer's state.")
    return jnp.dtype("float64" if dtype == jnp.float64 else "float32")


class Group(NamedTuple):
    """Weights that are updated as one stack.

    Attributes:
      shape: Their common shape.
      dtype: Of the stack and its slots: float32, or float64 for float64 weights.
      label: Whatever else they must have in common.
      members: Their positions among the leaves of the tree.
    """

    shape: tuple[int, ...]
    dtype: Any
    label: Any
    members: tuple[int, ...]


def group(tree: Tree, label: Callable[[str, Any], Hashable] = lambda path, leaf: None) -> list[Group]:
    """Groups the leaves of a tree by shape, slot dtype and `label(path, leaf)`, in order of appearance.

    Example:
      >>> import jax.numpy as jnp
      >>> tree = {"a": jnp.ones((2, 3)), "b": jnp.ones(2), "c": jnp.zeros((2, 3))}
      >>> [(g.shape, g.members) for g in group(tree)]
      [((2, 3), (0, 2)), ((2,), (1,))]
    """
    members: dict[Any, list[int]] = {}
    for i, (path, leaf) in enumerate(jax.tree.leaves_with_path(tree)):
        key = (jnp.shape(leaf), slot_dtype(jnp.result_type(leaf)), label(path_name(path), leaf))
        members.setdefault(key, []).append(i)
    return [Group(shape, dtype, label_, tuple(m)) for (shape, dtype, label_), m in members.items()]


def paths(tree: Tree) -> list[str]:
    """The paths of a tree's leaves."""
    return [path_name(path) for path, _ in jax.tree.leaves_with_path(tree)]


def stack(tree: Tree, groups: Sequence[Group]) -> list[Array]:
    """One array `[N, *shape]` per group, in the group's dtype."""
    leaves = jax.tree.leaves(tree)
    return [jnp.stack([jnp.asarray(leaves[i], g.dtype) for i in g.members]) for g in groups]


def unstack(stacks: Sequence[Array], groups: Sequence[Group], tree: Tree, step: Array) -> Tree:
    """The tree with the structure and dtypes of `tree` whose stacks these are.

    Slices at constant places are as many different kernels for XLA to compile (on a CPU 64 of
    them took 2.5 s, 0.3 s this way). So the place is looked up in a constant array, at an index
    that is 0 but that XLA does not know to be, and all slices are one kernel.
    """
    leaves, structure = jax.tree.flatten(tree)
    zero = jnp.minimum(step, 0)
    for x, g in zip(stacks, groups, strict=True):
        for n, i in enumerate(g.members):
            place = jax.lax.dynamic_index_in_dim(np.array([n, -1], np.int32), zero, keepdims=False)
            piece = x[0] if len(g.members) == 1 else jax.lax.dynamic_index_in_dim(x, place, keepdims=False)
            leaves[i] = piece.astype(jnp.result_type(leaves[i]))
    return jax.tree.unflatten(structure, leaves)


def zeros(groups: Sequence[Group]) -> tuple[Array, ...]:
    """A stack of zeros per group."""
    return tuple(jnp.zeros((len(g.members), *g.shape), g.dtype) for g in groups)


def rate_at(learning_rate: Rate, step: Array) -> Array:
    """The learning rate of the update after `step` others."""
    return jnp.asarray(learning_rate(step) if callable(learning_rate) else learning_rate)


def like(x: Any, array: Array) -> Array:
    """A hyper-parameter, Python number or (traced) array, in the dtype of an array."""
    return jnp.asarray(x).astype(array.dtype)


def is_zero(x: Any) -> bool:
    """Whether a hyper-parameter is known to be 0 while tracing."""
    return isinstance(x, int | float) and x == 0


def needs(params: Tree | None, optimizer: str, reason: str) -> Tree:
    """The weights, or a clear error where `update` was called without them."""
    if params is None:
        raise ValueError(f"{optimizer}: {reason} needs the weights; call update(gradients, slots, weights).")
    return params


def increment(step: Array) -> Array:
    """One more update done; stops before int32 overflows."""
    return jnp.minimum(step, jnp.iinfo(step.dtype).max - 1) + 1


def due(step: Array, every: int, block_index: Array | int | None = None) -> Array | bool:
    """Whether what is done every so many updates is due, staggered by `block_index`."""
    if every == 1:
        return True
    return (step + jnp.asarray(0 if block_index is None else block_index).astype(step.dtype)) % every == 0


def when(condition: Array | bool, compute: Callable[..., Any], otherwise: Callable[..., Any], *operands: Any) -> Any:
    """`jax.lax.cond`, or a plain call where the answer is known while tracing."""
    if isinstance(condition, bool):
        return (compute if condition else otherwise)(*operands)
    return jax.lax.cond(condition, compute, otherwise, *operands)


class _Default:
    """A default value that `optax.inject_hyperparams` does not take for a number to trace."""

    def __init__(self, value: Any):
        self.value = value

    def __repr__(self) -> str:
        return repr(self.value)

    def __eq__(self, other: object) -> bool:
        return self.value == (other.value if isinstance(other, _Default) else other)

    def __hash__(self) -> int:
        return hash(self.value)


def structural(*names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Marks arguments that decide shapes and loops, so they must be Python values, never traced.

    `optax.inject_hyperparams(shampoo)(learning_rate=0.1)` traces every argument that is a
    number, defaults included; the marked ones it leaves alone.
    """

    def decorate(factory: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(factory)

        @functools.wraps(factory)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
            bound = signature.bind(*args, **kwargs)
            for name in set(names) & set(bound.arguments):
                value = bound.arguments[name]
                if isinstance(value, jax.Array):
                    raise ValueError(
                        f"{factory.__name__}: {name} must be a Python number, got {value}. In "
                        f"optax.inject_hyperparams, list it: static_args=({name!r},)."
                    )
                bound.arguments[name] = value.value if isinstance(value, _Default) else value
            return factory(*bound.args, **bound.kwargs)

        parameters = [
            p.replace(default=_Default(p.default)) if name in names else p for name, p in signature.parameters.items()
        ]
        wrapped.__signature__ = signature.replace(parameters=parameters)  # pyright: ignore[reportAttributeAccessIssue]
        return wrapped

    return decorate


def match(path: str, patterns: Mapping[str, T], optimizer: str, argument: str) -> T | None:
    """The entry whose pattern (fnmatch, `*` also stands for `/`) matches a path, or None; an error where two do."""
    matches = [p for p in patterns if fnmatch.fnmatchcase(path, p)]
    if len(matches) > 1:
        raise ValueError(
            f"{optimizer}: weights at {path!r} match several patterns of {argument}: {', '.join(map(repr, matches))}. "
            "Make them narrower; their order does not matter."
        )
    return patterns[matches[0]] if matches else None


def check_choice(optimizer: str, name: str, value: Any, choices: Sequence[Any]) -> None:
    """Refuses an unknown setting, listing the known ones."""
    if value not in choices:
        raise ValueError(f"{optimizer}: {name} must be one of {', '.join(map(repr, choices))}; got {value!r}.")


def failures(slots: Tree) -> Array:
    """How many roots, eigenbases and statistics were not finite and so not taken, in all slots of a tree: int32.

    Counts the fields called `failures` of whatever slots the tree holds.

    Example:
      >>> import jax.numpy as jnp
      >>> from reversible_trainer.optimizers import shampoo
      >>> int(failures(shampoo(0.1).init({"kernel": jnp.ones((4, 4))})))
      0
    """
    return total(slots, "failures")


def slot_bytes_per_weight(factory: Factory, weights: Tree) -> float:
    """Bytes of slots for each weight of a tree of arrays or `ShapeDtypeStruct`; nothing is computed.

    Example:
      >>> import jax, optax
      >>> slot_bytes_per_weight(optax.sgd, {"kernel": jax.ShapeDtypeStruct((8, 8), "float32")})
      0.0
    """
    slots = jax.eval_shape(factory(1.0).init, weights)
    return tree_bytes(slots) / max(tree_size(weights), 1)


def norms(x: Array) -> Array:
    """Frobenius norm of every weight of a stack, as `[N, 1, ...]`."""
    return jnp.sqrt(jnp.sum(x * x, tuple(range(1, x.ndim)), keepdims=True))


def finite(x: Array) -> Array:
    """Which matrices of a stack `[K, n, n]` are finite: `[K, 1, 1]`."""
    return jnp.all(jnp.isfinite(x), (-2, -1), keepdims=True)
