"""Trajectories of the published implementations, float64, through the public API (golden/README.md)."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from reversible_trainer.optimizers import muon, orthogonalized, shampoo, soap

HERE = Path(__file__).parent / "golden"
META = json.loads((HERE / "meta.json").read_text())
INPUTS = np.load(HERE / "inputs.npz")


def load(optimizer, variant):
    """Initial weights, gradients and golden weights, as dicts from name to array (step first)."""
    info, golden = META[optimizer][variant], np.load(HERE / f"{optimizer}_f64.npz")
    names = [key.removeprefix(f"{variant}/") for key in golden.files if key.startswith(f"{variant}/")]
    weights = {n: np.asarray(INPUTS[f"{info['inputs']}/params/{n}"], np.float64) for n in names}
    steps = len(golden[f"{variant}/{names[0]}"])
    scale = np.float64(np.float32(info.get("grad_scale", 1.0)))
    gradients = {n: (INPUTS[f"{info['inputs']}/grads/{n}"][:steps] * scale).astype(np.float32) for n in names}
    return weights, gradients, {n: golden[f"{variant}/{n}"] for n in names}


def build(optimizer, hyper):
    """Ours, from the hyper-parameters of `meta.json`: a factory, arguments that may be traced, others."""
    hyper = dict(hyper)
    if optimizer == "shampoo":
        # Variants that differ in these alone are one program.
        traced = {"beta1": 0.9, "beta2": 0.999, "diagonal_epsilon": 1e-10, "matrix_epsilon": 1e-6, "weight_decay": 0.0}
        traced = {name: hyper.pop(name, value) for name, value in traced.items()}
        traced["learning_rate"] = hyper.pop("learning_rate")
        hyper["graft_type"] = {1: "sgd", 2: "adagrad"}[hyper.pop("graft_type", 1)]
        hyper.pop("preconditioning_compute_steps", None)  # recorded where the reference ignores it
        return shampoo, traced, hyper | {"variant": "reference"}
    if optimizer == "soap":
        return (
            soap,
            {"learning_rate": hyper.pop("lr")},
            hyper | {"betas": tuple(hyper["betas"]), "variant": "reference"},
        )
    same = ("momentum", "nesterov", "weight_decay", "weight_decay_method")
    traced, static = {"learning_rate": hyper["lr"]}, {name: hyper[name] for name in same}
    if "ns" not in hyper:
        return orthogonalized, traced, static | {"orthogonalize": lambda matrix, *, path: matrix}
    static |= {
        "coefficients": hyper["ns"],
        "steps": hyper["steps"],
        "scale": hyper["scale"],
        "extra_scale": hyper["extra"],
        "split": {"*qkv": hyper["split"]} if "split" in hyper else None,
        "output_axis": 0,
        "matmul_precision": hyper["fp32_matmul_prec"],
    }
    return muon, traced, static


_programs = {}


def trajectory(factory, traced, static, weights, gradients):
    """The weights after every step, step first."""
    key = factory, repr(static), tuple(weights)
    if key not in _programs:
        _programs[key] = jax.jit(lambda traced, g, s, w: factory(**traced, **static).update(g, s, w))
    slots = jax.jit(factory(**traced, **static).init)(weights)
    seen = []
    for t in range(len(next(iter(gradients.values())))):
        step = {n: jnp.asarray(g[t], jnp.float64) for n, g in gradients.items()}
        updates, slots = _programs[key](traced, step, slots, weights)
        weights = optax.apply_updates(weights, updates)
        seen.append(weights)
    return {n: np.stack([np.asarray(w[n]) for w in seen]) for n in weights}


def relative_error(ours, golden, initial):
    """Largest error over steps, in units of the largest displacement."""
    return np.max(np.abs(ours - golden)) / np.max(np.abs(golden - np.asarray(initial)))


@pytest.mark.parametrize(("optimizer", "variant"), [(o, v) for o, variants in META.items() for v in variants])
def test_golden(optimizer, variant, x64):
    weights, gradients, golden = load(optimizer, variant)
    info = META[optimizer][variant]
    ours = trajectory(*build(optimizer, info["hparams"]), weights, gradients)
    for name, expected in golden.items():
        assert relative_error(ours[name], expected, weights[name]) <= info["tol_f64"], name


def test_modern_shampoo_stays_within_a_percent_of_the_reference(x64):
    """On ranks 1 and 2; at higher ranks the reference's exponents 6 and 12 are not what it computes."""
    weights, gradients, golden = load("shampoo", "default")
    names = [name for name in weights if weights[name].ndim <= 2]
    weights, gradients = ({name: tree[name] for name in names} for tree in (weights, gradients))
    for root in ("eigh", "newton"):
        ours = trajectory(shampoo, {"learning_rate": 0.1}, {"block_size": 8, "root": root}, weights, gradients)
        for name in names:
            assert relative_error(ours[name], golden[name], weights[name]) <= 0.01, name


def test_layer_by_layer_is_the_whole_tree_given_pad_to(x64):
    weights, gradients, golden = load("shampoo", "default")
    static = {"block_size": 8, "variant": "reference", "pad_to": 8}
    for name in ("mat_small", "vec", "rank4"):
        one, g = {name: weights[name]}, {name: gradients[name]}
        ours = trajectory(shampoo, {"learning_rate": 0.1}, static, one, g)
        assert relative_error(ours[name], golden[name], weights[name]) <= 1e-6
