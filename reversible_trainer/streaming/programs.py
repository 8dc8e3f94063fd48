"""Compiled programs, made ahead of time and shared by equal layers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params

from reversible_trainer.streaming.placement import Placement
from reversible_trainer.tree import Tree


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """One compiled function with its figures.

    Attributes:
      name: Kind and layer, for events and profiles.
      tags: The ledger's tag for each part of the output.
      compiled: The executable: flat arguments in, flat outputs and a token out.
      out_tree: Structure of the outputs.
      outputs: Signatures of the flat outputs, the token last.
      donated: Positions of the flat arguments whose memory the outputs take over.
      argument_bytes: The arguments.
      output_bytes: The outputs, those in donated memory included.
      alias_bytes: Outputs that lie in donated memory.
      temporary_bytes: What the program needs while it runs.
      flops: Floating-point operations of matrix products and convolutions; what loops do whose
        number of turns depends on the data counts once.
    """

    name: str
    tags: tuple[str, ...]
    compiled: Any
    out_tree: Any
    outputs: tuple[jax.ShapeDtypeStruct, ...]
    donated: tuple[int, ...]
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temporary_bytes: int
    flops: float

    @property
    def bytes(self) -> int:
        """Accelerator memory from its start to its end."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temporary_bytes


class Programs:
    """All compiled programs of a trainer. Their number depends on the distinct blocks, never on depth."""

    def __init__(self, placement: Placement):
        self._placement = placement
        self._programs: dict[Hashable, Program] = {}
        self._shapes: dict[Hashable, Any] = {}

    def __len__(self) -> int:
        return len(self._programs)

    def __iter__(self):
        return iter(self._programs.values())

    def get(
        self,
        kind: str,
        variant: str,
        layer: Hashable,
        tags: Sequence[str],
        function: Callable[..., tuple[Any, ...]],
        arguments: tuple[Tree, ...],
        donate: Sequence[int] = (),
        options: dict[str, Any] | None = None,
    ) -> Program:
        """The program for `function`, compiled when it is asked for the first time.

        Args:
          kind: What the function does with the layer, for the program's name.
          variant: How. `kind`, `variant`, `layer` and the signatures of the arguments must
            determine the function.
          layer: The layer it is made of.
          tags: The ledger's tag for each entry of the function's output.
          function: From pytrees to a tuple of `len(tags)` pytrees.
          arguments: Their signatures.
          donate: Positions in `arguments` that the caller will not use again.
          options: For the compiler, such as `exact`'s.
        """
        leaves, tree = jax.tree.flatten(arguments)
        key = (kind, variant, layer, tree, tuple((x.shape, x.dtype) for x in leaves))
        if key not in self._programs:
            name = f"{kind} {getattr(layer, 'name', layer)}"
            self._programs[key] = self._compile(name, tuple(tags), function, arguments, donate, options)
        return self._programs[key]

    def shapes(self, kind: str, layer: Hashable, inputs: Tree, trace: Callable[[], Any]) -> Any:
        """What `trace` returns, which takes its time: asked once for equal layers and inputs."""
        leaves, tree = jax.tree.flatten(inputs)
        key = (kind, layer, tree, tuple((x.shape, x.dtype) for x in leaves))
        if key not in self._shapes:
            self._shapes[key] = trace()
        return self._shapes[key]

    def _compile(
        self,
        name: str,
        tags: tuple[str, ...],
        function: Callable,
        arguments: tuple[Tree, ...],
        donate: Sequence[int],
        options: dict[str, Any] | None,
    ) -> Program:
        leaves, in_tree = jax.tree.flatten(arguments)
        outputs, out_tree = jax.tree.flatten(jax.eval_shape(function, *arguments))
        sizes = [len(jax.tree.leaves(argument)) for argument in arguments]
        candidates = [sum(sizes[:a]) + i for a in sorted(donate) for i in range(sizes[a])]
        donated = _aliasable(leaves, candidates, outputs)

        def flat(*leaves: Any) -> tuple[Any, ...]:
            # The token tells when the program has run: all else may be donated to its successor.
            return *jax.tree.leaves(function(*jax.tree.unflatten(in_tree, leaves))), jnp.zeros((), jnp.int32)

        flat.__name__ = name.replace(" ", "_")
        jitted = jax.jit(flat, donate_argnums=donated, keep_unused=True)
        traced = jitted.trace(*self._placement.specify(leaves))
        compiled = traced.lower().compile(options)
        memory: Any = compiled.memory_analysis()
        return Program(
            name=name,
            tags=tags,
            compiled=compiled,
            out_tree=out_tree,
            outputs=(*outputs, jax.ShapeDtypeStruct((), jnp.int32)),
            donated=donated,
            argument_bytes=memory.argument_size_in_bytes,
            output_bytes=memory.output_size_in_bytes,
            alias_bytes=memory.alias_size_in_bytes,
            temporary_bytes=memory.temp_size_in_bytes,
            flops=count_flops(traced.jaxpr.jaxpr),
        )


def exact(weights: Tree) -> dict[str, Any]:
    """Compiler options of a program whose bits others must find too; `weights` are as the block computes with them."""
    options = {
        "xla_allow_excess_precision": False,  # or roundings to bfloat16 are left out where their surroundings allow it
        "xla_gpu_deterministic_ops": True,  # the same algorithm everywhere: nothing is tuned by timing
    }
    if any(w.dtype.itemsize == 2 for w in jax.tree.leaves(weights)):
        # XLA's newer code generator for CPUs, 5 % faster, makes one rounding of a product and a sum or two, as may be.
        options["xla_cpu_use_fusion_emitters"] = False
    return options


def count_flops(jaxpr: Any) -> float:
    """Floating-point operations of the matrix products and convolutions of a jaxpr, two per multiplication.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> a, b = jnp.ones((3, 5)), jnp.ones((5, 7))
      >>> count_flops(jax.make_jaxpr(jnp.dot)(a, b).jaxpr) == 2 * 3 * 5 * 7
      True
    """
    total = 0.0
    for equation in jaxpr.eqns:
        name, parameters = equation.primitive.name, equation.params
        if name == "dot_general":
            (contracted, _), _ = parameters["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            total += 2.0 * equation.outvars[0].aval.size * math.prod(shape[i] for i in contracted)
        elif name == "conv_general_dilated":
            kernel = equation.invars[1].aval
            features = kernel.shape[parameters["dimension_numbers"].rhs_spec[0]]
            total += 2.0 * equation.outvars[0].aval.size * kernel.size / features
        elif name == "cond":
            total += max(count_flops(branch.jaxpr) for branch in parameters["branches"])
        else:
            times = parameters["length"] if name == "scan" else 1
            total += times * sum(map(count_flops, jaxprs_in_params(parameters)))
    return total


def _aliasable(leaves: list[Any], candidates: list[int], outputs: list[Any]) -> tuple[int, ...]:
    """Those candidates whose shape and dtype an output has: donating others gains nothing, and JAX warns."""
    free = [(x.shape, x.dtype) for x in outputs]
    donated = []
    for i in candidates:
        wanted = (leaves[i].shape, leaves[i].dtype)
        if wanted in free:
            free.remove(wanted)
            donated.append(i)
    return tuple(donated)
