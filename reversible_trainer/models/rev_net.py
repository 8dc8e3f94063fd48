"""RevNet: a reversible residual network for images."""

from __future__ import annotations

import gin

from reversible_trainer.layers import (
    ConcatenateStreams,
    Conv,
    CrossEntropy,
    Dense,
    Dropout,
    HalfResidual,
    Layer,
    LayerNorm,
    LossSerial,
    MeanPool,
    Relu,
    ReversibleSerial,
    ReversibleSpaceToDepth,
    ReversibleSplit,
    ReversibleSwap,
    Serial,
)
from reversible_trainer.layers.core import check_rate
from reversible_trainer.layers.reversible import streams


@gin.configurable
def rev_net(
    classes: int = 10,
    width: int = 32,
    depth: int = 2,
    stages: int = 2,
    dropout: float = 0.0,
    arithmetic: str = "fixed_point",
) -> list[Layer]:
    """A reversible residual network: the stack is `(images [B, H, W, C], labels [B], mask [B])`.

    A convolution starts two residual streams, half of the channels each. Between two stages
    tiles of 2 x 2 pixels become channels, which loses nothing, so all blocks but the first
    and the last are reversible. (The paper has a standard block there, and batch
    normalization where this one normalizes each pixel.)

    Args:
      classes: Number of labels.
      width: Channels of each stream in the first stage; each further stage has four times as
        many channels in the streams, and twice as many between the two convolutions that are
        added to one.
      depth: Blocks per stage.
      stages: Number of stages; height and width must be divisible by `2 ** (stages - 1)`.
      dropout: Rate, after each second convolution and before the head's matrix.
      arithmetic: Of the residual streams: "fixed_point", which is reversed without any error, or "float32".

    Returns:
      `stages * (depth + 1) + 1` blocks.

    Source: Gomez et al. 2017, section 3 (https://arxiv.org/abs/1707.04585); the way between
    stages: Jacobsen et al. 2018 (https://arxiv.org/abs/1802.07088).
    """
    for name, size in {"classes": classes, "width": width, "depth": depth, "stages": stages}.items():
        least = 0 if name == "depth" else 1
        if type(size) is not int or size < least:
            raise ValueError(f"rev_net: {name} must be a whole number, at least {least}; got {size!r}.")
    check_rate("rev_net", dropout)
    enter = streams("rev_net", arithmetic)
    down = ReversibleSerial(*(ReversibleSpaceToDepth(2), ReversibleSwap()) * 2)
    blocks: list[Layer] = [Serial(Conv(2 * width), ReversibleSplit(), *enter)]
    for stage in range(stages):
        blocks += [down] * (stage > 0)
        half = HalfResidual(_residual(width * 2**stage, width * 4**stage, dropout))
        blocks += [ReversibleSerial(*(half, ReversibleSwap()) * 2)] * depth
    head = LayerNorm(), Relu(), MeanPool(), Dropout(dropout), Dense(classes), CrossEntropy()
    return [*blocks, LossSerial(ConcatenateStreams(), *head)]


def _residual(between: int, width: int, dropout: float) -> Layer:
    """What is added to one stream: two convolutions, with normalization and ReLU before each."""
    first, second = ((LayerNorm(), Relu(), Conv(features)) for features in (between, width))
    return Serial(*first, *second, Dropout(dropout))
