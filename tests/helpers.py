"""Tolerances by dtype, and comparisons of pytrees."""

import contextlib

import jax
import numpy as np
import pytest

# (rtol, atol). Any other number in a test says why.
TOLERANCES = {"float64": (1e-10, 1e-10), "float32": (1e-5, 1e-6), "bfloat16": (2e-2, 2e-2)}


def slow(*case):
    """A case for `make test-all`: another like it is always tested."""
    return pytest.param(*case, marks=pytest.mark.slow)


def assert_trees_close(actual, expected, factor=1.0):
    """Same structure, shapes and dtypes; values within `factor` tolerances of the dtype."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, a), e in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        where = jax.tree_util.keystr(path)
        assert (a.shape, a.dtype) == (e.shape, e.dtype), where
        rtol, atol = (factor * t for t in TOLERANCES.get(str(a.dtype), (0, 0)))
        np.testing.assert_allclose(_wide(a), _wide(e), rtol=rtol, atol=atol, err_msg=where)


def assert_trees_equal(actual, expected):
    """Same structure, shapes, dtypes and bits."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, a), e in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == e.dtype, jax.tree_util.keystr(path)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(e), err_msg=jax.tree_util.keystr(path))


def _wide(x):
    """As float64 (NumPy does not compare bfloat16), integers and booleans as they are."""
    x = np.asarray(x)
    return x.astype(np.float64) if jax.numpy.issubdtype(x.dtype, np.floating) else x


_compiled = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, _seconds, **_: _compiled.append(event) if event.endswith("backend_compile_duration") else None
)


@contextlib.contextmanager
def compilations():
    """Yields a list that holds, after the block, one entry for every program compiled in it."""
    before, found = len(_compiled), []
    yield found
    found.extend(_compiled[before:])
