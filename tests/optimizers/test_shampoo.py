"""Shampoo against a NumPy version with eigh; cadence, staggering, failures."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from reversible_trainer.optimizers import failures, shampoo

SHAPES = {"scalar": (), "vector": (5,), "matrix": (6, 11), "wide": (3, 20), "cube": (3, 5, 4), "small": (2, 3)}


def in_numpy(weights, gradients, block=8, lr=0.1, beta1=0.9, beta2=0.99, eps=1e-6, graft="sgd", decay=0.0, start=1):
    """Section by section after Anil et al., one weight and one block at a time, float64."""
    state, seen = {}, []
    for t, g_all in enumerate(gradients):
        for name, g in g_all.items():
            w = weights[name]
            shape = merged(g.shape, block) if g.ndim else ()
            s = state.setdefault(name, {"m": 0 * g, "d": 0 * g, "a": 0 * g, "S": {}})
            if graft == "sgd":
                f = g
            else:
                s["a"] = s["a"] + g * g if graft == "adagrad" else beta2 * s["a"] + (1 - beta2) * g * g
                f = g / (np.sqrt(s["a"] / (1 - beta2 ** (t + 1) if graft == "adam" else 1)) + 1e-10)
            q = np.array(g).reshape(shape)
            for corner in np.ndindex(*(-(-d // block) for d in shape)):
                where = tuple(slice(i * block, (i + 1) * block) for i in corner)
                b = g.reshape(shape)[where]
                for axis in range(b.ndim):
                    flat = np.moveaxis(b, axis, 0).reshape(b.shape[axis], -1)
                    old = s["S"].get((corner, axis), eps * np.eye(len(flat)))
                    s["S"][corner, axis] = old = beta2 * old + (1 - beta2) * flat @ flat.T
                    values, v = np.linalg.eigh(old)
                    root = (v * (np.maximum(values, 0) + eps * values[-1]) ** (-0.5 / b.ndim)) @ v.T
                    q[where] = np.moveaxis(np.tensordot(root, q[where], (1, axis)), 0, axis)
            q = q.reshape(g.shape)
            u = q * np.linalg.norm(f) / (np.linalg.norm(q) + 1e-16) + decay * w
            f = f + decay * w
            s["m"], s["d"] = beta1 * s["m"] + u, beta1 * s["d"] + f
            step = u + beta1 * s["m"] if t >= start else f + beta1 * s["d"]
            weights = weights | {name: w - lr * step}
        seen.append(weights)
    return seen


def merged(shape, block):
    out = [1]
    for d in shape:
        out = [*out[:-1], out[-1] * d] if out[-1] * d <= block else [*out, d]
    return tuple(d for d in out if d > 1)


def random_tree(seed, dtype=np.float64):
    generator = np.random.default_rng(seed)
    return {k: np.asarray(generator.normal(size=s), dtype) for k, s in SHAPES.items()}


@pytest.mark.parametrize("graft", ["sgd", "adagrad", "rmsprop", "adam"])
def test_modern_is_the_numpy_version(graft, x64):
    """In float32 too, but for the rounding of the statistics: null directions move by 6e-8 / 1e-6 of a root."""
    dtype, tolerance = ("float32", 0.02) if graft == "adam" else ("float64", 1e-6)
    weights, gradients = random_tree(0), [random_tree(seed) for seed in range(1, 6)]
    hyper = {"beta2": 0.99, "weight_decay": 0.01, "start_preconditioning_step": 2, "graft_type": graft, "block_size": 8}
    optimizer = shampoo(0.1, **hyper)
    w = {k: jnp.asarray(v, dtype) for k, v in weights.items()}
    slots, update = jax.jit(optimizer.init)(w), jax.jit(optimizer.update)
    for g, expected in zip(gradients, in_numpy(weights, gradients, graft=graft, decay=0.01, start=2), strict=True):
        updates, slots = update({k: jnp.asarray(v, dtype) for k, v in g.items()}, slots, w)
        w = optax.apply_updates(w, updates)
        for name in w:
            assert np.max(np.abs(np.asarray(w[name]) - expected[name])) <= tolerance * np.max(
                np.abs(expected[name] - weights[name])
            )


def test_graft_momentum_is_dropped_where_nothing_needs_it(x64):
    """With the default start only update 0 follows the graft: the same result, one slot less."""
    weights, gradients = random_tree(0), [random_tree(seed) for seed in range(1, 4)]
    optimizer = shampoo(0.1, beta2=0.99, block_size=8)
    slots, update = jax.jit(optimizer.init)(weights), jax.jit(optimizer.update)
    assert slots.graft_momentum == ()
    w = weights
    for g, expected in zip(gradients, in_numpy(weights, gradients), strict=True):
        updates, slots = update(g, slots, w)
        w = optax.apply_updates(w, updates)
        np.testing.assert_allclose(w["matrix"], expected["matrix"], rtol=1e-6, atol=1e-8)


def test_decoupled_weight_decay_stays_out_of_momentum():
    weights = {"a": jnp.ones((4, 4))}
    optimizer = shampoo(0.1, weight_decay=0.5, weight_decay_method="decoupled")
    slots = jax.jit(optimizer.init)(weights)
    updates, slots = jax.jit(optimizer.update)({"a": jnp.zeros((4, 4))}, slots, weights)
    np.testing.assert_allclose(updates["a"], -0.05, rtol=1e-6)
    assert not np.any(slots.momentum[0])


@pytest.mark.parametrize("variant", ["modern", "reference"])
def test_roots_and_statistics_keep_their_cadence(variant):
    weights = {"a": jnp.eye(4)}
    optimizer = shampoo(0.1, preconditioning_compute_steps=3, statistics_compute_steps=2, variant=variant)
    slots, update = jax.jit(optimizer.init)(weights), jax.jit(optimizer.update)
    roots, statistics = [], []
    for t in range(7):
        _, new = update({"a": (t + 1) * jnp.eye(4)}, slots, weights)
        roots.append(bool(np.any(new.preconditioners[0] != slots.preconditioners[0])))
        statistics.append(bool(np.any(new.statistics[0] != slots.statistics[0])))
        slots = new
    assert [t for t in range(7) if roots[t]] == [0, 3, 6]
    assert [t for t in range(7) if statistics[t]] == [0, 2, 4, 6]


def test_staggered_roots_take_turns():
    """Block i refreshes when (t + i) mod n is 0: one block in every step."""
    n, weights = 4, {"a": jnp.eye(4)}
    optimizer = shampoo(0.1, preconditioning_compute_steps=n, stagger=True)
    update = jax.jit(lambda g, s, w, i: optimizer.update(g, s, w, block_index=i))
    slots, refreshed = [jax.jit(optimizer.init)(weights)] * n, []
    for t in range(9):
        changed = []
        for i in range(n):
            _, new = update({"a": (t + 1) * jnp.eye(4)}, slots[i], weights, i)
            changed.append(bool(np.any(new.preconditioners[0] != slots[i].preconditioners[0])))
            slots[i] = new
        refreshed.append([i for i in range(n) if changed[i]])
    assert refreshed == [[0], [3], [2], [1], [0], [3], [2], [1], [0]]


def test_a_refresh_costs_nothing_on_steps_without_one():
    """The decomposition is inside a branch, and nowhere else."""
    weights = {"a": jnp.eye(4)}
    optimizer = shampoo(0.1, preconditioning_compute_steps=5)
    jaxpr = jax.make_jaxpr(optimizer.update)(weights, optimizer.init(weights), weights)
    outside = [equation for equation in jaxpr.jaxpr.eqns if equation.primitive.name != "cond"]
    assert "eigh" in str(jaxpr) and not any("eigh" in str(equation) for equation in outside)


@pytest.mark.parametrize("root", ["eigh", "newton"])
def test_a_failing_root_keeps_the_last_good_one_and_is_counted(root):
    weights = {"a": jnp.eye(4), "b": jnp.eye(4)}
    optimizer = shampoo(0.1, root=root)
    update = jax.jit(optimizer.update)
    _, slots = update(weights, jax.jit(optimizer.init)(weights), weights)
    broken = slots._replace(statistics=(slots.statistics[0].at[1].set(jnp.nan),))
    _, new = update(weights, broken, weights)
    np.testing.assert_array_equal(new.preconditioners[0][1], slots.preconditioners[0][1])
    assert np.all(np.isfinite(new.preconditioners[0]))
    assert int(failures({"blocks": [new, slots]})) == 1


def test_a_spike_leaves_statistics_and_roots_alone():
    """1e25 squared is infinite in float32: without care the statistic would stay so for ever."""
    weights = {"a": jnp.eye(4)}
    optimizer = shampoo(0.1)
    update = jax.jit(optimizer.update)
    _, slots = update(weights, jax.jit(optimizer.init)(weights), weights)
    _, new = update({"a": 1e25 * jnp.eye(4)}, slots, weights)
    np.testing.assert_array_equal(new.statistics[0], slots.statistics[0])
    assert int(failures(new)) == 1


def test_large_dimensions_follow_the_graft():
    weights = {"embedding": jnp.ones((40, 4))}
    optimizer = shampoo(0.1, no_preconditioning_for_layers_with_dim_gt=32)
    slots = optimizer.init(weights)
    assert slots.statistics == ()
    updates, _ = jax.jit(optimizer.update)(weights, slots, weights)
    np.testing.assert_allclose(updates["embedding"], -0.19, rtol=1e-5)  # Nesterov: 0.1 (1 + 0.9) g


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"graft_type": "adamw"}, "graft_type must be one of 'sgd', 'adagrad', 'rmsprop', 'adam'; got 'adamw'"),
        ({"variant": "new"}, "variant must be one of 'modern', 'reference'; got 'new'"),
        ({"root": "svd"}, "root must be one of None, 'eigh', 'rational', 'newton'; got 'svd'"),
        ({"pad_to": 8}, 'pad_to needs variant="reference"'),
    ],
)
def test_unknown_settings_are_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        shampoo(0.1, **setting)


def test_too_small_a_pad_is_refused():
    optimizer = shampoo(0.1, variant="reference", pad_to=2)
    weights = {"a": jnp.ones((4, 4))}
    with pytest.raises(ValueError, match="pad_to must be at least 16"):
        jax.eval_shape(functools.partial(optimizer.update), weights, optimizer.init(weights), weights)
