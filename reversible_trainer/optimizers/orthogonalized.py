"""Momentum whose matrices are orthogonalized before the step, and Muon, its best known member."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import gin
import jax
import jax.numpy as jnp
import optax

from reversible_trainer.optimizers import common, matrix
from reversible_trainer.tree import Array, Tree

Orthogonalize = Callable[..., Array]  # (matrix, *, path) -> matrix
_SCALES: dict[str, Callable[[int, int], float]] = {
    "shape_scaling": lambda rows, cols: math.sqrt(max(1, rows / cols)),
    "spectral": lambda rows, cols: math.sqrt(max(rows, cols)),
    "unit_rms_norm": lambda rows, cols: math.sqrt(rows / cols),
}


class OrthogonalizedSlots(NamedTuple):
    """Slots of `orthogonalized` and `muon`.

    Attributes:
      step: Updates done, int32 `[]`.
      momentum: `m`, a stack `[N, *shape]` per shape; float32, or float64 for float64 weights.
    """

    step: Array
    momentum: tuple[Array, ...]


class View(NamedTuple):
    """How weights are seen as matrices `[out, in]`: the output axis, and the sizes of the parts along it."""

    axis: int
    parts: tuple[int, ...]


@gin.configurable
@common.structural("output_axis")
def orthogonalized(
    learning_rate: common.Rate,
    momentum: float = 0.95,
    weight_decay: float = 0.01,
    *,
    orthogonalize: Orthogonalize,
    nesterov: bool = False,
    weight_decay_method: str = "decoupled",
    matmul_precision: str | None = "highest",
    before_update: Callable[[Array, Array], Array] | None = None,
    after_update: Callable[[Array], Array] | None = None,
    split: Mapping[str, Sequence[int]] | None = None,
    output_axis: int | Mapping[str, int] = 0,
    convolutions: Sequence[str] = (),
) -> optax.GradientTransformationExtraArgs:
    """Steps along `orthogonalize(momentum)`, matrix by matrix; a base for Muon and its relatives.

    Args:
      learning_rate: A float, a (traced) scalar or an optax schedule.
      momentum: `mu` of `m = m + (1 - mu) (g - m)`; no bias correction.
      weight_decay: See `weight_decay_method`.
      orthogonalize: `(matrix, *, path) -> matrix`, on matrices `[out, in]`; the identity gives
        plain momentum.
      nesterov: Whether momentum looks one step ahead.
      weight_decay_method: "decoupled" (times the learning rate), "independent" of it, or "l2"
        (added to the gradient).
      matmul_precision: `jax.default_matmul_precision` within `orthogonalize`, and nowhere else.
      before_update: `(w, o) -> o`, with the decayed weight, before the step is taken.
      after_update: `w -> w` after it.
      split: Maps a path pattern to sizes of parts along the output axis that are orthogonalized
        apart: query, key and value, or heads.
      output_axis: The axis of the outputs, for all weights or by path pattern (-1 for the
        others); the default takes a matrix as it is stored.
      convolutions: Path patterns of weights with more than two dimensions, each seen as a matrix
        `[out, everything else]`.

    Hooks get one weight at a time, in slot dtype and stored layout, and are mapped with `jax.vmap`.

    Example:
      >>> import jax.numpy as jnp
      >>> def polar(matrix, *, path):
      ...     u, _, vt = jnp.linalg.svd(matrix, full_matrices=False)
      ...     return u @ vt
      >>> weights = {"kernel": 3 * jnp.eye(2)}
      >>> optimizer = orthogonalized(0.1, weight_decay=0.0, orthogonalize=polar)
      >>> updates, slots = optimizer.update(weights, optimizer.init(weights))
      >>> updates["kernel"].round(3).tolist()
      [[-0.10000000149011612, 0.0], [0.0, -0.10000000149011612]]
    """

    def each(x: Array, paths: Sequence[str]) -> Array:
        with jax.default_matmul_precision(matmul_precision):
            return jnp.stack([orthogonalize(x[i], path=path) for i, path in enumerate(paths)])

    return _transformation(
        "orthogonalized",
        learning_rate,
        momentum,
        weight_decay,
        nesterov,
        weight_decay_method,
        each,
        before_update,
        after_update,
        split or {},
        output_axis,
        convolutions,
    )


@gin.configurable
@common.structural("steps", "output_axis")
def muon(
    learning_rate: common.Rate = 3e-4,
    momentum: float = 0.95,
    weight_decay: float = 0.01,
    *,
    nesterov: bool = False,
    weight_decay_method: str = "decoupled",
    coefficients: str = "quintic",
    steps: int = 5,
    scale: str = "spectral",
    extra_scale: float = 1.0,
    split: Mapping[str, Sequence[int]] | None = None,
    output_axis: int | Mapping[str, int] = -1,
    matmul_precision: str = "bfloat16",
    before_update: Callable[[Array, Array], Array] | None = None,
    after_update: Callable[[Array], Array] | None = None,
    convolutions: Sequence[str] = (),
) -> optax.GradientTransformationExtraArgs:
    """Muon: momentum with all singular values pushed to about 1 by a few Newton-Schulz steps.

    For matrices between hidden layers; give embeddings, the output head and vectors to another
    optimizer with `route`. Arguments not listed here are those of `orthogonalized`.

    Args:
      learning_rate: A float, a (traced) scalar or an optax schedule.
      momentum: `mu` of `m = m + (1 - mu) (g - m)`.
      weight_decay: Decoupled by default.
      nesterov: Whether momentum looks one step ahead.
      weight_decay_method: "decoupled", "independent" or "l2".
      coefficients: "simple", "quintic", "polar_express", "cans", "aol" or "deepseekv4".
      steps: Newton-Schulz steps.
      scale: What the orthogonal matrix is multiplied with: "spectral" sqrt(max(out, in)),
        "shape_scaling" sqrt(max(1, out / in)), "unit_rms_norm" sqrt(out / in).
      extra_scale: Another factor; 0.2 with "spectral" gives updates the size of Adam's.
      split: As in `{"*/qkv": (6, 3, 3)}`; every part has its own scale.
      output_axis: -1 for weights stored `[in, out]`, as our layers do; 0 for `[out, in]`.
      matmul_precision: "highest" keeps the slots' dtype in Newton-Schulz steps; anything else
        means bfloat16.
      before_update: `(w, o) -> o`.
      after_update: `w -> w`.
      convolutions: Path patterns of weights seen as `[out, everything else]`.

    Example:
      >>> import jax.numpy as jnp
      >>> weights = {"kernel": jnp.eye(4)}
      >>> optimizer = muon(0.1, weight_decay=0.0, matmul_precision="highest")
      >>> updates, slots = optimizer.update(weights, optimizer.init(weights))
      >>> bool(jnp.all(jnp.abs(jnp.diag(updates["kernel"]) + 0.2) < 0.07))
      True

    Source: Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon); scale: Liu et al. 2025
    (https://arxiv.org/abs/2502.16982).
    """
    common.check_choice("muon", "coefficients", coefficients, list(matrix.COEFFICIENTS))
    common.check_choice("muon", "scale", scale, list(_SCALES))

    def stacked(x: Array, paths: Sequence[str]) -> Array:
        highest = matmul_precision == "highest"
        with jax.default_matmul_precision("highest" if highest else "default"):
            o = matrix.newton_schulz(x, coefficients, steps, x.dtype if highest else jnp.bfloat16)
        return common.like(extra_scale, o) * _SCALES[scale](*x.shape[1:]) * o

    return _transformation(
        "muon",
        learning_rate,
        momentum,
        weight_decay,
        nesterov,
        weight_decay_method,
        stacked,
        before_update,
        after_update,
        split or {},
        output_axis,
        convolutions,
    )


def _transformation(
    name: str,
    learning_rate: common.Rate,
    momentum: Any,
    weight_decay: Any,
    nesterov: bool,
    weight_decay_method: str,
    orthogonalize: Callable[[Array, Sequence[str]], Array],
    before_update: Callable[[Array, Array], Array] | None,
    after_update: Callable[[Array], Array] | None,
    split: Mapping[str, Sequence[int]],
    output_axis: int | Mapping[str, int],
    convolutions: Sequence[str],
) -> optax.GradientTransformationExtraArgs:
    """Both of the above; `orthogonalize` gets a stack `[M, out, in]` and the paths of its `M` matrices."""
    common.check_choice(name, "weight_decay_method", weight_decay_method, ("decoupled", "independent", "l2"))
    decays = not common.is_zero(weight_decay)
    needs_weights = decays or before_update is not None or after_update is not None

    def groups_of(tree: Tree) -> list[common.Group]:
        return common.group(
            tree, lambda path, leaf: _view(name, path, jnp.shape(leaf), split, output_axis, convolutions)
        )

    def init(params: Tree) -> OrthogonalizedSlots:
        return OrthogonalizedSlots(jnp.zeros((), jnp.int32), common.zeros(groups_of(params)))

    def update(updates: Tree, state: Any, params: Tree | None = None, **_: Any) -> tuple[Tree, OrthogonalizedSlots]:
        slots: OrthogonalizedSlots = state
        tree = updates if params is None else params
        groups, paths = groups_of(tree), common.paths(tree)
        gs = common.stack(updates, groups)
        ws = common.stack(common.needs(params, name, "weight decay or a hook"), groups) if needs_weights else gs
        learning = common.rate_at(learning_rate, slots.step)
        changes, ms = [], []
        for group, g, w, m in zip(groups, gs, ws, slots.momentum, strict=True):
            lr, mu, decay = (common.like(x, g) for x in (learning, momentum, weight_decay))
            if decays and weight_decay_method == "l2":
                g = g + decay * w
            m = m + (1 - mu) * (g - m)
            ms.append(m)
            o = g + mu * (m - g) if nesterov else m
            o = _by_parts(o, group, [paths[i] for i in group.members], orthogonalize)
            change = jnp.zeros_like(g)
            if decays and weight_decay_method != "l2":
                change = -(lr * decay if weight_decay_method == "decoupled" else decay) * w
            if before_update is not None:
                o = jax.vmap(before_update)(w + change, o)
            change = change - lr * o
            if after_update is not None:
                change = jax.vmap(after_update)(w + change) - w
            changes.append(change)
        step = common.increment(slots.step)
        return common.unstack(changes, groups, tree, slots.step), OrthogonalizedSlots(step, tuple(ms))

    return optax.GradientTransformationExtraArgs(init, update)


def _view(
    name: str,
    path: str,
    shape: tuple[int, ...],
    split: Mapping[str, Sequence[int]],
    output_axis: int | Mapping[str, int],
    convolutions: Sequence[str],
) -> View:
    """How the weights at a path are seen; an error where nobody said."""
    where, title = f"{name}: weights at {path!r} have shape {shape}", name.capitalize()
    pattern = "*/" + path.rsplit("/", 1)[-1]
    if len(shape) < 2:
        raise ValueError(
            f"{where}, but {title} needs two or more dimensions. "
            f"Route it elsewhere, e.g. route.rules = {{{pattern!r}: @adam}}."
        )
    if len(shape) > 2 and common.match(path, dict.fromkeys(convolutions, True), name, "convolutions") is None:
        raise ValueError(
            f"{where}, but {title} sees two dimensions. Declare a convolution, seen as [out, everything else]: "
            f"{name}.convolutions = [{pattern!r}]; or route it elsewhere, e.g. route.rules = {{{pattern!r}: @adam}}."
        )
    axis = output_axis
    if isinstance(axis, Mapping):
        declared = common.match(path, axis, name, "output_axis")
        axis = -1 if declared is None else declared
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"{where}, which has no axis {axis}. Set output_axis to that of its outputs.")
    parts = tuple(common.match(path, split, name, "split") or (shape[axis],))
    if sum(parts) != shape[axis]:
        raise ValueError(f"{where}: split {parts} must add up to its output axis {axis} of {shape[axis]}.")
    return View(axis % len(shape), parts)


def _by_parts(
    x: Array, group: common.Group, paths: Sequence[str], orthogonalize: Callable[[Array, Sequence[str]], Array]
) -> Array:
    """Orthogonalizes a stack `[N, *shape]` as matrices `[out, in]`; neighbouring parts of one size in one go."""
    axis, parts = group.label  # a View
    moved = jnp.moveaxis(x, axis + 1, 1)
    matrices = moved.reshape(*moved.shape[:2], -1)
    n, _, width = matrices.shape
    results, start = [], 0
    for size, run in itertools.groupby(parts):
        count = len(list(run))
        part = matrices[:, start : start + count * size].reshape(n * count, size, width)
        o = orthogonalize(part, [path for path in paths for _ in range(count)])
        results.append(o.reshape(n, count * size, width))
        start += count * size
    return jnp.moveaxis(jnp.concatenate(results, 1).reshape(moved.shape), 1, axis + 1)
