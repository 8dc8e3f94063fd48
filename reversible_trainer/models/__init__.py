"""Models: functions that return a list of blocks, the last of which is a loss; and how their optimizers are routed."""

from reversible_trainer.models.transformer import reversible_transformer_lm, transformer_lm, transformer_route

__all__ = ["reversible_transformer_lm", "transformer_lm", "transformer_route"]
