"""Which rows and tokens count, in which order rows come, and what is logged of them."""

import random
from itertools import islice
from pathlib import Path

import datasets
import pytest
import torch
from accelerate import skip_first_batches
from accelerate.data_loader import prepare_data_loader
from datasets import Dataset
from torch.utils.data import DataLoader, RandomSampler
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaForCausalLM, PreTrainedModel
from transformers.trainer_pt_utils import LengthGroupedSampler
from trl import SFTConfig

from tests.helpers.tiny import ROOT, llama_config
from zero_recipes.engine.faults.end_of_stream import EndlessRows
from zero_recipes.engine.faults.rows_left_over import rows_left_over
from zero_recipes.engine.faults.sampler_epochs import begin_epoch
from zero_recipes.training.token_loss import TokenMetrics, tokens_repeated
from zero_recipes.training.trainer import ZeroSFTTrainer


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
                in_one = [row for row, n in zip(last, lengths, strict=True) for _ in range(n)]
                flat = torch.tensor([[*in_one, -100, -100]])
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


def endless(rows: datasets.IterableDataset, count: int) -> list[int]:
    return [row["row"] for row in islice(iter(EndlessRows(rows)), count)]


@pytest.mark.parametrize("counts", [[9], [4, 4, 2]], ids=["a file", "files"])
def test_a_shuffled_stream_has_all_of_its_rows_in_another_order_each_time(tmp_path, counts):
    rows = streamed(tmp_path, counts, 0)
    size = sum(counts)
    as_trl = rows.map(lambda row: row).shuffle(seed=0)
    for stream in (rows.shuffle(seed=0), as_trl):
        found = endless(stream, 3 * size)
        epochs = [found[start : start + size] for start in range(0, 3 * size, size)]
        assert [sorted(epoch) for epoch in epochs] == [list(range(size))] * 3
        assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
        assert epochs[0] == [row["row"] for row in stream.take(size)], "the first is the stream's own"
        assert endless(stream, 3 * size) == found, "a resumed run reads it again from its start"
    assert endless(rows, 2 * size) == list(range(size)) * 2, "one that nobody has shuffled keeps its order"


def test_shuffled_streams_give_the_same_batches_to_any_number_of_processes(tmp_path):
    """Also a mixture, of which an epoch draws other rows; whole, and by a run that is resumed in a later epoch."""
    first, second = streamed(tmp_path, [7], 0), streamed(tmp_path, [5, 3], 1)
    second = second.map(lambda row: {"row": row["row"] + 100})
    drawn = datasets.interleave_datasets([first, second], [0.5, 0.5], seed=0, stopping_strategy="all_exhausted")
    joined = datasets.concatenate_datasets([first, second])
    for rows in (first, second, drawn, joined):
        wanted = endless(rows.shuffle(seed=3), 48)
        for world in (1, 2, 3):
            ranks = []
            for rank in range(world):
                loader = DataLoader(EndlessRows(rows.shuffle(seed=3)), batch_size=2, collate_fn=list)
                prepared = prepare_data_loader(loader, num_processes=world, process_index=rank, dispatch_batches=False)
                steps = 48 // (2 * world)
                ranks.append(list(islice(iter(prepared), steps)))
                rest = list(islice(iter(skip_first_batches(prepared, steps - 2)), 2))
                assert rest == ranks[rank][-2:], "a resumed run takes other rows"
            order = [row["row"] for step in range(steps) for rank in range(world) for row in ranks[rank][step]]
            assert order == wanted


def test_an_empty_stream_ends(tmp_path):
    assert endless(streamed(tmp_path, [3], 0).filter(lambda row: False).shuffle(seed=0), 3) == []


@pytest.mark.parametrize("kind", ["random", "group_by_length"])
def test_the_order_of_an_epoch_follows_from_its_seed_and_number_alone(kind):
    def order(epoch: int, seed: int, drawn_before: int = 0) -> list[int]:
        torch.manual_seed(drawn_before)
        lengths = [1 + row % 7 for row in range(64)]
        sampler = RandomSampler(lengths) if kind == "random" else LengthGroupedSampler(4, lengths=lengths)
        begin_epoch(sampler, epoch, seed)
        return list(sampler)

    assert sorted(order(1, seed=3)) == list(range(64))
    assert order(1, seed=3) == order(1, seed=3, drawn_before=9)
    assert order(1, seed=3) != order(2, seed=3)
    assert order(1, seed=3) != order(1, seed=30)


@pytest.mark.parametrize("packed, loss_type", [(False, "nll"), (True, "nll"), (False, "dft")])
def test_the_loss_and_the_log_are_trls_without_a_gather_a_micro_batch(tmp_path, monkeypatch, packed, loss_type):
    draw, trainer = random.Random(f"{packed}{loss_type}"), made(tmp_path, loss_type)
    model = trainer.model
    gathered, gather = [], trainer.accelerator.gather
    monkeypatch.setattr(trainer.accelerator, "gather", lambda tensor: gathered.append(1) or gather(tensor))
    batches = [batch(draw, packed) for _ in range(5)]
    model.train()
    found = {}
    for when in ("micro_batch", "logging_steps"):
        trainer.token_metrics, trainer._total_train_tokens, before = TokenMetrics(trainer, when), 0, len(gathered)
        losses = [trainer.compute_loss(model, dict(each), num_items_in_batch=torch.tensor(11)) for each in batches]
        losses.append(trainer.compute_loss(model, dict(batches[0])))  # without a count: the mean of its own tokens
        waited = len(gathered) - before
        trainer.log({})
        log = {key: value for key, value in trainer.state.log_history[-1].items() if key != "epoch"}
        found[when] = [loss.item() for loss in losses], log, waited
    trl, ours = found["micro_batch"], found["logging_steps"]
    assert ours[0] == trl[0] and ours[1] == pytest.approx(trl[1], rel=1e-6)
    assert {"entropy", "mean_token_accuracy", "num_tokens"} <= set(ours[1])
    assert (trl[2], ours[2]) == (24, 24 if loss_type == "dft" else 0)


def made(folder: Path, loss_type: str = "nll", model: PreTrainedModel | None = None, **keys) -> ZeroSFTTrainer:
    torch.manual_seed(7)
    model = model or LlamaForCausalLM(llama_config(num_hidden_layers=1))
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tiny_world" / "base")
    args = SFTConfig(output_dir=str(folder), use_cpu=True, bf16=False, report_to=[], loss_type=loss_type, **keys)
    rows = Dataset.from_dict({"input_ids": [[5, 6, 7]], "labels": [[5, 6, 7]]})
    return ZeroSFTTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer)


class Uncounted(LlamaForCausalLM):
    """Takes no count of tokens for a loss of its own, as Gemma 3n."""

    accepts_loss_kwargs = False


MODELS = {
    "Llama": lambda: LlamaForCausalLM(llama_config(num_hidden_layers=1)),
    "without a count": lambda: Uncounted(llama_config(num_hidden_layers=1)),
    "without a type of loss": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=1031, n_embd=8, n_layer=1, n_head=2)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_steps_tokens_with_a_loss_are_counted_for_every_model(tmp_path, name):
    """Each row's first token has none, though it has a label."""
    trainer = made(tmp_path, model=MODELS[name]())
    trainer.callback_handler.train_dataloader = trainer.get_train_dataloader()
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 8]])
    batches = [{"input_ids": ids, "labels": ids.clone()} for _ in range(2)]
    batches[1]["labels"][:, :2] = -100
    _, count = trainer.get_batch_samples(iter(batches), 2, torch.device("cpu"))
    assert count == 2 * 3 + 2 * 2


def test_an_evaluations_accuracy_is_a_mean_over_tokens_not_over_batches(tmp_path):
    trainer, draw = made(tmp_path), random.Random(3)
    trainer.model.eval()
    right = supervised = 0
    for each in (batch(draw, packed=False) for _ in range(5)):
        with torch.no_grad():
            trainer.compute_loss(trainer.model, dict(each))
            best = trainer.model(each["input_ids"], attention_mask=each["attention_mask"]).logits[:, :-1].argmax(-1)
        wanted = each["labels"][:, 1:]
        right += int((best == wanted).sum())
        supervised += int((wanted != -100).sum())
    trainer.log({})
    assert trainer.state.log_history[-1]["eval_mean_token_accuracy"] == pytest.approx(right / supervised)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_an_evaluations_loss_is_a_mean_over_the_tokens_that_have_one(tmp_path, batch_size):
    """A row's first token is predicted by none. The rows: long ones and short ones, one in part, one without loss."""
    draw = random.Random(5)
    ids = [[draw.randrange(5, 1000) for _ in range(length)] for length in (40, 2, 3, 2, 25, 7)]
    labels = [[*row] for row in ids]
    labels[4][:20] = [-100] * 20
    labels[5] = [-100] * 7
    trainer = made(tmp_path, per_device_eval_batch_size=batch_size)
    found = trainer.evaluate(Dataset.from_dict({"input_ids": ids, "labels": labels}))["eval_loss"]
    summed = tokens = 0.0
    for row, wanted in zip(ids, labels, strict=True):
        logits = trainer.model(torch.tensor([row])).logits[0, :-1]
        losses = torch.nn.functional.cross_entropy(logits, torch.tensor(wanted[1:]), reduction="none")  # 0 of -100
        summed += losses.sum().item()
        tokens += sum(label != -100 for label in wanted[1:])
    assert tokens == 39 + 1 + 2 + 1 + 5 and found == pytest.approx(summed / tokens, rel=1e-5)


def batch(draw: random.Random, packed: bool) -> dict[str, torch.Tensor]:
    """Rows of any length with padding, or one line without a mask; in one of five no token has a loss."""
    shape = (1, draw.randint(5, 30)) if packed else (draw.randint(1, 4), draw.randint(5, 30))
    ids = torch.randint(5, 1000, shape)
    labels = ids.masked_fill(torch.rand(shape) < draw.choice([0.3, 0.5, 0.7, 0.9, 1.0]), -100)
    if packed:
        return {"input_ids": ids, "labels": labels, "position_ids": torch.arange(shape[1]).unsqueeze(0)}
    mask = torch.arange(shape[1]) < torch.randint(3, shape[1] + 1, (shape[0], 1))
    return {"input_ids": ids, "labels": labels.masked_fill(~mask, -100), "attention_mask": mask.long()}
