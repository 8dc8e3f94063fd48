"""What every test runs under: strict promotion, no gin bindings left by another test, no program compiled twice."""

import os
import tempfile

import gin
import pytest

# Tests build the same programs again and again, in processes of their own too: the compiler's results are kept
# for the length of the run.
_compiled = tempfile.TemporaryDirectory(prefix="reversible_trainer_tests_")  # removed when the first process ends
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", _compiled.name)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as the package does; here jax is imported first
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import jax  # noqa: E402  (reads the environment when it is imported)

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_disable_most_optimizations", True)  # half the compile time; `optimized` brings them back


@pytest.fixture(autouse=True)
def cleared_gin():
    gin.clear_config()
    yield
    gin.clear_config()


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def optimized():
    """Programs as users get them, where bytes, bits or time are what is tested."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)
