"""SOAP (Vyas et al. 2024, https://arxiv.org/abs/2409.11321): Adam in the eigenbasis of Shampoo's statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import gin
import jax
import jax.numpy as jnp
import optax

from reversible_trainer.optimizers import common, matrix, statistics
from reversible_trainer.tree import Array, Tree

Stacks = Sequence[Array]


class SoapSlots(NamedTuple):
    """Slots of `soap`; `dtype` is float32, or float64 for float64 weights.

    The `N` weights of one shape are a stack, and so are the `K` statistics of one size.

    Attributes:
      step: Updates done, int32 `[]`; the first only sets up the bases.
      failures: Statistics and bases that were not finite and so not taken, int32 `[]`.
      momentum: `m`, `dtype[N, *shape]` per shape.
      second_moment: `v`, alike, in the eigenbases.
      statistics: `L`, `R` and so on, `dtype[K, n, n]` per size.
      bases: Their eigenvectors, alike, largest eigenvalue first; `()` in the reference variant.
    """

    step: Array
    failures: Array
    momentum: tuple[Array, ...]
    second_moment: tuple[Array, ...]
    statistics: tuple[Array, ...]
    bases: tuple[Array, ...]


@gin.configurable
@common.structural("precondition_frequency", "max_precondition_dim")
def soap(
    learning_rate: common.Rate = 1e-3,
    betas: tuple[float, ...] = (0.9, 0.999, 0.95),
    weight_decay: float = 0.1,
    eps: float = 1e-6,
    *,
    variant: str = "modern",
    precondition_frequency: int = 10,
    max_precondition_dim: int = 2048,
) -> optax.GradientTransformationExtraArgs:
    """Adam, run in the eigenbasis of the gradients' second moments along every axis.

    The first update sets up the bases and changes nothing else. Weights of rank 0 and 1, and
    axes of size 1 or above `max_precondition_dim`, keep their own basis: there it is Adam.

    Args:
      learning_rate: A float, a (traced) scalar or an optax schedule.
      betas: Decay of `m`, of `v` and of the statistics; two values mean that the third is the second.
      weight_decay: Decoupled.
      eps: Added to the root of `v`.
      variant: "modern", or "reference" to reproduce the published implementation (matrices only,
        a full decomposition in every update).
      precondition_frequency: Updates from one refresh of the bases to the next. With the extra
        argument `block_index`, they are due when the update's number plus that is a multiple.
      max_precondition_dim: Axes above this size keep their own basis.

    Example:
      >>> import jax.numpy as jnp
      >>> weights = {"kernel": jnp.ones((4, 3)), "bias": jnp.ones(3)}
      >>> optimizer = soap(0.1)
      >>> slots = optimizer.init(weights)
      >>> updates, slots = optimizer.update(weights, slots, weights)
      >>> float(jnp.abs(updates["kernel"]).max()), [b.shape for b in slots.bases]
      (0.0, [(1, 4, 4), (1, 3, 3)])
    """
    common.check_choice("soap", "variant", variant, ("modern", "reference"))
    reference = variant == "reference"
    b1, b2, b3 = (*betas, betas[-1])[:3]

    def plan(tree: Tree) -> statistics.Plan:
        if reference:
            _check_matrices(tree)
            return statistics.plan(groups := common.group(tree), [group.shape for group in groups], 0)
        groups = common.group(tree)
        shapes = [group.shape if len(group.shape) > 1 and 0 not in group.shape else None for group in groups]
        return statistics.plan(groups, shapes, 0, wanted=lambda n: 1 < n <= max_precondition_dim)

    def init(params: Tree) -> SoapSlots:
        shapes = plan(params)
        eyes = statistics.identities(shapes)
        return SoapSlots(
            step=jnp.zeros((), jnp.int32),
            failures=jnp.zeros((), jnp.int32),
            momentum=common.zeros(shapes.groups),
            second_moment=common.zeros(shapes.groups),
            statistics=tuple(jnp.zeros_like(eye) for eye in eyes),
            bases=() if reference else eyes,
        )

    def update(
        updates: Tree, state: Any, params: Tree | None = None, *, block_index: Any = None, **_: Any
    ) -> tuple[Tree, SoapSlots]:
        slots: SoapSlots = state
        tree = updates if params is None else params
        shapes = plan(tree)
        g = common.stack(updates, shapes.groups)
        contractions = statistics.contract(shapes, statistics.cut(shapes, g))
        s, failed = _accumulate(slots.statistics, contractions, b3)
        if reference:
            t, first = slots.step + 1, jnp.zeros((), bool)
            bases = [
                matrix.eigenbasis(s_ + common.like(eps, s_) * jnp.eye(s_.shape[-1], dtype=s_.dtype))[0] for s_ in s
            ]
        else:  # the basis from before the current gradient; the first update does not count
            t, first = jnp.maximum(slots.step, 1), slots.step == 0
            bases = slots.bases
        m = [jnp.where(first, m_, _mean(m_, g_, b1)) for m_, g_ in zip(slots.momentum, g, strict=True)]
        rotated_m, rotated_g = (_rotate(shapes, [q.mT for q in bases], x) for x in (m, g))
        v = [
            jnp.where(first, v_, _mean(v_, g_ * g_, b2)) for v_, g_ in zip(slots.second_moment, rotated_g, strict=True)
        ]
        floored = v if reference else [_floor(v_, axes) for v_, axes in zip(v, _rotated_axes(shapes), strict=True)]
        steps = [_adam(m_, v_, t, b1, b2, eps) for m_, v_ in zip(rotated_m, floored, strict=True)]
        steps = _rotate(shapes, bases, steps)
        if not common.is_zero(weight_decay):
            w = common.stack(common.needs(params, "soap", "weight_decay"), shapes.groups)
            steps = [x + common.like(weight_decay, x) * w_ for x, w_ in zip(steps, w, strict=True)]
        lr = common.rate_at(learning_rate, slots.step)
        steps = [jnp.where(first, 0, -common.like(lr, x) * x) for x in steps]
        if not reference:
            bases, v, bad = _refresh(shapes, slots.step, precondition_frequency, block_index, s, slots.bases, v)
            failed += bad
        new = SoapSlots(
            step=common.increment(slots.step),
            failures=slots.failures + failed,
            momentum=tuple(m),
            second_moment=tuple(v),
            statistics=s,
            bases=() if reference else tuple(bases),
        )
        return common.unstack(steps, shapes.groups, tree, slots.step), new

    return optax.GradientTransformationExtraArgs(init, update)


def _check_matrices(tree: Tree) -> None:
    for path, leaf in zip(common.paths(tree), jax.tree.leaves(tree), strict=True):
        if jnp.ndim(leaf) != 2:
            raise ValueError(
                f"soap: weights at {path!r} have shape {jnp.shape(leaf)}, but the reference handles matrices only. "
                'Set soap.variant = "modern", or route them elsewhere.'
            )


def _mean(old: Array, new: Array, beta: Any) -> Array:
    b = common.like(beta, old)
    return b * old + (1 - b) * new


def _accumulate(s: Stacks, c: Stacks, b3: Any) -> tuple[tuple[Array, ...], Array]:
    """The statistics with new contractions, leaving out and counting those that are not finite."""
    good = [common.finite(c_) for c_ in c]
    new = tuple(jnp.where(ok, _mean(s_, c_, b3), s_) for ok, s_, c_ in zip(good, s, c, strict=True))
    return new, sum((jnp.sum(~ok, dtype=jnp.int32) for ok in good), jnp.zeros((), jnp.int32))


def _rotate(shapes: statistics.Plan, matrices: Stacks, x: Stacks) -> list[Array]:
    """Weights multiplied along every axis that has a statistic; the others as they are."""
    y = statistics.uncut(shapes, statistics.multiply(shapes, matrices, statistics.cut(shapes, x)))
    return [x_ if y_ is None else y_ for x_, y_ in zip(x, y, strict=True)]


def _adam(m: Array, v: Array, t: Array, b1: Any, b2: Any, eps: Any) -> Array:
    t_ = t.astype(m.dtype)
    m = m / (1 - common.like(b1, m) ** t_)
    v = v / (1 - common.like(b2, v) ** t_)
    return m / (jnp.sqrt(v) + common.like(eps, v))


def _rotated_axes(shapes: statistics.Plan) -> list[list[int]]:
    """Per group, the axes of its stack that have a basis."""
    parts = [part for parts in shapes.kinds.values() for part in parts]
    return [sorted(part.axis + 1 for part in parts if part.group == i) for i in range(len(shapes.groups))]


def _floor(v: Array, axes: Sequence[int]) -> Array:
    """`v`, raised where it is a rounding error: m / sqrt(v) would be one rounding error over another.

    The mean of `v` in a direction, an index along a rotated axis, estimates its eigenvalue.
    Where that is unresolved, `v` is at least what independent directions with the least
    resolved eigenvalue would give, lambda_i mu_j / trace; and it is nowhere below what a
    rotation resolves.
    """
    if not axes:
        return v
    resolution, everything = matrix.resolution(v.dtype), tuple(range(1, v.ndim))
    total = jnp.mean(v, everything, keepdims=True)
    model, unresolved = total, jnp.zeros((), bool)
    for axis in axes:
        energy = jnp.mean(v, [a for a in everything if a != axis], keepdims=True)
        least = resolution * jnp.max(energy, axis, keepdims=True)
        model = model * jnp.maximum(energy, least) / jnp.maximum(total, jnp.finfo(v.dtype).tiny)
        unresolved = unresolved | (energy < least)
    v = jnp.where(unresolved, jnp.maximum(v, model), v)
    return jnp.maximum(v, (10 * resolution) ** 2 * jnp.max(v, everything, keepdims=True))


def _refresh(
    shapes: statistics.Plan, step: Array, every: int, block_index: Any, s: Stacks, bases: Stacks, v: Stacks
) -> tuple[tuple[Array, ...], tuple[Array, ...], Array]:
    """New bases, `v` in their order, and failures: full ones in update 0, then one orthogonal iteration when due."""
    zero = jnp.zeros((), jnp.int32)

    def keep() -> Any:
        return tuple(bases), tuple(v), zero

    def set_up() -> Any:
        new, bad = [], zero
        for s_, q in zip(s, bases, strict=True):
            q_new, good = matrix.eigenbasis(s_)
            new.append(jnp.where(good[:, None, None], q_new, q))
            bad += jnp.sum(~good, dtype=jnp.int32)
        return tuple(new), tuple(v), bad

    def refine() -> Any:
        new, sorted_v, bad = [], list(v), zero
        for s_, q, parts in zip(s, bases, shapes.kinds.values(), strict=True):
            q_new, order, good = matrix.refine_eigenbasis(s_, q)
            new.append(jnp.where(good[:, None, None], q_new, q))
            order = jnp.where(good[:, None], order, jnp.arange(q.shape[-1], dtype=order.dtype))
            bad += jnp.sum(~good, dtype=jnp.int32)
            for part, places in zip(parts, statistics.split(order, parts), strict=True):
                v_ = sorted_v[part.group]
                places = jnp.expand_dims(places, [a for a in range(1, v_.ndim) if a != part.axis + 1])
                sorted_v[part.group] = jnp.take_along_axis(v_, places, part.axis + 1)
        return tuple(new), tuple(sorted_v), bad

    due = jnp.asarray(common.due(step, every, block_index))
    return jax.lax.switch(jnp.where(step == 0, 2, due.astype(jnp.int32)), [keep, refine, set_up])
