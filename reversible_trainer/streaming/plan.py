"""The memory plan: what a step will need, known before anything is allocated."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from reversible_trainer.streaming.ledger import Event


@dataclasses.dataclass(frozen=True)
class BlockPlan:
    """One block of a plan; activations are those of all microbatches.

    Attributes:
      name: The layer's name.
      policy: What the block does with its activations.
      why: The reason for that policy.
      weights: Number of weights.
      weight_bytes: Their bytes.
      slot_bytes: Bytes of the optimizer's slots.
      gradient_bytes: Bytes of the gradients of its weights.
      temporary_bytes: What the largest of its programs needs besides arguments and outputs.
      residual_bytes: What stays on the accelerator from its forward to its backward pass: memos, or all residuals.
      saved_bytes: Inputs that are kept from its forward to its backward pass.
      stack_bytes: The stack that it leaves to the next block.
      forward_bytes: Accelerator memory of its forward program: arguments, outputs, temporaries.
      backward_bytes: The same for the largest program of its backward pass and update.
      flops: Floating-point operations of matrix products and convolutions in a step.
      send_bytes: That are copied to the accelerator for it in a step.
      fetch_bytes: That are copied back.
      peak_bytes: The largest total on the accelerator while this block is at work.
      totals: The largest totals meanwhile by what has just happened: `send`, or the name of a program that was started.
    """

    name: str
    policy: str
    why: str
    weights: int
    weight_bytes: int
    slot_bytes: int
    gradient_bytes: int
    temporary_bytes: int
    residual_bytes: int
    saved_bytes: int
    stack_bytes: int
    forward_bytes: int
    backward_bytes: int
    flops: float
    send_bytes: int
    fetch_bytes: int
    peak_bytes: int
    totals: dict[str, int]


@dataclasses.dataclass(frozen=True)
class SweepPlan:
    """One sweep of a step.

    Attributes:
      name: "forward", "backward" or "update".
      flops: Floating-point operations of matrix products and convolutions.
      send_bytes: That are copied to the accelerator.
      fetch_bytes: That are copied back.
    """

    name: str
    flops: float
    send_bytes: int
    fetch_bytes: int


class Floor(NamedTuple):
    """The least time of a step, if each sweep takes as long as its programs or its copies, whichever takes longer.

    Attributes:
      compute_seconds: Of all programs.
      link_seconds: Of all copies; those in and those out go at once.
      step_seconds: Of the step.
      hidden_from_tokens: Tokens per step from which the programs of both sweeps take longer than
        the copies; None if nothing is copied or computed.
    """

    compute_seconds: float
    link_seconds: float
    step_seconds: float
    hidden_from_tokens: int | None


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """What a step will need.

    Attributes:
      blocks: One entry per block.
      sweeps: One entry per sweep.
      peak_accelerator_bytes: The largest total on the accelerator.
      peak_host_bytes: Weights, slots and states on the host, with the copies under way.
      checkpoint_bytes: Weights, slots and states, once.
      peak: The event at which the accelerator's peak is reached, with its arrays by tag.
      events: All events of a step, in order.
      microbatches: How many there are.
      waiting: Where saved inputs and the stacks between the blocks wait: "accelerator" or "host".
      why: The reason for those two.
      tokens: Positions in a step: the elements of the batch's first array.
    """

    blocks: tuple[BlockPlan, ...]
    sweeps: tuple[SweepPlan, ...]
    peak_accelerator_bytes: int
    peak_host_bytes: int
    checkpoint_bytes: int
    peak: Event
    events: tuple[Event, ...]
    microbatches: int
    waiting: str
    why: str
    tokens: int

    @property
    def flops(self) -> float:
        """Floating-point operations of a step."""
        return sum(sweep.flops for sweep in self.sweeps)

    def floor(self, flops_per_second: float, bytes_per_second: float) -> Floor:
        """The least time of a step on an accelerator and a link (one way) of these speeds."""
        compute = [sweep.flops / flops_per_second for sweep in self.sweeps]
        link = [max(sweep.send_bytes, sweep.fetch_bytes) / bytes_per_second for sweep in self.sweeps]
        ratios = [t / c for c, t in zip(compute, link, strict=True) if c]  # an update sweep may compute nothing
        hidden = round(self.tokens * max(ratios)) if any(ratios) else None
        return Floor(sum(compute), sum(link), sum(map(max, compute, link)), hidden)
