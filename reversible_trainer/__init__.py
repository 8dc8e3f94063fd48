"""Train models that do not fit the accelerator, layer by layer.

Read in this order: `tree`, `layers/base`, `layers/reversible`, `streaming`, `passes`, `schedule`, `trainer`.
"""

import os

# jaxlib's eigendecompositions run in OpenBLAS, whose threads get in the way of XLA's own: measured 100 times slower
# on a busy machine. It reads this when jax is first imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from reversible_trainer.layers.base import Layer, LossLayer, ReversibleLayer
from reversible_trainer.loop import run
from reversible_trainer.trainer import Trainer
from reversible_trainer.tree import TrainState

__all__ = ["Layer", "LossLayer", "ReversibleLayer", "TrainState", "Trainer", "run"]
