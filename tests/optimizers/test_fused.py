"""The optimizers fused in the trainer: the golden trajectories again, splits, failures in the metrics, staggering."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import slow
from jax.extend.core import ClosedJaxpr, Jaxpr
from test_golden import META, build, load, relative_error

import reversible_trainer.trainer as trainer_module
from reversible_trainer import Layer, LossLayer, Trainer
from reversible_trainer.optimizers import shampoo, soap

Shapes = tuple[tuple[str, tuple[int, ...]], ...]


@dataclasses.dataclass(frozen=True)
class Tensors(Layer):
    """Weights `w` whose gradients are the inputs `g`: puts back `sum(w * g)`."""

    shapes: Shapes

    @property
    def n_in(self):
        return len(self.shapes)

    def init(self, key, inputs):
        return {name: jnp.zeros(shape) for name, shape in self.shapes}, ()

    def forward(self, weights, state, inputs, key, memo=None):
        return (sum(jnp.sum(weights[name] * g) for (name, _), g in zip(self.shapes, inputs, strict=True)),), (), ()


@dataclasses.dataclass(frozen=True)
class LossTensors(LossLayer):
    """The same for the last block, which adds what the other has found."""

    shapes: Shapes

    @property
    def n_in(self):
        return 1 + len(self.shapes)

    def init(self, key, inputs):
        return Tensors(self.shapes).init(key, inputs)

    def forward(self, weights, state, inputs, key, memo=None):
        (found,), _, _ = Tensors(self.shapes).forward(weights, state, inputs[1:], key)
        return (inputs[0] + found, jnp.ones(())), (), ()


def model(shapes):
    """Two blocks, each with half the weights."""
    half = len(shapes) // 2
    return [Tensors(shapes[:half]), LossTensors(shapes[half:])]


def largest_statistic(weights, hyper):
    slots = jax.eval_shape(shampoo(**{"learning_rate": 0.1} | hyper).init, weights)
    return max(s.shape[-1] for s in slots.statistics)


def families():
    """The golden variants by what is compiled: `{key: (factory, static, [(optimizer, variant, traced)])}`."""
    found = {}
    for optimizer, variants in META.items():
        for variant, info in variants.items():
            factory, traced, static = build(optimizer, info["hparams"])
            traced |= {name: static.pop(name) for name in ("momentum", "weight_decay", "eps") if name in static}
            traced |= {f"b{i}": b for i, b in enumerate(static.pop("betas", ()), 1)}
            if "matrix_epsilon" in traced:  # the trainer's init has no place in the table yet
                static["matrix_epsilon"] = traced.pop("matrix_epsilon")
            names = tuple(load(optimizer, variant)[0])
            key = f"{optimizer} {' '.join(f'{k}={v}' for k, v in static.items())} {','.join(names)}"
            found.setdefault(key, (factory, static, []))[2].append((optimizer, variant, traced))
    return found


FAMILIES = families()


def some(families):
    """All of them, a fifth of each optimizer's not slow; `test_golden.py` has all without a trainer."""
    counts = collections.Counter()
    for family in families:
        optimizer = family.split()[0]
        yield family if counts[optimizer] % 5 == 0 else slow(family)
        counts[optimizer] += 1


@pytest.mark.parametrize(
    "family", list(some(FAMILIES)), ids=lambda family: "-".join(variant for _, variant, _ in FAMILIES[family][2])
)
def test_golden_fused(family, x64, monkeypatch):
    """The learning rate of the trainer's step is a place in a table: variants of a family share their programs."""
    monkeypatch.setattr(trainer_module, "check_separable", lambda *_: None)  # tested elsewhere; it has no such table
    factory, static, members = FAMILIES[family]
    rows = {name: jnp.asarray([traced[name] for *_, traced in members]) for name in members[0][2]}
    weights, *_ = load(*members[0][:2])
    if factory is shampoo:
        static = static | {"pad_to": largest_statistic(weights, static)}

    def optimizer(place):
        traced = {name: row[jnp.asarray(place, int)] for name, row in rows.items()}
        betas = [traced.pop(name) for name in ("b1", "b2", "b3") if name in traced]
        return factory(**traced, **static, **({"betas": tuple(betas)} if betas else {}))

    names = list(weights)
    trainer = Trainer(model(tuple((name, weights[name].shape) for name in names)), optimizer)
    for place, (kind, variant, _) in enumerate(members):
        weights, gradients, golden = load(kind, variant)
        batches = [tuple(gradients[name][t].astype(np.float64) for name in names) for t in range(len(golden[names[0]]))]
        state = trainer.init(jax.random.key(0), batches[0])
        state.weights = [{name: jnp.array(weights[name]) for name in entry} for entry in state.weights]
        seen = []
        for batch in batches:
            state, metrics = trainer.step(state, batch, place)
            seen.append({name: np.array(w) for entry in state.weights for name, w in entry.items()})
        assert int(metrics["skipped_blocks"]) == 0
        for name in names:
            ours = np.stack([step[name] for step in seen])
            assert relative_error(ours, golden[name], weights[name]) <= META[kind][variant]["tol_f64"], (variant, name)


def test_what_an_optimizer_does_not_take_is_in_the_metrics():
    """1e25 is finite and updates the weights; its square is not and stays out of the statistics."""
    trainer = Trainer(model((("a", (4, 4)), ("b", (4, 4)))), functools.partial(shampoo, graft_type="adam"))
    batches = [(value * np.eye(4, dtype=np.float32), np.eye(4, dtype=np.float32)) for value in (1.0, 1e25, 1.0)]
    state, counts = trainer.init(jax.random.key(0), batches[0]), []
    for batch in batches:
        state, metrics = trainer.step(state, batch, 0.1)
        counts.append(int(metrics["optimizer_failures"]))
        assert int(metrics["skipped_blocks"]) == 0
    assert counts == [0, 1, 1]


def operations(jaxpr, branch):
    """Floating-point operations of matrix products and decompositions, where every `cond` takes this branch."""
    count = 0
    for equation in jaxpr.eqns:
        name, out = equation.primitive.name, equation.outvars[0].aval.shape
        if name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            count += 2 * np.prod(out) * np.prod([equation.invars[0].aval.shape[i] for i in contracted])
        elif name in ("eigh", "geqrf", "householder_product"):
            count += 9 * np.prod(equation.invars[0].aval.shape) * equation.invars[0].aval.shape[-1]
        elif name == "cond":
            branches = equation.params["branches"]
            count += operations(branches[min(branch, len(branches) - 1)].jaxpr, branch)
        else:
            inner = [x for x in equation.params.values() if isinstance(x, ClosedJaxpr | Jaxpr)]
            times = equation.params["length"] if name == "scan" else 1
            count += times * sum(operations(getattr(x, "jaxpr", x), branch) for x in inner)
    return int(count)


@pytest.mark.parametrize(
    "factory",
    [
        functools.partial(shampoo, preconditioning_compute_steps=10, stagger=True, root="eigh"),
        functools.partial(soap, precondition_frequency=10),
    ],
)
def test_no_step_of_a_staggered_run_costs_much_more_than_the_others(factory):
    """Work of the optimizer over the blocks of a model, for at least as many blocks as steps between refreshes.

    SOAP's update 0, which sets up all bases, is left out: it changes no weights.
    """
    weights = {"kernel": jax.ShapeDtypeStruct((64, 64), "float32"), "wide": jax.ShapeDtypeStruct((64, 256), "float32")}
    optimizer = factory(0.1)
    slots = jax.eval_shape(optimizer.init, weights)
    jaxpr = jax.make_jaxpr(lambda g, s, w, i: optimizer.update(g, s, w, block_index=i))(
        weights, slots, weights, 3
    ).jaxpr
    without, refreshing = operations(jaxpr, 0), operations(jaxpr, 1)
    assert refreshing > 1.3 * without
    for blocks in (10, 12, 25, 64):
        steps = [sum(refreshing if (t + i) % 10 == 0 else without for i in range(blocks)) for t in range(1, 41)]
        assert max(steps) <= 1.5 * np.median(steps)
