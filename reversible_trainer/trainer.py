"""The trainer: two sweeps over the blocks, each block streamed through the accelerator twice."""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from reversible_trainer import passes, sweeps
from reversible_trainer.layers.base import Layer, LossLayer, ReversibleLayer, Stack
from reversible_trainer.passes import Clock, Optimizer, Recipe, rate_dtype
from reversible_trainer.probe import check_separable
from reversible_trainer.schedule import POLICIES, Schedule, ScheduledBlock, clock_signature
from reversible_trainer.streaming import Accelerator, BlockPlan, Event, Ledger, MemoryPlan, Placement, Programs
from reversible_trainer.sweeps import Metrics
from reversible_trainer.tree import Array, TrainState, Tree, describe, signature, tree_bytes, tree_size

_HELD_METRICS = 8  # steps whose metrics the plan lets a caller hold unread


class NonFiniteError(FloatingPointError):
    """A loss or a gradient was not finite, and the trainer was told to raise.

    Attributes:
      state: The run after the step: blocks that were not updated are as before.
      metrics: Of the step.
    """

    def __init__(self, message: str, state: TrainState, metrics: Metrics):
        super().__init__(message)
        self.state, self.metrics = state, metrics


class Trainer:
    """Trains a list of blocks whose weights and slots live in host memory.

    Args:
      blocks: Layers; the last one is a `LossLayer`.
      optimizer: Factory, learning rate -> `optax.GradientTransformation`. Its update is
        compiled into the backward pass of each block and sees one block at a time. (On a CPU
        that of a large block is a program of its own, which runs beside the next backward pass.)
      microbatches: Parts that a batch is cut into along the first axis. Each block is sent
        once per sweep and runs them one after the other; their gradients add up, and there
        is one update. Memory for activations inside a block shrinks accordingly.
      compute_dtype: What the blocks compute in, such as "bfloat16". The weights stay what they
        are; the forward sweep is sent copies in this dtype, which the host holds besides.
        Residual streams, losses and norms stay float32.
      update: "fused" updates each block in the backward sweep. "deferred" sends gradients to
        the host and updates all blocks in a third sweep, or none if anything is not finite.
      clip_per_block: Largest norm of one block's mean gradients; larger ones are scaled to it.
      clip_global: Largest norm of all mean gradients together, as of
        `optax.clip_by_global_norm`; needs `update="deferred"`.
      policy: What a block does with its activations. "reverse": nothing, its inputs are
        computed from its outputs (reversible blocks). "recompute": its inputs stay on the
        accelerator, and the backward pass runs the block again. "keep": all that the backward
        pass needs stays there, most memory, nothing is computed twice. "auto" is "reverse"
        for reversible blocks and "recompute" for the others. Or a function, `(index, layer)`
        to a policy or None for "auto"'s.
      accelerator_memory: Bytes, or text as in "16GiB", or "device" for the device's own limit:
        "auto" then gives "keep" to as many blocks as fit, the last ones first, and what does
        not fit at all is refused.
      prefetch: Blocks that are sent ahead of the one at work.
      placement: Where arrays live; by default `Placement.shared()` on a CPU, else
        `Placement.pinned()`.
      non_finite: "skip" leaves blocks with gradients that are not finite, and those after them
        in the sweep, as they were; "raise" does so too and raises `NonFiniteError`.
      transactional: Whether a step that fails leaves the state it was given usable and
        unchanged, at twice the host memory.

    Attributes:
      ledger: What is on the accelerator; `ledger.peak_bytes` is the most there has been.
      programs: The compiled programs; `len(programs)` does not depend on depth.

    Raises:
      ValueError: If blocks or optimizer cannot be trained this way, or settings contradict
        each other.
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
        policy: str | Callable[[int, Layer], str | None] = "auto",
        accelerator_memory: str | int | None = None,
        prefetch: int = 1,
        placement: Placement | None = None,
        verify_reversal: bool = False,
        non_finite: str = "skip",
        transactional: bool = False,
    ):
        if verify_reversal:
            raise NotImplementedError("Trainer(verify_reversal=...): not yet; this version has only its default.")
        _check_whole("microbatches", microbatches, 1)
        _check_whole("prefetch", prefetch, 0)
        _check_choice("update", update, ("fused", "deferred"))
        _check_choice("non_finite", non_finite, ("skip", "raise"))
        if not callable(policy):
            _check_choice("policy", policy, ("auto", *POLICIES))
        _check_clipping(update, clip_per_block, clip_global)
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
        self._recipe = Recipe(optimizer, _checked_dtype(compute_dtype), clip_per_block, clip_global)
        self._microbatches, self._deferred, self._raises = microbatches, update == "deferred", non_finite == "raise"
        self._memory = None if accelerator_memory is None else accelerator_bytes(accelerator_memory)
        self._accelerator = Accelerator(self.placement, self.ledger, prefetch, transactional)
        self._schedules: dict[Any, Schedule] = {}
        self._fitted: dict[Schedule, Schedule] = {}  # to accelerator_memory
        self._rooms: dict[Schedule, dict[int, int]] = {}  # of those whose programs are compiled
        self._returned: weakref.ref[TrainState] | None = None  # by the last step
        self._copies: list[Tree] | None = None  # of its weights, in the dtype that is computed in

    # What callers use.

    def init(self, key: Array, batch: Stack) -> TrainState:
        """Makes a new run, block by block: the accelerator never holds the whole model.

        Args:
          key: Random key, `jax.random.key(seed)`.
          batch: The first stack, or its signature.
        """
        if getattr(key, "dtype", None) != clock_signature().key.dtype:
            raise ValueError(f"Trainer.init: expected a key made by jax.random.key(seed), got {key!r}.")
        return sweeps.init(self._accelerator, self._training_schedule(batch), key)

    def init_signature(self, batch: Stack) -> TrainState:
        """A `TrainState` of `ShapeDtypeStruct`s: what `init` would make, nothing allocated."""
        blocks = self._training_schedule(batch).blocks
        weights, slots, states = ([getattr(b, name) for b in blocks] for name in ("weights", "slots", "state"))
        return TrainState(0, clock_signature().key, weights, slots, states)

    def predict_signature(self, batch: Stack) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the logits for the inputs of a batch, nothing computed."""
        block = self._schedule(batch).blocks[-1]
        layer: Any = block.layer
        predict = functools.partial(passes.predict, layer, self._recipe)
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

        Raises:
          NonFiniteError: If `non_finite="raise"` and blocks were skipped.
        """
        schedule = self._training_schedule(batch)
        rate = learning_rate if isinstance(learning_rate, jax.Array) else np.asarray(learning_rate)
        if rate.shape != () or rate.dtype.kind not in "fiuV":  # V: bfloat16
            raise ValueError(f"Trainer.step: the learning rate must be one number, got {learning_rate!r}.")
        ours = self._returned is not None and self._returned() is state
        if not ours:  # what the last step returned fits
            schedule.check_state(state)
        if schedule not in self._rooms:
            schedule.training_programs()
            settings = self._accelerator.prefetch, self._accelerator.transactional
            self._rooms[schedule] = sweeps.room(schedule, *settings)
        self.placement.reserve(self._rooms[schedule])
        clock = Clock(state.key, np.int32(state.step), rate.astype(rate_dtype()))
        transactional = self._accelerator.transactional
        copies = list(self._copies) if ours and self._copies else None
        if schedule.casts and copies is None:
            copies = sweeps.cast(self._accelerator, schedule, state)
        self._copies = self._returned = None
        work = state_copy(state) if transactional else state.consume()
        try:
            metrics = sweeps.train(self._accelerator, schedule, work, copies, self._cut(batch), clock)
            if transactional:
                jax.block_until_ready((work.weights, work.slots, work.states, metrics))
                state.consume()
        except Exception as error:
            self._accelerator.abandon()
            if not transactional:
                error.add_note(f"Step {clock.step + 1} had consumed its state: go on from the last checkpoint.")
            raise
        self._returned, self._copies = weakref.ref(work), copies
        if self._raises and (skipped := int(metrics["skipped_blocks"])):
            first = int(metrics["first_skipped_block"])
            raise NonFiniteError(
                f"Trainer.step: step {work.step} left {skipped} of {len(self.blocks)} blocks as they were: the loss "
                f"({float(metrics['loss']):g}) or the gradients of block {first} {self.blocks[first].name} were not "
                "finite, or the batch had no weight. The error's `state` is the run as it is now.",
                work,
                metrics,
            )
        return work, metrics

    def evaluate(self, state: TrainState, batch: Stack) -> Metrics:
        """`loss`, the loss layer's metrics and `weight` of a batch, deterministic (no dropout)."""
        schedule = self._schedule(batch)
        schedule.check_state(state, ("weights", "states"))
        return sweeps.infer(self._accelerator, schedule, state, batch, "evaluate")

    def predict(self, state: TrainState, inputs: Stack) -> Array:
        """The logits for `inputs`, the first stack without targets and mask; deterministic."""
        return sweeps.infer(self._accelerator, self._schedule(inputs, state), state, inputs, "predict")

    def plan(self, batch: Stack) -> MemoryPlan:
        """What `init` and steps with such batches will need: the same sweeps, run over a ledger without arrays."""
        return self._plan(self._training_schedule(batch))

    # How they do it.

    def _plan(self, schedule: Schedule) -> MemoryPlan:
        placement, ledger = Placement.planned(self.placement), Ledger()
        accelerator = Accelerator(placement, ledger, self._accelerator.prefetch, self._accelerator.transactional)
        peaks = [0] * len(schedule)

        def watch(event: Event) -> None:
            if event.block is not None:
                peaks[event.block] = max(peaks[event.block], event.bytes)

        ledger.watch = watch
        clock = placement.to_host(clock_signature())
        state = sweeps.init(accelerator, schedule, clock.key)
        copies = sweeps.cast(accelerator, schedule, state) if schedule.casts else None
        batches = [schedule.batch] * schedule.microbatches
        before = state_copy(state)  # what a transactional step leaves to the caller
        metrics = sweeps.train(accelerator, schedule, state, copies, batches, clock)
        del before
        held = [placement.to_accelerator(metrics) for _ in range(_HELD_METRICS)]
        ledger.track("metrics", held)
        # A second step begins while the last program of the first still runs.
        sweeps.train(accelerator, schedule, state, copies, batches, clock)
        blocks = tuple(_block_plan(schedule, block, peaks[block.index]) for block in schedule.blocks)
        assert ledger.peak is not None
        return MemoryPlan(blocks, ledger.peak_bytes, ledger.peak_host_bytes, ledger.peak)

    def _cut(self, batch: Stack) -> list[Stack]:
        """The microbatches of a batch."""
        n = self._microbatches
        if n == 1:
            return [batch]
        return [tuple(x[m * len(x) // n : (m + 1) * len(x) // n] for x in batch) for m in range(n)]

    def _training_schedule(self, batch: Stack) -> Schedule:
        """The schedule of one microbatch of such batches."""
        _check_batch(batch)
        n = self._microbatches
        for x in batch if n > 1 else ():
            if not x.shape or x.shape[0] % n:
                raise ValueError(
                    f"Trainer: a batch is cut into {n} microbatches along the first axis of its arrays, which must "
                    f"be a multiple of {n}; got ({describe(batch)})."
                )
        if n > 1:
            batch = tuple(jax.ShapeDtypeStruct((x.shape[0] // n, *x.shape[1:]), x.dtype) for x in batch)
        schedule = self._schedule(batch)
        if self._memory is None:
            return schedule
        if schedule not in self._fitted:
            self._fitted[schedule] = self._within_memory(schedule)
        return self._fitted[schedule]

    def _schedule(self, batch: Stack, state: TrainState | None = None) -> Schedule:
        _check_batch(batch)
        key = (state is None, *((x.shape, x.dtype) for x in batch))
        if key not in self._schedules:
            schedule = self._traced(signature(batch), state, self._choice)
            if not self._schedules and state is None:
                trained = {b.layer.name: b.weights for b in schedule.blocks if b.layer.trains}
                check_separable(self.optimizer, trained)
            self._schedules[key] = schedule
        return self._schedules[key]

    def _traced(
        self, batch: Stack, state: TrainState | None, choose: Callable[[int, Layer], tuple[str, str]]
    ) -> Schedule:
        settings = self.blocks, self._recipe, choose, self.programs, batch
        return Schedule(*settings, self._microbatches, self._deferred, self.placement.side_by_side, state)

    def _choice(self, index: int, layer: Layer) -> tuple[str, str]:
        """The policy of a block, and why."""
        reversible = isinstance(layer, ReversibleLayer)
        asked = self.policy(index, layer) if callable(self.policy) else self.policy
        if asked in (None, "auto"):
            if reversible:
                return "reverse", "reversible: its inputs are computed from its outputs"
            return "recompute", "standard: keeps its input"
        where = f"Trainer: the policy of block {index} {layer.name}"
        _check_choice(where, asked, ("auto", *POLICIES))
        if asked == "reverse" and not reversible:
            if not callable(self.policy):  # asked of all blocks
                return "recompute", "standard: cannot be reversed"
            raise ValueError(f"{where} cannot be 'reverse': it is no ReversibleLayer. Use 'recompute' or 'keep'.")
        return asked, f"policy {asked!r} was asked for"

    def _within_memory(self, schedule: Schedule) -> Schedule:
        """The schedule with as many blocks that keep as the accelerator's memory allows, the last ones first."""
        assert self._memory is not None
        needed = self._plan(schedule).peak_accelerator_bytes
        if needed > self._memory:
            raise ValueError(
                f"Trainer: a step needs {needed:,} bytes on the accelerator, and accelerator_memory is "
                f"{self._memory:,}. Use more microbatches, prefetch=0, or smaller blocks."
            )
        if self.policy != "auto":
            return schedule
        places = [b.index for b in schedule.blocks if b.policy in ("reverse", "recompute")]

        def keeping(count: int) -> Schedule:
            chosen = set(places[len(places) - count :])

            def choose(index: int, layer: Layer) -> tuple[str, str]:
                return ("keep", "its residuals fit the memory") if index in chosen else self._choice(index, layer)

            return self._traced(schedule.batch, None, choose)

        best, low, high = schedule, 0, len(places)
        while low < high:  # the peak rises with the number of blocks that keep
            middle = (low + high + 1) // 2
            candidate = keeping(middle)
            if self._plan(candidate).peak_accelerator_bytes <= self._memory:
                best, low = candidate, middle
            else:
                high = middle - 1
        return best


def state_copy(state: TrainState) -> TrainState:
    """Another state with the same arrays, in lists of its own."""
    return TrainState(state.step, state.key, list(state.weights), list(state.slots), list(state.states))


# What is asked of the blocks and settings, and said of them.


def accelerator_bytes(given: str | int) -> int:
    """Bytes from a number, text with a unit, or "device".

    Example:
      >>> accelerator_bytes("16GiB"), accelerator_bytes("1.5 MB"), accelerator_bytes(4096)
      (17179869184, 1500000, 4096)
    """
    if given == "device":
        limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
        if limit is None:
            raise ValueError(f"Trainer(accelerator_memory='device'): {jax.devices()[0]} does not tell; give bytes.")
        return limit
    units = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kMGT]?i?)B?\s*", str(given))
    if not match or match[2] not in units or float(match[1]) <= 0:
        raise ValueError(f"Trainer(accelerator_memory={given!r}): expected bytes, as in 16GiB or 500MB, or 'device'.")
    return int(float(match[1]) * units[match[2]])


def _check_whole(name: str, value: Any, least: int) -> None:
    if type(value) is not int or value < least:
        raise ValueError(f"Trainer({name}={value!r}): expected a whole number, {least} or more.")


def _check_choice(name: str, value: Any, known: Sequence[str]) -> None:
    if value not in known:
        where = name if " " in name else f"Trainer({name}={value!r})"
        raise ValueError(f"{where}: expected one of {', '.join(map(repr, known))}, got {value!r}.")


def _check_clipping(update: str, clip_per_block: Any, clip_global: Any) -> None:
    for name, value in {"clip_per_block": clip_per_block, "clip_global": clip_global}.items():
        if value is not None and not (isinstance(value, int | float) and 0 < value < float("inf")):
            raise ValueError(f"Trainer({name}={value!r}): expected a positive number, the largest norm, or None.")
    if clip_global is not None and update == "fused":
        raise ValueError(
            f"Trainer(clip_global={clip_global}): the norm of all gradients is known only after the whole backward "
            "sweep, and update='fused' has updated the blocks by then. Set update='deferred' (gradients wait on the "
            "host, one sweep more), or clip each block by itself with clip_per_block."
        )
    if clip_global is not None and clip_per_block is not None:
        raise ValueError("Trainer: clip_global and clip_per_block exclude each other; set one of them.")


def _checked_dtype(dtype: Any) -> Any:
    if dtype is None:
        return None
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating):
        raise ValueError(f"Trainer(compute_dtype={dtype!r}): expected a floating-point dtype, as 'bfloat16', or None.")
    return found


def _check_batch(batch: Any) -> None:
    if not isinstance(batch, tuple) or not all(hasattr(x, "shape") and hasattr(x, "dtype") for x in batch):
        kinds = ", ".join(type(x).__name__ for x in batch) if isinstance(batch, tuple) else ""
        got = f"a tuple of ({kinds})" if kinds else f"a {type(batch).__name__}"
        raise TypeError(f"Trainer: a batch is a tuple of arrays, the first stack; got {got}.")


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
    programs = {kind: schedule.program(kind, block.index) for kind in schedule.kinds(block.index)}
    flops = sum(program.flops for program in programs.values())
    forward = programs.pop("forward").bytes if "forward" in programs else 0
    return BlockPlan(
        name=block.layer.name,
        policy=block.policy,
        why=block.why,
        weights=tree_size(block.weights),
        weight_bytes=tree_bytes(block.weights),
        slot_bytes=tree_bytes(block.slots),
        forward_bytes=forward,
        backward_bytes=max((program.bytes for program in programs.values()), default=0),
        flops=flops,
        peak_bytes=peak_bytes,
    )
