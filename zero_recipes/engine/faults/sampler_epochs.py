"""A resumed run has other rows in its steps than the uninterrupted one, from the second epoch on.

The Trainer gives the samplers of `group_by_length` and of `use_seedable_sampler: false` no generator: from the second
epoch on they draw what dropout has left, on each rank another number. Of `batch_rebalance` accelerate hides `set_epoch`
where batches are skipped: an epoch that a run is resumed in has the first one's order.

Library: transformers 5.23, trainer.py (`_get_train_sampler`); accelerate 1.15, data_loader.py (`skip_first_batches`).
Upstream: none found; of accelerate's own resume: huggingface/accelerate#4233.
Here: each epoch's order follows from seed and epoch alone.

See it: one CPU

    from types import SimpleNamespace

    from accelerate.data_loader import prepare_data_loader, skip_first_batches
    from torch.utils.data import BatchSampler, DataLoader
    from transformers import Trainer

    args = SimpleNamespace(train_sampling_strategy="group_by_length", length_column_name="length")
    args.train_batch_size = args.gradient_accumulation_steps = 1
    rows = [{"input_ids": [1] * length} for length in range(1, 5)]
    trainer = SimpleNamespace(args=args, processing_class=None, train_dataset=rows)
    sampler = Trainer._get_train_sampler(trainer, rows)
    assert sampler.generator is None and not hasattr(sampler, "set_epoch")

    sampler = BatchSampler(range(8), 2, False)
    sampler.set_epoch = None
    loader = prepare_data_loader(DataLoader(range(8), batch_sampler=sampler), num_processes=1, process_index=0)
    assert not hasattr(skip_first_batches(loader, 1).batch_sampler, "set_epoch")
"""

import torch
from torch.utils.data import RandomSampler, Sampler
from transformers.trainer_pt_utils import LengthGroupedSampler


def begin_epoch(sampler: Sampler | None, epoch: int, seed: int) -> None:
    """Tell a training sampler the epoch: a step's rows follow from seed and step alone, also after a resume."""
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    elif isinstance(sampler, (LengthGroupedSampler, RandomSampler)) and epoch > 0:
        sampler.generator = torch.Generator().manual_seed(seed + epoch)
