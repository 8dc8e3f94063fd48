"""Layers: table of contents. The protocol is in `base`, the mathematics of each in its docstring."""

from reversible_trainer.layers.attention import Attention
from reversible_trainer.layers.base import Layer, LayerError, LossLayer, ReversibleLayer
from reversible_trainer.layers.combinators import Dup, Residual, Select, Serial
from reversible_trainer.layers.core import Dense, Dropout, Embedding, FeedForward, Gelu, Relu
from reversible_trainer.layers.frozen import Frozen
from reversible_trainer.layers.initializers import (
    GlorotNormal,
    GlorotUniform,
    HeNormal,
    Initializer,
    LecunNormal,
    Normal,
    Ones,
    TruncatedNormal,
    VarianceScaling,
    Zeros,
)
from reversible_trainer.layers.losses import CrossEntropy, LossSerial
from reversible_trainer.layers.normalization import LayerNorm, RMSNorm
from reversible_trainer.layers.reversible import (
    HalfResidual,
    ReversibleConcatenatePair,
    ReversibleReshape,
    ReversibleSelect,
    ReversibleSerial,
    ReversibleSplit,
    ReversibleSwap,
)

__all__ = [
    "Attention",
    "CrossEntropy",
    "Dense",
    "Dropout",
    "Dup",
    "Embedding",
    "FeedForward",
    "Frozen",
    "Gelu",
    "GlorotNormal",
    "GlorotUniform",
    "HalfResidual",
    "HeNormal",
    "Initializer",
    "Layer",
    "LayerError",
    "LayerNorm",
    "LecunNormal",
    "LossLayer",
    "LossSerial",
    "Normal",
    "Ones",
    "Relu",
    "Residual",
    "ReversibleConcatenatePair",
    "ReversibleLayer",
    "ReversibleReshape",
    "ReversibleSelect",
    "ReversibleSerial",
    "ReversibleSplit",
    "ReversibleSwap",
    "RMSNorm",
    "Select",
    "Serial",
    "TruncatedNormal",
    "VarianceScaling",
    "Zeros",
]
