"""What each block does for batches of one signature: policy, shapes, and its compiled programs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from reversible_trainer import passes, reversal
from reversible_trainer.layers.base import Layer, LossLayer, Stack, cotangent_signature, put, take
from reversible_trainer.passes import Clock, Health, Recipe, rate_dtype
from reversible_trainer.streaming import Program, Programs
from reversible_trainer.streaming.programs import exact
from reversible_trainer.tree import Resident, TrainState, Tree, describe, same_signature, signature, tree_bytes

POLICIES = ("keep", "recompute", "reverse")
Choose = Callable[[int, Layer], tuple[str, str]]  # block index, layer -> policy, reason
LARGE = 2**18  # bytes of a block's weights; an update of fewer takes hardly longer than to start it
_INDEX = jax.ShapeDtypeStruct((), jnp.int32)


@dataclasses.dataclass(frozen=True, eq=False)
class ScheduledBlock:
    """A block with its policy and the signatures of all that goes in and out of it, for one microbatch.

    Attributes:
      policy: "reverse", "recompute", "keep", "loss", or "frozen": below the lowest block that
        is trained, without a backward pass.
      why: The reason for it.
      stack: Of the whole stack that it leaves.
      saves_inputs: Whether its inputs are kept until its backward pass.
      verifies: Whether its reconstructed inputs are compared with the real ones.
    """

    index: int
    layer: Layer
    policy: str
    why: str
    weights: Tree
    slots: Tree
    state: Tree
    inputs: Stack
    outputs: Stack
    memo: Tree
    stack: Stack = ()
    saves_inputs: bool = False
    verifies: bool = False

    @property
    def looks(self) -> bool:
        """Whether its forward pass looks at the streams that it leaves."""
        return self.policy != "loss" and reversal.has_fixed_point(self.outputs)

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
        recipe: Recipe,
        choose: Choose,
        programs: Programs,
        batch: Stack,
        microbatches: int = 1,
        deferred: bool = False,
        side_by_side: bool = False,
        on_host: bool = False,
        verify: bool = False,
        state: TrainState | Resident | None = None,
    ):
        """Traces the blocks one after the other.

        Args:
          layers: The blocks.
          recipe: How weights are computed with and updated.
          choose: Gives the policy of each block, and why.
          programs: Where compiled programs are kept.
          batch: Signature of the first stack, of one microbatch.
          microbatches: How many there are in a step.
          deferred: Whether updates have a sweep of their own.
          side_by_side: Whether programs that do not need each other's results run at once.
          on_host: Whether activations wait on the host: saved inputs, and the stacks between
            the blocks when there are several microbatches.
          verify: Whether reconstructed inputs are compared with the real ones.
          state: The run whose arrays it is for, if the batch lacks what the loss needs
            (targets and mask), so that they cannot be had by tracing `init`.
        """
        self._recipe, self._programs = recipe, programs
        self._found: dict[tuple[str, int], Program] = {}
        self._clock = clock_signature()
        self.batch, self.microbatches, self.deferred, self.on_host = batch, microbatches, deferred, on_host
        self.lowest = next((i for i, layer in enumerate(layers) if layer.trains), len(layers))
        if self.lowest == len(layers):
            raise ValueError("Trainer: every block is Frozen; leave at least one to be trained.")
        blocks: list[ScheduledBlock] = []
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
            block = self._block(index, layer, choose, inputs, made, run=not last)
            stack = put(rest, block.outputs)
            blocks.append(dataclasses.replace(block, stack=stack))
        needed = _inputs_needed(blocks, self.lowest)
        reverses = [verify and b.policy == "reverse" for b in blocks]
        # The true inputs of the first block of each run of reversible blocks are known; only there a float stream's
        # drift can be seen.
        starts = {i for i, r in enumerate(reverses) if r and not (i and reverses[i - 1])}
        needed |= {i for i in starts if reversal.has_floats(blocks[i].inputs)}
        self.blocks = [
            dataclasses.replace(b, saves_inputs=b.index in needed, verifies=r)
            for b, r in zip(blocks, reverses, strict=True)
        ]
        # Whether gradients and update of a block are one program. Where programs run side by side they are two, so
        # that the next block's backward pass need not wait for a large update.
        large = side_by_side and max(tree_bytes(b.weights) for b in blocks) >= LARGE
        self.in_one = microbatches == 1 and not deferred and not large

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> ScheduledBlock:
        return self.blocks[index]

    @property
    def casts(self) -> bool:
        """Whether the forward sweep is sent copies of the weights in the dtype that is computed in."""
        return self._recipe.compute_dtype is not None

    def kinds(self, index: int) -> tuple[str, ...]:
        """The kinds of program that a training step runs for a block."""
        block = self.blocks[index]
        cast = ("cast",) if self.casts and block.policy != "loss" else ()
        merge = self._once("merge") if jax.tree.leaves(block.state) else ()
        if block.policy == "frozen":
            return (*cast, "forward")
        if block.policy == "loss":
            if self.in_one:
                return ("loss",)
            return (*self._once("loss_zeros"), "loss_gradients", *merge, "start", *self._updates(block.layer))
        if not block.layer.trains:
            return (*cast, "forward", "gradients")
        if self.in_one:
            return (*cast, "forward", "backward")
        return (*cast, "forward", *merge, *self._once("zeros"), "gradients", *self._updates(block.layer))

    def _once(self, kind: str) -> tuple[str, ...]:
        """Sums start at zero where there is something to add up."""
        return (kind,) if self.microbatches > 1 else ()

    def _updates(self, layer: Layer) -> tuple[str, ...]:
        return () if not layer.trains else ("measure", "update") if self.deferred else ("update",)

    def program(self, kind: str, index: int) -> Program:
        """The program of one block, by the name of its pass."""
        if (kind, index) not in self._found:
            block = self.blocks[index]
            self._found[kind, index] = getattr(self, f"_{kind}")(block, block.layer)
        return self._found[kind, index]

    def training_programs(self) -> None:
        """Compiles all that a step runs: what is wrong shows before a state is consumed."""
        for block in self.blocks:
            for kind in self.kinds(block.index):
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
        owners: dict[int, int] = {}
        for index, weights in enumerate(state.weights):
            for leaf in jax.tree.leaves(weights):
                if owners.setdefault(id(leaf), index) != index:
                    raise ValueError(
                        f"Trainer: blocks {owners[id(leaf)]} and {index} have an array of weights in common. Shared "
                        "weights are not supported: each block is updated by itself. Give each block its own copy."
                    )

    @property
    def host_bytes(self) -> int:
        """Weights, slots and states of all blocks."""
        return sum(block.host_bytes for block in self.blocks)

    def _block(self, index: int, layer: Layer, choose: Choose, inputs: Stack, made: Tree, run: bool) -> ScheduledBlock:
        if isinstance(layer, LossLayer):
            policy, why = "loss", "the last block: forward and backward pass in one"
        elif index < self.lowest:
            policy, why = "frozen", "no block below it is trained: it has no backward pass"
        else:
            policy, why = choose(index, layer)
        init = functools.partial(passes.init, layer, self._recipe, inputs)
        trace = functools.partial(jax.eval_shape, init, self._clock.key, _INDEX)
        weights, slots, state = made or self._programs.shapes("init", layer, inputs, trace)
        outputs, memo = (), None
        if run:
            forward = functools.partial(passes.forward, layer, "", False)
            arguments = (self.sent(weights), state, inputs, None, self._clock, _INDEX, _INDEX)
            trace = functools.partial(jax.eval_shape, forward, *arguments)
            outputs, _, memo, _ = self._programs.shapes("forward", layer, (weights, state, inputs), trace)
        return ScheduledBlock(index, layer, policy, why, weights, slots, state, inputs, outputs, memo)

    def sent(self, weights: Tree) -> Tree:
        """Signature of the weights that are sent for a forward pass."""
        return jax.eval_shape(self._recipe.cast, weights)

    def _options(self, block: ScheduledBlock) -> dict[str, Any] | None:
        """For the compiler: on fixed-point streams, whatever is computed again must come out the same."""
        matters = reversal.has_fixed_point((*block.inputs, *block.outputs))
        return exact(self.sent(block.weights)) if matters else None

    # One method per kind of program: its function, its arguments and which of them it may overwrite.

    def _init(self, block: ScheduledBlock, layer: Any) -> Program:
        function = functools.partial(passes.init, layer, self._recipe, block.inputs)
        variant = describe(block.inputs)  # these shapes are no arguments, but they matter
        tags = ("weights", "slots", "states")
        return self._programs.get("init", variant, layer, tags, function, (self._clock.key, _INDEX))

    def _slots(self, block: ScheduledBlock, layer: Any) -> Program:
        function = functools.partial(passes.new_slots, layer, self._recipe)
        return self._programs.get("slots", "", layer, ("slots",), function, (block.weights,))

    def _cast(self, block: ScheduledBlock, layer: Any) -> Program:
        function = lambda weights: (self._recipe.cast(weights),)  # noqa: E731
        return self._programs.get("cast", "", layer, ("weights",), function, (block.weights,))

    def _forward(self, block: ScheduledBlock, layer: Any) -> Program:
        policy = "keep" if block.policy == "keep" else ""
        function = functools.partial(passes.forward, layer, policy, block.verifies)
        seen = self.seen if block.looks else None
        arguments = (self.sent(block.weights), block.state, block.inputs, seen, self._clock, _INDEX, _INDEX)
        kept = " inputs kept" if block.saves_inputs else ""
        variant = f"{policy}{kept}{' verified' if block.verifies else ''}"
        tags, donate = ("activations", "states", "residuals", "metrics"), (3,) if kept else (2, 3)
        return self._programs.get("forward", variant, layer, tags, function, arguments, donate, self._options(block))

    def _infer(self, block: ScheduledBlock, layer: Any) -> Program:
        function = functools.partial(passes.infer, layer, self._recipe)
        arguments = (block.weights, block.state, block.inputs)
        return self._programs.get("infer", "", layer, ("activations",), function, arguments, donate=(2,))

    def _pulls_back(self, block: ScheduledBlock) -> tuple[tuple[Any, ...], tuple[Any, ...], list[int], str]:
        """What all backward passes have in common: settings, arguments, what of them may be overwritten, a name."""
        entries = {"reverse": block.outputs, "recompute": block.inputs, "keep": ()}[block.policy]
        cotangents = tuple(map(cotangent_signature, block.outputs))
        memo = block.memo
        if block.policy == "keep" or block.verifies:  # what the forward program returns; equal blocks share it
            forward = self.program("forward", block.index)
            _, _, memo, _ = jax.tree.unflatten(forward.out_tree, forward.outputs[:-1])
        # A stored input is not overwritten: a reversible block below may need it as its output.
        donate = [0, 1, 2, 4] if block.policy == "reverse" else [1, 2, 4]
        settings = (block.layer, self._recipe, block.policy, block.verifies, (block.inputs, block.outputs))
        truth = block.inputs if block.verifies and block.saves_inputs else None
        flow = (entries, cotangents, memo, truth, self.seen if block.verifies else None)
        return settings, flow, donate, f"by {block.policy} {describe(block.inputs)}"

    def _backward(self, block: ScheduledBlock, layer: Any) -> Program:
        settings, flow, donate, name = self._pulls_back(block)
        function = functools.partial(passes.backward, *settings)
        arguments = (
            *(block.weights, block.slots, block.state, block.state, *flow),
            *(self._clock, self._weight_sum, _health_signature(), _INDEX, _INDEX),
        )
        tags = ("weights", "slots", "states", "activations", "cotangents", "metrics", "metrics")
        donate = (0, 1, 2, *(4 + i for i in donate), 11)
        return self._programs.get("backward", name, layer, tags, function, arguments, donate, self._options(block))

    def _gradients(self, block: ScheduledBlock, layer: Any) -> Program:
        settings, flow, donate, name = self._pulls_back(block)
        function = functools.partial(passes.gradients, *settings)
        sums = block.weights if layer.trains and self.microbatches > 1 else None
        arguments = (block.weights, block.state, *flow, sums, self._clock, _INDEX, _INDEX)
        tags = ("activations", "cotangents", "metrics", "gradients")
        donate = (*(2 + i for i in donate), 7)
        return self._programs.get("gradients", name, layer, tags, function, arguments, donate, self._options(block))

    def _loss(self, block: ScheduledBlock, layer: Any) -> Program:
        function = functools.partial(passes.loss, layer, self._recipe)
        arguments = (block.weights, block.slots, block.state, block.inputs, self._clock, _INDEX, _INDEX)
        tags = ("weights", "slots", "states", "cotangents", "metrics", "metrics", "metrics")
        return self._programs.get("loss", "", layer, tags, function, arguments, (0, 1, 2) if layer.trains else ())

    def _loss_gradients(self, block: ScheduledBlock, layer: Any) -> Program:
        function = functools.partial(passes.loss_gradients, layer, self._recipe)
        arguments = (
            *(block.weights, block.state, block.inputs),
            self._loss_sums if self.microbatches > 1 else (None, None),
            *(self._clock, _INDEX, _INDEX),
        )
        return self._programs.get(
            "loss gradients", "", layer, ("states", "cotangents", "gradients"), function, arguments, donate=(3,)
        )

    def _zeros(self, block: ScheduledBlock, layer: Any) -> Program:
        function = lambda: (passes.zeros(block.weights),)  # noqa: E731
        return self._programs.get("zeros", describe(block.weights), layer, ("gradients",), function, ())

    def _merge(self, block: ScheduledBlock, layer: Any) -> Program:
        states = (block.state,) * self.microbatches
        name = f"{self.microbatches} of {describe(block.state)}"
        return self._programs.get("merge", name, layer, ("states",), passes.merge, (states,))

    def _loss_zeros(self, block: ScheduledBlock, layer: Any) -> Program:
        function = lambda: (passes.zeros(self._loss_sums),)  # noqa: E731
        return self._programs.get("zeros", describe(self._loss_sums), layer, ("gradients",), function, ())

    def _start(self, block: ScheduledBlock, layer: Any) -> Program:
        function = functools.partial(passes.start, layer)
        return self._programs.get("start", "", layer, ("metrics",) * 3, function, (self._loss_sums[1],))

    def _measure(self, block: ScheduledBlock, layer: Any) -> Program:
        function = lambda *arguments: (passes.measure(self._recipe, *arguments),)  # noqa: E731
        arguments = (block.weights, _health_signature(), _INDEX)
        return self._programs.get("measure", "", layer, ("metrics",), function, arguments, donate=(1,))

    def _update(self, block: ScheduledBlock, layer: Any) -> Program:
        function = functools.partial(passes.update, layer, self._recipe, not self.deferred)
        arguments = (
            *(block.weights, block.slots, block.state, block.state, block.weights),
            *(self._clock, self._weight_sum, _health_signature(), _INDEX),
        )
        tags = ("weights", "slots", "states", "metrics")
        return self._programs.get("update", "", layer, tags, function, arguments, donate=(0, 1, 2, 7))

    def _evaluate(self, block: ScheduledBlock, layer: Any) -> Program:
        function = functools.partial(passes.evaluate, layer, self._recipe)
        arguments = (block.weights, block.state, block.inputs)
        return self._programs.get("evaluate", "", layer, ("metrics",), function, arguments)

    def _predict(self, block: ScheduledBlock, layer: Any) -> Program:
        function = functools.partial(passes.predict, layer, self._recipe)
        arguments = (block.weights, block.state, block.inputs)
        return self._programs.get("predict", "", layer, ("activations",), function, arguments)

    @functools.cached_property
    def _loss_sums(self) -> tuple[Tree, Stack]:
        """Signatures of the loss's gradients and outputs."""
        loss = self.blocks[-1]
        run = functools.partial(passes.forward, loss.layer, "", False)
        arguments = (self.sent(loss.weights), loss.state, loss.inputs, None, self._clock, _INDEX, _INDEX)
        return (loss.weights if loss.layer.trains else None), jax.eval_shape(run, *arguments)[0]

    @functools.cached_property
    def watched(self) -> tuple[str, ...]:
        """The metrics that tell what has been seen of the streams."""
        found = {"near_range_blocks"} if any(b.looks for b in self.blocks) else set()
        for block in self.blocks:
            if block.verifies:
                found |= {"mismatched_blocks"} if reversal.has_fixed_point(block.inputs) else set()
                found |= {"drift"} if reversal.has_floats(block.inputs) else set()
        return tuple(sorted(found))

    @functools.cached_property
    def seen(self) -> reversal.Seen:
        """What is known of the streams at the start of a step, in plain memory."""
        return reversal.nothing(len(self.blocks), self.microbatches)

    @property
    def _weight_sum(self) -> Any:
        return self._loss_sums[1][1]


def _inputs_needed(blocks: Sequence[ScheduledBlock], lowest: int) -> set[int]:
    """Indices of blocks whose inputs are saved: they recompute, or they keep and a block below reverses from there."""
    needed = {block.index for block in blocks if block.policy == "recompute"}
    stack: list[int | None] = [None] * len(blocks[-1].inputs)  # who would have had to save this entry
    for block in reversed(blocks[lowest:-1]):
        n_out = block.layer.n_out
        if block.policy == "reverse":
            needed.update(owner for owner in stack[:n_out] if owner is not None)
        owner = block.index if block.policy == "keep" else None
        stack = [owner] * block.layer.n_in + stack[n_out:]
    return needed


def _health_signature() -> Health:
    norm = jax.ShapeDtypeStruct((), rate_dtype())
    return Health(jax.ShapeDtypeStruct((), jnp.bool_), _INDEX, norm, _INDEX, _INDEX)


def clock_signature() -> Clock:
    """Signature of the clock; the key is of JAX's default implementation."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    return Clock(key, _INDEX, jax.ShapeDtypeStruct((), rate_dtype()))
