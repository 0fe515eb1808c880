"""Which rows of an epoch are repeated, and in which order rows come: without a launch, by accelerate's own samplers."""

import random
from itertools import islice

import datasets
import torch
from accelerate import skip_first_batches
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader

from zero_recipes.libs.huggingface import rows_left_over
from zero_recipes.training.token_loss import EndlessRows, tokens_repeated


def loaders(rows: int, size: int, world: int, drop_last: bool, split: bool, shuffle: bool) -> list:
    """The training data loader of each rank, as accelerate makes it."""
    return [
        prepare_data_loader(
            DataLoader(range(rows), batch_size=size, drop_last=drop_last, shuffle=shuffle, collate_fn=list),
            num_processes=world,
            process_index=rank,
            split_batches=split,
            use_seedable_sampler=True,
            data_seed=3,
        )
        for rank in range(world)
    ]


def test_every_row_of_an_epoch_counts_once_whatever_is_repeated():
    """100 epochs drawn at random, on up to 5 ranks, rows in lines of their own and in one."""
    draw, repeated = random.Random(11), 0
    for _ in range(100):
        world, split, drop_last = draw.randint(2, 5), draw.random() < 0.2, draw.random() < 0.2
        size = draw.randint(1, 5) * (world if split else 1)
        rows = draw.randint(1, 60)
        counted, seen = [], 0
        ranks = loaders(rows, size, world, drop_last, split, draw.random() < 0.5)
        left_over = {rows_left_over(loader) for loader in ranks}.pop()
        for rank, loader in enumerate(ranks):
            *others, last = list(loader.batch_sampler) or [[]]
            seen += sum(map(len, [*others, last]))
            if last and left_over:
                labels = torch.tensor(last).unsqueeze(1).repeat(1, 3)
                kept = labels[~tokens_repeated(labels, None, left_over, rank)].reshape(-1, 3)[:, 0].tolist()
                lengths = [draw.randint(1, 4) for _ in last]
                flat = torch.tensor(
                    [[row for row, n in zip(last, lengths, strict=True) for _ in range(n)] + [-100] * 2]
                )
                in_one = flat[~tokens_repeated(flat, lengths, left_over, rank)].tolist()
                assert list(dict.fromkeys(row for row in in_one if row != -100)) == list(dict.fromkeys(kept))
                last = kept
            counted += [row for batch in [*others, last] for row in batch]
        assert len(set(counted)) == len(counted), (rows, size, world, split, drop_last)
        if drop_last:
            assert len(counted) == seen and rows_left_over(ranks[0]) == 0
        else:
            assert sorted(counted) == list(range(rows))
        repeated += seen - len(counted)
    assert repeated > 150, "no row was repeated"


def streamed(folder, counts: list[int], seed: int) -> datasets.IterableDataset:
    """Rows numbered from 0 in as many files as there are counts."""
    start = 0
    for number, count in enumerate(counts):
        path = folder / f"{seed}-{number}.jsonl"
        path.write_text("".join(f'{{"row": {row}}}\n' for row in range(start, start + count)))
        start += count
    files = {"train": [str(folder / f"{seed}-{number}.jsonl") for number in range(len(counts))]}
    return datasets.load_dataset("json", data_files=files, streaming=True, split="train")


def test_a_stream_gives_the_same_batches_to_any_number_of_processes_and_has_no_end(tmp_path):
    """However many files it has, and however uneven they are."""
    draw = random.Random(13)
    for seed in range(8):
        counts = [draw.randint(1, 9) for _ in range(draw.randint(1, 4))]
        rows, world, size = streamed(tmp_path, counts, seed), draw.randint(1, 4), draw.randint(1, 4)
        ranks = [
            prepare_data_loader(
                DataLoader(EndlessRows(rows), batch_size=size, collate_fn=lambda given: [row["row"] for row in given]),
                num_processes=world,
                process_index=rank,
                dispatch_batches=False,
            )
            for rank in range(world)
        ]
        steps = 3 * sum(counts) // (size * world) + 2
        taken = [list(islice(iter(loader), steps)) for loader in ranks]
        order = [row for step in range(steps) for rank in range(world) for row in taken[rank][step]]
        assert order == [number % sum(counts) for number in range(steps * size * world)]
        skipped = [list(islice(iter(skip_first_batches(loader, steps - 2)), 2)) for loader in ranks]
        assert skipped == [batches[-2:] for batches in taken], "a resumed run takes other rows"
