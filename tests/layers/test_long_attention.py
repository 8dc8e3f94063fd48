"""Local and hashed attention against slow ones in NumPy; memos, keys, gradients, reversal, refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_trees_close, assert_trees_equal

from reversible_trainer.layers import Attention, HalfResidual, LayerError, LocalAttention, LSHAttention
from reversible_trainer.layers import long_attention as module
from reversible_trainer.layers.base import differentiate

KEY = jax.random.key(0)
H, D = 2, 8


def positions(T, seed=0, dtype=jnp.float64):
    return jnp.array(np.random.default_rng(seed).standard_normal((2, T, D)), dtype)


@functools.partial(jax.jit, static_argnums=0)
def run(layer, weights, state, x, key=None, memo=None):
    (y,), _, memo = layer.forward(weights, state, (x,), key, memo)
    return y, memo


def heads_of(x, weights, *names):
    """`x @ kernel` for each name, as NumPy [B, T, H, K]."""
    B, T, _ = x.shape
    return [(np.asarray(x) @ np.asarray(weights[name]["kernel"])).reshape(B, T, H, D // H) for name in names]


def weighed(scores, values):
    """`softmax(scores) values` and the logarithm of the softmax's sum."""
    most = scores.max(-1, keepdims=True)
    p = np.exp(scores - most)
    total = p.sum(-1, keepdims=True)
    return p / total @ values, (most + np.log(total))[..., 0]


# Local attention.


def local_by_hand(layer, weights, x):
    """All scores at once, and a mask."""
    T = x.shape[1]
    q, k, v = (h.swapaxes(1, 2) for h in heads_of(x, weights, "query", "key", "value"))
    t = np.arange(T)
    away = t // layer.chunk_length - t[:, None] // layer.chunk_length
    seen = (-layer.chunks_before <= away) & (away <= layer.chunks_after) & ((t <= t[:, None]) | (not layer.causal))
    y, _ = weighed(np.where(seen, q @ k.swapaxes(2, 3) / np.sqrt(D / H), -np.inf), v)
    return y.swapaxes(1, 2).reshape(x.shape) @ np.asarray(weights["output"]["kernel"])


@pytest.mark.parametrize(
    "T, before, after, causal",
    [(24, 1, 0, True), (24, 2, 1, True), (24, 0, 0, False), (24, 1, 1, False), (8, 3, 2, False), (8, 5, 0, True)],
)
def test_local_attention_against_a_mask(x64, T, before, after, causal):
    layer = LocalAttention(H, 4, before, after, causal=causal)
    x = positions(T, seed=T + before)
    weights, _ = layer.init(KEY, (x,))
    assert_trees_close(run(layer, weights, (), x)[0], jnp.array(local_by_hand(layer, weights, x)))


@pytest.mark.parametrize("causal, rotary", [(True, True), (False, False)])
def test_local_attention_over_one_chunk_is_attention(causal, rotary):
    x = positions(5, dtype=jnp.float32)
    layer, attention = LocalAttention(H, causal=causal, rotary=rotary), Attention(H, causal=causal, rotary=rotary)
    weights, _ = attention.init(KEY, (x,))
    assert jax.tree.structure(layer.init(KEY, (x,))[0]) == jax.tree.structure(weights)
    assert_trees_close(run(layer, weights, (), x)[0], run(attention, weights, (), x)[0])


# Hashed attention.


def buckets_by_hand(layer, directions, qk):
    """[B, H, R, T] from [B, T, H, K]."""
    R, factors = layer.hashes, layer.buckets if isinstance(layer.buckets, tuple) else (layer.buckets,)
    B, T = qk.shape[:2]
    buckets = np.zeros((B, H, R, T), int)
    for b, h, r, t in np.ndindex(B, H, R, T):
        along, scale = qk[b, t, h] @ directions[h, :, r], 1
        for n in factors:
            mine, along = along[: n // 2], along[n // 2 :]
            buckets[b, h, r, t] += scale * int(np.argmax([*mine, *-mine]))
            scale *= n
        buckets[b, h, r, t] += r * scale
    return buckets


def lsh_by_hand(layer, weights, x, buckets):
    """One chunk after the other, one query after the other."""
    B, T, _ = x.shape
    C, R = layer.chunk_length, layer.hashes
    n = R * T // C
    qk, v = heads_of(x, weights, "query_key", "value")
    keys = qk / np.sqrt(np.mean(qk**2, -1, keepdims=True) + 1e-6) / np.sqrt(D / H)
    y, log_sum = np.zeros((B, H, R, T, D // H)), np.zeros((B, H, R, T))
    for b, h in np.ndindex(B, H):
        places = sorted((buckets[b, h, r, t], t, r) for r in range(R) for t in range(T))
        for i, (_, t, r) in enumerate(places):
            chunks = [(i // C + j) % n for j in range(-layer.chunks_before, layer.chunks_after + 1)]
            seen = np.array([places[c * C + j][1] for c in chunks for j in range(C)])
            scores = keys[b, seen, h] @ qk[b, t, h]
            scores = np.where(layer.causal & (seen > t), -1e9, scores)
            scores = np.where(seen == t, -1e5, scores)
            y[b, h, r, t], log_sum[b, h, r, t] = weighed(scores, v[b, seen, h])
    share = np.exp(log_sum - log_sum.max(2, keepdims=True))
    y = np.sum(y * (share / share.sum(2, keepdims=True))[..., None], 2)
    return y.swapaxes(1, 2).reshape(x.shape) @ np.asarray(weights["output"]["kernel"])


LSH = {
    "one round": LSHAttention(H, 4, buckets=6, fixed=True),
    "two rounds": LSHAttention(H, 4, hashes=2, buckets=6, fixed=True),
    "both ways": LSHAttention(H, 4, 1, 1, hashes=2, buckets=6, causal=False, fixed=True),
    "factors": LSHAttention(H, 4, hashes=2, buckets=(2, 4), fixed=True),
}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", LSH)
def test_hashed_attention_against_a_slow_one(x64, name, seed):
    layer, x = LSH[name], positions(24, seed)
    weights, state = layer.init(jax.random.key(seed), (x,))
    y, memo = run(layer, weights, state, x)
    (qk,) = heads_of(x, weights, "query_key")
    buckets = buckets_by_hand(layer, np.asarray(state["directions"]), qk)
    assert_trees_equal(memo, jnp.array(buckets.reshape(2, H, -1), jnp.int32))
    assert_trees_close(y, jnp.array(lsh_by_hand(layer, weights, x, buckets)))


@pytest.mark.parametrize("causal", [True, False])
def test_hashed_attention_over_one_chunk_sees_everything(x64, causal):
    layer, x = LSHAttention(H, 8, causal=causal, hashes=2), positions(5)
    weights, _ = layer.init(KEY, (x,))
    y, memo = run(layer, weights, (), x)
    assert memo is None
    whole = LSHAttention(H, 5, 0, 0, causal=causal)  # as the slow one does it, of one bucket
    assert_trees_close(y, jnp.array(lsh_by_hand(whole, weights, x, np.zeros((2, H, 1, 5), int))))


def test_a_memo_repeats_decisions(x64):
    layer, x, other = LSH["two rounds"], positions(24), positions(24, seed=1)
    weights, state = layer.init(KEY, (x,))
    _, memo = run(layer, weights, state, x)
    assert memo.shape == (2, H, 2 * 24) and memo.dtype == jnp.int32
    y, same = run(layer, weights, state, other, memo=memo)
    assert_trees_equal(same, memo)
    assert_trees_close(y, jnp.array(lsh_by_hand(layer, weights, other, np.asarray(memo).reshape(2, H, 2, 24))))
    hashed, anew = run(layer, weights, state, other)
    assert np.any(anew != memo) and not np.allclose(y, hashed)


def test_directions_come_from_the_key_or_the_state(x64):
    layer, x = LAYERS["lsh"], positions(16)
    weights, state = layer.init(KEY, (x,))
    keys = (None, KEY, jax.random.key(1))
    runs = [run(layer, weights, state, x, key) for key in keys]
    assert_trees_equal(run(layer, weights, state, x), runs[0])  # without a key nothing is random
    for i, j in ((0, 1), (1, 2), (2, 0)):
        assert np.any(runs[i][1] != runs[j][1])
    dropped, other = (run(layer, weights, state, x, key, runs[0][1])[0] for key in keys[1:])
    assert not np.allclose(dropped, runs[0][0]) and not np.allclose(dropped, other)

    layer, x = LSH["two rounds"], positions(24)
    weights, state = layer.init(KEY, (x,))
    assert state["directions"].shape == (H, D // H, 2, 3)
    assert_trees_equal(run(layer, weights, state, x, KEY), run(layer, weights, state, x))


def test_buckets_are_chosen_from_the_length():
    # A power of two of about 2 T / chunk_length; from 2 * chunk_length on, two factors.
    chosen = {T: LSHAttention(H)._factors(T) for T in (64, 192, 1024, 4096, 8192, 32768, 65536)}
    expected = {64: (2,), 192: (4,), 1024: (32,), 4096: (128,), 8192: (16, 16), 32768: (32, 32), 65536: (32, 64)}
    assert chosen == expected


def test_sorting_is_stable_however_large_the_numbers():
    memo = jax.random.randint(KEY, (2, H, 1, 24), 0, 6)
    expected = np.argsort(memo, axis=-1, stable=True)
    for buckets in (6, 2**31 // 24 + 1):  # packed into one number; too large for that
        order, undo = module._sort(memo, buckets)
        np.testing.assert_array_equal(order, expected)
        np.testing.assert_array_equal(np.argsort(order, axis=-1), undo)


def test_the_strongest_direction_is_the_first_of_them():
    x = jnp.array([[3.0, -4.0, 4.0], [-2.0, 1.0, 0.0], [0.0, 0.0, 0.0], [-5.0, -5.0, 5.0]])
    np.testing.assert_array_equal(module._strongest(x), jnp.argmax(jnp.concatenate([x, -x], axis=-1), axis=-1))


# Both.

LAYERS = {
    "local": LocalAttention(H, 4, 1, 1, causal=False, dropout=0.3),
    "lsh": LSHAttention(H, 4, hashes=2, dropout=0.3),
}


@functools.partial(jax.jit, static_argnums=0)
def both_ways(layer, weights, state, inputs, memo=None):
    outputs, _, memo, pullback = differentiate(layer, weights, state, inputs, KEY, memo)
    return outputs, memo, pullback(tuple(jnp.cos(y) for y in outputs))


@functools.partial(jax.jit, static_argnums=0)
def back(layer, weights, state, outputs, memo):
    cts = tuple(jnp.cos(y) for y in outputs)
    again = layer.reverse(weights, state, outputs, KEY, memo)
    return again, layer.reverse_and_grad(weights, state, outputs, cts, KEY, memo)


@pytest.mark.parametrize("name", LAYERS)
def test_reversal_and_its_gradient(x64, name):
    layer = HalfResidual(LAYERS[name])
    xs = positions(16), positions(16, seed=1)
    weights, state = layer.init(KEY, xs)
    ys, memo, gradients = both_ways(layer, weights, state, xs)
    assert_trees_close(back(layer, weights, state, ys, memo), (xs, (xs, gradients)))


@pytest.mark.parametrize("name", LAYERS)
def test_gradient_against_central_differences(x64, name):
    layer, x = LAYERS[name], positions(16)
    weights, state = layer.init(KEY, (x,))
    _, memo, (x_cts, weight_grads) = both_ways(layer, weights, state, (x,))
    given = (x,), weights
    direction = jax.tree.map(lambda x: np.sin(np.arange(1.0, x.size + 1)).reshape(x.shape), given)
    h, sums = 1e-5, []
    for s in (h, -h):
        (x_s,), weights_s = jax.tree.map(lambda x, d, s=s: x + s * d, given, direction)
        sums.append(float(jnp.sum(jnp.sin(run(layer, weights_s, state, x_s, KEY, memo)[0]))))
    dots = jax.tree.map(np.vdot, (x_cts, weight_grads), direction)
    # Central differences err by h^2 times a third derivative.
    assert sum(jax.tree.leaves(dots)) == pytest.approx((sums[0] - sums[1]) / (2 * h), rel=1e-7)


@pytest.mark.parametrize("name", LAYERS)
def test_groups_of_heads_change_nothing(x64, monkeypatch, name):
    layer, x = LAYERS[name], positions(16)
    weights, state = layer.init(KEY, (x,))
    expected = both_ways(layer, weights, state, (x,))
    monkeypatch.setattr(module, "_SCORES", 1000)  # local attention has 192 scores in a head, hashed attention 256
    found = jax.jit(lambda *args: both_ways.__wrapped__(layer, *args))(weights, state, (x,))
    assert_trees_close(found, expected)


@pytest.mark.parametrize("name", LAYERS)
def test_weights_in_bfloat16_on_a_stream_in_float32(name):
    layer, x = LAYERS[name], positions(16, dtype=jnp.float32)
    weights, state = layer.init(KEY, (x,))
    y, memo = run(layer, weights, state, x, KEY)
    half = jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights)
    (y_half,), _, (x_cts, weight_grads) = both_ways(layer, half, state, (x,), memo)
    assert y_half.dtype == x_cts[0].dtype == jnp.float32
    assert {g.dtype for g in jax.tree.leaves(weight_grads)} == {jnp.dtype(jnp.bfloat16)}
    np.testing.assert_allclose(y_half, y, rtol=0.05, atol=0.05)  # three roundings to bfloat16 one after the other


@pytest.mark.parametrize("layer", [LocalAttention(H, 4), LSHAttention(H, 4)])
def test_lengths_that_cannot_be_cut_are_refused(layer):
    message = r"must be a multiple of chunk_length=4, or no more than that; got 10. Pad the sequences to 12"
    with pytest.raises(LayerError, match=message):
        layer.init(KEY, (jax.ShapeDtypeStruct((2, 10, D), jnp.float32),))
    weights, state = layer.init(KEY, (jax.ShapeDtypeStruct((2, 8, D), jnp.float32),))
    with pytest.raises(LayerError, match=message):
        layer.forward(weights, state, (jnp.ones((2, 10, D)),), None)


def test_fixed_directions_are_for_the_length_they_were_drawn_for():
    layer = LSHAttention(H, 4, fixed=True)
    weights, state = layer.init(KEY, (jax.ShapeDtypeStruct((2, 8, D), jnp.float32),))
    with pytest.raises(LayerError, match="length of 16 takes buckets=.8,. and so 4 directions; the state has 2"):
        layer.forward(weights, state, (jnp.ones((2, 16, D)),), None)


@pytest.mark.parametrize(
    "make, match",
    [
        (lambda: LocalAttention(2, chunk_length=0), "chunk_length must be at least 1, .*got 0, 1, 0"),
        (lambda: LSHAttention(2, chunks_after=-1), "got 64, 1, -1"),
        (lambda: LocalAttention(2, dropout=1.0), "at least 0 and less than 1; got 1.0"),
        (lambda: LSHAttention(2, hashes=0), "hashes must be at least 1.*got hashes=0"),
        (lambda: LSHAttention(2, buckets=7), "an even number or a tuple of even numbers; got .*buckets=7"),
        (lambda: LSHAttention(2, buckets=(4, 3)), r"got hashes=1, buckets=\(4, 3\)"),
        (lambda: LSHAttention(3).init(KEY, (jax.ShapeDtypeStruct((2, 8, D), jnp.float32),)), "heads must divide"),
    ],
)
def test_fields_that_make_no_sense_are_refused(make, match):
    with pytest.raises(ValueError, match=match):
        make()
