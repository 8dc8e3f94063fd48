"""Inverse roots, eigenbases and Newton-Schulz against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reversible_trainer.optimizers import matrix, rational


def exact_root(s, p, epsilon):
    """The inverse root in float64 by `eigh`."""
    eigenvalues, v = np.linalg.eigh(np.asarray(s, np.float64))
    ridge = epsilon * eigenvalues[..., -1:]
    return (v * ((np.maximum(eigenvalues, 0) + ridge) ** (-1 / p))[..., None, :]) @ np.swapaxes(v, -1, -2)


def statistics(n, seed=0):
    """Full rank, rank one, and eigenvalues over twelve orders of magnitude: float32 `[3, n, n]`."""
    generator = np.random.default_rng(seed)
    q = np.linalg.qr(generator.normal(size=(n, n)))[0]
    halves = generator.normal(size=(n, 2 * n)), generator.normal(size=(n, 1)), q * np.logspace(-6, 0, n)
    s = np.stack([h @ h.T for h in halves]).astype(np.float32)
    # Rounding makes some eigenvalues negative: eigh takes them for 0, Newton does not.
    return s + np.float32(1e-7) * np.trace(s, axis1=1, axis2=2)[:, None, None] * np.eye(n, dtype=np.float32)


def error(root, s, p, epsilon=1e-6):
    """The largest error over the largest entry."""
    expected = exact_root(s, p, epsilon)
    return np.max(np.abs(np.asarray(root) - expected)) / np.max(np.abs(expected))


@pytest.mark.parametrize(
    "method, n, exponents",
    [
        ("eigh", 24, (1, 2, 3, 4, 5, 6, 8)),
        ("newton", 24, (1, 2, 3, 4, 5, 6, 8)),
        ("rational", 50, (2, 3, 4, 6, 8)),  # not a multiple of its blocks
    ],
)
def test_inverse_roots_are_float64_inside_float32_programs(method, n, exponents):
    """In a cond, compiled ahead of time: where the trainer uses them."""
    s = statistics(n)

    def refresh(s, due):
        return jax.lax.cond(
            due,
            lambda s: [matrix.inverse_root(s, p, 1e-6, method) for p in exponents],
            lambda s: [(s, jnp.zeros(3, bool))] * len(exponents),
            s,
        )

    results = jax.jit(refresh).lower(s, True).compile()(s, jnp.array(True))
    for p, (root, good) in zip(exponents, results, strict=True):
        assert root.dtype == jnp.float32 and bool(jnp.all(good))
        assert error(root, s, p) < 1e-6


@pytest.mark.parametrize("method, n", [("eigh", 4), ("newton", 4), ("rational", 3), ("rational", 48)])
def test_a_root_of_nonsense_is_not_good_and_that_of_zero_is(method, n):
    s = statistics(n).copy()
    s[1, 0, 0] = np.nan
    s[2] = 0
    root, good = jax.jit(lambda s: matrix.inverse_root(s, 4, 1e-6, method))(s)
    assert good.tolist() == [True, False, True]
    assert error(root[0], s[0], 4) < 1e-6
    np.testing.assert_allclose(root[2], 1e-22**-0.25 * np.eye(n), rtol=1e-6, atol=1e-9)  # of 3e5


@pytest.mark.parametrize("x64", [False, True])
def test_rational_roots_are_found_without_eigenvectors_unless_an_eigenvalue_is_negative(x64):
    """Also in float64 programs; one that is negative by rounding counts as 0."""
    s = statistics(50)
    slightly, much = s.copy(), s.copy()
    slightly[1] -= 1.5e-7 * np.trace(s[1]) * np.eye(50, dtype=np.float32)
    much[0] *= -1
    with jax.enable_x64(x64):
        rational, eigh = (
            jax.jit(lambda s, method=method: matrix.inverse_root(s, 4, 1e-6, method)[0]) for method in (None, "eigh")
        )
        assert matrix.default_root() == "rational" and np.any(rational(s) != eigh(s))
        for stack in (s, slightly):
            assert error(rational(stack), stack, 4) < 1e-6
        np.testing.assert_array_equal(rational(much), eigh(much))


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("epsilon", [1e-6, np.float32(1e-6), 1e-9])
def test_what_rational_roots_are_not_for_is_left_to_eigh(n, epsilon):
    s = statistics(n)
    found, expected = (jax.jit(lambda s, e, m=m: matrix.inverse_root(s, 2, e, m)[0]) for m in ("rational", "eigh"))
    np.testing.assert_array_equal(found(s, epsilon), expected(s, epsilon))


@pytest.mark.parametrize("p, epsilon", [(1, 1e-6), (4, 1e-7), (4, 2.0), (4, float("nan"))])
def test_there_are_no_partial_fractions_outside_their_range(p, epsilon):
    assert rational.partial_fractions(p, epsilon) is None


@pytest.mark.parametrize("p", [2, 3, 4, 6, 8, 12])
@pytest.mark.parametrize("epsilon", [5e-7, 1e-6, 1e-4, 1e-2, 1.0])
def test_partial_fractions_are_accurate_and_their_shifts_positive(p, epsilon):
    terms = rational.partial_fractions(p, epsilon)
    x = np.geomspace(epsilon, 1 + epsilon, 7919)
    value = terms.constant + (terms.weights / (x[:, None] + terms.shifts)).sum(1)
    assert np.max(np.abs(value - x ** (-1 / p))) < 1e-7 * epsilon ** (-1 / p)
    assert np.all(terms.shifts > 0) and len(terms.shifts) <= 18


def test_eigenbasis_diagonalizes_and_depends_continuously_on_the_matrix():
    """Also where the matrix has rank one, so that LAPACK's null vectors are arbitrary."""
    s = statistics(12)[:2]
    nudged = np.nextafter(s, np.float32(np.inf))
    nudged = (nudged + nudged.swapaxes(1, 2)) / 2
    basis, good = jax.jit(matrix.eigenbasis)(s)
    assert bool(jnp.all(good))
    np.testing.assert_allclose(basis.mT @ basis, np.broadcast_to(np.eye(12), (2, 12, 12)), atol=1e-5)
    rotated = np.asarray(basis.mT @ s @ basis)
    quotients = np.diagonal(rotated, axis1=1, axis2=2)
    assert np.all(np.diff(quotients) <= 1e-5 * quotients[:, :1])
    np.testing.assert_allclose(rotated, quotients[..., None] * np.eye(12), atol=1e-5 * rotated.max())
    overlap = np.abs(np.einsum("kij,kij->kj", basis, jax.jit(matrix.eigenbasis)(nudged)[0]))
    assert overlap.min() > 0.999


def test_eigenbasis_of_zero_is_the_identity_and_of_nonsense_is_refused():
    basis, good = jax.jit(matrix.eigenbasis)(jnp.stack([jnp.zeros((3, 3)), jnp.full((3, 3), jnp.nan)]))
    assert basis[0].tolist() == np.eye(3).tolist() and good.tolist() == [True, False]


def test_refining_converges_to_the_eigenbasis_and_tracks_places():
    s = statistics(8)[:1]
    exact = np.linalg.eigh(s[0].astype(np.float64))[1][:, ::-1]
    refine = jax.jit(matrix.refine_eigenbasis)
    q = jnp.eye(8)[None]
    for _ in range(200):
        q, _, good = refine(s, q)
    assert bool(good[0])
    np.testing.assert_allclose(np.abs(np.einsum("ij,ij->j", np.asarray(q[0]), exact)), 1, atol=1e-3)
    shuffled, order, _ = refine(s, q[:, :, ::-1])
    assert order.tolist() == [list(range(8))[::-1]]
    np.testing.assert_allclose(np.abs(np.einsum("ij,ij->j", np.asarray(shuffled[0]), exact)), 1, atol=1e-3)


# Singular values from 0.01 to 1 of the norm end up in these bands; steps as published.
BANDS = {
    "simple": (5, 0.65, 1.25),
    "quintic": (5, 0.95, 1.05),
    "polar_express": (8, 0.99, 1.01),
    "cans": (8, 0.95, 1.05),
    "aol": (8, 0.5, 1.3),
    "deepseekv4": (10, 0.99, 1.01),
}


@pytest.mark.parametrize("name", matrix.COEFFICIENTS)
def test_newton_schulz_pushes_singular_values_into_a_band(name):
    steps, low, high = BANDS[name]
    generator = np.random.default_rng(0)
    u, v = (np.linalg.qr(generator.normal(size=(n, 6)))[0] for n in (9, 6))
    x = jnp.asarray((u * np.linspace(0.05, 1, 6)) @ v.T, jnp.float32)
    for y in (x, x.T):
        values = np.linalg.svd(jax.jit(lambda y: matrix.newton_schulz(y, name, steps))(y), compute_uv=False)
        assert low < values.min() and values.max() < high


def test_newton_schulz_of_zero_is_zero():
    assert not np.any(matrix.newton_schulz(jnp.zeros((2, 3, 4))))
