"""The trainer: two sweeps over the blocks, each block streamed through the accelerator twice."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from reversible_trainer import passes
from reversible_trainer.layers.base import Layer, LossLayer, Stack, put, take
from reversible_trainer.passes import Clock, Optimizer
from reversible_trainer.probe import check_separable
from reversible_trainer.schedule import Schedule, ScheduledBlock, clock_signature, rate_dtype
from reversible_trainer.streaming import (
    Accelerator,
    BlockPlan,
    Event,
    Ledger,
    MemoryPlan,
    Placement,
    Programs,
)
from reversible_trainer.tree import Array, TrainState, Tree, signature, tree_bytes, tree_size

Metrics = dict[str, Array]
_HELD_METRICS = 8  # steps whose metrics the plan lets a caller hold unread


class Trainer:
    """Trains a list of blocks whose weights and slots live in host memory.

    Args:
      blocks: Layers; the last one is a `LossLayer`.
      optimizer: Factory, learning rate -> `optax.GradientTransformation`. Its update is
        compiled into the backward pass of each block and sees one block at a time.
      policy: What a block does with its activations: "auto" is "reverse" for reversible
        blocks and "recompute" (from its stored input) for the others; "recompute" is that
        for all of them.
      prefetch: Blocks that are sent ahead of the one at work.
      placement: Where arrays live; by default `Placement.shared()` on a CPU, else
        `Placement.pinned()`.

    Attributes:
      ledger: What is on the accelerator; `ledger.peak_bytes` is the most there has been.
      programs: The compiled programs; `len(programs)` does not depend on depth.

    Raises:
      ValueError: If blocks or optimizer cannot be trained this way.
      NotImplementedError: For arguments that a later version brings.

    Example:
      >>> import jax, numpy as np, optax
      >>> from reversible_trainer.models import reversible_transformer_lm
      >>> blocks = reversible_transformer_lm(vocab_size=11, width=8, depth=2, heads=2, ff_width=16)
      >>> trainer = Trainer(blocks, optax.adam)
      >>> tokens = np.zeros((2, 4), np.int32)
      >>> batch = (tokens, tokens, np.ones((2, 4), bool))
      >>> state = trainer.init(jax.random.key(0), batch)
      >>> state, metrics = trainer.step(state, batch, 1e-3)
      >>> state.step, float(metrics["weight"])
      (1, 8.0)
    """

    def __init__(
        self,
        blocks: Sequence[Layer],
        optimizer: Optimizer,
        microbatches: int = 1,
        compute_dtype: Any = None,
        update: str = "fused",
        clip_per_block: float | None = None,
        clip_global: float | None = None,
        policy: str = "auto",
        accelerator_memory: str | int | None = None,
        prefetch: int = 1,
        placement: Placement | None = None,
        verify_reversal: bool = False,
        non_finite: str = "skip",
        transactional: bool = False,
    ):
        later = {
            "microbatches": microbatches != 1,
            "compute_dtype": compute_dtype is not None,
            "update": update != "fused",
            "clip_per_block": clip_per_block is not None,
            "clip_global": clip_global is not None,
            "accelerator_memory": accelerator_memory is not None,
            "verify_reversal": verify_reversal,
            "non_finite": non_finite != "skip",
            "transactional": transactional,
        }
        for argument in (name for name, given in later.items() if given):
            raise NotImplementedError(f"Trainer({argument}=...): not yet; this version has only its default.")
        if policy not in ("auto", "recompute"):
            raise ValueError(f"Trainer(policy={policy!r}): expected 'auto' or 'recompute'.")
        if type(prefetch) is not int or prefetch < 0:
            raise ValueError(f"Trainer(prefetch={prefetch!r}): expected a number of blocks, 0 or more.")
        if not isinstance(placement, Placement | None):
            raise TypeError(
                f"Trainer(placement={placement!r}): expected a Placement, as Placement.pinned() or Placement.shared()."
            )
        self.blocks = _checked(blocks)
        self.optimizer = optimizer
        self.policy = policy
        self.placement = placement or Placement.default()
        self.programs = Programs(self.placement)
        self.ledger = Ledger()
        self._accelerator = Accelerator(self.placement, self.ledger, prefetch)
        self._schedules: dict[Any, Schedule] = {}
        self._returned: weakref.ref[TrainState] | None = None  # by the last step

    # What callers use.

    def init(self, key: Array, batch: Stack) -> TrainState:
        """Makes a new run, block by block: the accelerator never holds the whole model.

        Args:
          key: Random key, `jax.random.key(seed)`.
          batch: The first stack, or its signature.
        """
        if getattr(key, "dtype", None) != clock_signature().key.dtype:
            raise ValueError(f"Trainer.init: expected a key made by jax.random.key(seed), got {key!r}.")
        return _init(self._accelerator, self._schedule(batch), key)

    def init_signature(self, batch: Stack) -> TrainState:
        """A `TrainState` of `ShapeDtypeStruct`s: what `init` would make, nothing allocated."""
        blocks = self._schedule(batch).blocks
        weights, slots, states = ([getattr(b, name) for b in blocks] for name in ("weights", "slots", "state"))
        return TrainState(0, clock_signature().key, weights, slots, states)

    def predict_signature(self, batch: Stack) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the logits for the inputs of a batch, nothing computed."""
        block = self._schedule(batch).blocks[-1]
        layer: Any = block.layer
        predict = functools.partial(passes.predict, layer)
        (logits,) = jax.eval_shape(predict, block.weights, block.state, block.inputs)
        return logits

    def step(self, state: TrainState, batch: Stack, learning_rate: Any) -> tuple[TrainState, Metrics]:
        """One training step; returns as soon as it is enqueued.

        Args:
          state: Is consumed: its entries move into the state that is returned.
          batch: The first stack, a tuple of arrays.
          learning_rate: Scalar for this step.

        Returns:
          `(state, metrics)`. The metrics are scalars on the accelerator: `loss`, what the
          loss layer counts, `weight`, and `skipped_blocks` with `first_skipped_block`: how
          many blocks were left as they were because the loss or a gradient was not finite
          or the batch had no weight, and the first of them in the sweep (-1: none); and
          `optimizer_failures`: how many roots, bases and statistics were not finite and so
          not taken since the run began.
        """
        schedule = self._schedule(batch)
        rate = learning_rate if isinstance(learning_rate, jax.Array) else np.asarray(learning_rate)
        if rate.shape != () or rate.dtype.kind not in "fiuV":  # V: bfloat16
            raise ValueError(f"Trainer.step: the learning rate must be one number, got {learning_rate!r}.")
        if self._returned is None or self._returned() is not state:  # what the last step returned fits
            schedule.check_state(state)
        schedule.training_programs()
        clock = Clock(state.key, np.int32(state.step), rate.astype(rate_dtype()))
        try:
            state, metrics = _train(self._accelerator, schedule, state.consume(), batch, clock)
        except Exception as error:
            error.add_note(f"Step {clock.step + 1} had consumed its state: go on from the last checkpoint.")
            raise
        self._returned = weakref.ref(state)
        return state, metrics

    def evaluate(self, state: TrainState, batch: Stack) -> Metrics:
        """`loss`, the loss layer's metrics and `weight` of a batch, deterministic (no dropout)."""
        schedule = self._schedule(batch)
        schedule.check_state(state, ("weights", "states"))
        return _infer(self._accelerator, schedule, state, batch, "evaluate")

    def predict(self, state: TrainState, inputs: Stack) -> Array:
        """The logits for `inputs`, the first stack without targets and mask; deterministic."""
        return _infer(self._accelerator, self._schedule(inputs, state), state, inputs, "predict")

    def plan(self, batch: Stack) -> MemoryPlan:
        """What `init` and steps with such batches will need: the same sweeps, run over a ledger without arrays."""
        schedule, placement, ledger = self._schedule(batch), Placement.planned(self.placement), Ledger()
        accelerator = Accelerator(placement, ledger, self._accelerator.prefetch)
        peaks = [0] * len(schedule)

        def watch(event: Event) -> None:
            if event.block is not None:
                peaks[event.block] = max(peaks[event.block], event.bytes)

        ledger.watch = watch
        clock = placement.to_host(clock_signature())
        state = _init(accelerator, schedule, clock.key)
        state, metrics = _train(accelerator, schedule, state, schedule.batch, clock)
        held = [placement.to_accelerator(metrics) for _ in range(_HELD_METRICS)]
        ledger.track("metrics", held)
        # A second step begins while the last program of the first still runs.
        _train(accelerator, schedule, state, schedule.batch, clock)
        blocks = tuple(_block_plan(schedule, block, peaks[block.index]) for block in schedule.blocks)
        assert ledger.peak is not None
        return MemoryPlan(blocks, ledger.peak_bytes, ledger.peak_host_bytes, ledger.peak)

    def _schedule(self, batch: Stack, state: TrainState | None = None) -> Schedule:
        if not isinstance(batch, tuple) or not all(hasattr(x, "shape") and hasattr(x, "dtype") for x in batch):
            kinds = ", ".join(type(x).__name__ for x in batch) if isinstance(batch, tuple) else ""
            got = f"a tuple of ({kinds})" if kinds else f"a {type(batch).__name__}"
            raise TypeError(f"Trainer: a batch is a tuple of arrays, the first stack; got {got}.")
        key = (state is None, *((x.shape, x.dtype) for x in batch))
        if key not in self._schedules:
            schedule = Schedule(self.blocks, self.optimizer, self.policy, self.programs, signature(batch), state)
            if not self._schedules and state is None:
                check_separable(self.optimizer, {b.layer.name: b.weights for b in schedule.blocks})
            self._schedules[key] = schedule
        return self._schedules[key]


# The sweeps.


def _init(accelerator: Accelerator, schedule: Schedule, key: Array) -> TrainState:
    """Makes every block on the accelerator and fetches it."""
    state = TrainState(0, accelerator.placement.to_host(key), [], [], [])
    accelerator.ledger.host(-accelerator.ledger.host_bytes)
    key = accelerator.place("batch", key)
    for block in schedule.blocks:
        accelerator.ledger.block = block.index
        made = accelerator.run(schedule.program("init", block.index), key, np.int32(block.index))
        for entries, tree in zip((state.weights, state.slots, state.states), accelerator.fetch(made), strict=True):
            entries.append(tree)
    accelerator.finish()
    return state


def _train(
    accelerator: Accelerator, schedule: Schedule, state: TrainState, batch: Stack, clock: Clock
) -> tuple[TrainState, Metrics]:
    """One step: a forward sweep, the loss, a backward sweep that updates each block as it passes."""
    ledger, last = accelerator.ledger, len(schedule) - 1
    ledger.host(schedule.host_bytes - ledger.host_bytes)
    stack: Stack = accelerator.place("batch", batch)
    clock = accelerator.place("batch", clock)
    cotangents: Stack = ()
    saved: dict[int, Stack] = {}  # inputs of the blocks that recompute
    memos: dict[int, Tree] = {}
    new_states: list[Tree] = list(state.states)
    metrics, total_weight, health = {}, None, None

    def needed(visit: tuple[str, int]) -> tuple[dict[str, Tree], bool]:
        kind, i = visit
        if kind == "forward":
            return {"weights": state.weights[i], "states": state.states[i]}, False
        moved = {"weights": state.weights[i], "slots": state.slots[i], "states": (state.states[i], new_states[i])}
        state.weights[i] = state.slots[i] = state.states[i] = new_states[i] = None  # they come back changed
        return moved, True

    visits = [*(("forward", i) for i in range(last)), ("loss", last), *(("backward", i) for i in reversed(range(last)))]
    for (kind, i), arrays in accelerator.stream(visits, needed):
        ledger.block = i
        block, program, index = schedule[i], schedule.program(kind, i), np.int32(i)
        if kind == "forward":
            weights, old_state = arrays
            inputs, stack = take(stack, block.layer.n_in)
            outputs, new_state, memos[i] = accelerator.run(program, weights, old_state, inputs, clock, index)
            if block.policy == "recompute":
                saved[i] = inputs
            if jax.tree.leaves(new_state):
                new_states[i] = accelerator.fetch(new_state)
            stack = put(stack, outputs)
            continue
        weights, slots, (old_state, new_state) = arrays
        if kind == "loss":
            *updated, cotangents, metrics, total_weight, health = accelerator.run(
                program, weights, slots, old_state, stack, clock, index
            )
        else:
            entries, stack = take(stack, block.layer.n_out)
            entries_ct, cotangents = take(cotangents, block.layer.n_out)
            if block.policy == "recompute":
                entries = saved.pop(i)
            *updated, inputs, inputs_ct, health = accelerator.run(
                *(program, weights, slots, old_state, new_state, entries, entries_ct, memos.pop(i)),
                *(clock, total_weight, health, index),
            )
            stack = put(stack, inputs if block.policy == "reverse" else entries)
            cotangents = put(cotangents, inputs_ct)
        state.weights[i], state.slots[i], state.states[i] = accelerator.fetch(tuple(updated))
    accelerator.finish()
    ledger.block = None
    state.step += 1
    assert health is not None
    counts = {"skipped_blocks": health.skipped, "first_skipped_block": health.first}
    return state, {**metrics, **counts, "optimizer_failures": health.failures}


def _infer(accelerator: Accelerator, schedule: Schedule, state: TrainState, batch: Stack, last_kind: str) -> Any:
    """A forward sweep without randomness; the last block evaluates or predicts."""
    weights, states, last = state.weights, state.states, len(schedule) - 1
    stack = accelerator.place("batch", batch)
    result = None

    def needed(visit: tuple[str, int]) -> tuple[dict[str, Tree], bool]:
        return {"weights": weights[visit[1]], "states": states[visit[1]]}, False

    visits = [*(("infer", i) for i in range(last)), (last_kind, last)]
    for (kind, i), arrays in accelerator.stream(visits, needed):
        inputs, stack = (stack, ()) if i == last else take(stack, schedule[i].layer.n_in)
        (result,) = accelerator.run(schedule.program(kind, i), *arrays, inputs)
        stack = put(stack, result) if i < last else ()
    accelerator.finish()
    return result


# What is asked of the blocks, and said of them.


def _checked(blocks: Sequence[Layer]) -> tuple[Layer, ...]:
    for i, block in enumerate(blocks):
        if not isinstance(block, Layer):
            raise TypeError(f"Trainer: block {i} must be a Layer, got {block!r} ({type(block).__name__}).")
        if isinstance(block, LossLayer) != (i == len(blocks) - 1):
            place = "the last block" if i == len(blocks) - 1 else f"block {i} of {len(blocks)}"
            raise ValueError(
                f"Trainer: {place} is {block.name}. The last block, and no other, must be a LossLayer "
                "such as CrossEntropy() or LossSerial(..., CrossEntropy())."
            )
    if not blocks:
        raise ValueError("Trainer: blocks is empty; the least is one LossLayer.")
    return tuple(blocks)


def _block_plan(schedule: Schedule, block: ScheduledBlock, peak_bytes: int) -> BlockPlan:
    programs = [schedule.program(kind, block.index) for kind in block.kinds]
    return BlockPlan(
        name=block.layer.name,
        policy=block.policy,
        why=block.why,
        weights=tree_size(block.weights),
        weight_bytes=tree_bytes(block.weights),
        slot_bytes=tree_bytes(block.slots),
        forward_bytes=programs[0].bytes if len(programs) == 2 else 0,
        backward_bytes=programs[-1].bytes,
        flops=sum(program.flops for program in programs),
        peak_bytes=peak_bytes,
    )
