"""The rows of a step follow from the seed and the step's number alone, so that a resumed run sees the same ones."""

from __future__ import annotations

from collections.abc import Iterator

import datasets
import torch
from torch.utils.data import RandomSampler, Sampler
from transformers.trainer_pt_utils import LengthGroupedSampler


def begin_epoch(sampler: Sampler | None, epoch: int, seed: int) -> None:
    """Tell a training sampler the epoch.

    transformers 5.23, trainer.py `_get_train_sampler` gives the sampler of group_by_length no generator: it draws from
    the random numbers of each process, which dropout has used by the second epoch, otherwise on each rank and after a
    resume. So does the random one under accelerator_config.use_seedable_sampler: false. The first epoch stays as it is
    there: nothing has been drawn yet.
    accelerate 1.15, data_loader.py `skip_first_batches` puts another sampler around that of batch_rebalance, and
    `_run_epoch` no longer finds its `set_epoch`: an epoch that a run is resumed in had the first one's order.
    """
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    elif isinstance(sampler, (LengthGroupedSampler, RandomSampler)) and epoch > 0:
        sampler.generator = torch.Generator().manual_seed(seed + epoch)


class EndlessRows(torch.utils.data.IterableDataset):
    """A stream that begins again where it ends, within a step if need be; every process reads all of it.

    transformers 5.23, trainer.py `_run_epoch` does not know where an epoch of a stream ends: it takes no step with the
    batches that are left over, adds their gradients to the next step's, and a resumed run stops at the stream's end
    (huggingface/transformers#26413).
    accelerate 1.15, data_loader.py `prepare_data_loader` gives the processes files of their own where a `datasets`
    stream has enough of them: their rows then depend on how many processes there are, and the ranks end at different
    steps. Of any other stream each process takes its rows of every batch.
    """

    def __init__(self, rows: datasets.IterableDataset):
        self.rows = rows.repeat(None)

    def __iter__(self) -> Iterator[dict]:
        return iter(self.rows)
