"""Data sets: objects that give a training batch for every step, and batches to evaluate on."""

from reversible_trainer.data.corpus import shakespeare as shakespeare
from reversible_trainer.data.corpus import shakespeare_works as shakespeare_works
from reversible_trainer.data.text import Batch as Batch
from reversible_trainer.data.text import TextData as TextData
