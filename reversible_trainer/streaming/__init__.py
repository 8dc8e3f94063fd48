"""Moving blocks between host and accelerator, and knowing what that costs."""

from reversible_trainer.streaming.accelerator import Accelerator
from reversible_trainer.streaming.ledger import Event, Ledger
from reversible_trainer.streaming.placement import Pending, Placement
from reversible_trainer.streaming.plan import BlockPlan, MemoryPlan
from reversible_trainer.streaming.programs import Program, Programs

__all__ = [
    "Accelerator",
    "BlockPlan",
    "Event",
    "Ledger",
    "MemoryPlan",
    "Pending",
    "Placement",
    "Program",
    "Programs",
]
