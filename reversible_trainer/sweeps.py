"""The sweeps over the blocks: what is sent, run and fetched, in which order."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import psutil

from reversible_trainer.layers.base import Stack, is_differentiable, put, take
from reversible_trainer.passes import Clock
from reversible_trainer.reversal import Seen
from reversible_trainer.schedule import Schedule, ScheduledBlock
from reversible_trainer.streaming import Accelerator, Waiting
from reversible_trainer.streaming.accelerator import Visit
from reversible_trainer.tree import Array, Resident, TrainState, Tree, describe, tree_bytes

Metrics = dict[str, Array]


class Added(NamedTuple):
    """What making a block added: bytes on the accelerator meanwhile, on the host, and to the process (by psutil).

    The copy to the host may still be under way when the process is asked.
    """

    block: int
    accelerator_bytes: int
    host_bytes: int
    resident_bytes: int


def init(accelerator: Accelerator, schedule: Schedule, key: Array) -> tuple[TrainState, list[Added]]:
    """Makes every block on the accelerator and fetches it; says what that added."""
    process, added = psutil.Process(), []
    state = TrainState(0, accelerator.placement.to_host(key), [], [], [])
    accelerator.ledger.host(-accelerator.ledger.host_bytes)
    key = accelerator.place("batch", key)
    for block in schedule.blocks:
        accelerator.ledger.block = block.index
        before = process.memory_info().rss
        program = schedule.program("init", block.index)
        made = accelerator.run(program, key, np.int32(block.index))
        for entries, tree in zip((state.weights, state.slots, state.states), accelerator.fetch(made), strict=True):
            entries.append(tree)
        rise = process.memory_info().rss - before
        added.append(Added(block.index, program.bytes, block.host_bytes, rise))
    accelerator.finish()
    return state, added


def new_slots(accelerator: Accelerator, schedule: Schedule, state: TrainState) -> None:
    """Replaces the slots of all blocks by those that a new run with these weights would have."""
    visits = [("slots", i) for i in range(len(schedule))]
    for (_, i), (weights,) in accelerator.stream(visits, lambda visit: ({"weights": state.weights[visit[1]]}, False)):
        state.slots[i] = accelerator.fetch(accelerator.run(schedule.program("slots", i), weights)[0])
    accelerator.finish()


def cast(accelerator: Accelerator, schedule: Schedule, state: TrainState) -> list[Tree]:
    """Copies of the weights in the dtype that is computed in, on the host; the forward sweep is sent these."""
    copies: list[Tree] = []
    visits = [("cast", i) for i in range(len(schedule) - 1)]
    for (_, i), (weights,) in accelerator.stream(visits, lambda visit: ({"weights": state.weights[visit[1]]}, False)):
        copies.append(accelerator.fetch(accelerator.run(schedule.program("cast", i), weights)[0]))
    accelerator.finish()
    return copies


def infer(
    accelerator: Accelerator, schedule: Schedule, state: TrainState | Resident, batch: Stack, last_kind: str
) -> Any:
    """A forward sweep without randomness; the last block evaluates or predicts."""
    last = len(schedule) - 1
    stack = accelerator.place("batch", batch)
    result = None
    visits = [*(("infer", i) for i in range(last)), (last_kind, last)]

    def needed(visit: Visit) -> tuple[dict[str, Tree], bool]:
        return _inferred(state, visit[1]), False

    stays = isinstance(state, Resident)
    arrived = ((v, [*_inferred(state, v[1]).values()]) for v in visits) if stays else accelerator.stream(visits, needed)
    for (kind, i), arrays in arrived:
        inputs, stack = (stack, ()) if i == last else take(stack, len(schedule[i].inputs))
        (result,) = accelerator.run(schedule.program(kind, i), *arrays, inputs)
        stack = put(stack, result) if i < last else ()
    accelerator.catch_up(1)
    accelerator.finish()
    return result


def reside(accelerator: Accelerator, state: TrainState) -> Resident:
    """Sends all blocks and keeps them there."""
    indices = range(len(state.weights))
    sent = [accelerator.send(_inferred(state, i), False, visit=("infer", i)).arrays() for i in indices]
    weights, states = zip(*sent, strict=True)
    return Resident(list(weights), [None for _ in indices], list(states))


def _inferred(state: TrainState | Resident, i: int) -> dict[str, Tree]:
    """What inference needs of a block, by tag."""
    return {"weights": state.weights[i], "states": state.states[i]}


def room(schedule: Schedule, prefetch: int, transactional: bool) -> collections.Counter[int]:
    """What a step fetches and holds besides the state it was given: bytes of a fetch -> how many at once."""
    held: collections.Counter[int] = collections.Counter()
    moving: collections.Counter[int] = collections.Counter()
    for block in schedule.blocks:
        if not block.layer.trains:
            continue
        copied = schedule.casts and block.policy != "loss"
        updated = block.host_bytes + (tree_bytes(schedule.sent(block.weights)) if copied else 0)
        held[updated] += transactional
        moving[updated] = prefetch + 2
        held[tree_bytes(block.weights)] += schedule.deferred
        if schedule.on_host and block.saves_inputs:
            held[_moving_bytes(block.inputs)] += schedule.microbatches
        if state_bytes := tree_bytes(block.state):
            held[state_bytes] += 1 + schedule.deferred
    if schedule.on_host and schedule.microbatches > 1:
        for stack in {describe(b.stack): b.stack for b in schedule.blocks}.values():
            held[_moving_bytes(stack)] += 2 * schedule.microbatches + prefetch + 2  # its cotangents too
    return held if transactional else held + moving


def _moving_bytes(stack: Stack) -> int:
    """Of what goes to the host when this stack waits there."""
    return sum(tree_bytes(x) for x in stack if is_differentiable(x))


@dataclasses.dataclass
class Step:
    """One training step: a forward sweep, the loss, a backward sweep that updates each block as it passes.

    With deferred updates they have a sweep of their own, when all gradients are known.

    Attributes:
      state: The run; its entries are replaced one by one.
      copies: Of the weights, in the dtype that is computed in; none if that is theirs.
      clock: On the accelerator.
      waiting: Activations by what they are and microbatch: the "stack" between the blocks, the
        "cotangents" of that, and for some blocks, with their index, "saved" inputs.
      memos: Block index -> memos or residuals per microbatch, likewise.
      later: Block index -> its state after the step, on the host.
      grads: Block index -> its gradients, on the host, when updates are deferred.
      seen: What has been seen of the streams, if they are looked at.
      before_update: Is told each block before the host gives its arrays away.
      passes: Block index and microbatch of the passes still to come.
    """

    accelerator: Accelerator
    schedule: Schedule
    state: TrainState
    copies: list[Tree]
    clock: Clock
    waiting: Waiting
    before_update: Callable[[int], None]
    memos: dict[int, list[Tree]] = dataclasses.field(default_factory=dict)
    later: dict[int, Tree] = dataclasses.field(default_factory=dict)
    grads: dict[int, Tree] = dataclasses.field(default_factory=dict)
    metrics: Metrics = dataclasses.field(default_factory=dict)
    weight_sum: Any = None
    health: Any = None
    seen: Any = None
    passes: Iterator[tuple[int, int]] = dataclasses.field(default_factory=lambda: iter(()))

    def run(self) -> tuple[Metrics, Seen | None]:
        """Goes through all visits; returns the metrics, and what has been seen of the streams."""
        schedule = self.schedule
        last = len(schedule) - 1
        backward = range(last - 1, schedule.lowest - 1, -1)
        visits = [*(("forward", i) for i in range(last)), ("loss", last), *(("backward", i) for i in backward)]
        self.passes = iter([(i, m) for _, i in visits for m in range(schedule.microbatches)])
        next(self.passes)
        if schedule.deferred:
            visits += [("update", i) for i in range(len(schedule)) if schedule[i].layer.trains]
        for (kind, i), arrays in self.accelerator.stream(visits, self._needed):
            getattr(self, f"_{kind}")(schedule[i], *arrays)
        self.accelerator.finish()
        self.state.step += 1
        counts = {"skipped_blocks": self.health.skipped, "first_skipped_block": self.health.first}
        for name in schedule.watched:
            counts[name] = getattr(self.seen, name)
        return {**self.metrics, **counts, "optimizer_failures": self.health.failures}, self.seen

    def _needed(self, visit: Visit) -> tuple[dict[str, Tree], bool]:
        """What a visit is sent, by tag, and whether the host gives it away."""
        (kind, i), state = visit, self.state
        if kind == "forward":
            weights = self.copies[i] if self._copied(i) else state.weights[i]
            return {"weights": weights, "states": state.states[i]}, False
        states = (state.states[i], self.later.get(i, state.states[i]))
        if not self._updates(kind, i):
            return {"weights": state.weights[i], "states": states}, False
        entries = {"weights": state.weights[i], "slots": state.slots[i], "states": states}
        if kind == "update":
            entries["gradients"] = self.grads.pop(i)
        self.before_update(i)
        # They come back changed.
        state.weights[i] = state.slots[i] = state.states[i] = None
        self.later.pop(i, None)
        if self._copied(i):
            self.copies[i] = None
        return entries, True

    def _updates(self, kind: str, i: int) -> bool:
        """Whether a visit updates its block."""
        return self.schedule[i].layer.trains and (kind == "update" or not self.schedule.deferred)

    def _forward(self, block: ScheduledBlock, weights: Tree, state: Tree) -> None:
        i, program, states = block.index, self.schedule.program("forward", block.index), []
        for m in range(self.schedule.microbatches):
            inputs, rest = take(self.waiting.take(("stack", m)), len(block.inputs))
            outputs, new_state, memo, seen = self.accelerator.run(
                *(program, weights, state, inputs, self.seen if block.looks else None, self.clock, *_place(i, m))
            )
            self.seen = self.seen if seen is None else seen
            states.append(new_state)
            if block.policy != "frozen":
                self.memos.setdefault(i, []).append(memo)
            if block.saves_inputs:
                self.waiting.put(("saved", i, m), "activations", inputs, self.schedule.on_host)
            self._put("stack", m, put(rest, outputs))
            del inputs, rest, outputs  # the next microbatch's pass must not find them still held
            self._send_next_pass()
        if jax.tree.leaves(state) and block.layer.trains:
            self.later[i] = self.accelerator.fetch(self._merged(block, states))

    def _merged(self, block: ScheduledBlock, states: list[Tree]) -> Tree:
        """The state after a step, from those after each microbatch."""
        if len(states) == 1 or not jax.tree.leaves(states):
            return states[-1]
        return self.accelerator.run(self.schedule.program("merge", block.index), tuple(states))[0]

    def _loss(self, block: ScheduledBlock, weights: Tree, *slots_and_states: Any) -> None:
        *slots, states = slots_and_states
        i, run, schedule = block.index, self.accelerator.run, self.schedule
        if schedule.in_one:
            slots, stack = slots or [block.slots], self.waiting.take(("stack", 0))
            *updated, cotangents, self.metrics, self.weight_sum, self.health = run(
                schedule.program("loss", i), weights, *slots, states[0], stack, self.clock, *_place(i, 0)
            )
            self._put("stack", 0, stack)
            self._put("cotangents", 0, cotangents)
            if block.layer.trains:
                self._fetch(i, updated)
            self._send_next_pass()
            return
        sums = (None, None)
        if schedule.microbatches > 1:
            (sums,) = run(schedule.program("loss_zeros", i))
        new_states = []
        for m in range(schedule.microbatches):
            program, stack = schedule.program("loss_gradients", i), self.waiting.take(("stack", m))
            new_state, cotangents, sums = run(program, weights, states[0], stack, sums, self.clock, *_place(i, m))
            new_states.append(new_state)
            self._put("stack", m, stack)
            self._put("cotangents", m, cotangents)
            del stack, cotangents
            self._send_next_pass()
        grads, outputs = sums
        self.metrics, self.weight_sum, self.health = run(schedule.program("start", i), outputs)
        if block.layer.trains:
            self._finish_gradients(block, grads, weights, slots, states[0], self._merged(block, new_states))

    def _backward(self, block: ScheduledBlock, weights: Tree, *slots_and_states: Any) -> None:
        *slots, states = slots_and_states
        i, run, schedule = block.index, self.accelerator.run, self.schedule
        memos = self.memos.pop(i)
        trains_in_one = schedule.in_one and block.layer.trains
        sums = None
        if block.layer.trains and schedule.microbatches > 1:
            (sums,) = run(schedule.program("zeros", i))
        for m in range(schedule.microbatches):
            entries, stack = take(self.waiting.take(("stack", m)), len(block.outputs))
            cts, rest_cts = take(self.waiting.take(("cotangents", m)), len(block.outputs))
            saved = self.waiting.take(("saved", i, m)) if block.saves_inputs else None
            flow = (
                *({"reverse": entries, "recompute": saved, "keep": ()}[block.policy], cts, memos[m]),
                *((saved, self.seen) if block.verifies else (None, None)),
            )
            memos[m] = None
            del entries, cts
            if trains_in_one:
                *updated, inputs, input_cts, seen, self.health = run(
                    *(schedule.program("backward", i), weights, *slots, states[0], states[1], *flow),
                    *(self.clock, self.weight_sum, self.health, *_place(i, m)),
                )
                self._fetch(i, updated)
            else:
                program = schedule.program("gradients", i)
                inputs, input_cts, seen, sums = run(
                    *(program, weights, states[0], *flow, sums, self.clock, *_place(i, m))
                )
            self.seen = self.seen if seen is None else seen
            del flow
            if block.policy != "reverse":
                inputs = saved if saved is not None else (None,) * len(block.inputs)  # nobody will ask for them
            self._put("stack", m, put(stack, inputs))
            self._put("cotangents", m, put(rest_cts, input_cts))
            del inputs, input_cts, stack, rest_cts, saved
            self._send_next_pass()
        if block.layer.trains and not trains_in_one:
            self._finish_gradients(block, sums, weights, slots, states[0], states[-1])

    def _put(self, kind: str, m: int, stack: Stack) -> None:
        """Lets a stack wait for the next block; a single one has nothing to wait for."""
        tag = "cotangents" if kind == "cotangents" else "activations"
        self.waiting.put((kind, m), tag, stack, self.schedule.on_host and self.schedule.microbatches > 1)

    def _send_next_pass(self) -> None:
        """Sends what the next pass needs and waits on the host, when all but the program just enqueued has run."""
        following = next(self.passes, None)
        if not self.schedule.on_host or not self.accelerator.prefetch or following is None:
            return
        i, m = following
        self.accelerator.catch_up(1)
        for key in (("stack", m), ("cotangents", m), ("saved", i, m)):
            self.waiting.send(key)

    def _finish_gradients(
        self, block: ScheduledBlock, grads: Tree, weights: Tree, slots: Sequence[Tree], state: Tree, new_state: Tree
    ) -> None:
        """Updates a block whose gradients are complete, or sends these to the host until all are."""
        if self.schedule.deferred:
            program = self.schedule.program("measure", block.index)
            (self.health,) = self.accelerator.run(program, grads, self.health, np.int32(block.index))
            self.grads[block.index] = self.accelerator.fetch(grads)
            if block.policy == "loss" and jax.tree.leaves(new_state):
                self.later[block.index] = self.accelerator.fetch(new_state)
        else:
            self._run_update(block, weights, slots[0], state, new_state, grads)

    def _update(self, block: ScheduledBlock, weights: Tree, slots: Tree, states: tuple[Tree, ...], grads: Tree) -> None:
        self._run_update(block, weights, slots, states[0], states[-1], grads)

    def _run_update(self, block: ScheduledBlock, *arrays: Tree) -> None:
        *updated, self.health = self.accelerator.run(
            self.schedule.program("update", block.index),
            *(*arrays, self.clock, self.weight_sum, self.health, np.int32(block.index)),
        )
        self._fetch(block.index, updated)

    def _fetch(self, i: int, updated: Sequence[Tree]) -> None:
        state = self.state
        copy = self.accelerator.run(self.schedule.program("cast", i), updated[0]) if self._copied(i) else ()
        *parts, copy = self.accelerator.fetch((*updated, copy))
        state.weights[i], state.slots[i], state.states[i] = parts
        if self._copied(i):
            (self.copies[i],) = copy

    def _copied(self, i: int) -> bool:
        """Whether a block's weights are sent forward as a copy; the loss has no forward pass of its own."""
        return i < len(self.copies)


def train(
    accelerator: Accelerator,
    schedule: Schedule,
    state: TrainState,
    copies: list[Tree] | None,
    microbatches: Sequence[Stack],
    clock: Clock,
    before_update: Callable[[int], None] = lambda block: None,
) -> tuple[Metrics, Seen | None]:
    """One training step, which replaces the entries of `state` and of `copies`; see `Step`."""
    copies = [] if copies is None else copies
    host_bytes = schedule.host_bytes + tree_bytes(copies)
    accelerator.ledger.host(host_bytes - accelerator.ledger.host_bytes)
    waiting = Waiting(accelerator, is_differentiable)
    step = Step(accelerator, schedule, state, copies, accelerator.place("batch", clock), waiting, before_update)
    if schedule.watched:
        step.seen = accelerator.place("metrics", schedule.seen)
    for m, microbatch in enumerate(microbatches):
        step.waiting.put(("stack", m), "batch", accelerator.place("batch", microbatch))
    return step.run()


def _place(index: int, microbatch: int) -> tuple[np.int32, np.int32]:
    return np.int32(index), np.int32(microbatch)
