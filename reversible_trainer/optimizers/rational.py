"""Inverse roots of tridiagonal matrices, by partial fractions: x^(-1/p) = c + sum_k w_k / (x + s_k).

Every resolvent of a tridiagonal matrix costs O(n^2), so that its eigenvectors are never
needed. In float64, on stacks: diagonals `[K, n]`, and below them `[K, n - 1]`.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.interpolate import AAA

from reversible_trainer.tree import Array

BLOCK = 16  # rows; the products of as many ratios of at least SMALLEST can be divided by
SMALLEST = 1e-18


class PartialFractions(NamedTuple):
    """x^(-1/p) = `constant + sum(weights / (x + shifts))` for x from epsilon to 1 + epsilon."""

    p: int
    epsilon: float
    shifts: np.ndarray
    weights: np.ndarray
    constant: float


@functools.cache
def partial_fractions(p: int, epsilon: float) -> PartialFractions | None:
    """To 3e-8 of the largest value; None where there are none of use.

    Source: AAA, Nakatsukasa, Sète and Trefethen 2018, https://arxiv.org/abs/1612.00337.
    """
    if p < 2 or not 5e-7 <= epsilon <= 1:
        return None
    x = np.geomspace(0.999 * epsilon, 1.001 + epsilon, 1000)
    shifts = -AAA(x, x ** (-1 / p), rtol=3e-8).poles()
    if np.any(shifts.imag != 0) or np.any(shifts.real <= 0):
        return None
    # Least squares: the weights that belong to the poles are less accurate.
    columns = np.column_stack([1 / (x[:, None] + shifts.real), np.ones(len(x))])
    size = np.linalg.norm(columns, axis=0)
    *weights, constant = np.linalg.lstsq(columns / size, x ** (-1 / p), rcond=1e-15)[0] / size
    return PartialFractions(p, epsilon, shifts.real, np.array(weights), constant)


def inverse_root(d: Array, e: Array, largest: Array, terms: PartialFractions) -> tuple[Array, Array]:
    """`(T + ridge I)^(-1/p)` of positive semi-definite matrices, as H + H^T + middle I.

    Args:
      d: The diagonals.
      e: What stands next to them.
      largest: The largest eigenvalues `[K]`.
      terms: Those for p and epsilon; the ridge is `epsilon * max(largest, 1e-16)`.

    Returns:
      Lower triangles H, float32 `[K, n, n]`; and the means of the diagonals, `[K, 1, 1]`:
      without these the entries, and so their rounding errors, are several times smaller.

    With pivots u from the top and v from the bottom, the inverse of a tridiagonal matrix has
    1 / (u_i + v_i - t_ii) on its diagonal, and going down a column from row i - 1 to row i
    multiplies by r_i = -e_i / v_i (Meurant 1992, https://doi.org/10.1137/0613045). So below the
    diagonal the sum of P inverses is a product of factors with P columns: rows come a block at
    a time, as matrix products.
    """
    (count, n), size = d.shape, len(terms.shifts)
    blocks = -(-n // BLOCK)
    scale = jnp.maximum(largest, 1e-16)[:, None]
    padding = blocks * BLOCK - n
    d = jnp.pad(d / scale + terms.epsilon, ((0, 0), (0, padding)), constant_values=1.0).T[..., None]
    above = jnp.pad(e / scale, ((0, 0), (1, padding))).T[..., None]
    below = jnp.roll(above, -1, 0)

    def row(c: tuple[Array, Array], x: tuple[Array, ...]) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        pivot, product = c
        d, before, after, last = x
        pivot = d + terms.shifts - before**2 / pivot
        product = jnp.where(last, 1.0, product)
        ratio = -after / pivot
        return (pivot, product * jnp.where(jnp.abs(ratio) < SMALLEST, SMALLEST, ratio)), (pivot, product)

    # Both directions at once: [rows, 2, K, P]. Only the one from the bottom needs products of r.
    rows = tuple(jnp.stack((x, y[::-1]), 1) for x, y in ((d, d), (above, below), (below, above)))
    start = jnp.full((2, count, size), jnp.inf), jnp.ones((2, count, size))
    pivots, products = jax.lax.scan(row, start, (*rows, jnp.arange(blocks * BLOCK) % BLOCK == 0))[1]
    up, down, product = pivots[:, 0], pivots[::-1, 1], products[::-1, 1]
    whole = (-product * above / down)[::BLOCK, ..., None]  # from a block's first row to its last
    factor = scale ** (-1 / terms.p)
    diagonal = factor * terms.weights / (up + down - (d + terms.shifts))
    mean = jnp.mean(jnp.sum(diagonal[:n], -1), 0)[:, None, None]

    def cut(x: Array) -> Array:
        return x.reshape(blocks, BLOCK, count, size).transpose(0, 2, 1, 3)

    def block(columns: Array, x: tuple[Array, ...]) -> tuple[Array, Array]:
        left, right, ratio, first = x
        columns = jax.lax.dynamic_update_slice_in_dim(columns * ratio, right, first, -1)
        rows = jnp.matmul(left, columns, precision=jax.lax.Precision.HIGHEST)
        ahead = jnp.arange(blocks * BLOCK) - (first + jnp.arange(BLOCK))[:, None]
        return columns, jnp.where(ahead < 0, rows, jnp.where(ahead == 0, (rows - mean) / 2, 0)).astype(jnp.float32)

    xs = cut(1 / product), cut(diagonal * product).mT, whole, BLOCK * jnp.arange(blocks)
    half = jax.lax.scan(block, jnp.zeros((count, size, blocks * BLOCK)), xs)[1]
    half = half.transpose(1, 0, 2, 3).reshape(count, -1, blocks * BLOCK)[:, :n, :n]
    return half, mean + terms.constant * factor[..., None]


def largest_eigenvalue(d: Array, e: Array, values: int = 31, passes: int = 5) -> Array:
    """Multisection `[K]`, to 3e-8 of what Gershgorin's circles allow."""
    beside = jnp.pad(jnp.abs(e), ((0, 0), (1, 1)))
    low, high = jnp.max(d, -1), jnp.max(d + beside[:, 1:] + beside[:, :-1], -1)
    steps = jnp.arange(1, values + 1) / (values + 1)

    def narrow(_: int, c: tuple[Array, Array]) -> tuple[Array, Array]:
        low, width = c
        inside = ~_exceeds(low[:, None] + width[:, None] * steps, d, e)
        new = width / (values + 1)
        return low + new * jnp.sum(inside, -1, dtype=new.dtype), new

    low, width = jax.lax.fori_loop(0, passes, narrow, (low, high - low))
    return low + width


def semidefinite(d: Array, e: Array, tolerance: Array) -> Array:
    """Whether no eigenvalue is below `-tolerance` `[K]`."""
    return _exceeds(tolerance[:, None], -d, e)[:, 0]


def _exceeds(x: Array, d: Array, e: Array) -> Array:
    """Whether values x `[K, X]` are larger than all eigenvalues: all pivots of x I - T are positive."""

    def row(c: tuple[Array, Array], de: tuple[Array, Array]) -> tuple[tuple[Array, Array], None]:
        pivot = x - de[0] - de[1] ** 2 / c[0]
        return (pivot, jnp.minimum(c[1], pivot)), None

    infinite = jnp.full(x.shape, jnp.inf)
    rows = d.T[..., None], jnp.pad(e, ((0, 0), (1, 0))).T[..., None]
    return jax.lax.scan(row, (infinite, infinite), rows)[0][1] > 0
