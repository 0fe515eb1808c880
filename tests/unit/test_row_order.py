"""Which rows of an epoch are repeated, and in which order rows come: without a launch, by accelerate's own samplers."""

from __future__ import annotations

import random
from itertools import islice

import datasets
import pytest
import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader

from zero_recipes.data.prepare import read_whole
from zero_recipes.libs.huggingface import rows_left_over
from zero_recipes.training.token_loss import CollatorWithRowLengths, EndlessRows, kept_rows, tokens_after, without_loss


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
    """100 epochs drawn at random, on up to 5 ranks, with more places than rows among them."""
    draw, repeated = random.Random(11), 0
    for _ in range(100):
        world, split, drop_last = draw.randint(2, 5), draw.random() < 0.2, draw.random() < 0.2
        size = draw.randint(1, 5) * (world if split else 1)
        rows = draw.randint(1, 60)
        counted, seen = [], 0
        ranks = loaders(rows, size, world, drop_last, split, draw.random() < 0.5)
        left_over = {rows_left_over(loader) for loader in ranks}.pop()
        for rank, loader in enumerate(ranks):
            batches = list(loader.batch_sampler)
            seen += sum(len(batch) for batch in batches)
            if batches and left_over:
                batches[-1] = batches[-1][: kept_rows(len(batches[-1]), left_over, rank)]
            counted += [row for batch in batches for row in batch]
        assert len(set(counted)) == len(counted), (rows, size, world, split, drop_last)
        if drop_last:
            assert len(counted) == seen and rows_left_over(ranks[0]) == 0
        else:
            assert sorted(counted) == list(range(rows))
        repeated += seen - len(counted)
    assert repeated > 150, "no row was repeated"


def test_nothing_is_filled_on_one_process_or_where_batches_are_rebalanced():
    assert rows_left_over(Accelerator(cpu=True).prepare(DataLoader(range(7), batch_size=2))) == 0
    (loader, _) = loaders(7, 2, 2, False, False, False)
    loader.batch_sampler.batch_size = None  # transformers' BatchRebalanceSampler has none
    assert rows_left_over(loader) == 0


@pytest.mark.private
def test_counting_the_rows_left_over_is_still_needed():
    """Fails when accelerate keeps the count where batches are skipped: then read GradientState.remainder alone."""
    (loader, _) = loaders(51, 2, 2, False, False, False)
    (dropping, _) = loaders(51, 2, 2, True, False, False)
    counts = []
    for each in (loader, skip_first_batches(loader, 3)):
        for _ in each:
            counts.append(each.gradient_state.remainder)
    assert counts[0] == 3 == rows_left_over(loader) and counts[-1] == -1
    assert dropping._drop_last and not skip_first_batches(dropping, 3)._drop_last


def test_the_tokens_of_repeated_rows_are_found_where_rows_stand_in_one():
    draw = random.Random(12)
    for _ in range(100):
        lengths = [draw.randint(1, 9) for _ in range(draw.randint(1, 6))]
        padding, kept = draw.randint(0, 4), draw.randint(0, len(lengths))
        rows = [{"input_ids": [1] * length} for length in lengths]
        flat = [number for number, length in enumerate(lengths) for _ in range(length)]

        def collate(given: list[dict], flat=flat, padding=padding) -> dict:
            return {"labels": torch.tensor([flat + [-100] * padding])}

        batch = CollatorWithRowLengths(collate)(rows)
        without_loss(batch, tokens_after(batch["labels"], kept, batch["row_lengths"]))
        assert [label for label in batch["labels"][0].tolist() if label != -100] == [n for n in flat if n < kept]
        lines = {"labels": torch.zeros(len(lengths), 9, dtype=torch.long)}
        without_loss(lines, tokens_after(lines["labels"], kept, None))
        assert (lines["labels"] != -100).all(dim=1).tolist() == [n < kept for n in range(len(lengths))]


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


def test_an_evaluation_stream_is_read_whole(tmp_path):
    rows = read_whole(streamed(tmp_path, [3, 0, 5], 0).map(lambda row: {"twice": 2 * row["row"]}))
    assert isinstance(rows, datasets.Dataset) and rows["twice"][:] == [0, 2, 4, 6, 8, 10, 12, 14]
