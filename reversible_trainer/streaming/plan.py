"""The memory plan: what a step will need, known before anything is allocated."""

from __future__ import annotations

import dataclasses

from reversible_trainer.streaming.ledger import Event


@dataclasses.dataclass(frozen=True)
class BlockPlan:
    """One block of a plan.

    Attributes:
      name: The layer's name.
      policy: What the block does with its activations.
      why: The reason for that policy.
      weights: Number of weights.
      weight_bytes: Their bytes.
      slot_bytes: Bytes of the optimizer's slots.
      forward_bytes: Accelerator memory of its forward program: arguments, outputs, temporaries.
      backward_bytes: The same for its backward program.
      flops: Floating-point operations of both, by the compiler's count.
      peak_bytes: The largest total on the accelerator while this block is at work.
    """

    name: str
    policy: str
    why: str
    weights: int
    weight_bytes: int
    slot_bytes: int
    forward_bytes: int
    backward_bytes: int
    flops: float
    peak_bytes: int


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """What a step will need.

    Attributes:
      blocks: One entry per block.
      peak_accelerator_bytes: The largest total on the accelerator.
      peak_host_bytes: Weights, slots and states on the host, with the copies under way.
      peak: The event at which the accelerator's peak is reached, with its arrays by tag.
    """

    blocks: tuple[BlockPlan, ...]
    peak_accelerator_bytes: int
    peak_host_bytes: int
    peak: Event
