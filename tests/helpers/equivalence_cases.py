"""Cases of tests/helpers/group.py: the reference, a plain PyTorch loop in fp32, without Trainer, accelerate, DeepSpeed
or micro batches."""

from collections.abc import Iterator

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, PreTrainedModel

import run_sft
from zero_recipes.data.load import load_tokenizer
from zero_recipes.data.prepare import prepare_rows

Rows = list[dict[str, list[int]]]


def token_losses(model: PreTrainedModel, rows: Rows) -> list[torch.Tensor]:
    """The losses of each row's tokens that have one. Rows are padded on the right; padding has no loss."""

    def padded(key: str, fill: int) -> torch.Tensor:
        return pad_sequence([torch.tensor(row[key]) for row in rows], batch_first=True, padding_value=fill)

    ids, targets = padded("input_ids", 0), padded("labels", -100)[:, 1:]
    mask = pad_sequence([torch.ones(len(row["input_ids"]), dtype=torch.long) for row in rows], batch_first=True)
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
    losses = cross_entropy(logits.transpose(1, 2), targets, ignore_index=-100, reduction="none")
    return [row[target != -100] for row, target in zip(losses, targets, strict=True)]


def token_weighted(losses: list[torch.Tensor]) -> torch.Tensor:
    """The mean over all tokens of the global batch."""
    return torch.cat(losses).mean()


def global_batches(rows: int, size: int, seed: int) -> Iterator[list[int]]:
    """Row numbers of one optimizer step after another, for ever; an epoch's last batch may be shorter."""
    epoch = 0
    while True:
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed + epoch)).tolist()
        yield from (order[start : start + size] for start in range(0, rows, size))
        epoch += 1


def reference(folder: str, rows: Rows, values: dict) -> tuple[PreTrainedModel, list[float]]:
    """(model, losses) of AdamW with a linear schedule.

    `values`: a recipe's max_steps, global_batch_size, learning_rate, weight_decay, max_grad_norm, data_seed.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": values["weight_decay"]}, {"params": vectors, "weight_decay": 0.0}]
    )
    losses = []
    batches = global_batches(len(rows), values["global_batch_size"], values["data_seed"])
    for step in range(values["max_steps"]):
        for group in optimizer.param_groups:
            group["lr"] = values["learning_rate"] * (1 - step / values["max_steps"])
        loss = token_weighted(token_losses(model, [rows[i] for i in next(batches)]))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), values["max_grad_norm"])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return model, losses


def prepared(argv: list[str]) -> tuple:
    """(the recipe's values, its ModelConfig, training rows, evaluation rows) as run_sft.py would have them."""
    run = run_sft.read_run(argv)
    _, training_args, model_args, _ = run.trl_arguments()
    rows = prepare_rows(run.settings, training_args, load_tokenizer(run.settings))
    return run.settings.as_dict(), model_args, list(rows.train), list(rows.evaluation or ())


def train_plainly(argv: list[str], folder: str) -> dict:
    """The reference run of a recipe; its model is saved in `folder`."""
    values, model_args, rows, _ = prepared(argv)
    model, losses = reference(model_args.model_name_or_path, rows, values)
    model.save_pretrained(folder)
    return {"losses": losses}


def evaluate_plainly(argv: list[str]) -> float:
    """The token-weighted loss of the model, before training, over the whole evaluation split."""
    _, model_args, _, rows = prepared(argv)
    model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path, dtype=torch.float32)
    with torch.no_grad():
        return float(token_weighted(token_losses(model, rows)))
