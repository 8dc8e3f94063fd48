"""Data sets: objects that give a training batch for every step, and batches to evaluate on."""

from reversible_trainer.data.ahead import BatchesAhead as BatchesAhead
from reversible_trainer.data.ahead import DataError as DataError
from reversible_trainer.data.base import Batch as Batch
from reversible_trainer.data.base import DataSet as DataSet
from reversible_trainer.data.base import Text as Text
from reversible_trainer.data.corpus import shakespeare as shakespeare
from reversible_trainer.data.corpus import shakespeare_works as shakespeare_works
from reversible_trainer.data.digits import ImageData as ImageData
from reversible_trainer.data.digits import digits as digits
from reversible_trainer.data.tasks import CopyTask as CopyTask
from reversible_trainer.data.tasks import copy_task as copy_task
from reversible_trainer.data.text import TextData as TextData
