"""The trainer: two sweeps over the blocks, each block streamed through the accelerator twice."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from reversible_trainer import checks, passes, planning, sweeps
from reversible_trainer.layers.base import Layer, ReversibleLayer, Stack
from reversible_trainer.passes import Clock, Optimizer, Recipe, rate_dtype
from reversible_trainer.planning import Headroom
from reversible_trainer.probe import check_separable
from reversible_trainer.reversal import Seen
from reversible_trainer.schedule import POLICIES, Schedule, clock_signature
from reversible_trainer.streaming import (
    Accelerator,
    Ledger,
    MemoryPlan,
    Placement,
    Programs,
    Recorder,
    device_limit,
    memory_bytes,
)
from reversible_trainer.sweeps import Metrics
from reversible_trainer.tree import Array, Resident, TrainState, Tree, describe, signature, tree_bytes

_VERIFY = ("warn", "raise", "recompute")  # what to do about reversals that are not exact
_log = logging.getLogger("reversible_trainer")


class NonFiniteError(FloatingPointError):
    """A loss or a gradient was not finite, and the trainer was told to raise.

    Attributes:
      state: The run after the step: blocks that were not updated are as before.
      metrics: Of the step.
    """

    def __init__(self, message: str, state: TrainState, metrics: Metrics):
        super().__init__(message)
        self.state, self.metrics = state, metrics


class ReversalError(ArithmeticError):
    """Blocks were not reversed as well as asked for, and the trainer was told to raise.

    Attributes:
      state: The run after the step, which has been done.
      metrics: Of the step.
      blocks: Indices of the blocks whose reconstructed inputs had other bits.
    """

    def __init__(self, message: str, state: TrainState, metrics: Metrics, blocks: list[int]):
        super().__init__(message)
        self.state, self.metrics, self.blocks = state, metrics, blocks


class OutOfMemoryError(MemoryError):
    """Accelerator or host had less memory than planned; the message says what was there."""


class Trainer:
    """Trains a list of blocks whose weights and slots live in host memory.

    Args:
      blocks: Layers; the last one is a `LossLayer`.
      optimizer: Factory, learning rate -> `optax.GradientTransformation`. Its update is
        compiled into the backward pass of each block and sees one block at a time. (On a CPU
        that of a large block is a program of its own, which runs beside the next backward pass.)
      microbatches: Parts that a batch is cut into along the first axis. Each block is sent
        once per sweep and runs them one after the other; their gradients add up, and there
        is one update. Memory for activations inside a block shrinks accordingly. "auto":
        as few as fit `accelerator_memory`.
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
      waiting: Where activations wait: inputs that "recompute" saves, and the stacks between the
        blocks when there are several microbatches. "accelerator", or "host", from where
        they are sent one pass ahead. "auto" is the host only if `accelerator_memory` asks for it.
      prefetch: Blocks that are sent ahead of the one at work.
      placement: Where arrays live; by default `Placement.shared()` on a CPU, else
        `Placement.pinned()`.
      verify_reversal: Whether what reversible blocks reconstruct is compared with what there was.
        Fixed-point streams: by checksums, at every block; any difference is one too many.
        Floating-point streams: by the drift at the first block of each run of reversible
        blocks, whose true input is kept for it. "warn" (or True) logs a warning; "raise" raises
        `ReversalError`; "recompute" warns, and the blocks in question recompute from then on.
        Each step is waited for.
      drift_limit: The largest drift that is no reason to warn or raise; None: any is.
      non_finite: "skip" leaves blocks with gradients that are not finite, and those after them
        in the sweep, as they were; "raise" does so too and raises `NonFiniteError`.
      transactional: Whether a step that fails leaves the state it was given usable and
        unchanged, at twice the host memory.

    Attributes:
      ledger: What is on the accelerator; `ledger.peak_bytes` is the most there has been.
      programs: The compiled programs; `len(programs)` does not depend on depth.
      added: What each block of the last `init` added to accelerator, host and process; also
        logged by the logger `reversible_trainer`.

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
        microbatches: int | str = 1,
        compute_dtype: Any = None,
        update: str = "fused",
        clip_per_block: float | None = None,
        clip_global: float | None = None,
        policy: str | Callable[[int, Layer], str | None] = "auto",
        accelerator_memory: str | int | None = None,
        waiting: str = "auto",
        prefetch: int = 1,
        placement: Placement | None = None,
        verify_reversal: bool | str = False,
        drift_limit: float | None = 1e-2,
        non_finite: str = "skip",
        transactional: bool = False,
    ):
        self._settings = {name: value for name, value in locals().items() if name != "self"}
        checks.choice("verify_reversal", verify_reversal, (False, True, *_VERIFY))
        if drift_limit is not None and not (isinstance(drift_limit, int | float) and drift_limit >= 0):
            raise ValueError(f"Trainer(drift_limit={drift_limit!r}): expected a number, 0 or more, or None.")
        if microbatches != "auto":
            checks.whole("microbatches", microbatches, 1)
        elif accelerator_memory is None:
            raise ValueError("Trainer(microbatches='auto'): set accelerator_memory, which they have to fit.")
        checks.choice("waiting", waiting, ("auto", "accelerator", "host"))
        checks.whole("prefetch", prefetch, 0)
        checks.choice("update", update, ("fused", "deferred"))
        checks.choice("non_finite", non_finite, ("skip", "raise"))
        if not callable(policy):
            checks.choice("policy", policy, ("auto", *POLICIES))
        checks.clipping(update, clip_per_block, clip_global)
        if not isinstance(placement, Placement | None):
            raise TypeError(
                f"Trainer(placement={placement!r}): expected a Placement, as Placement.pinned() or Placement.shared()."
            )
        self.blocks = checks.blocks(blocks)
        self.optimizer = optimizer
        self.policy = policy
        self.placement = placement or Placement.default()
        self.programs = Programs(self.placement)
        self.ledger = Ledger()
        self._recipe = Recipe(optimizer, checks.dtype(compute_dtype), clip_per_block, clip_global)
        self._verify, self._drift_limit = "warn" if verify_reversal is True else verify_reversal, drift_limit
        self._not_exact: frozenset[int] = frozenset()  # blocks that were not reversed exactly, and recompute
        self._microbatches, self._deferred, self._raises = microbatches, update == "deferred", non_finite == "raise"
        where = f"Trainer(accelerator_memory={accelerator_memory!r})"
        self._memory = None if accelerator_memory is None else memory_bytes(accelerator_memory, where)
        self._accelerator = Accelerator(self.placement, self.ledger, prefetch, transactional)
        # Whether activations may wait on the host, in the order in which that is tried.
        self._places = {"auto": (False, True), "accelerator": (False,), "host": (True,)}[waiting]
        if self.placement.same_memory:
            self._places = (False,)  # there is nowhere to go
        self.added: list[sweeps.Added] = []
        self._schedules: dict[Any, Schedule] = {}
        self._fitted: dict[str, tuple[Schedule, str]] = {}  # to accelerator_memory, by the batch's signature
        self._plans: dict[Schedule, MemoryPlan] = {}
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
        schedule = self._training_schedule(batch)
        self.check_memory(batch)
        try:
            state, self.added = sweeps.init(self._accelerator, schedule, key)
        except Exception as error:
            explained = self._explained(error, batch)
            raise explained from (None if explained is error else error)
        for block, *added in self.added:
            text = "init: block %d %s: %d bytes on the accelerator meanwhile, %d to the host, process %+d"
            _log.info(text, block, self.blocks[block].name, *added)
        return state

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

    def new_slots(self, state: TrainState, batch: Stack) -> TrainState:
        """The run with slots as this optimizer has them before its first update; weights and states stay.

        Args:
          state: Is consumed. Its slots may be None.
          batch: The first stack, or its signature.
        """
        schedule = self._training_schedule(batch)
        schedule.check_state(state, ("weights", "states"))
        work = state.consume()
        sweeps.new_slots(self._accelerator, schedule, work)
        return work

    @property
    def update_order(self) -> Sequence[int]:
        """Indices of the blocks in the order in which a step replaces them."""
        indices = range(len(self.blocks))
        return indices if self._deferred else indices[::-1]

    def step(
        self,
        state: TrainState,
        batch: Stack,
        learning_rate: Any,
        before_update: Callable[[int], None] = lambda block: None,
    ) -> tuple[TrainState, Metrics]:
        """One training step; returns as soon as it is enqueued.

        Args:
          state: Is consumed: its entries move into the state that is returned.
          batch: The first stack, a tuple of arrays.
          learning_rate: Scalar for this step.
          before_update: Is called with the index of each block before its arrays are taken from the
            host to be replaced. Who still reads them, such as `checkpoint.Writer`, makes the step
            wait here.

        Returns:
          `(state, metrics)`. The metrics are scalars on the accelerator: `loss`, what the
          loss layer counts, `weight`, and `skipped_blocks` with `first_skipped_block`: how
          many blocks were left as they were because the loss or a gradient was not finite
          or the batch had no weight, and the first of them in the sweep (-1: none); and
          `optimizer_failures`: how many roots, bases and statistics were not finite and so
          not taken since the run began. With fixed-point streams, `near_range_blocks`: how many
          blocks left a stream within a factor of 4 of its range. With `verify_reversal`,
          `mismatched_blocks`, how many were not reversed exactly (those below inherit the error
          and are not counted), and `drift`, the largest
          difference of a reconstructed floating-point stream over its largest value.

        Raises:
          NonFiniteError: If `non_finite="raise"` and blocks were skipped.
          ReversalError: If `verify_reversal="raise"` and reversing was not exact.
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
        work = state.copy() if transactional else state.consume()
        try:
            microbatches = _cut(batch, schedule.microbatches)
            settings = work, copies, microbatches, clock, before_update
            metrics, seen = sweeps.train(self._accelerator, schedule, *settings)
            if transactional:
                jax.block_until_ready((work.weights, work.slots, work.states, metrics))
                state.consume()
        except Exception as error:
            explained = self._explained(error, batch)
            if not transactional:
                explained.add_note(f"Step {clock.step + 1} had consumed its state: go on from the last checkpoint.")
            raise explained from (None if explained is error else error)
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
        if self._verify:
            self._check_reversal(schedule, work, metrics, seen)
        return work, metrics

    @contextlib.contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Records the steps inside, what is copied and run when, and memory at every event.

        At its end it waits until all of it is done. Steps are a little slower meanwhile: programs
        are enqueued only when their block has arrived.
        """
        recorder, watch = Recorder(), self.ledger.watch
        self._accelerator.recorder, self.ledger.watch = recorder, recorder.watch
        try:
            yield recorder
        finally:
            self._accelerator.recorder, self.ledger.watch = None, watch
            recorder.close()

    def evaluate(self, state: TrainState | Resident, batch: Stack) -> Metrics:
        """`loss`, the loss layer's metrics and `weight` of a batch, deterministic (no dropout)."""
        schedule = self._schedule(batch)
        if not isinstance(state, Resident):
            schedule.check_state(state, ("weights", "states"))
        return sweeps.infer(self._accelerator, schedule, state, batch, "evaluate")

    def predict(self, state: TrainState | Resident, inputs: Stack) -> Array:
        """The logits for `inputs`, the first stack without targets and mask; deterministic.

        Blocks are streamed; those of a `Resident` state are on the accelerator already.
        """
        return sweeps.infer(self._accelerator, self._schedule(inputs, state), state, inputs, "predict")

    def reside(self, state: TrainState) -> TrainState | Resident:
        """Weights and untrained states on the accelerator, for many calls of `evaluate` and `predict`.

        If they take more than half of its memory this is the state itself, whose blocks are streamed.
        """
        limit = self._memory or device_limit()
        if limit is not None and tree_bytes((state.weights, state.states)) > limit // 2:
            return state
        return sweeps.reside(self._accelerator, state)

    def plan(self, batch: Stack) -> MemoryPlan:
        """What `init` and steps with such batches will need: the same sweeps, run over a ledger without arrays."""
        schedule, why = self._choice(batch)
        return dataclasses.replace(self._plan(schedule), why=why)

    def check_memory(self, batch: Stack) -> None:
        """Raises `ValueError` if what `plan` says is more than there is: on the accelerator, or on the host.

        The limits are `accelerator_memory`, or else what the device tells of itself, and the
        memory that this process may still take, or the free room on the disk. `init` asks too.
        """
        schedule = self._training_schedule(batch)
        for where, needed, limit in self.limits():
            if needed(self._plan(schedule)) > limit:
                raise self._too_much(where, limit, batch, schedule, needed)

    def headroom(self, batch: Stack) -> Headroom:
        """How many more blocks, microbatches or rows would fit within the limits of `check_memory`."""
        schedule = self._training_schedule(batch)
        limits = [(needed, limit) for _, needed, limit in self.limits()]

        def planned(changes: dict[str, Any], batch: Stack) -> MemoryPlan:
            return self._variant(schedule, changes).plan(batch)

        return planning.headroom(self.blocks, signature(batch), limits, planned)

    def limits(self) -> list[tuple[str, Callable[[MemoryPlan], int], int]]:
        """Where memory is limited, how much of it a plan needs, and the limit in bytes."""
        found: list[tuple[str, Callable[[MemoryPlan], int], int]] = []
        if (limit := self._memory or device_limit()) is not None:
            found.append(("accelerator memory", lambda plan: plan.peak_accelerator_bytes, limit))
        where, available, shared = self.placement.room()
        found.append((where, lambda plan: plan.peak_host_bytes + shared * plan.peak_accelerator_bytes, available))
        return found

    # How they do it.

    def _plan(self, schedule: Schedule) -> MemoryPlan:
        if schedule not in self._plans:
            settings = self._accelerator.prefetch, self._accelerator.transactional
            self._plans[schedule] = planning.plan(schedule, self.placement, *settings)
        return self._plans[schedule]

    def _explained(self, error: Exception, batch: Stack) -> Exception:
        """Ends a sweep that failed; gives the error, or one that says what was planned if memory has run out."""
        ledger = self.ledger
        live = ", ".join(f"{tag} {nbytes:,}" for tag, nbytes in sorted(ledger.arrays.items()) if nbytes)
        at = "" if ledger.block is None else f" at block {ledger.block} {self.blocks[ledger.block].name}"
        self._accelerator.abandon()
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
            return error
        plan = self.plan(batch)
        return OutOfMemoryError(
            f"Trainer: memory has run out{at}: {str(error).splitlines()[0]} Planned were "
            f"{plan.peak_accelerator_bytes:,} bytes on the accelerator and {plan.peak_host_bytes:,} on the host. There "
            f"were, on the accelerator, {live or 'no arrays'}; on the host {ledger.host_bytes:,} bytes. Something else "
            f"may use the memory too. Change {', '.join(planning.leaner(self._settings, plan))}."
        )

    def _variant(self, schedule: Schedule, changes: dict[str, Any]) -> Trainer:
        """A trainer that does what this one does by a schedule, but for some settings."""
        chosen = {"microbatches": schedule.microbatches, "waiting": "host" if schedule.on_host else "accelerator"}
        other = Trainer(**{**self._settings, **chosen, "accelerator_memory": None, **changes})
        if not changes.keys() & {"update", "compute_dtype"}:  # they make other programs of the same name
            other.programs = self.programs
        return other

    def _too_much(
        self, where: str, limit: int, batch: Stack, schedule: Schedule, needed: Callable[[MemoryPlan], int]
    ) -> ValueError:
        """The error that says what is needed, what is there, and what would help."""
        plan = self._plan(schedule)
        now, others = needed(plan), {}
        if where.startswith("host memory"):
            others["placement=Placement.disk(folder)"] = plan.peak_host_bytes
            others["an optimizer without slots"] = sum(block.slot_bytes for block in plan.blocks)
        measure = lambda changes: needed(self._variant(schedule, changes).plan(batch))  # noqa: E731
        settings = self._settings, schedule.microbatches, schedule.on_host
        found = planning.savings(*settings, batch, now, measure, others)
        return ValueError(
            f"Trainer: training needs {now:,} bytes of {where}, and {limit:,} are there. "
            f"{'What would help most: ' + '; '.join(found) if found else 'Use smaller blocks or batches'}."
        )

    def _choice(self, batch: Stack) -> tuple[Schedule, str]:
        """The schedule of one microbatch of such batches, and why it has so many and where activations wait."""
        checks.stack(batch)
        if self._memory is None:
            assert isinstance(self._microbatches, int)
            return self._schedule(batch, None, self._microbatches, self._places[0]), "as set"
        key = describe(batch)
        if key not in self._fitted:
            self._fitted[key] = self._within_memory(batch)
        return self._fitted[key]

    def _training_schedule(self, batch: Stack) -> Schedule:
        return self._choice(batch)[0]

    def _schedule(
        self,
        batch: Stack,
        state: TrainState | Resident | None = None,
        microbatches: int = 1,
        on_host: bool = False,
    ) -> Schedule:
        checks.stack(batch)
        key = (state is None, microbatches, on_host, *((x.shape, x.dtype) for x in batch))
        if key not in self._schedules:
            part = _microbatch(batch, microbatches) if microbatches > 1 else signature(batch)
            schedule = self._traced(part, state, self._policy, microbatches, on_host)
            if not self._schedules and state is None:
                trained = {b.layer.name: b.weights for b in schedule.blocks if b.layer.trains}
                check_separable(self.optimizer, trained)
            self._schedules[key] = schedule
        return self._schedules[key]

    def _traced(
        self,
        batch: Stack,
        state: TrainState | Resident | None,
        choose: Callable[[int, Layer], tuple[str, str]],
        microbatches: int,
        on_host: bool,
    ) -> Schedule:
        settings = self.blocks, self._recipe, choose, self.programs, batch
        how = (microbatches, self._deferred, self.placement.side_by_side, on_host, bool(self._verify) and state is None)
        return Schedule(*settings, *how, state)

    def _policy(self, index: int, layer: Layer) -> tuple[str, str]:
        """The policy of a block, and why."""
        reversible = isinstance(layer, ReversibleLayer)
        if index in self._not_exact:
            return "recompute", "on this device it was not reversed exactly"
        asked = self.policy(index, layer) if callable(self.policy) else self.policy
        if asked in (None, "auto"):
            if reversible:
                return "reverse", "reversible: its inputs are computed from its outputs"
            return "recompute", "standard: keeps its input"
        where = f"Trainer: the policy of block {index} {layer.name}"
        checks.choice(where, asked, ("auto", *POLICIES))
        if asked == "reverse" and not reversible:
            if not callable(self.policy):  # asked of all blocks
                return "recompute", "standard: cannot be reversed"
            raise ValueError(f"{where} cannot be 'reverse': it is no ReversibleLayer. Use 'recompute' or 'keep'.")
        return asked, f"policy {asked!r} was asked for"

    def _check_reversal(self, schedule: Schedule, state: TrainState, metrics: Metrics, seen: Seen | None) -> None:
        """Warns, raises or lets blocks recompute if the step's streams did not come back as they were."""
        if not {"mismatched_blocks", "drift"} & set(schedule.watched):
            return
        assert seen is not None
        found, drift = np.flatnonzero(np.asarray(seen.mismatched)).tolist(), float(seen.drift)
        limit = float("inf") if self._drift_limit is None else self._drift_limit
        said = []
        if found:
            named = ", ".join(f"{i} {self.blocks[i].name}" for i in found)
            said.append(f"blocks were not reversed exactly, their inputs came back with other bits: {named}.")
        if drift > limit:
            said.append(
                f"floating-point streams came back with a difference of {drift:.2g} of their largest value, more than "
                f"drift_limit = {limit:g}. Use arithmetic='fixed_point', or policy='recompute'."
            )
        if not said:
            return
        message = f"Trainer.step: in step {state.step} {' And '.join(said)}"
        if found and self._verify == "recompute":
            self._not_exact |= frozenset(found)
            for cache in (self._schedules, self._fitted, self._plans, self._rooms):
                cache.clear()
            message += " These blocks recompute from now on."
        if self._verify == "raise":
            raise ReversalError(f"{message} The error's `state` is the run as it is now.", state, metrics, found)
        _log.warning(message)

    def _within_memory(self, batch: Stack) -> tuple[Schedule, str]:
        """The first schedule that fits the memory, with as many blocks that keep as it allows."""
        limit, asked = self._memory or 0, self._microbatches
        counts = [asked] if isinstance(asked, int) else planning.microbatch_counts(batch)
        fits = lambda schedule: self._plan(schedule).peak_accelerator_bytes <= limit  # noqa: E731
        tried = []
        for on_host in self._places:
            for count in counts:
                schedule = self._schedule(batch, None, count, on_host)
                if fits(schedule):
                    why = f"{'the first tried that fits' if tried else 'fits'} accelerator_memory, {limit:,} bytes"
                    if self.policy != "auto":
                        return schedule, why
                    return planning.keep_what_fits(schedule, self._keeping(schedule), fits), why
                tried.append(schedule)
        least = min(tried, key=lambda schedule: self._plan(schedule).peak_accelerator_bytes)
        raise self._too_much("accelerator memory", limit, batch, least, lambda p: p.peak_accelerator_bytes)

    def _keeping(self, schedule: Schedule) -> Callable[[frozenset[int]], Schedule]:
        """Makes the schedule in which some blocks keep their residuals."""

        def make(indices: frozenset[int]) -> Schedule:
            def choose(index: int, layer: Layer) -> tuple[str, str]:
                return ("keep", "its residuals fit the memory") if index in indices else self._policy(index, layer)

            return self._traced(schedule.batch, None, choose, schedule.microbatches, schedule.on_host)

        return make


def _cut(batch: Stack, count: int) -> list[Stack]:
    """The microbatches of a batch."""
    if count == 1:
        return [batch]
    return [tuple(x[m * len(x) // count : (m + 1) * len(x) // count] for x in batch) for m in range(count)]


def _microbatch(batch: Stack, count: int) -> Stack:
    """Signature of one microbatch."""
    if any(not x.shape or x.shape[0] % count for x in batch):
        raise ValueError(
            f"Trainer: a batch is cut into {count} microbatches along the first axis of its arrays, which must "
            f"be a multiple of {count}; got ({describe(batch)})."
        )
    return tuple(jax.ShapeDtypeStruct((x.shape[0] // count, *x.shape[1:]), x.dtype) for x in batch)
