"""Where arrays live: host memory and accelerator memory, and the copies between them."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from reversible_trainer.streaming.machine import host_available
from reversible_trainer.tree import Tree

Device = Any  # a jax.Device, which type checkers take for a variable

if TYPE_CHECKING:
    from reversible_trainer.streaming.programs import Program


class Pending:
    """Arrays on their way from one memory to the other.

    Their source is held until `wait`, because the copy reads it until then.
    """

    def __init__(self, arrays: Tree, source: Tree):
        self._arrays, self._source = arrays, source

    def arrays(self) -> Tree:
        """The arrays where they were sent; using them waits for the copy by itself."""
        return self._arrays

    def tracked(self) -> Tree:
        """Objects that live as long as the arrays will be where they were sent; as a rule these themselves."""
        return self._arrays

    def block(self) -> None:
        """Returns when the copy is done; may be called by any thread."""
        jax.block_until_ready(self._arrays)

    def wait(self) -> None:
        """Returns when the copy is done, and lets go of its source."""
        self.block()
        self._source = None


class Placement(abc.ABC):
    """Host and accelerator memory, and the only code that copies between them.

    Attributes:
      same_memory: Whether host and accelerator are one memory, so that nothing is copied.
    """

    same_memory = False

    @property
    def side_by_side(self) -> bool:
        """Whether programs that do not need each other's results run at once, as on a CPU."""
        return jax.devices()[0].platform == "cpu"

    @abc.abstractmethod
    def send(self, tree: Tree, keep: bool = False) -> Pending:
        """Starts copying from the host to the accelerator.

        Args:
          tree: Arrays on the host.
          keep: Whether they must outlive what is done with the copies, donation included.
        """

    @abc.abstractmethod
    def fetch(self, tree: Tree) -> Pending:
        """Starts copying from the accelerator to the host."""

    @abc.abstractmethod
    def to_accelerator(self, tree: Tree) -> Tree:
        """Private copies, on the accelerator, of arrays from anywhere (a batch, a scalar)."""

    @abc.abstractmethod
    def to_host(self, tree: Tree) -> Tree:
        """Private copies, where the entries of a `TrainState` live, of arrays from anywhere."""

    def reserve(self, sizes: Mapping[int, int]) -> None:  # noqa: B027  (most need not)
        """Makes sure that there is room for so many fetches of so many bytes each, or raises `OSError`."""

    def room(self) -> tuple[str, int, bool]:
        """Where weights and slots live, the bytes free there, and whether the accelerator's arrays live there too."""
        shared = jax.devices()[0].platform == "cpu"
        return f"host memory{' (that of the accelerator included)' * shared}", host_available(), shared

    def specify(self, signature: Tree) -> Tree:
        """A signature with the sharding that a program's arguments will have."""
        return signature

    def execute(self, program: Program, leaves: Sequence[Any]) -> Sequence[Any]:
        """Enqueues a compiled program; its donated arguments are gone afterwards."""
        return program.compiled(*leaves)

    def wait(self, array: Any) -> None:
        """Returns when `array` has been computed."""
        jax.block_until_ready(array)

    @staticmethod
    def pinned(device: Device | None = None) -> Placement:
        """Weights and slots in page-locked host memory, copied to `device` and back."""
        return _Pinned(device or jax.devices()[0])

    @staticmethod
    def shared() -> Placement:
        """Host and accelerator are the same memory, as on a CPU: nothing is copied."""
        device = jax.devices()[0]
        if device.platform != "cpu":
            raise ValueError(
                f"Placement.shared(): host and accelerator must be one memory, as on a CPU; the device is a "
                f"{device.platform} ({device}). Use Placement.pinned()."
            )
        return _Shared()

    @staticmethod
    def disk(folder: str, device: Device | None = None) -> Placement:
        """Weights and slots in a file in `folder`, read and written in the background.

        The file takes room for all weights and slots and a few blocks more, has no name, and
        is gone when the process ends. Raises `OSError` when the disk is full.
        """
        from reversible_trainer.streaming.disk import Disk  # which is made of what is here

        return Disk(folder, device or jax.devices()[0])

    @staticmethod
    def planned(like: Placement) -> Placement:
        """Nothing is allocated and nothing runs: a sweep here accounts for what it would hold in `like`."""
        return _Planned(like)

    @staticmethod
    def default() -> Placement:
        """`shared` on a CPU, `pinned` elsewhere."""
        return Placement.shared() if jax.devices()[0].platform == "cpu" else Placement.pinned()


class OnDevice(Placement):
    """What placements whose accelerator is one device have in common."""

    def __init__(self, device: Device):
        self.accelerator = SingleDeviceSharding(device, memory_kind="device")

    def to_accelerator(self, tree: Tree) -> Tree:  # noqa: D102
        return jax.device_put(private_copy(tree), self.accelerator)

    def specify(self, signature: Tree) -> Tree:  # noqa: D102
        def with_sharding(x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.accelerator)

        return jax.tree.map(with_sharding, signature)


class _Pinned(OnDevice):
    def __init__(self, device: Device):
        super().__init__(device)
        self.host = SingleDeviceSharding(device, memory_kind="pinned_host")

    def send(self, tree: Tree, keep: bool = False) -> Pending:
        return Pending(jax.device_put(tree, self.accelerator), tree)

    def fetch(self, tree: Tree) -> Pending:
        return Pending(jax.device_put(tree, self.host), tree)

    def to_host(self, tree: Tree) -> Tree:
        return jax.device_put(private_copy(tree), self.host)


class _Shared(Placement):
    same_memory = True

    def send(self, tree: Tree, keep: bool = False) -> Pending:
        return Pending(private_copy(tree) if keep else tree, None)

    def fetch(self, tree: Tree) -> Pending:
        return Pending(tree, None)

    def to_accelerator(self, tree: Tree) -> Tree:
        return private_copy(tree)

    def to_host(self, tree: Tree) -> Tree:
        return private_copy(tree)


def private_copy(tree: Tree) -> Tree:
    """Copies that nobody else can see or write.

    `device_put` may share the memory of a numpy array, even when told not to; donating
    such an array would overwrite the caller's data.
    """

    def copy(x: Any) -> jax.Array:
        is_key = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return jax.random.clone(x) if is_key else jnp.array(x, copy=True)

    return jax.tree.map(copy, tree)


class Placeholder:
    """Stands for an array that is planned, or still to be read: it has a size and a lifetime, and no memory."""

    __slots__ = ("__weakref__", "dtype", "shape")

    def __init__(self, like: Any):
        self.shape, self.dtype = like.shape, like.dtype


class _Planned(Placement):
    def __init__(self, like: Placement):
        self.same_memory = like.same_memory

    def send(self, tree: Tree, keep: bool = False) -> Pending:
        copied = keep or not self.same_memory
        return _PlannedPending(jax.tree.map(Placeholder, tree) if copied else tree, tree)

    def fetch(self, tree: Tree) -> Pending:
        return self.send(tree)

    def to_accelerator(self, tree: Tree) -> Tree:
        return jax.tree.map(Placeholder, tree)

    to_host = to_accelerator

    def execute(self, program: Program, leaves: Sequence[Any]) -> Sequence[Any]:
        return [Placeholder(x) for x in program.outputs]

    def wait(self, array: Any) -> None:
        pass


class _PlannedPending(Pending):
    def block(self) -> None:
        pass
