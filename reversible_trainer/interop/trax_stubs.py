"""trax 1.4.1 on today's JAX, without the TensorFlow that it names but does not need for training."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# What these parts of trax import for weights in files, data sets and trax's second backend.
STUBS = ("tensorflow", "tensorflow_datasets", "trax.tf_numpy")


@functools.cache
def import_trax() -> Any:
    """The package `trax`, with `fastmath`, `layers`, `models`, `optimizers` and `shapes` imported.

    Other parts of trax are not there. TensorFlow is as absent (or present) afterwards as it
    was; what needs it, such as weights in files, fails when it is called.

    Raises:
      ImportError: trax is not installed.
    """
    if "trax" not in sys.modules:
        spec = importlib.util.find_spec("trax")
        if spec is None:
            raise ImportError("trax is not installed. `make trax` installs it, without TensorFlow.", name="trax")
        # The package's own `__init__` would import all of trax and so gym, t5 and seqio: it does not run.
        sys.modules["trax"] = importlib.util.module_from_spec(spec)
    finder, before = _Finder(), set(sys.modules)
    sys.meta_path.insert(0, finder)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # trax compares with `is not ()`
            for name in ("fastmath", "layers", "models", "optimizers", "shapes"):
                importlib.import_module(f"trax.{name}")
    finally:
        sys.meta_path.remove(finder)
        for name in set(sys.modules) - before:
            if isinstance(sys.modules[name], _Module):  # others look for TensorFlow here
                del sys.modules[name]
    return sys.modules["trax"]


class _Finder(MetaPathFinder, Loader):
    """Finds a stub for every module in `STUBS` and below."""

    def find_spec(self, fullname, path=None, target=None):
        if f"{fullname}.".startswith(tuple(f"{name}." for name in STUBS)):
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


class _Class(type):
    """The type of what a stub holds: classes, so that trax's `isinstance(x, tf.DType)` is false, with attributes."""

    def __getattr__(cls, name):
        return _stub(f"{cls.__name__}.{name}")

    def __call__(cls, *_args, **_kwargs):
        raise NotImplementedError(f"import_trax: {cls.__name__} was called, but trax runs without TensorFlow here.")


class _Module(ModuleType):
    """A module of which every attribute is a stub."""

    def __getattr__(self, name):
        return _stub(f"{self.__name__}.{name}")


def _stub(name: str) -> type:
    if name.rpartition(".")[2].startswith("__"):  # the import machinery and `copy` ask for these
        raise AttributeError(name)
    return _Class(name, (), {})
