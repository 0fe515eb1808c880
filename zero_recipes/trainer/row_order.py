"""The rows of an epoch follow from the seed and the epoch's number alone, so that a resumed run sees the same ones."""

from __future__ import annotations

import torch
from transformers.trainer_pt_utils import LengthGroupedSampler
from trl import SFTTrainer


class SeededOrderSFTTrainer(SFTTrainer):
    """SFTTrainer that tells its sampler the epoch. accelerate does so for the random order alone.

    transformers 5.23, trainer.py `_get_train_sampler` gives the sampler of group_by_length no generator: it draws from
    the random numbers of each process, which dropout has used by the second epoch, otherwise on each rank and after a
    resume. The first epoch stays as it is there: no number has been drawn yet.
    accelerate 1.15, data_loader.py `skip_first_batches` puts another sampler around that of batch_rebalance, and
    `_run_epoch` no longer finds its `set_epoch`: an epoch that a run is resumed in had the first one's order.
    """

    _train_sampler = None  # of a stream, for good

    def _get_train_sampler(self, train_dataset=None):
        self._train_sampler = super()._get_train_sampler(train_dataset)
        return self._train_sampler

    def _run_epoch(self, *arguments, epoch: int, **keywords) -> None:
        if hasattr(self._train_sampler, "set_epoch"):
            self._train_sampler.set_epoch(epoch)
        elif isinstance(self._train_sampler, LengthGroupedSampler) and epoch > 0:
            seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
            self._train_sampler.generator = torch.Generator().manual_seed(seed + epoch)
        super()._run_epoch(*arguments, epoch=epoch, **keywords)
