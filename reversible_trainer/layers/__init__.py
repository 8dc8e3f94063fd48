"""Layers: table of contents. The protocol is in `base`, the mathematics of each in its docstring."""

from reversible_trainer.layers.attention import Attention, CrossAttention
from reversible_trainer.layers.base import Layer, LayerError, LossLayer, ReversibleLayer
from reversible_trainer.layers.chunks import Chunked, ChunkedLoss
from reversible_trainer.layers.combinators import Dup, Residual, Select, Serial
from reversible_trainer.layers.convolution import Conv, MeanPool, ReversibleSpaceToDepth
from reversible_trainer.layers.core import Dense, Dropout, Embedding, FeedForward, Function, Gelu, Relu
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
from reversible_trainer.layers.long_attention import LocalAttention, LSHAttention
from reversible_trainer.layers.losses import CrossEntropy, LossSerial
from reversible_trainer.layers.normalization import LayerNorm, RMSNorm
from reversible_trainer.layers.positions import AxialPositions, LearnedPositions, SinusoidalPositions
from reversible_trainer.layers.reversible import (
    ConcatenateStreams,
    FromFixedPoint,
    HalfResidual,
    ReversibleConcatenatePair,
    ReversibleReshape,
    ReversibleSelect,
    ReversibleSerial,
    ReversibleSplit,
    ReversibleSwap,
    ToFixedPoint,
)

__all__ = [
    "Attention",
    "AxialPositions",
    "Chunked",
    "ChunkedLoss",
    "ConcatenateStreams",
    "Conv",
    "CrossAttention",
    "CrossEntropy",
    "Dense",
    "Dropout",
    "Dup",
    "Embedding",
    "FeedForward",
    "FromFixedPoint",
    "Frozen",
    "Function",
    "Gelu",
    "GlorotNormal",
    "GlorotUniform",
    "HalfResidual",
    "HeNormal",
    "Initializer",
    "Layer",
    "LayerError",
    "LayerNorm",
    "LearnedPositions",
    "LecunNormal",
    "LocalAttention",
    "LossLayer",
    "LossSerial",
    "LSHAttention",
    "MeanPool",
    "Normal",
    "Ones",
    "Relu",
    "Residual",
    "ReversibleConcatenatePair",
    "ReversibleLayer",
    "ReversibleReshape",
    "ReversibleSelect",
    "ReversibleSerial",
    "ReversibleSpaceToDepth",
    "ReversibleSplit",
    "ReversibleSwap",
    "RMSNorm",
    "Select",
    "Serial",
    "SinusoidalPositions",
    "ToFixedPoint",
    "TruncatedNormal",
    "VarianceScaling",
    "Zeros",
]
