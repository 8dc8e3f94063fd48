"""Muon and its base: singular values, splits, axes, hooks, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reversible_trainer.optimizers import muon, orthogonalized

GENERATOR = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(GENERATOR.normal(size=shape), jnp.float32)


def first_update(optimizer, gradients, weights=None):
    weights = gradients if weights is None else weights
    return jax.jit(lambda g, w: optimizer.update(g, optimizer.init(w), w)[0])(gradients, weights)


@pytest.mark.parametrize(("precision", "low", "high"), [("highest", 0.7, 1.2), ("bfloat16", 0.7, 1.2)])
def test_singular_values_are_about_one(precision, low, high):
    """Five steps of the default coefficients; the smallest singular value given is 3 % of the norm."""
    u, v = (np.linalg.qr(GENERATOR.normal(size=(n, 5)))[0] for n in (12, 5))
    x = jnp.asarray((u * [0.06, 0.3, 0.7, 1.0, 1.5]) @ v.T, jnp.float32)
    for g in (x, x.T):
        optimizer = muon(1.0, weight_decay=0.0, matmul_precision=precision)
        update = first_update(optimizer, {"a": g})["a"] / np.sqrt(12)
        values = np.linalg.svd(update, compute_uv=False)
        assert low < values.min() and values.max() < high


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_split_parts_are_orthogonalized_apart(axis):
    """The same as separate weights, each with its own scale; two parts of one size in one go."""
    sizes, x = (6, 3, 3), normal(12, 12)
    shared = {"weight_decay": 0.0, "output_axis": axis, "matmul_precision": "highest"}
    whole = first_update(muon(1.0, split={"*/qkv": sizes}, **shared), {"attention": {"qkv": x}})["attention"]["qkv"]
    parts = jnp.split(x, [6, 9], axis)
    apart = first_update(muon(1.0, **shared), dict(zip("qkv", parts, strict=True)))
    np.testing.assert_allclose(whole, jnp.concatenate([apart[k] for k in "qkv"], axis), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("scale", "expected"), [("spectral", 12**0.5), ("shape_scaling", 2**0.5), ("unit_rms_norm", 2**0.5)]
)
def test_scale_follows_the_output_axis(scale, expected):
    """A weight of 6 inputs and 12 outputs, stored either way."""
    x, shared = normal(6, 12), {"weight_decay": 0.0, "scale": scale, "matmul_precision": "highest", "steps": 5}
    ours = first_update(muon(1.0, **shared), {"a": x})["a"]
    transposed = first_update(muon(1.0, output_axis=0, **shared), {"a": x.T})["a"]
    np.testing.assert_allclose(ours, transposed.T, rtol=1e-4, atol=1e-5)
    assert np.linalg.norm(ours, 2) == pytest.approx(expected, rel=0.2)


def test_the_output_axis_can_be_declared_by_path():
    x, optimizer = normal(6, 12), muon(1.0, weight_decay=0.0, output_axis={"t": 0}, matmul_precision="highest")
    update = first_update(optimizer, {"a": x, "t": x.T})
    np.testing.assert_allclose(update["a"], update["t"].T, rtol=1e-4, atol=1e-5)


def test_a_declared_convolution_is_a_matrix_of_its_outputs():
    x, shared = normal(3, 3, 4, 8), {"weight_decay": 0.0, "matmul_precision": "highest"}
    ours = first_update(muon(1.0, convolutions=["*/kernel"], **shared), {"conv": {"kernel": x}})["conv"]["kernel"]
    flat = first_update(muon(1.0, **shared), {"a": x.reshape(-1, 8)})["a"]
    np.testing.assert_allclose(ours.reshape(-1, 8), flat, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("path", "shape", "message"),
    [
        (
            "scale",
            (512,),
            r"muon: weights at 'norm/scale' have shape \(512,\), but Muon needs two or more dimensions. "
            r"Route it elsewhere, e.g. route.rules = \{'\*/scale': @adam\}.",
        ),
        ("kernel", (3, 3, 4, 8), r"Declare a convolution.*muon.convolutions = \['\*/kernel'\]"),
        ("qkv", (4, 8), r"split \(6, 3, 3\) must add up to its output axis -1 of 8"),
    ],
)
def test_what_muon_cannot_see_as_a_matrix_is_refused(path, shape, message):
    with pytest.raises(ValueError, match=message):
        muon(0.1, split={"*/qkv": (6, 3, 3)}).init({"norm": {path: jnp.ones(shape)}})


def test_a_weight_that_two_patterns_match_is_refused():
    with pytest.raises(ValueError, match=r"'a/b' match several patterns of split: 'a/\*', '\*/b'"):
        muon(0.1, split={"a/*": (2,), "*/b": (2,)}).init({"a": {"b": jnp.ones((2, 2))}})


def test_the_base_gives_path_and_matrix_to_the_orthogonalization():
    seen = []

    def negate(matrix, *, path):
        seen.append((path, matrix.shape))
        return -matrix

    gradients = {"a": normal(2, 3), "b": {"c": normal(2, 3)}}
    optimizer = orthogonalized(0.5, momentum=0.0, weight_decay=0.0, orthogonalize=negate)
    updates = first_update(optimizer, gradients)
    np.testing.assert_allclose(updates["b"]["c"], 0.5 * gradients["b"]["c"], rtol=1e-6)
    assert seen == [("a", (2, 3)), ("b/c", (2, 3))]


def test_matmul_precision_holds_in_the_orthogonalization_only():
    seen = []

    def identity(matrix, *, path):
        seen.append(jax.config.jax_default_matmul_precision)
        return matrix

    before = jax.config.jax_default_matmul_precision
    first_update(orthogonalized(0.1, orthogonalize=identity, matmul_precision="bfloat16"), {"a": normal(2, 2)})
    assert seen == ["bfloat16"] and jax.config.jax_default_matmul_precision == before


def test_hooks_make_a_hyperball():
    """The update is scaled to the norm of the decayed weight, the result back to that norm: one weight at a time."""
    norm = jnp.linalg.norm
    optimizer = muon(
        0.1,
        weight_decay=0.5,
        before_update=lambda w, o: o * norm(w) / norm(o),
        after_update=lambda w: w / norm(w),
    )
    weights = {"a": normal(3, 4), "b": 7 * normal(3, 4)}
    updates = first_update(optimizer, {"a": normal(3, 4), "b": normal(3, 4)}, weights)
    for name, w in weights.items():
        assert float(norm(w + updates[name])) == pytest.approx(1.0, rel=1e-4)
        assert float(norm(updates[name] + w * (1 - 1 / norm(w)))) > 0
