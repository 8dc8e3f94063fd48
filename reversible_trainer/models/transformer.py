"""Transformer language models, standard and reversible.

Both read the stack `(tokens, targets, mask)`, each `[B, T]`, and predict `targets` from the
tokens up to the same position. Norms come before attention and feed-forward, positions are
rotary.
"""

from __future__ import annotations

import gin

from reversible_trainer.layers import (
    Attention,
    ConcatenateStreams,
    CrossEntropy,
    Dense,
    Dropout,
    Dup,
    Embedding,
    FeedForward,
    HalfResidual,
    Layer,
    LossSerial,
    Residual,
    ReversibleSerial,
    ReversibleSwap,
    RMSNorm,
    Serial,
)
from reversible_trainer.layers.attention import head_width
from reversible_trainer.layers.core import check_rate
from reversible_trainer.layers.reversible import streams
from reversible_trainer.optimizers import Factory, route


@gin.configurable
def transformer_lm(
    vocab_size: int = 256,
    width: int = 128,
    depth: int = 4,
    heads: int = 4,
    ff_width: int = 512,
    dropout: float = 0.0,
    max_length: int | None = None,
) -> list[Layer]:
    """A decoder-only transformer of standard blocks.

    Args:
      vocab_size: Number of tokens, V.
      width: D, of the residual stream.
      depth: Blocks between embedding and head, each attention and feed-forward.
      heads: Of attention; must divide the width.
      ff_width: Of the feed-forward layers, between their two matrices.
      dropout: Rate, after the embedding, attention and feed-forward.
      max_length: Longest sequence accepted; None: any. Has no other effect, as rotary
        positions need no table.

    Returns:
      `depth` + 2 blocks.
    """
    check_sizes(vocab_size, width, depth, heads, ff_width, dropout, max_length)
    attention, feed_forward = _sublayers(heads, ff_width, dropout)
    return [
        Serial(Embedding(vocab_size, width, max_length=max_length), Dropout(dropout)),
        *[Serial(Residual(attention), Residual(feed_forward))] * depth,
        LossSerial(RMSNorm(), Dense(vocab_size, use_bias=False), CrossEntropy()),
    ]


@gin.configurable
def reversible_transformer_lm(
    vocab_size: int = 256,
    width: int = 128,
    depth: int = 4,
    heads: int = 4,
    ff_width: int = 512,
    dropout: float = 0.0,
    max_length: int | None = None,
    arithmetic: str = "fixed_point",
) -> list[Layer]:
    """A decoder-only transformer of reversible blocks.

    The embedding starts two residual streams. Attention reads the second and adds to the
    first, feed-forward the other way round; the head reads both, side by side.

    Args:
      vocab_size: Number of tokens, V.
      width: D, of each residual stream.
      depth: Blocks between embedding and head, each attention and feed-forward.
      heads: Of attention; must divide the width.
      ff_width: Of the feed-forward layers, between their two matrices.
      dropout: Rate, after the embedding, attention and feed-forward.
      max_length: Longest sequence accepted; None: any. Has no other effect, as rotary
        positions need no table.
      arithmetic: Of the residual streams: "fixed_point", which is reversed without any error, or "float32".

    Returns:
      `depth` + 2 blocks, all but the first and last reversible.

    Source: Kitaev et al. 2020, section 3 (https://arxiv.org/abs/2001.04451).
    """
    check_sizes(vocab_size, width, depth, heads, ff_width, dropout, max_length)
    enter = streams("reversible_transformer_lm", arithmetic)
    attention, feed_forward = _sublayers(heads, ff_width, dropout)
    block = ReversibleSerial(HalfResidual(attention), ReversibleSwap(), HalfResidual(feed_forward), ReversibleSwap())
    return [
        Serial(Embedding(vocab_size, width, max_length=max_length), Dropout(dropout), Dup(), *enter),
        *[block] * depth,
        LossSerial(ConcatenateStreams(), RMSNorm(), Dense(vocab_size, use_bias=False), CrossEntropy()),
    ]


@gin.configurable
def transformer_route(matrices: Factory, others: Factory) -> Factory:
    """The usual routing for both models: the blocks' matrices to one optimizer, all else to another.

    Args:
      matrices: Factory for the kernels of attention and feed-forward, such as Shampoo, SOAP or Muon.
      others: Factory for the embedding, the head, and the norms' scales, such as Adam.

    Returns:
      A factory, as of `route`.

    Example:
      >>> import optax
      >>> from reversible_trainer.optimizers import muon
      >>> optimizer = transformer_route(muon, optax.adamw)
    """
    return route({"*/Serial/*/kernel": matrices}, default=others)


def _sublayers(heads: int, ff_width: int, dropout: float) -> tuple[Layer, Layer]:
    """What a block adds to its residual streams."""
    attention = Serial(RMSNorm(), Attention(heads), Dropout(dropout))
    feed_forward = Serial(RMSNorm(), FeedForward(ff_width), Dropout(dropout))
    return attention, feed_forward


def check_sizes(
    vocab_size: int, width: int, depth: int, heads: int, ff_width: int, dropout: float, max_length: int | None
) -> None:
    """Refuses sizes that make no transformer."""
    sizes = {"vocab_size": vocab_size, "width": width, "depth": depth, "heads": heads, "ff_width": ff_width}
    for name, size in {**sizes, "max_length": 1 if max_length is None else max_length}.items():
        least = 0 if name == "depth" else 1
        if type(size) is not int or size < least:
            raise ValueError(f"transformer: {name} must be a whole number, at least {least}; got {size!r}.")
    head_width(width, heads)
    check_rate("transformer", dropout)
