"""In the last step of an epoch some rows are trained twice, and in a resumed epoch nobody can tell which.

accelerate fills an epoch's last batches with the first rows. Its own count of the rows that are left over
(`gradient_state.remainder`) is lost in `skip_first_batches`: SkipBatchSampler has no `batch_size`, and `begin`
suppresses the AttributeError.

Library: accelerate 1.15, data_loader.py (`DataLoaderStateMixin.begin`, `BatchSamplerShard`, `DataLoaderDispatcher`).
Upstream: huggingface/accelerate#4235.
Here: the rows are counted from the loader as it was. Repeated rows have no loss (training/token_loss.py).

See it: one CPU

    from accelerate.data_loader import prepare_data_loader, skip_first_batches
    from accelerate.state import GradientState
    from torch.utils.data import DataLoader

    loader = prepare_data_loader(DataLoader(range(5), batch_size=2), num_processes=2, process_index=0)
    known = []
    for each in (loader, skip_first_batches(loader, 1)):
        for _ in each:
            known.append(GradientState().remainder)
    assert known[0] == 1 and known[-1] == -1, known
"""

from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher


def rows_left_over(loader) -> int:
    """Count the rows in an epoch's last batches, over all ranks, before accelerate fills them with the first rows.

    0 where it fills none. `loader`: accelerate's, before any batch is skipped.
    """
    if isinstance(loader, DataLoaderDispatcher):  # counts while it hands out
        return loader.gradient_state.remainder
    sampler = loader.batch_sampler
    if not isinstance(sampler, BatchSamplerShard) or sampler.drop_last or sampler.batch_size is None:
        return 0
    at_once = sampler.batch_size
    if not sampler.split_batches:
        at_once *= sampler.num_processes
    return len(loader.dataset) % at_once
