"""Linear algebra of the matrix optimizers, on stacks of matrices `[..., n, n]`.

Nothing here is mapped with `jax.vmap`: a batch dimension is part of every formula, because
float64 arithmetic inside a float32 program (`jax.enable_x64`) is cut to float32 under `vmap`.
The mathematics is in README.md of this folder.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from reversible_trainer.tree import Array

HIGHEST = jax.lax.Precision.HIGHEST


def default_root() -> str:
    """`"eigh"` on a CPU, `"newton"` (matrix products only) elsewhere."""
    return "eigh" if jax.default_backend() == "cpu" else "newton"


def inverse_root(s: Array, p: int, epsilon: Array | float, method: str | None = None) -> tuple[Array, Array]:
    """`(S + ridge I)^(-1/p)` for a stack of symmetric positive semi-definite matrices.

    Args:
      s: Matrices `[..., n, n]`, float32 or float64.
      p: A positive integer.
      epsilon: The ridge is `epsilon * max(largest eigenvalue, 1e-16)`.
      method: `"eigh"`, `"newton"` or None for `default_root()`.

    Returns:
      The roots, in the dtype of `s`, and a bool `[...]`: whether the root can be trusted.

    Both work in float64 (Newton on a TPU in float32): with a ridge of 1e-6 a float32
    eigendecomposition is off by 1e-2.
    """
    solve = {"eigh": _eigh_root, "newton": _newton_root}[method or default_root()]
    wide = jnp.float32 if method != "eigh" and jax.default_backend() == "tpu" else jnp.float64
    with jax.enable_x64(True):
        root, good = solve(s.astype(wide), p, jnp.asarray(epsilon).astype(wide))
        root = root.astype(s.dtype)
        return root, good & jnp.all(jnp.isfinite(root), (-2, -1))


def _eigh_root(s: Array, p: int, epsilon: Array) -> tuple[Array, Array]:
    eigenvalues, v = jnp.linalg.eigh(s)  # ascending
    ridge = epsilon * jnp.maximum(eigenvalues[..., -1:], 1e-16)
    roots = (jnp.maximum(eigenvalues, 0) + ridge) ** (-1 / p)
    return _mm(v * roots[..., None, :], v.mT), jnp.all(jnp.isfinite(roots), -1)


class _Newton(NamedTuple):
    """The state of the coupled Newton iteration; per-matrix values have shape `[..., 1, 1]`."""

    step: Array
    m: Array  # M = H^p A, which goes to the identity
    h: Array
    error: Array
    best_h: Array
    best_error: Array
    rises: Array  # steps since the error was at its lowest


def _newton_root(s: Array, p: int, epsilon: Array) -> tuple[Array, Array]:
    """Coupled Newton iteration: T = (1 + 1/p) I - M/p, M <- T^p M, H <- H T.

    Unlike the published loop it keeps the best iterate, gives up on a matrix only after
    several rises of the error, and raises T to the exact power.
    """
    eye = jnp.eye(s.shape[-1], dtype=s.dtype)
    tolerance, patience, most = (1e-10 if s.dtype == jnp.float64 else 1e-6), 4, 100
    a = s + epsilon * jnp.maximum(largest_eigenvalue(s), 1e-16) * eye
    z = (1 + p) / (2 * jnp.linalg.norm(a, axis=(-2, -1), keepdims=True))
    m, h = z * a, z ** (1 / p) * eye
    error = _distance(m, eye)

    def active(c: _Newton) -> Array:
        return (c.best_error > tolerance) & (c.rises < patience)

    def body(c: _Newton) -> _Newton:
        t = jnp.where(active(c), (1 + 1 / p) * eye - c.m / p, eye)
        m, h = _mm(power(t, p), c.m), _mm(c.h, t)
        error = _distance(m, eye)
        better = error < c.best_error
        return _Newton(
            c.step + 1,
            m,
            h,
            error,
            jnp.where(better, h, c.best_h),
            jnp.where(better, error, c.best_error),
            jnp.where(better, 0, c.rises + 1),
        )

    start = _Newton(jnp.int32(0), m, h, error, h, error, jnp.zeros(error.shape, jnp.int32))
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
    z = (1 + p) / (2 * jnp.linalg.norm(a, axis=(-2, -1), keepdims=True))
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


def largest_eigenvalue(s: Array, steps: int = 100, tolerance: float = 1e-6, absolute: float = 0.0) -> Array:
    """Power iteration from a fixed start, until the Rayleigh quotients `[..., 1, 1]` stand still."""
    start = np.random.default_rng(0).uniform(-1, 1, (s.shape[-1], 1)).astype(s.dtype)
    v = jnp.broadcast_to(jnp.asarray(start / np.linalg.norm(start)), (*s.shape[:-1], 1))

    def body(c: tuple[Array, ...]) -> tuple[Array, ...]:
        step, v, old, moving = c
        sv = _mm(s, v)
        value = jnp.sum(v * sv, (-2, -1), keepdims=True)
        moved = jnp.abs(value - old) > absolute + tolerance * jnp.abs(value)
        v = sv / jnp.maximum(jnp.linalg.norm(sv, axis=(-2, -1), keepdims=True), 1e-30)
        return step + 1, v, jnp.where(moving, value, old), moving & moved

    zero = jnp.zeros((*s.shape[:-2], 1, 1), s.dtype)
    carry = jnp.int32(0), v, zero, jnp.ones(zero.shape, bool)
    return jax.lax.while_loop(lambda c: (c[0] < steps) & jnp.any(c[3]), body, carry)[2]


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


def _mm(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=HIGHEST)


def _distance(m: Array, eye: Array) -> Array:
    return jnp.max(jnp.abs(m - eye), (-2, -1), keepdims=True)
