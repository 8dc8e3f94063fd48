"""Moving blocks between host and accelerator, and knowing what that costs."""

from reversible_trainer.streaming.accelerator import Accelerator
from reversible_trainer.streaming.ledger import Event, Ledger, peaks
from reversible_trainer.streaming.machine import device_limit, memory_bytes, parse_amount
from reversible_trainer.streaming.placement import Pending, Placement
from reversible_trainer.streaming.plan import BlockPlan, Floor, MemoryPlan, SweepPlan
from reversible_trainer.streaming.programs import Program, Programs
from reversible_trainer.streaming.recorder import Recorder, Sample, Span, Tally
from reversible_trainer.streaming.waiting import Waiting

__all__ = [
    "Accelerator",
    "BlockPlan",
    "Event",
    "Floor",
    "Ledger",
    "MemoryPlan",
    "Pending",
    "Placement",
    "Program",
    "Programs",
    "Recorder",
    "Sample",
    "Span",
    "SweepPlan",
    "Tally",
    "Waiting",
    "device_limit",
    "memory_bytes",
    "parse_amount",
    "peaks",
]
