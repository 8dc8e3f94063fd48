"""Linear algebra of the matrix optimizers, on stacks of matrices `[K, n, n]`.

Nothing here is mapped with `jax.vmap`: a batch dimension is part of every formula, because
float64 arithmetic inside a float32 program (`jax.enable_x64`) is cut to float32 under `vmap`.
The mathematics is in README.md of this folder.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from reversible_trainer.optimizers import rational
from reversible_trainer.tree import Array

HIGHEST = jax.lax.Precision.HIGHEST
SMALL = 48  # smaller matrices gain less by the rational root than its compilation takes


def default_root() -> str:
    """`"rational"` on a CPU, `"newton"` (matrix products only) elsewhere."""
    return "rational" if jax.default_backend() == "cpu" else "newton"


def inverse_root(s: Array, p: int, epsilon: Array | float, method: str | None = None) -> tuple[Array, Array]:
    """`(S + ridge I)^(-1/p)` for a stack of symmetric positive semi-definite matrices.

    Args:
      s: Matrices `[K, n, n]`, float32 or float64.
      p: A positive integer.
      epsilon: The ridge is `epsilon * max(largest eigenvalue, 1e-16)`.
      method: `"eigh"`, `"rational"` (without eigenvectors, about half the time), `"newton"` or
        None for `default_root()`.

    Returns:
      The roots, in the dtype of `s`, and a bool `[K]`: whether the root can be trusted.

    All work in float64 (Newton on a TPU in float32): with a ridge of 1e-6 a float32
    eigendecomposition is off by 1e-2. Negative eigenvalues count as 0, except with Newton.
    `"rational"` is for float32 matrices on a CPU, of 48 rows or more, `p > 1`, and an `epsilon`
    that is a Python number from 5e-7 to 1. It leaves to `"eigh"` whatever else it is given, and
    stacks in which a matrix has a negative eigenvalue, then at 1.3 times the cost.
    """
    method = method or default_root()
    solve = {"eigh": _eigh_root, "rational": _eigh_root, "newton": _newton_root}[method]
    here = s.dtype == jnp.float32 and s.shape[-1] >= SMALL and jax.default_backend() == "cpu"
    if method == "rational" and here and isinstance(epsilon, int | float):
        terms = rational.partial_fractions(p, float(epsilon))
        solve = functools.partial(_rational_root, terms=terms) if terms else _eigh_root
    with jax.enable_x64(True):
        root, good = solve(s, p, jnp.asarray(epsilon).astype(jnp.float64))
        root = root.astype(s.dtype)
        return root, good & jnp.all(jnp.isfinite(root), (-2, -1))


def _eigh_root(s: Array, p: int, epsilon: Array) -> tuple[Array, Array]:
    eigenvalues, v = _each(lambda s: _eigh(s.astype(jnp.float64)), s)  # ascending
    ridge = epsilon * jnp.maximum(eigenvalues[..., -1:], 1e-16)
    roots = (jnp.maximum(eigenvalues, 0) + ridge) ** (-1 / p)
    return _mm(v * roots[..., None, :], v.mT), jnp.all(jnp.isfinite(roots), -1)


def _rational_root(s: Array, p: int, epsilon: Array, terms: rational.PartialFractions) -> tuple[Array, Array]:
    """S = Q T Q^T with T tridiagonal, and its root is Q f(T) Q^T: no eigenvectors, which take most of the time.

    Rounding errors in Q are not divided by the ridge, so that float32 will do for it.
    """

    def tridiagonal(s: Array) -> tuple[Array, ...]:
        a, d, e, taus = jax.lax.linalg.tridiagonal(s.astype(jnp.float64), lower=True)
        # LAPACK's Q leaves the first entry alone: here that is a first reflector with a tau of 0.
        return jnp.roll(a, 1, 1).astype(jnp.float32), jnp.pad(taus, (1, 0)).astype(jnp.float32), d, e

    def by_fractions() -> tuple[Array, Array]:
        q = _each(lambda x: jax.lax.linalg.householder_product(*x), reflectors)
        half, middle = rational.inverse_root(d, e, largest, terms)
        root = _mm(_mm(q, half), q.mT)
        return (root + root.mT).astype(middle.dtype) + middle * jnp.eye(s.shape[-1]), jnp.ones(s.shape[0], bool)

    *reflectors, d, e = _each(tridiagonal, s)
    largest = rational.largest_eigenvalue(d, e)
    # An eigenvalue of -ridge / 1e6, taken as it is and not for 0, puts its root off by 1e-6 / p.
    usable = rational.semidefinite(d, e, 1e-6 * epsilon * jnp.maximum(largest, 1e-16)) | ~jnp.isfinite(largest)
    return jax.lax.cond(jnp.all(usable), by_fractions, lambda: _eigh_root(s, p, epsilon))


class _Newton(NamedTuple):
    """The state of the coupled Newton iteration; per-matrix values have shape `[K, 1, 1]`."""

    step: Array
    m: Array  # M = H^p A, which goes to the identity
    h: Array
    best_h: Array
    best_error: Array
    stalls: Array  # steps in a row that hardly lowered it


def _newton_root(s: Array, p: int, epsilon: Array) -> tuple[Array, Array]:
    """Coupled Newton iteration: T = (1 + 1/p) I - M/p, M <- T^p M, H <- H T.

    Unlike the published loop it keeps the best iterate, raises T to the exact power, gives up
    on a matrix only after several steps without progress, and measures the error |M - I|_F,
    which falls in every step after the first (all eigenvalues of M then rise towards 1); the
    largest entry does not, so that it stops the published loop early.
    """
    wide = jnp.float32 if jax.default_backend() == "tpu" else jnp.float64
    s, epsilon, eye = s.astype(wide), epsilon.astype(wide), jnp.eye(s.shape[-1], dtype=wide)
    tolerance, patience, most = (1e-9 if s.dtype == jnp.float64 else 1e-5), 3, 100
    a = s + epsilon * jnp.maximum(largest_eigenvalue(s), 1e-16) * eye
    z = (1 + p) / (2 * _norm(a))
    m, h = z * a, z ** (1 / p) * eye
    error = _norm(m - eye)

    def active(c: _Newton) -> Array:
        return (c.best_error > tolerance) & (c.stalls < patience)

    def body(c: _Newton) -> _Newton:
        t = jnp.where(active(c), (1 + 1 / p) * eye - c.m / p, eye)
        m, h = _mm(power(t, p), c.m), _mm(c.h, t)
        error = _norm(m - eye)
        better = error < c.best_error
        # Far from the end, small eigenvalues grow by a constant factor and the error hardly falls.
        progress = (error < 0.9 * c.best_error) | (c.best_error > 0.5)
        best_h, best_error = jnp.where(better, h, c.best_h), jnp.where(better, error, c.best_error)
        return _Newton(c.step + 1, m, h, best_h, best_error, jnp.where(progress, 0, c.stalls + 1))

    start = _Newton(jnp.int32(0), m, h, h, error, jnp.zeros(error.shape, jnp.int32))
    end = jax.lax.while_loop(lambda c: (c.step < most) & jnp.any(active(c)), body, start)
    return end.best_h, end.best_error[..., 0, 0] < 0.1


def reference_roots(s: Sequence[Array], p: int, epsilon: Array | float, pad: int) -> list[tuple[Array, Array]]:
    """The inverse roots of the published Shampoo implementation, faults included (README.md lists them).

    Args:
      s: Stacks of statistics `[K, n, n]`, of one dtype.
      p: The inverse `p`-th root is sought.
      epsilon: The ridge is `epsilon * max(largest eigenvalue, 1e-16)`, of the padded matrix.
      pad: All are padded with an identity to this size.

    Returns:
      For each stack its roots, and whether each is taken, bool `[K]`.
    """
    padded = [
        jnp.tile(jnp.eye(pad, dtype=x.dtype), (x.shape[0], 1, 1)).at[:, : x.shape[1], : x.shape[1]].set(x) for x in s
    ]
    root, good = _reference_root(jnp.concatenate(padded), p, jnp.asarray(epsilon).astype(s[0].dtype))
    ends = np.cumsum([x.shape[0] for x in s])
    pieces = zip(s, jnp.split(root, ends[:-1]), jnp.split(good, ends[:-1]), strict=True)
    return [(r[:, : x.shape[1], : x.shape[1]], g) for x, r, g in pieces]


def _reference_root(s: Array, p: int, epsilon: Array) -> tuple[Array, Array]:
    eye = jnp.eye(s.shape[-1], dtype=s.dtype)
    ridge = epsilon * jnp.maximum(largest_eigenvalue(s, tolerance=0, absolute=1e-6), 1e-16)
    if s.shape[-1] == 1:
        return (s + ridge) ** (-1 / p), jnp.ones(s.shape[0], bool)
    a = s + ridge * eye
    z = (1 + p) / (2 * _norm(a))
    m, h = z * a, z ** (1 / p) * eye
    q = min(8, 2 ** round(math.log2(p)))  # the power meant to be p

    def running(c: tuple[Array, ...]) -> Array:
        step, _, _, _, error, run = c
        return (step < 100) & (error > 1e-6) & run

    def body(c: tuple[Array, ...]) -> tuple[Array, ...]:
        step, m_old, h_old, _, error, _ = c
        t = (1 + 1 / p) * eye - m_old / p
        m, h = _mm(power(t, q), m_old), _mm(h_old, t)
        new = _distance(m, eye)
        c_new = step + 1, m, h, h_old, new, new < 1.2 * error
        return tuple(jnp.where(running(c), x, old) for x, old in zip(c_new, c, strict=True))

    error = _distance(m, eye)
    start = (jnp.zeros(error.shape, jnp.int32), m, h, h, error, jnp.ones(error.shape, bool))
    _, _, h, h_old, error, run = jax.lax.while_loop(lambda c: jnp.any(running(c)), body, start)
    return jnp.where(run, h, h_old), error[:, 0, 0] < 0.1


def largest_eigenvalue(s: Array, steps: int = 100, tolerance: float = 1e-7, absolute: float = 0.0) -> Array:
    """Power iteration from a fixed start, until the Rayleigh quotients `[K, 1, 1]` stand still."""
    start = np.random.default_rng(0).uniform(-1, 1, (s.shape[-1], 1)).astype(s.dtype)
    v = jnp.broadcast_to(jnp.asarray(start / np.linalg.norm(start)), (*s.shape[:-1], 1))

    def body(c: tuple[Array, ...]) -> tuple[Array, ...]:
        step, v, old, moving = c
        sv = _mm(s, v)
        value = jnp.sum(v * sv, (-2, -1), keepdims=True)
        moved = jnp.abs(value - old) > absolute + tolerance * jnp.abs(value)
        v = sv / jnp.maximum(_norm(sv), 1e-30)
        return step + 1, v, jnp.where(moving, value, old), moving & moved

    zero = jnp.zeros((*s.shape[:-2], 1, 1), s.dtype)
    carry = jnp.int32(0), v, zero, jnp.ones(zero.shape, bool)
    return jax.lax.while_loop(lambda c: (c[0] < steps) & jnp.any(c[3]), body, carry)[2]


# Newton-Schulz coefficients (a, b, c) per step, and what follows when there are more steps:
# the whole list again ("cycle") or its last entry ("last").
COEFFICIENTS: dict[str, tuple[str, tuple[tuple[float, float, float], ...]]] = {
    "simple": ("last", ((3.4445, -4.7750, 2.0315),)),  # Jordan et al. 2024, kellerjordan.github.io/posts/muon
    "quintic": (
        "cycle",
        (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
    ),
    "polar_express": (  # Amsel et al. 2025, https://arxiv.org/abs/2505.16932
        "last",
        (
            (8.2051, -22.9019, 16.4607),
            (4.0664, -2.8612, 0.5184),
            (3.9096, -2.8234, 0.5250),
            (3.2856, -2.4153, 0.4853),
            (2.2779, -1.6198, 0.3985),
            (1.8726, -1.2307, 0.3585),
            (1.8564, -1.2132, 0.3568),
            (1.8750, -1.2500, 0.3750),
        ),
    ),
    "cans": (  # Grishina et al. 2025, https://arxiv.org/abs/2506.10935
        "last",
        (
            (8.4703, -25.1081, 18.6293),
            (4.1828, -3.1087, 0.5806),
            (3.9619, -2.9541, 0.5630),
            (3.2866, -2.4647, 0.5074),
            (2.2737, -1.6447, 0.4162),
        ),
    ),
    "aol": (
        "cycle",
        (
            (4.0098, -7.0585, 2.4635),
            (3.4585, -5.5479, 2.5959),
            (2.7573, -3.2939, 1.4254),
            (2.7215, -3.0494, 1.3169),
        ),
    ),
    "deepseekv4": ("last", ((3.4445, -4.7750, 2.0315),) * 8 + ((2.0, -1.5, 0.5),) * 2),
}


def coefficient_schedule(coefficients: str, steps: int) -> list[tuple[float, float, float]]:
    """The `(a, b, c)` of every step.

    Example:
      >>> coefficient_schedule("deepseekv4", 12)[7:]
      [(3.4445, -4.775, 2.0315), (2.0, -1.5, 0.5), (2.0, -1.5, 0.5), (2.0, -1.5, 0.5), (2.0, -1.5, 0.5)]
    """
    then, known = COEFFICIENTS[coefficients]
    return [known[i % len(known)] if then == "cycle" else known[min(i, len(known) - 1)] for i in range(steps)]


def newton_schulz(x: Array, coefficients: str = "quintic", steps: int = 5, dtype: Any = None) -> Array:
    """Pushes all singular values of matrices `[..., m, n]` towards 1: X <- a X + (b A + c A^2) X, A = X X^T.

    Args:
      x: Any matrices; zero stays zero.
      coefficients: A name in `COEFFICIENTS`.
      steps: How many times.
      dtype: Of the arithmetic; by default that of `x`.
    """
    wide = x.shape[-2] > x.shape[-1]
    y = x.mT if wide else x  # the shorter side gives the smaller A
    y = y / jnp.maximum(_norm(y), 1e-15)
    y = y.astype(dtype or x.dtype)
    for a, b, c in coefficient_schedule(coefficients, steps):
        gram = y @ y.mT
        y = a * y + (b * gram + c * (gram @ gram)) @ y
    return (y.mT if wide else y).astype(x.dtype)


def resolution(dtype: Any) -> float:
    """Eigenvalues below this times the largest are rounding errors: their eigenvectors are undetermined."""
    return 100 * float(jnp.finfo(dtype).eps)


def eigenbasis(s: Array) -> tuple[Array, Array]:
    """Eigenvectors of a stack `[K, n, n]`, largest eigenvalue first, and a bool `[K]`: whether they are finite.

    Those that are undetermined are replaced by a fixed random frame, projected off the
    others, so that the result depends continuously on the matrix; a zero matrix gives the
    identity. In float64, as in `inverse_root`.
    """
    n, tolerance = s.shape[-1], resolution(s.dtype)
    frame = np.random.default_rng(0).normal(size=(n, n))
    wide = jnp.float32 if jax.default_backend() == "tpu" else jnp.float64
    with jax.enable_x64(True):
        eigenvalues, v = _each(_eigh, s.astype(wide))
        largest = eigenvalues[..., -1:, None]
        determined = eigenvalues[..., None, ::-1] > tolerance * largest
        kept = jnp.where(determined, v[..., ::-1], 0)
        frame = jnp.broadcast_to(jnp.asarray(frame, wide), s.shape)
        q = _each(jnp.linalg.qr, jnp.where(determined, kept, frame - _mm(kept, _mm(kept.mT, frame))))[0]
        q = jnp.where(largest == 0, jnp.eye(n, dtype=wide), q).astype(s.dtype)
        return q, jnp.isfinite(largest[..., 0, 0]) & jnp.all(jnp.isfinite(q), (-2, -1))


def refine_eigenbasis(s: Array, q: Array) -> tuple[Array, Array, Array]:
    """One step of orthogonal iteration from a basis `q` of a stack `[K, n, n]`.

    The matrix is shifted by what it resolves, so undetermined directions stay where they are.

    Returns:
      The basis, largest Rayleigh quotient first; the places `[K, n]`, int32, that its vectors
      had in `q`; and whether the result is finite, bool `[K]`.
    """
    sq = _mm(s, q)
    quotients = jnp.sum(q * sq, -2)
    order = jnp.argsort(quotients, -1, descending=True).astype(jnp.int32)
    shift = jnp.maximum(resolution(s.dtype) * jnp.max(quotients, -1), 1e-30)
    shifted = sq + shift[:, None, None] * q
    new = _each(jnp.linalg.qr, jnp.take_along_axis(shifted, order[:, None, :], -1))[0]
    return new, order, jnp.all(jnp.isfinite(new), (-2, -1))


def _each(decompose: Callable[..., Any], s: Any) -> Any:
    """`decompose` for a stack `[K, n, n]`; on a CPU one matrix after the other.

    jaxlib's batched decompositions split their batch over the very threads they run on and
    wait: as many at once as there are threads, in one program or several, wait for ever (seen
    with jax 0.10.2 on two cores). One matrix at a time waits for nobody, and is as fast.
    """
    return jax.lax.map(decompose, s) if jax.default_backend() == "cpu" else decompose(s)


def power(t: Array, p: int) -> Array:
    """`t` multiplied with itself `p` times, by repeated squaring."""
    result = None
    while p:
        if p % 2:
            result = t if result is None else _mm(result, t)
        p //= 2
        t = _mm(t, t) if p else t
    assert result is not None, "the exponent must be positive"
    return result


def _eigh(s: Array) -> Any:
    return jnp.linalg.eigh(s, symmetrize_input=False)  # statistics are symmetric, and LAPACK reads one half


def _mm(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=HIGHEST)


def _norm(x: Array) -> Array:
    return jnp.linalg.norm(x, axis=(-2, -1), keepdims=True)


def _distance(m: Array, eye: Array) -> Array:
    return jnp.max(jnp.abs(m - eye), (-2, -1), keepdims=True)
