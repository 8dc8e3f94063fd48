"""Models: functions that return a list of blocks, the last of which is a loss; and how their optimizers are routed."""

from reversible_trainer.models.reformer import reformer, reformer_lm
from reversible_trainer.models.rev_net import rev_net
from reversible_trainer.models.transformer import reversible_transformer_lm, transformer_lm, transformer_route

__all__ = ["reformer", "reformer_lm", "rev_net", "reversible_transformer_lm", "transformer_lm", "transformer_route"]
