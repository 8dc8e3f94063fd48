"""optax's optimizers and schedules as gin configurables, under their own names.

What a run is configured with is a factory `learning_rate -> GradientTransformation`, so in
a gin file an optimizer is a reference without parentheses, its other arguments bindings,
while a schedule is called:

    run.optimizer = @adamw
    adamw.weight_decay = 0.1
    run.learning_rate = @warmup_cosine_decay_schedule()
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gin
import optax

from reversible_trainer.optimizers.common import Factory

# Those whose first argument is a learning rate and whose update needs nothing but gradients
# and weights; not lbfgs (a line search) nor polyak_sgd (the loss).
_OPTIMIZERS = (
    "adabelief adadelta adafactor adagrad adam adamax adamaxw adamw adan amsgrad fromage lamb lars lion nadam nadamw "
    "novograd optimistic_adam_v2 optimistic_gradient_descent radam rmsprop rprop sgd sign_sgd signum sm3 yogi"
).split()
_SCHEDULES = (
    "constant_schedule cosine_decay_schedule cosine_onecycle_schedule exponential_decay join_schedules "
    "linear_onecycle_schedule linear_schedule piecewise_constant_schedule piecewise_interpolate_schedule "
    "polynomial_schedule sgdr_schedule warmup_constant_schedule warmup_cosine_decay_schedule "
    "warmup_exponential_decay_schedule"
).split()


def _register(names: Sequence[str]) -> dict[str, Factory]:
    register: Any = gin.external_configurable
    return {name: register(getattr(optax, name), name=name, module="optax") for name in names}


OPTIMIZERS: dict[str, Factory] = _register(_OPTIMIZERS)
SCHEDULES: dict[str, Factory] = _register(_SCHEDULES)
