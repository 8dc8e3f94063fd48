"""Routing by path, and optimizers by name and from gin."""

import functools

import gin
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from reversible_trainer import optimizers
from reversible_trainer.optimizers import muon, named, route, shampoo, unmatched

WEIGHTS = {"norm": {"scale": jnp.ones(4)}, "dense": {"kernel": jnp.ones((4, 4)), "bias": jnp.ones(4)}}


def one_update(factory, **extra):
    optimizer = factory(0.1)
    with jax.numpy_dtype_promotion("standard"):  # optax relies on it
        slots = optimizer.init(WEIGHTS)
        return jax.jit(lambda w, s: optimizer.update(w, s, w, **extra))(WEIGHTS, slots)


def test_every_weight_goes_to_the_optimizer_of_its_pattern():
    updates, slots = one_update(
        route({"*/scale": optax.sgd, "*/bias": functools.partial(optax.sgd, momentum=0.5)}, muon)
    )
    assert sorted(slots.by_pattern) == ["*/bias", "*/scale", "default"]
    np.testing.assert_allclose(updates["norm"]["scale"], -0.1, rtol=1e-6)
    assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, WEIGHTS)
    assert [m.shape for m in slots.by_pattern["default"].momentum] == [(1, 4, 4)]


def test_rules_without_weights_have_no_slots_and_are_known():
    _, slots = one_update(route({"*/embedding": optax.adam, "*/scale": optax.sgd}, optax.sgd))
    assert slots.by_pattern["*/embedding"] is None
    assert unmatched([slots, ()]) == ["*/embedding"]
    assert unmatched([slots, slots._replace(by_pattern={"*/embedding": ()})]) == []


def test_extra_arguments_reach_those_that_take_them():
    factory = functools.partial(shampoo, preconditioning_compute_steps=3, stagger=True)
    one_update(route({"*/kernel": factory}, optax.adam), block_index=2)


def test_a_star_crosses_slashes():
    _, slots = one_update(route({"*": optax.sgd}))
    assert list(slots.by_pattern) == ["*"]


def test_two_matches_are_an_error():
    factory = route({"*/scale": optax.sgd, "norm/*": optax.adam}, optax.sgd)
    with pytest.raises(ValueError, match=r"matched by two: 'norm/scale' by '\*/scale' and 'norm/\*'"):
        factory(0.1).init(WEIGHTS)


def test_no_match_is_an_error_without_a_default():
    with pytest.raises(ValueError, match="no pattern matches the weights at 'dense/bias', 'norm/scale'.*route.default"):
        route({"*/kernel": optax.sgd})(0.1).init(WEIGHTS)


def test_what_is_no_factory_is_refused():
    with pytest.raises(TypeError, match="must map to a factory.*in gin @adam without"):
        route({"*": optax.sgd(0.1)})  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="route.default"):
        route({"default": optax.sgd})


def test_gin_builds_factories_and_schedules():
    seen = {}

    @gin.configurable(module="tests")
    def configured(optimizer, learning_rate):
        seen.update(optimizer=optimizer, learning_rate=learning_rate)

    gin.parse_config("""
        configured.optimizer = @route()
        configured.learning_rate = @warmup_cosine_decay_schedule()
        route.rules = {'*/scale': @sgd, '*/kernel': @shampoo}
        route.default = @adamw
        sgd.momentum = 0.5
        shampoo.block_size = 2
        adamw.weight_decay = 0.1
        warmup_cosine_decay_schedule.init_value = 0.0
        warmup_cosine_decay_schedule.peak_value = 1.0
        warmup_cosine_decay_schedule.warmup_steps = 10
        warmup_cosine_decay_schedule.decay_steps = 100
    """)
    gin.get_configurable("configured")()
    assert float(seen["learning_rate"](5)) == pytest.approx(0.5)
    _, slots = one_update(seen["optimizer"])
    assert [s.shape for s in slots.by_pattern["*/kernel"].statistics] == [(8, 2, 2)]
    assert isinstance(slots.by_pattern["*/scale"][0], optax.TraceState)
    assert "shampoo.block_size = 2" in gin.operative_config_str()
    assert "shampoo.exponent_override = 0" in gin.operative_config_str()


@pytest.mark.parametrize("name", sorted(optimizers.KNOWN.keys() - {"orthogonalized"}))
def test_known_optimizers_are_factories_of_a_learning_rate(name):
    weights = {"a": jax.ShapeDtypeStruct((4, 4), "float32")}

    def update(learning_rate, w):
        optimizer = optax.with_extra_args_support(named(name)(learning_rate))
        return optimizer.update(w, optimizer.init(w), w, block_index=0)[0]

    with jax.numpy_dtype_promotion("standard"):
        rate = jax.ShapeDtypeStruct((), "float32")
        assert jax.eval_shape(update, rate, weights)["a"].shape == (4, 4)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(
        ValueError, match=r"no optimizer is called 'adammw'; did you mean 'adamw'\? Known: adabelief,.*muon,"
    ):
        named("adammw")
