"""Which optimizers a fused update may have."""

import functools

import jax
import optax
import pytest

from reversible_trainer.optimizers import muon, route, shampoo
from reversible_trainer.probe import check_separable

WEIGHTS = {"Serial": {name: jax.ShapeDtypeStruct((6, 12), "float32") for name in ("a", "b", "c", "qkv")}}


def clipped(learning_rate):
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(learning_rate))


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adamw,
        functools.partial(shampoo, graft_type="adam", block_size=4),
        route({"*/a": clipped, "*/c": clipped}, default=optax.sgd),  # one weight each: nothing global about it
        # Miniatures of its weights would not add up to the parts.
        functools.partial(muon, split={"*/qkv": (6, 3, 3)}, matmul_precision="highest"),
    ],
    ids=["adamw", "shampoo", "each apart", "split"],
)
def test_what_sees_one_weight_at_a_time_is_taken(optimizer):
    check_separable(optimizer, WEIGHTS)


@pytest.mark.parametrize(
    "optimizer",
    [
        clipped,
        route({"*/[ac]": clipped}, default=optax.sgd),
        lambda learning_rate: optax.noisy_sgd(learning_rate, key=0),
    ],
    ids=["all", "two of four", "noise"],
)
def test_what_depends_on_other_weights_is_refused(optimizer):
    with pytest.raises(ValueError, match="the optimizer's update of 'Serial/[abc]' depends on other weights"):
        check_separable(optimizer, WEIGHTS)
