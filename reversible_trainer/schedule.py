"""What each block does for batches of one signature: policy, shapes, and its compiled programs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from reversible_trainer import passes
from reversible_trainer.layers.base import Layer, LossLayer, ReversibleLayer, Stack, is_differentiable, put, take
from reversible_trainer.passes import Clock, Health, Optimizer
from reversible_trainer.streaming import Program, Programs
from reversible_trainer.tree import TrainState, Tree, describe, same_signature, signature, tree_bytes

Policy = Literal["reverse", "recompute", "loss"]
_INDEX = jax.ShapeDtypeStruct((), jnp.int32)


@dataclasses.dataclass(frozen=True, eq=False)
class ScheduledBlock:
    """A block with its policy and the signatures of all that goes in and out of it."""

    index: int
    layer: Layer
    policy: Policy
    why: str
    weights: Tree
    slots: Tree
    state: Tree
    inputs: Stack
    outputs: Stack
    memo: Tree

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of program that a training step runs for it."""
        return ("loss",) if self.policy == "loss" else ("forward", "backward")

    @property
    def host_bytes(self) -> int:
        """Weights, slots and state."""
        return tree_bytes((self.weights, self.slots, self.state))


class Schedule:
    """The blocks of a model for one batch signature, in order, with their programs.

    A program is compiled when it is first asked for; equal blocks get the same one.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        optimizer: Optimizer,
        policy: str,
        programs: Programs,
        batch: Stack,
        state: TrainState | None = None,
    ):
        """Traces the blocks one after the other.

        Args:
          layers: The blocks.
          optimizer: Factory.
          policy: "auto" or "recompute".
          programs: Where compiled programs are kept.
          batch: Signature of the first stack.
          state: The run whose arrays it is for, if the batch lacks what the loss needs
            (targets and mask), so that they cannot be had by tracing `init`.
        """
        self._optimizer, self._programs, self._policy = optimizer, programs, policy
        self._found: dict[tuple[str, int], Program] = {}
        self._clock = clock_signature()
        self.batch = batch
        self.blocks: list[ScheduledBlock] = []
        stack = batch
        for index, layer in enumerate(layers):
            last = index == len(layers) - 1
            if last and state is None and len(stack) != layer.n_in:
                raise ValueError(
                    f"Trainer: the loss, block {index} {layer.name}, takes {layer.n_in} entries, but {len(stack)} are "
                    f"left on the stack when it is reached: ({describe(stack)}). The batch was ({describe(batch)})."
                )
            try:
                inputs, rest = (stack, ()) if last else take(stack, layer.n_in)
            except ValueError as error:
                raise ValueError(f"Trainer: block {index} {layer.name}: {error}") from None
            made = None if state is None else signature((state.weights[index], state.slots[index], state.states[index]))
            block = self._block(index, layer, inputs, made, run=not last)
            self.blocks.append(block)
            stack = put(rest, block.outputs)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> ScheduledBlock:
        return self.blocks[index]

    def program(self, kind: str, index: int) -> Program:
        """The program of one block: init, forward, backward, loss, infer, evaluate or predict."""
        if (kind, index) not in self._found:
            block = self.blocks[index]
            self._found[kind, index] = getattr(self, f"_{kind}")(block, block.layer)
        return self._found[kind, index]

    def training_programs(self) -> None:
        """Compiles all that a step runs: what is wrong shows before a state is consumed."""
        for block in self.blocks:
            for kind in block.kinds:
                self.program(kind, block.index)

    def check_state(self, state: TrainState, parts: Sequence[str] = ("weights", "slots", "states")) -> None:
        """Raises `ValueError` unless the state is one of these blocks and this optimizer."""
        for part in parts:
            entries, name = getattr(state, part), {"states": "state"}.get(part, part)
            if len(entries) != len(self.blocks):
                raise ValueError(
                    f"Trainer: the state has {len(entries)} blocks, this trainer {len(self.blocks)}. "
                    "Use the trainer whose init made the state."
                )
            for block, got in zip(self.blocks, entries, strict=True):
                expected = getattr(block, name)
                if not same_signature(expected, got):
                    raise ValueError(
                        f"Trainer: {part} of block {block.index} {block.layer.name} are not this trainer's: expected "
                        f"({describe(expected)}), got ({describe(got)}). Use the trainer whose init made the state."
                    )

    @property
    def host_bytes(self) -> int:
        """Weights, slots and states of all blocks."""
        return sum(block.host_bytes for block in self.blocks)

    def _block(self, index: int, layer: Layer, inputs: Stack, made: Tree, run: bool) -> ScheduledBlock:
        if isinstance(layer, LossLayer):
            policy, why = "loss", "the last block: forward, backward and update in one program"
        elif isinstance(layer, ReversibleLayer) and self._policy != "recompute":
            policy, why = "reverse", "reversible: its inputs are computed from its outputs"
        else:
            asked = isinstance(layer, ReversibleLayer)
            policy, why = "recompute", "policy='recompute' was asked for" if asked else "standard: keeps its input"
        init = functools.partial(passes.init, layer, self._optimizer, inputs)
        weights, slots, state = made or jax.eval_shape(init, self._clock.key, _INDEX)
        outputs, memo = (), None
        if run:
            forward = functools.partial(passes.forward, layer)
            outputs, _, memo = jax.eval_shape(forward, weights, state, inputs, self._clock, _INDEX)
        return ScheduledBlock(index, layer, policy, why, weights, slots, state, inputs, outputs, memo)

    # One method per kind of program: its function, its arguments and which of them it may overwrite.

    def _init(self, block: ScheduledBlock, layer: Any) -> Program:
        function = functools.partial(passes.init, layer, self._optimizer, block.inputs)
        kind = f"init {describe(block.inputs)}"  # the inputs' shapes are no arguments, but they matter
        return self._programs.get(kind, layer, ("weights", "slots", "states"), function, (self._clock.key, _INDEX))

    def _forward(self, block: ScheduledBlock, layer: Any) -> Program:
        function = functools.partial(passes.forward, layer)
        arguments = (block.weights, block.state, block.inputs, self._clock, _INDEX)
        kind = "forward" if block.policy == "reverse" else "forward, input kept"
        donate = (2,) if block.policy == "reverse" else ()
        return self._programs.get(kind, layer, ("activations", "states", "residuals"), function, arguments, donate)

    def _infer(self, block: ScheduledBlock, layer: Any) -> Program:
        function = functools.partial(passes.infer, layer)
        arguments = (block.weights, block.state, block.inputs)
        return self._programs.get("infer", layer, ("activations",), function, arguments, donate=(2,))

    def _backward(self, block: ScheduledBlock, layer: Any) -> Program:
        reverse = block.policy == "reverse"
        function = functools.partial(passes.backward, layer, self._optimizer, reverse)
        entries = block.outputs if reverse else block.inputs
        cotangents = tuple(x if is_differentiable(x) else None for x in block.outputs)
        arguments = (
            *(block.weights, block.slots, block.state, block.state),
            *(entries, cotangents, block.memo),
            *(self._clock, self._total_weight, _HEALTH, _INDEX),
        )
        tags = ("weights", "slots", "states", "activations", "cotangents", "metrics")
        # A stored input is not overwritten: a reversible block below may need it as its output.
        donate = (0, 1, 2, 4, 5, 8) if reverse else (0, 1, 2, 5, 8)
        return self._programs.get(f"backward by {block.policy}", layer, tags, function, arguments, donate)

    def _loss(self, block: ScheduledBlock, layer: Any) -> Program:
        function = functools.partial(passes.loss, layer, self._optimizer)
        arguments = (block.weights, block.slots, block.state, block.inputs, self._clock, _INDEX)
        tags = ("weights", "slots", "states", "cotangents", "metrics", "metrics", "metrics")
        return self._programs.get("loss", layer, tags, function, arguments, donate=(0, 1, 2))

    def _evaluate(self, block: ScheduledBlock, layer: Any) -> Program:
        function = functools.partial(passes.evaluate, layer)
        return self._programs.get("evaluate", layer, ("metrics",), function, (block.weights, block.state, block.inputs))

    def _predict(self, block: ScheduledBlock, layer: Any) -> Program:
        function = functools.partial(passes.predict, layer)
        arguments = (block.weights, block.state, block.inputs)
        return self._programs.get("predict", layer, ("activations",), function, arguments)

    @functools.cached_property
    def _total_weight(self) -> Any:
        loss = self.blocks[-1]
        run = functools.partial(passes.forward, loss.layer)
        sums, _, _ = jax.eval_shape(run, loss.weights, loss.state, loss.inputs, self._clock, _INDEX)
        return sums[1]


_HEALTH = Health(jax.ShapeDtypeStruct((), jnp.bool_), _INDEX, _INDEX, _INDEX)


def clock_signature() -> Clock:
    """Signature of the clock; the key is of JAX's default implementation."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    return Clock(key, _INDEX, jax.ShapeDtypeStruct((), rate_dtype()))


def rate_dtype() -> np.dtype:
    """The learning rate is float32, or float64 when JAX is in 64-bit mode."""
    return np.dtype(jax.dtypes.canonicalize_dtype(float))
