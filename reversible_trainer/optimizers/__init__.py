"""Optimizers: optax gradient transformations with statistics of whole matrices, and routing.

What the trainer is given is a *factory*, `learning_rate -> optax.GradientTransformation`:
each of these functions is one, and so are `optax.adamw`, `functools.partial(shampoo, beta1=0.95)`
and what `route(...)` returns. README.md has the mathematics.
"""

import difflib

from reversible_trainer.optimizers.average import AverageSlots as AverageSlots
from reversible_trainer.optimizers.average import averages as averages
from reversible_trainer.optimizers.average import averaging as averaging
from reversible_trainer.optimizers.common import Factory as Factory
from reversible_trainer.optimizers.common import failures as failures
from reversible_trainer.optimizers.common import slot_bytes_per_weight as slot_bytes_per_weight
from reversible_trainer.optimizers.gin_optax import OPTIMIZERS as _OPTAX
from reversible_trainer.optimizers.gin_optax import SCHEDULES as SCHEDULES
from reversible_trainer.optimizers.orthogonalized import OrthogonalizedSlots as OrthogonalizedSlots
from reversible_trainer.optimizers.orthogonalized import muon as muon
from reversible_trainer.optimizers.orthogonalized import orthogonalized as orthogonalized
from reversible_trainer.optimizers.route import RouteSlots as RouteSlots
from reversible_trainer.optimizers.route import route as route
from reversible_trainer.optimizers.route import scaled as scaled
from reversible_trainer.optimizers.route import unmatched as unmatched
from reversible_trainer.optimizers.shampoo import ShampooSlots as ShampooSlots
from reversible_trainer.optimizers.shampoo import shampoo as shampoo
from reversible_trainer.optimizers.soap import SoapSlots as SoapSlots
from reversible_trainer.optimizers.soap import soap as soap

KNOWN: dict[str, Factory] = {**_OPTAX, "shampoo": shampoo, "orthogonalized": orthogonalized, "muon": muon, "soap": soap}


def named(name: str) -> Factory:
    """The optimizer of this name, as in a gin file.

    Example:
      >>> named("adamw")(0.1).init({})[0].count.tolist()
      0
    """
    if name not in KNOWN:
        close = difflib.get_close_matches(name, KNOWN, 1)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        raise ValueError(
            f"optimizers: no optimizer is called {name!r}{hint} Known: {', '.join(sorted(KNOWN))}; "
            "route(...) combines them."
        )
    return KNOWN[name]
