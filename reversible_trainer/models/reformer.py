"""Reformers: reversible transformers for long sequences, a language model and an encoder with a decoder.

Norms come before attention and feed-forward. Attention may be full, local or hashed, block by
block; feed-forward and loss may be computed in chunks of positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import gin
import jax

from reversible_trainer.layers import (
    Attention,
    AxialPositions,
    Chunked,
    ChunkedLoss,
    ConcatenateStreams,
    CrossAttention,
    CrossEntropy,
    Dense,
    Dropout,
    Dup,
    Embedding,
    FeedForward,
    HalfResidual,
    Layer,
    LayerNorm,
    LearnedPositions,
    LocalAttention,
    LossLayer,
    LossSerial,
    LSHAttention,
    ReversibleSerial,
    ReversibleSwap,
    RMSNorm,
    Select,
    Serial,
    SinusoidalPositions,
)
from reversible_trainer.layers.reversible import streams
from reversible_trainer.models.transformer import check_sizes

POSITIONS = ("axial", "learned", "sinusoidal", "rotary", "none")
NORMS = {"layer": LayerNorm(), "rms": RMSNorm()}
ACTIVATIONS = {"relu": jax.nn.relu, "gelu": jax.nn.gelu}


@gin.configurable
def reformer_lm(
    vocab_size: int = 256,
    width: int = 128,
    depth: int = 4,
    heads: int = 4,
    ff_width: int = 512,
    dropout: float = 0.0,
    max_length: int | None = 4096,
    arithmetic: str = "fixed_point",
    attention: Sequence[str] = ("local", "lsh"),
    local_chunk_length: int = 64,
    lsh_chunk_length: int = 64,
    chunks_before: int = 1,
    chunks_after: int = 0,
    hashes: int = 1,
    buckets: int | tuple[int, ...] | None = None,
    positions: str = "axial",
    axial_shape: tuple[int, int] | None = None,
    axial_widths: tuple[int, int] | None = None,
    norm: str = "layer",
    ff_activation: str = "relu",
    ff_chunk_length: int | None = None,
    loss_chunk_length: int | None = None,
) -> list[Layer]:
    """A decoder-only Reformer, whose stack is `(tokens, targets, mask)`, each `[B, T]`.

    The embedding starts two residual streams, equal at first. Attention reads the second and
    adds to the first, feed-forward the other way round; the head reads both, side by side.

    Args:
      vocab_size: Number of tokens, V.
      width: D, of each residual stream.
      depth: Blocks between embedding and head, each attention and feed-forward.
      heads: Of attention; must divide the width.
      ff_width: Of the feed-forward layers, between their two matrices.
      dropout: Rate, after the embedding, attention and feed-forward.
      max_length: Longest sequence accepted. None: any, for positions without a table.
      arithmetic: Of the residual streams: "fixed_point", which is reversed without any error, or "float32".
      attention: Kinds of attention, "full", "local" or "lsh", which the blocks have in turn.
      local_chunk_length: Positions in a chunk of local attention, which must divide T unless
        it is longer.
      lsh_chunk_length: Likewise of hashed attention.
      chunks_before: Chunks before its own that a position sees in local and hashed attention.
      chunks_after: Chunks after it, likewise, as far as they hold earlier positions.
      hashes: Rounds of hashing.
      buckets: Number of buckets, or factors of it; see `LSHAttention`.
      positions: "axial", "learned" or "sinusoidal", added to the embedding; "rotary", in full
        and local attention (hashed attention then has none); or "none".
      axial_shape: (rows, columns) that positions are laid out in; None: a square that holds
        `max_length`.
      axial_widths: Of the tables for rows and for columns; None: a quarter of the width for rows.
      norm: "layer" or "rms".
      ff_activation: "relu" or "gelu".
      ff_chunk_length: Positions that feed-forward layers compute at a time; None: all.
      loss_chunk_length: Positions whose logits exist at a time; None: all.

    Returns:
      `depth` + 2 blocks, all but the first and last reversible.

    Source: Kitaev et al. 2020 (https://arxiv.org/abs/2001.04451).
    """
    check_sizes(vocab_size, width, depth, heads, ff_width, dropout, max_length)
    enter = streams("reformer_lm", arithmetic)
    placed = _positions(positions, width, max_length, axial_shape, axial_widths)
    normed = _choice("norm", norm, NORMS)
    feed_forward = _feed_forward(normed, ff_width, ff_activation, ff_chunk_length, dropout)
    chunking = local_chunk_length, lsh_chunk_length, chunks_before, chunks_after, hashes, buckets
    layers = _self_attention(attention, depth, heads, positions == "rotary", *chunking)
    return [
        Serial(Embedding(vocab_size, width, max_length=max_length), *placed, Dropout(dropout), Dup(), *enter),
        *[_block(Serial(normed, layer, Dropout(dropout)), feed_forward) for layer in layers],
        _head(vocab_size, normed, loss_chunk_length),
    ]


@gin.configurable
def reformer(
    vocab_size: int = 256,
    width: int = 128,
    depth: int = 4,
    heads: int = 4,
    ff_width: int = 512,
    dropout: float = 0.0,
    max_length: int | None = 4096,
    arithmetic: str = "fixed_point",
    source_vocab_size: int | None = None,
    encoder_depth: int | None = None,
    attention: Sequence[str] = ("full",),
    local_chunk_length: int = 64,
    lsh_chunk_length: int = 64,
    chunks_before: int = 1,
    chunks_after: int = 0,
    hashes: int = 1,
    buckets: int | tuple[int, ...] | None = None,
    positions: str = "axial",
    axial_shape: tuple[int, int] | None = None,
    axial_widths: tuple[int, int] | None = None,
    norm: str = "layer",
    ff_activation: str = "relu",
    ff_chunk_length: int | None = None,
    loss_chunk_length: int | None = None,
) -> list[Layer]:
    """A Reformer with an encoder and a decoder, from one sequence to another of whatever length.

    The stack is `(source [B, S], source_mask [B, S], tokens [B, T], targets [B, T], mask [B, T])`.
    Positions of the source whose mask, bool or integer, is zero are padding that nobody sees.
    `targets` are predicted from the whole source and the tokens up to the same position.

    The encoder's blocks see the whole source. A standard block joins their two streams, side by
    side and normed, and starts two for the decoder, whose blocks are self-attention, attention
    to the encoded source, and feed-forward.

    Args:
      vocab_size: Number of tokens that are predicted, V.
      width: This and what is not named here is as in `reformer_lm`.
      depth: Blocks of the decoder.
      max_length: Longest sequence accepted, on either side.
      source_vocab_size: Number of tokens of the source; None: V.
      encoder_depth: Blocks of the encoder; None: `depth`.
      attention: Kinds of the decoder's attention to itself. The encoder's is full, which alone
        knows of padding.

    Returns:
      `encoder_depth` + `depth` + 3 blocks; not reversible are the first, the last and the one
      between encoder and decoder.

    Source: Kitaev et al. 2020, section 5 (https://arxiv.org/abs/2001.04451).
    """
    check_sizes(vocab_size, width, depth, heads, ff_width, dropout, max_length)
    source_vocab_size = vocab_size if source_vocab_size is None else source_vocab_size
    encoder_depth = depth if encoder_depth is None else encoder_depth
    check_sizes(source_vocab_size, width, encoder_depth, heads, ff_width, dropout, max_length)
    enter = streams("reformer", arithmetic)
    placed = _positions(positions, width, max_length, axial_shape, axial_widths)
    normed = _choice("norm", norm, NORMS)
    feed_forward = _feed_forward(normed, ff_width, ff_activation, ff_chunk_length, dropout)
    chunking = local_chunk_length, lsh_chunk_length, chunks_before, chunks_after, hashes, buckets
    layers = _self_attention(attention, depth, heads, positions == "rotary", *chunking)

    def start(vocab: int) -> list[Layer]:
        return [Embedding(vocab, width, max_length=max_length), *placed, Dropout(dropout), Dup(), *enter]

    def sublayer(layer: Layer) -> Layer:
        return Serial(normed, layer, Dropout(dropout))

    encoder = _block(sublayer(Attention(heads, causal=False, rotary=positions == "rotary", masked=True)), feed_forward)
    across = sublayer(CrossAttention(heads))
    # Stacks: x1, x2, source_mask, tokens, targets, mask in the encoder; encoded, source_mask, tokens, ... in between;
    # x1, x2, encoded, source_mask, targets, mask in the decoder.
    return [
        Serial(*start(source_vocab_size)),
        *[encoder] * encoder_depth,
        Serial(ConcatenateStreams(), normed, Select((2, 0, 1)), *start(vocab_size)),
        *[_block(sublayer(layer), across, feed_forward) for layer in layers],
        LossSerial(Select((0, 1), n_in=4), _head(vocab_size, normed, loss_chunk_length)),
    ]


def _block(*sublayers: Layer) -> Layer:
    """Each sublayer reads one stream and adds to the other, in turn."""
    return ReversibleSerial(*(layer for f in sublayers for layer in (HalfResidual(f), ReversibleSwap())))


def _feed_forward(normed: Layer, ff_width: int, activation: str, chunk_length: int | None, dropout: float) -> Layer:
    layer = Serial(normed, FeedForward(ff_width, _choice("ff_activation", activation, ACTIVATIONS)), Dropout(dropout))
    return layer if chunk_length is None else Chunked(layer, chunk_length)


def _head(vocab_size: int, normed: Layer, chunk_length: int | None) -> LossLayer:
    head = LossSerial(ConcatenateStreams(), normed, Dense(vocab_size, use_bias=False), CrossEntropy())
    return head if chunk_length is None else ChunkedLoss(head, chunk_length)


def _self_attention(
    attention: Sequence[str],
    depth: int,
    heads: int,
    rotary: bool,
    local_chunk_length: int,
    lsh_chunk_length: int,
    chunks_before: int,
    chunks_after: int,
    hashes: int,
    buckets: int | tuple[int, ...] | None,
) -> list[Layer]:
    """The layers whose kinds `attention` names, over and over."""
    kinds = {
        "full": Attention(heads, rotary=rotary),
        "local": LocalAttention(heads, local_chunk_length, chunks_before, chunks_after, rotary=rotary),
        "lsh": LSHAttention(heads, lsh_chunk_length, chunks_before, chunks_after, hashes, buckets),
    }
    if isinstance(attention, str) or not attention:
        raise ValueError(f"reformer: attention must be a tuple of kinds, as in ('local', 'lsh'); got {attention!r}.")
    layers = [_choice("attention", kind, kinds) for kind in attention]
    return [layers[i % len(layers)] for i in range(depth)]


def _positions(
    positions: str,
    width: int,
    max_length: int | None,
    axial_shape: tuple[int, int] | None,
    axial_widths: tuple[int, int] | None,
) -> list[Layer]:
    """The layer that adds positions to the embedding, if one does."""
    _choice("positions", positions, dict.fromkeys(POSITIONS))
    if positions == "sinusoidal":
        return [SinusoidalPositions()]
    if positions not in ("axial", "learned"):
        return []
    if max_length is None:
        raise ValueError(f"reformer: positions={positions!r} have a table and need max_length, which is None.")
    if positions == "learned":
        return [LearnedPositions(max_length)]
    if axial_shape is None:
        columns = math.isqrt(max_length - 1) + 1
        axial_shape = -(-max_length // columns), columns
    layer = AxialPositions(axial_shape, (width // 4, width - width // 4) if axial_widths is None else axial_widths)
    if math.prod(layer.shape) < max_length or sum(layer.widths) != width:
        raise ValueError(
            f"reformer: axial_shape must hold max_length positions, and axial_widths add up to the width; got "
            f"{layer.shape} for max_length={max_length}, {layer.widths} for width={width}."
        )
    return [layer]


def _choice(name: str, value: str, known: dict[str, Any]) -> Any:
    """What a name stands for."""
    if value not in known:
        raise ValueError(f"reformer: {name} must be one of {', '.join(map(repr, known))}; got {value!r}.")
    return known[value]
