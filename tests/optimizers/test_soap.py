"""SOAP against a NumPy version; first update, cadence, sides, noise, failures."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from reversible_trainer.optimizers import failures, soap


def in_numpy(w, gradients, lr=0.01, betas=(0.9, 0.99, 0.95), decay=0.1, eps=1e-6, every=3):
    """Vyas et al., algorithm 3: eigh first, then one step of orthogonal iteration at a time, float64."""
    b1, b2, b3 = betas
    m, v, basis, seen = 0 * w, 0 * w, None, []
    sides = [np.zeros((n, n)) for n in w.shape]
    for t, g in enumerate(gradients):
        sides = [b3 * s + (1 - b3) * c for s, c in zip(sides, (g @ g.T, g.T @ g), strict=True)]
        if t == 0:
            basis = [np.linalg.eigh(s)[1][:, ::-1] for s in sides]
        else:
            u, r = basis
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * (u.T @ g @ r) ** 2
            step = (u.T @ m @ r / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)
            w = w - lr * decay * w - lr * u @ step @ r.T
            if t % every == 0:
                for axis, (s, q) in enumerate(zip(sides, basis, strict=True)):
                    order = np.argsort(-np.einsum("ij,ij->j", q, s @ q))
                    v = np.take(v, order, axis)
                    shift = 100 * np.finfo(np.float64).eps * np.max(np.einsum("ij,ij->j", q, s @ q))
                    basis[axis] = np.linalg.qr((s @ q + shift * q)[:, order])[0]
        seen.append(w)
    return seen


def run(optimizer, w, gradients):
    slots, update, seen = jax.jit(optimizer.init)({"a": w}), jax.jit(optimizer.update), []
    w = {"a": w}
    for g in gradients:
        updates, slots = update({"a": g}, slots, w)
        w = optax.apply_updates(w, updates)
        seen.append(w["a"])
    return seen, slots


def test_modern_is_the_numpy_version(x64):
    generator = np.random.default_rng(0)
    w, gradients = generator.normal(size=(6, 6)), generator.normal(size=(10, 6, 6))
    optimizer = soap(0.01, betas=(0.9, 0.99, 0.95), precondition_frequency=3)
    ours, _ = run(optimizer, jnp.asarray(w), jnp.asarray(gradients))
    for a, b in zip(ours, in_numpy(w, gradients), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-10)


def test_the_first_update_only_sets_up_the_bases():
    w = jnp.ones((3, 4))
    seen, slots = run(soap(0.1), w, [w])
    np.testing.assert_array_equal(seen[0], w)
    assert not np.any(slots.momentum[0]) and np.any(slots.statistics[0])


def test_vectors_scalars_and_large_sides_are_left_to_adam():
    """After the first update, Adam; a matrix with one large side has a basis on the other only."""
    generator = np.random.default_rng(0)
    weights = {"v": generator.normal(size=5), "s": generator.normal(), "m": generator.normal(size=(9, 3))}
    weights = {k: jnp.asarray(x, jnp.float32) for k, x in weights.items()}
    ours, adam = (
        soap(0.1, weight_decay=0.0, eps=1e-8, betas=(0.9, 0.99), max_precondition_dim=8),
        optax.adam(0.1, 0.9, 0.99),
    )
    slots = jax.jit(ours.init)(weights)
    assert [b.shape for b in slots.bases] == [(1, 3, 3)]
    update = jax.jit(ours.update)
    _, slots = update(weights, slots, weights)
    with jax.numpy_dtype_promotion("standard"):
        expected = {k: weights[k] for k in "vs"}
        adam_slots = adam.init(expected)
        for _ in range(3):
            updates, slots = update(weights, slots, weights)
            expected, adam_slots = adam.update({k: weights[k] for k in "vs"}, adam_slots)
            for k in "vs":
                np.testing.assert_allclose(updates[k], expected[k], rtol=1e-4)


@pytest.mark.parametrize(("index", "expected"), [(None, [0, 4, 8]), (1, [0, 3, 7]), (5, [0, 3, 7])])
def test_bases_are_refreshed_on_time_and_staggered(index, expected):
    generator = np.random.default_rng(0)
    weights = {"a": jnp.ones((3, 4))}
    optimizer = soap(0.1, precondition_frequency=4)
    update = jax.jit(lambda g, s, w, i: optimizer.update(g, s, w, block_index=i))
    slots, changed = jax.jit(optimizer.init)(weights), []
    for t in range(9):
        _, new = update({"a": jnp.asarray(generator.normal(size=(3, 4)), jnp.float32)}, slots, weights, index)
        if any(np.any(a != b) for a, b in zip(new.bases, slots.bases, strict=True)):
            changed.append(t)
        slots = new
    assert changed == expected


def test_rounding_of_the_gradients_does_not_matter():
    """One unit in the last place of rank-deficient float32 gradients: the reference moves by percents."""
    generator = np.random.default_rng(0)
    w = jnp.asarray(generator.normal(size=(12, 16)), jnp.float32)
    left, right = generator.normal(size=(12, 4)), generator.normal(size=(4, 16))
    gradients = np.stack([left @ generator.normal(size=(4, 4)) @ right for _ in range(20)]).astype(np.float32)
    sign = np.where(generator.random(gradients.shape) < 0.5, -np.inf, np.inf).astype(np.float32)
    moved = {}
    for variant in ("modern", "reference"):
        results = [run(soap(0.01, variant=variant), w, g)[0][-1] for g in (gradients, np.nextafter(gradients, sign))]
        moved[variant] = np.linalg.norm(results[0] - results[1]) / np.linalg.norm(results[0] - w)
    assert moved["modern"] < 2e-3 < 1e-2 < moved["reference"]


def test_failures_keep_the_last_good_basis_and_are_counted():
    w = {"a": jnp.eye(3), "b": jnp.eye(3)}
    optimizer = soap(0.1, precondition_frequency=1)
    update = jax.jit(optimizer.update)
    slots = jax.jit(optimizer.init)(w)
    for _ in range(2):
        _, slots = update(w, slots, w)
    broken = slots._replace(statistics=(slots.statistics[0].at[1].set(jnp.nan),))
    _, new = update(w, broken, w)
    np.testing.assert_array_equal(new.bases[0][1], slots.bases[0][1])
    assert int(failures(new)) == 1 and np.all(np.isfinite(new.bases[0]))
    _, spiked = update({"a": 1e30 * jnp.eye(3), "b": jnp.eye(3)}, slots, w)
    np.testing.assert_array_equal(spiked.statistics[0][0], slots.statistics[0][0])
    assert int(failures(spiked)) == 2


def test_the_reference_takes_matrices_only():
    with pytest.raises(
        ValueError, match=r"weights at 'bias' have shape \(3,\), but the reference handles matrices only"
    ):
        soap(0.1, variant="reference").init({"bias": jnp.ones(3)})
