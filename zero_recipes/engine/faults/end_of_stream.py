"""A streamed data set takes more rows a step where it ends, and a resumed run ends there: `max_steps` is not reached.

The Trainer takes no step with the batches that a stream's end leaves over, and adds their gradients to the next step's.
A run that is resumed behind the stream's end trains nothing. accelerate gives the processes files of their own where a
stream has enough of them: ranks then end at different steps, and the others wait.

Library: transformers 5.23, trainer.py (`_run_epoch`); accelerate 1.15, data_loader.py.
Upstream: huggingface/transformers#26413.
Here: a stream begins again where it ends, within a step if need be, and every process reads all of it.

See it: one CPU

    import torch
    from transformers import Trainer, TrainingArguments


    class Line(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.calls = torch.nn.Parameter(torch.zeros(1)), 0

        def forward(self, x, labels=None):
            self.calls += 1
            return {"loss": (self.weight * x).sum()}


    class Three(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter([{"x": torch.ones(1)}] * 3)


    args = TrainingArguments(
        "/tmp/out",
        max_steps=2,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=1,
        remove_unused_columns=False,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
    )
    trainer = Trainer(Line(), args, train_dataset=Three())
    trainer.train()
    assert trainer.model.calls > 4, "two steps of two rows take five"
"""

from collections.abc import Iterator

import datasets
import torch


class EndlessRows(torch.utils.data.IterableDataset):
    """A stream that begins again where it ends, within a step if need be; every process reads all of it.

    A shuffled one has another order each time, which follows from the seed and the number of times alone: a resumed
    run reads it from its start again, and skips what is trained. One that is not shuffled keeps the order of its files.
    """

    def __init__(self, rows: datasets.IterableDataset):
        self.rows = rows
        self.is_shuffled = is_shuffled(rows)

    def __iter__(self) -> Iterator[dict]:
        epoch = 0
        while True:
            if self.is_shuffled:
                self.rows.set_epoch(epoch)
            has_rows = False
            for row in self.rows:
                has_rows = True
                yield row
            if not has_rows:
                return
            epoch += 1


def is_shuffled(rows: datasets.IterableDataset) -> bool:
    """Whether a stream, or a part of one, is drawn from a shuffle buffer.

    Private: `_ex_iterable` of a stream, and the parts that it is made of (datasets 5.2, iterable_dataset.py). Nothing
    public says it, and `set_epoch` would also change the order of the files of a stream that nobody has shuffled.
    """
    from datasets.iterable_dataset import BufferShuffledExamplesIterable

    waiting = [rows._ex_iterable]
    while waiting:
        part = waiting.pop()
        if isinstance(part, BufferShuffledExamplesIterable):
            return True
        waiting += getattr(part, "ex_iterables", [])
        if hasattr(part, "ex_iterable"):
            waiting.append(part.ex_iterable)
    return False
