"""What every optimizer of ours must do."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_trees_close, compilations

from reversible_trainer.optimizers import failures, muon, orthogonalized, route, shampoo, slot_bytes_per_weight, soap


def polar(matrix, *, path):
    u, _, vt = jnp.linalg.svd(matrix, full_matrices=False)
    return u @ vt


MATRICES = {"a": (4, 6), "b": (4, 6), "c": (5, 3)}
EVERYTHING = {"a": (4, 6), "b": (4, 6), "scalar": (), "vector": (7,), "thin": (1, 9, 1), "four": (2, 2, 3, 5)}
OPTIMIZERS = {
    "shampoo": (functools.partial(shampoo, block_size=8), EVERYTHING),
    "shampoo_adam": (functools.partial(shampoo, block_size=8, graft_type="adam", weight_decay=0.01), EVERYTHING),
    "shampoo_rare": (
        functools.partial(
            shampoo, block_size=8, preconditioning_compute_steps=3, statistics_compute_steps=2, stagger=True
        ),
        EVERYTHING,
    ),
    "shampoo_newton": (functools.partial(shampoo, block_size=8, root="newton"), MATRICES),
    "shampoo_reference": (functools.partial(shampoo, block_size=8, variant="reference"), MATRICES),
    "orthogonalized": (functools.partial(orthogonalized, orthogonalize=polar), MATRICES),
    "muon": (functools.partial(muon, nesterov=True), MATRICES),
    "soap": (functools.partial(soap, precondition_frequency=3), EVERYTHING),
    "soap_reference": (functools.partial(soap, variant="reference"), MATRICES),
    "route": (route({"?": muon}, default=shampoo), EVERYTHING),
}
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)
one_of_each = pytest.mark.parametrize("name", ["shampoo", "orthogonalized", "muon", "soap", "route"])


def case(name, dtype=jnp.float32):
    factory, shapes = OPTIMIZERS[name]
    generator = np.random.default_rng(0)
    return factory, {k: jnp.asarray(generator.normal(size=s), dtype) for k, s in shapes.items()}


@functools.lru_cache
def program(name):
    """`(learning_rate, gradients, slots, weights, block_index) -> (updates, slots)`, as the trainer compiles it."""
    factory, _ = OPTIMIZERS[name]
    return jax.jit(lambda lr, g, s, w, i: factory(lr).update(g, s, w, block_index=i))


@every_optimizer
def test_descends_on_a_quadratic_and_compiles_once(name):
    factory, weights = case(name)
    slots = jax.jit(factory(0.0).init)(weights)
    size = lambda w: float(sum(np.sum(np.square(x)) for x in jax.tree.leaves(w)))  # noqa: E731
    first, programs = size(weights), []
    for t in range(12):
        with compilations() as compiled:
            updates, slots = program(name)(0.01 * 0.9**t, weights, slots, weights, 1)
        programs.append(len(compiled))
        weights = {k: jnp.asarray(np.asarray(w) + np.asarray(updates[k])) for k, w in weights.items()}
    assert size(weights) < 0.98 * first
    assert int(failures(slots)) == 0
    assert not any(programs[1:])


@every_optimizer
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_keeps_structure_shapes_and_dtypes(name, dtype):
    factory, weights = case(name, dtype)
    optimizer = factory(0.1)
    slots = jax.eval_shape(optimizer.init, weights)
    updates, new = jax.eval_shape(optimizer.update, weights, slots, weights)
    assert jax.tree.structure(new) == jax.tree.structure(slots)
    same = lambda a, b: (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, b.weak_type)  # noqa: E731
    assert all(map(same, jax.tree.leaves(new), jax.tree.leaves(slots)))
    assert not any(x.weak_type for x in jax.tree.leaves(slots))
    assert {str(x.dtype) for x in jax.tree.leaves(slots)} <= {"float32", "int32"}
    assert all(map(same, jax.tree.leaves(updates), jax.tree.leaves(jax.eval_shape(lambda: weights))))


@every_optimizer
def test_zero_gradients_are_harmless(name):
    factory, weights = case(name)
    slots = jax.jit(factory(0.1).init)(weights)
    zeros = jax.tree.map(jnp.zeros_like, weights)
    for gradients in (zeros, weights, zeros, zeros):
        updates, slots = program(name)(0.1, gradients, slots, weights, 0)
        assert all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves((updates, slots)))
    assert int(failures(slots)) == 0


@every_optimizer
def test_an_empty_tree_is_harmless(name):
    factory, _ = OPTIMIZERS[name]
    slots = factory(0.1).init({})
    assert program(name)(0.1, {}, slots, {}, 0)[0] == {}


@one_of_each
def test_weights_apart_are_weights_together(name):
    factory, weights = case(name)

    def second_updates(weights):
        optimizer = factory(0.1)
        _, slots = optimizer.update(jax.tree.map(jnp.sin, weights), optimizer.init(weights), weights)
        return optimizer.update(weights, slots, weights)[0]

    @jax.jit
    def run(weights):
        halves = [{k: weights[k] for k in list(weights)[side::2]} for side in (0, 1)]
        return second_updates(weights), second_updates(halves[0]) | second_updates(halves[1])

    whole, apart = run(weights)
    assert_trees_close(apart, whole, factor=10)  # reductions in another order, then inverse roots


@one_of_each
def test_plain_optax_compositions(name):
    factory, weights = case(name)
    weights = {k: weights[k] for k in ("a", "vector") if k in weights}
    gradients = jax.tree.map(jnp.sin, weights)
    labels = {k: "ours" if v.ndim == 2 else "adam" for k, v in weights.items()}
    with jax.numpy_dtype_promotion("standard"):  # optax relies on it
        compositions = [
            optax.chain(optax.clip_by_global_norm(1.0), factory(0.1)),
            optax.MultiSteps(factory(0.1), 2),
            optax.partition({"ours": factory(0.1), "adam": optax.adam(0.1)}, labels),
            factory(optax.linear_schedule(0.1, 0.0, 10)),
        ]
        if isinstance(factory, functools.partial):  # what partial sets is no default any more, so it must be listed
            static = list(factory.keywords)
            compositions.append(optax.inject_hyperparams(factory, static_args=static)(learning_rate=0.1))

        @jax.jit
        def run(gradients, weights):
            results = []
            for optimizer in compositions:
                update = lambda slots, _, o=optimizer: o.update(gradients, slots, weights)[::-1]  # noqa: E731
                results.append(jax.lax.scan(update, optimizer.init(weights), length=4)[1])
            return jax.tree.map(lambda x: x[-1], results)

        for updates in run(gradients, weights):
            assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, weights)
            assert all(bool(jnp.any(x != 0)) for x in jax.tree.leaves(updates))


@pytest.mark.parametrize("factory", [shampoo, muon, soap])
def test_inject_hyperparams_needs_no_list_of_static_arguments(factory):
    weights = {"a": jnp.ones((4, 4))}
    with jax.numpy_dtype_promotion("standard"):
        optimizer = optax.inject_hyperparams(factory)(learning_rate=0.1)
        slots = jax.jit(optimizer.init)(weights)
        _, slots = jax.jit(optimizer.update)(weights, slots, weights)
    assert float(slots.hyperparams["learning_rate"]) == pytest.approx(0.1)


def test_structural_arguments_are_never_traced():
    with pytest.raises(ValueError, match=r"shampoo: block_size must be a Python number.*static_args=\('block_size',\)"):
        optax.inject_hyperparams(shampoo)(0.1, block_size=8).init({"a": jnp.ones((4, 4))})


@pytest.mark.parametrize("factory", [shampoo, muon, soap, orthogonalized])
def test_weights_are_asked_for_where_they_are_needed(factory):
    keywords = {"orthogonalize": polar} if factory is orthogonalized else {}
    weights = {"a": jnp.ones((2, 2))}
    optimizer = factory(0.1, weight_decay=0.1, **keywords)
    with pytest.raises(ValueError, match=r"needs the weights; call update\(gradients, slots, weights\)"):
        jax.eval_shape(lambda w: optimizer.update(w, optimizer.init(w)), weights)


def test_integers_are_refused():
    with pytest.raises(TypeError, match="floating point weights; got int32"):
        soap(0.1).init({"a": jnp.ones((2, 2), jnp.int32)})


def test_slot_bytes_per_weight():
    weights = {"kernel": jax.ShapeDtypeStruct((128, 256), "float32")}
    assert slot_bytes_per_weight(muon, weights) == pytest.approx(4, abs=0.01)
    # Momentum; two blocks with two statistics and two roots each, the size of a block.
    assert slot_bytes_per_weight(shampoo, weights) == pytest.approx(4 * 5, abs=0.01)
    # m and v; L and its basis half as large as the weights, R and its basis twice as large.
    assert slot_bytes_per_weight(soap, weights) == pytest.approx(4 * (2 + 2 * 0.5 + 2 * 2), abs=0.01)


@pytest.mark.parametrize("name", ["shampoo", "soap", "muon"])
def test_programs_do_not_grow_with_the_number_of_weights(name):
    """The rule is traced once per shape. A weight adds the few operations that stack it and take out its update.

    None of them is a slice at a constant place: XLA compiles every such slice for itself.
    """
    factory, _ = OPTIMIZERS[name]

    def operations(count):
        weights = {str(i): jax.ShapeDtypeStruct((16, 16), "float32") for i in range(count)}
        slots = jax.eval_shape(factory(0.1).init, weights)
        equations = jax.make_jaxpr(factory(0.1).update)(weights, slots, weights).jaxpr.eqns
        return len(equations), sum(equation.primitive.name == "slice" for equation in equations)

    (few, few_slices), (many, many_slices) = operations(4), operations(64)
    assert many - few <= 12 * 60 and many_slices == few_slices
