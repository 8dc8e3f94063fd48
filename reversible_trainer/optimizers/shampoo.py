"""Distributed Shampoo (Anil et al. 2020, https://arxiv.org/abs/2002.09018)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import gin
import jax.numpy as jnp
import optax

from reversible_trainer.optimizers import blocking, common, matrix, statistics
from reversible_trainer.tree import Array, Tree

Stacks = Sequence[Array]


class ShampooSlots(NamedTuple):
    """Slots of `shampoo`; `dtype` is float32, or float64 for float64 weights.

    The `N` weights of one shape are a stack, and so are the `K` statistics of one size and
    exponent, whichever blocks of whichever weights they belong to.

    Attributes:
      step: Updates done, int32 `[]`.
      failures: Statistics and roots that were not finite and so not taken, int32 `[]`.
      statistics: `S`, `dtype[K, n, n]` per size and exponent.
      preconditioners: `P`, inverse roots of `S` (with a ridge), alike.
      momentum: `m`, `dtype[N, *shape]` per shape.
      graft_momentum: `d`, alike; `()` where nothing needs it.
      graft: Second moments `a` of the graft, alike; `()` for `graft_type="sgd"`.
    """

    step: Array
    failures: Array
    statistics: tuple[Array, ...]
    preconditioners: tuple[Array, ...]
    momentum: tuple[Array, ...]
    graft_momentum: tuple[Array, ...]
    graft: tuple[Array, ...]


@gin.configurable
@common.structural(
    "start_preconditioning_step",
    "preconditioning_compute_steps",
    "statistics_compute_steps",
    "block_size",
    "no_preconditioning_for_layers_with_dim_gt",
    "exponent_override",
    "pad_to",
)
def shampoo(
    learning_rate: common.Rate,
    beta1: float = 0.9,
    beta2: float = 0.999,
    diagonal_epsilon: float = 1e-10,
    matrix_epsilon: float = 1e-6,
    weight_decay: float = 0.0,
    start_preconditioning_step: int = 1,
    preconditioning_compute_steps: int = 1,
    statistics_compute_steps: int = 1,
    block_size: int = 128,
    best_effort_shape_interpretation: bool = True,
    graft_type: str = "sgd",
    no_preconditioning_for_layers_with_dim_gt: int = 8192,
    nesterov: bool = True,
    exponent_override: int = 0,
    *,
    variant: str = "modern",
    weight_decay_method: str = "momentum",
    pad_to: int | None = None,
    root: str | None = None,
    stagger: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Shampoo: gradients times inverse roots of their second moments along every axis, with grafted lengths.

    Momentum is a heavy ball, `m = beta1 m + u`: at `beta1=0.9` steps are ten times as long as
    those of an average, which matters when a learning rate is carried over from Adam.

    Args:
      learning_rate: A float, a (traced) scalar or an optax schedule.
      beta1: Momentum.
      beta2: Decay of the statistics and of the graft's moments; 1.0 sums them up.
      diagonal_epsilon: Added to the root of the graft's second moments.
      matrix_epsilon: Statistics start at this times the identity; also the relative ridge of the roots.
      weight_decay: See `weight_decay_method`.
      start_preconditioning_step: Updates before this one, counted from 0, follow the graft.
      preconditioning_compute_steps: Updates from one computation of the roots to the next.
      statistics_compute_steps: Likewise for the statistics.
      block_size: Dimensions are merged up to this size and cut at it; 0 does neither.
      best_effort_shape_interpretation: Whether to merge dimensions.
      graft_type: Whose length the update of every weight has: "sgd", "adagrad", "rmsprop" or
        "adam" (RMSProp with bias correction; the momentum stays Shampoo's own).
      no_preconditioning_for_layers_with_dim_gt: Weights with a larger dimension follow the graft.
      nesterov: Whether momentum looks one step ahead.
      exponent_override: The `p` of the inverse `p`-th roots; 0 means twice the rank.
      variant: "modern", or "reference" to reproduce the published implementation.
      weight_decay_method: "momentum" adds it to what momentum sums up, "decoupled" to the step.
      pad_to: For "reference" only: the size to which it pads statistics. By default the largest
        of the tree; who updates layer by layer passes the largest of the model.
      root: "rational" (for a CPU; where it does not apply, "eigh"), "eigh" (in float64) or
        "newton" (matrix products only). By default "rational" on a CPU, else "newton".
      stagger: Compute roots when the update's number plus the extra argument `block_index` is
        a multiple of `preconditioning_compute_steps`. Until then a block follows the graft.

    Example:
      >>> import jax.numpy as jnp
      >>> weights = {"kernel": jnp.ones((4, 4))}
      >>> optimizer = shampoo(0.1, block_size=4, graft_type="adam")
      >>> slots = optimizer.init(weights)
      >>> updates, slots = optimizer.update(weights, slots, weights)
      >>> [s.shape for s in slots.statistics]
      [(2, 4, 4)]

    Source: Anil et al. 2020, algorithm 1 and section 4; grafting: Agarwal et al. 2020
    (https://arxiv.org/abs/2002.11803).
    """
    graft_type = graft_type.lower()
    common.check_choice("shampoo", "graft_type", graft_type, ("sgd", "adagrad", "rmsprop", "adam"))
    common.check_choice("shampoo", "variant", variant, ("modern", "reference"))
    common.check_choice("shampoo", "weight_decay_method", weight_decay_method, ("momentum", "decoupled"))
    common.check_choice("shampoo", "root", root, (None, "eigh", "rational", "newton"))
    reference = variant == "reference"
    if pad_to is not None and not reference:
        raise ValueError('shampoo: pad_to needs variant="reference"; variant="modern" never pads.')
    # Only updates before `start_preconditioning_step` step along d, and before update 0 it is 0.
    keeps_d = reference or start_preconditioning_step > 1

    def plan(tree: Tree) -> statistics.Plan:
        groups = common.group(tree)
        merge = block_size if best_effort_shape_interpretation else None
        shapes = [_shape(group.shape, merge, no_preconditioning_for_layers_with_dim_gt) for group in groups]
        return statistics.plan(groups, shapes, block_size, lambda rank: exponent_override or 2 * rank)

    def init(params: Tree) -> ShampooSlots:
        shapes = plan(params)
        eyes = statistics.identities(shapes)
        return ShampooSlots(
            step=jnp.zeros((), jnp.int32),
            failures=jnp.zeros((), jnp.int32),
            statistics=tuple(common.like(matrix_epsilon, eye) * eye for eye in eyes),
            preconditioners=eyes,
            momentum=common.zeros(shapes.groups),
            graft_momentum=common.zeros(shapes.groups) if keeps_d else (),
            graft=() if graft_type == "sgd" else common.zeros(shapes.groups),
        )

    def roots(shapes: statistics.Plan, s: Stacks, old: Stacks) -> tuple[tuple[Array, ...], Array]:
        # The inverse roots of all statistics, or the old ones where that fails; and how often it did.
        if reference:
            solved = _reference_roots(shapes, s, matrix_epsilon, pad_to)
        else:
            kinds = zip(shapes.kinds, s, strict=True)
            solved = [matrix.inverse_root(s_, kind.p, matrix_epsilon, root) for kind, s_ in kinds]
        new = tuple(jnp.where(good[:, None, None], p, old_) for (p, good), old_ in zip(solved, old, strict=True))
        return new, sum((jnp.sum(~good, dtype=jnp.int32) for _, good in solved), jnp.zeros((), jnp.int32))

    def update(
        updates: Tree, state: Any, params: Tree | None = None, *, block_index: Any = None, **_: Any
    ) -> tuple[Tree, ShampooSlots]:
        slots: ShampooSlots = state
        tree = updates if params is None else params
        shapes = plan(tree)
        g = common.stack(updates, shapes.groups)
        blocks = statistics.cut(shapes, g)
        t, zero = slots.step, jnp.zeros((), jnp.int32)

        s, skipped = common.when(
            common.due(t, statistics_compute_steps),
            lambda s: _accumulate(s, statistics.contract(shapes, blocks), beta2, literally=reference),
            lambda s: (s, zero),
            slots.statistics,
        )
        p, failed = common.when(
            common.due(t, preconditioning_compute_steps, block_index if stagger else None),
            lambda s, old: roots(shapes, s, old),
            lambda s, old: (old, zero),
            s,
            slots.preconditioners,
        )

        f, a = _graft(graft_type, g, slots.graft, t, beta2, diagonal_epsilon)
        q = [
            (g_ if g_.ndim == 1 else f_) if q_ is None else q_
            for q_, f_, g_ in zip(statistics.uncut(shapes, statistics.multiply(shapes, p, blocks)), f, g, strict=True)
        ]
        if stagger and block_index is not None:  # without roots yet, q would be the gradient
            started = t >= -jnp.asarray(block_index).astype(t.dtype) % preconditioning_compute_steps
            q = [jnp.where(started, q_, f_) for q_, f_ in zip(q, f, strict=True)]
        u = [q_ * (common.norms(f_) / (common.norms(q_) + 1e-16)) for q_, f_ in zip(q, f, strict=True)]

        decay = None
        if not common.is_zero(weight_decay):
            w = common.stack(common.needs(params, "shampoo", "weight_decay"), shapes.groups)
            decay = [common.like(weight_decay, w_) * w_ for w_ in w]
        if decay and weight_decay_method == "momentum":
            u, f = _add(u, decay), _add(f, decay)
        m, step = _heavy_ball(slots.momentum, u, beta1, nesterov)
        d = slots.graft_momentum if keeps_d else [jnp.zeros_like(f_) for f_ in f]
        d, graft_step = _heavy_ball(d, f, beta1, nesterov)
        if start_preconditioning_step > 0:
            started = t >= start_preconditioning_step
            step = [jnp.where(started, a_, b_) for a_, b_ in zip(step, graft_step, strict=True)]
        if decay and weight_decay_method == "decoupled":
            step = _add(step, decay)

        lr = common.rate_at(learning_rate, t)
        step = common.unstack([-common.like(lr, s_) * s_ for s_ in step], shapes.groups, tree, t)
        failures = slots.failures + skipped + failed
        return step, ShampooSlots(common.increment(t), failures, s, p, m, d if keeps_d else (), a)

    return optax.GradientTransformationExtraArgs(init, update)


def _shape(shape: tuple[int, ...], merge: int | None, largest: int) -> tuple[int, ...] | None:
    """The shape as Shampoo sees it, dimensions merged up to `merge`; None for what follows the graft."""
    if shape == () or 0 in shape or max(shape) > largest:
        return None
    return shape if merge is None else blocking.merge(shape, merge)


def _accumulate(s: Stacks, c: Stacks, beta2: Any, literally: bool) -> tuple[tuple[Array, ...], Array]:
    """`S = w1 S + w2 C`, leaving out (and counting) what is not finite unless `literally`."""
    new, skipped = [], jnp.zeros((), jnp.int32)
    for s_, c_ in zip(s, c, strict=True):
        w1, w2 = _weights(beta2, s_)
        s_new = w1 * s_ + w2 * c_
        if not literally:
            good = common.finite(c_)
            s_new = jnp.where(good, s_new, s_)
            skipped += jnp.sum(~good, dtype=jnp.int32)
        new.append(s_new)
    return tuple(new), skipped


def _reference_roots(
    shapes: statistics.Plan, s: Stacks, matrix_epsilon: Any, pad_to: int | None
) -> list[tuple[Array, Array]]:
    """The reference's roots, all padded to one size; those with one exponent in one loop."""
    kinds = list(shapes.kinds)
    largest = max([0, *(kind.n for kind in kinds)])
    if pad_to is not None and pad_to < largest:
        raise ValueError(f"shampoo: pad_to must be at least {largest}, the size of a statistic; got {pad_to}.")
    solved: dict[int, tuple[Array, Array]] = {}
    for p, dtype in dict.fromkeys((kind.p, kind.dtype) for kind in kinds):
        members = [i for i, kind in enumerate(kinds) if (kind.p, kind.dtype) == (p, dtype)]
        roots = matrix.reference_roots([s[i] for i in members], p, matrix_epsilon, pad_to or largest)
        solved |= zip(members, roots, strict=True)
    return [solved[i] for i in range(len(kinds))]


def _graft(
    graft_type: str, g: Stacks, a: Stacks, t: Array, beta2: Any, diagonal_epsilon: Any
) -> tuple[Stacks, tuple[Array, ...]]:
    """The update `f` whose length is grafted, and its second moments `a`."""
    if graft_type == "sgd":
        return g, ()
    f, new = [], []
    for g_, a_ in zip(g, a, strict=True):
        w1, w2 = (1, 1) if graft_type == "adagrad" else _weights(beta2, a_)
        a_ = w1 * a_ + w2 * g_ * g_
        new.append(a_)
        if graft_type == "adam":
            b = common.like(beta2, a_)
            a_ = a_ / jnp.where(b == 1, 1, 1 - b ** (t + 1).astype(b.dtype))
        f.append(g_ / (jnp.sqrt(a_) + common.like(diagonal_epsilon, a_)))
    return f, tuple(new)


def _weights(beta2: Any, array: Array) -> tuple[Array, Array]:
    """What is kept of the old and taken of the new: an average, or a sum where `beta2` is 1."""
    b = common.like(beta2, array)
    return b, jnp.where(b == 1, 1, 1 - b)


def _heavy_ball(m: Stacks, u: Stacks, beta1: Any, nesterov: bool) -> tuple[tuple[Array, ...], list[Array]]:
    """The new momentum `m = beta1 m + u` and the step to take."""
    new = tuple(common.like(beta1, u_) * m_ + u_ for m_, u_ in zip(m, u, strict=True))
    if not nesterov:
        return new, list(new)
    return new, [common.like(beta1, u_) * m_ + u_ for m_, u_ in zip(new, u, strict=True)]


def _add(xs: Stacks, ys: Stacks) -> list[Array]:
    return [x + y for x, y in zip(xs, ys, strict=True)]
