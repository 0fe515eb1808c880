"""Supervised fine-tuning of the tiny base on the CPU, and the scores of its answers.

A plain loop that does in one process what the demo does under DeepSpeed: the same prompt, a loss on the answer
alone, and bfloat16 weights that are rounded from a float32 copy after every step.
"""

import math
import random
from collections import Counter

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from tiny_world.pretrain import BASE
from tiny_world.world import Row
from zero_recipes.data.forms import alpaca_prompt

ROWS_PER_STEP = 16
WARMUP_STEPS = 6
LONGEST_ANSWER = 40  # tokens; the longest reference has fewer (a test holds this)


def encode(tokenizer: PreTrainedTokenizerBase, row: Row) -> tuple[list[int], list[int]]:
    """Token ids of the prompt, and of the answer with the end-of-text token."""
    prompt = tokenizer(alpaca_prompt(row["instruction"], row["input"]))["input_ids"]
    return prompt, [*tokenizer(row["output"])["input_ids"], tokenizer.eos_token_id]


def collate(tokenizer: PreTrainedTokenizerBase, rows: list[Row]) -> dict[str, torch.Tensor]:
    """A batch padded on the right, every tensor [rows, longest]; labels are -100 on prompts and padding."""
    pairs = [encode(tokenizer, row) for row in rows]
    width = max(len(prompt) + len(answer) for prompt, answer in pairs)
    batch: dict[str, list[list[int]]] = {"input_ids": [], "attention_mask": [], "labels": []}
    for prompt, answer in pairs:
        used = len(prompt) + len(answer)
        batch["input_ids"].append(prompt + answer + [tokenizer.pad_token_id] * (width - used))
        batch["attention_mask"].append([1] * used + [0] * (width - used))
        batch["labels"].append([-100] * len(prompt) + answer + [-100] * (width - used))
    return {name: torch.tensor(values) for name, values in batch.items()}


def tune(
    tokenizer: PreTrainedTokenizerBase,
    rows: list[Row],
    learning_rate: float,
    steps: int,
    seed: int,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[PreTrainedModel, list[float]]:
    """Fine-tune the base; returns the model and the loss of every step (nats per answer token).

    The optimiser is the Trainer's default (AdamW, no weight decay, gradients clipped to norm 1), the schedule a
    linear warm-up and a cosine to zero. The seed gives the order of the rows, new in every pass over them.
    """
    model = AutoModelForCausalLM.from_pretrained(BASE, dtype=dtype)
    weights = list(model.parameters())
    master = [weight.detach().float().clone() for weight in weights]
    optimizer = torch.optim.AdamW(master, lr=learning_rate, weight_decay=0.0)
    rng, waiting, losses = random.Random(seed), [], []
    model.train()
    for step in range(steps):
        if step < WARMUP_STEPS:
            factor = step / WARMUP_STEPS
        else:
            factor = 0.5 * (1 + math.cos(math.pi * (step - WARMUP_STEPS) / (steps - WARMUP_STEPS)))
        optimizer.param_groups[0]["lr"] = learning_rate * factor
        if len(waiting) < ROWS_PER_STEP:
            waiting += rng.sample(rows, len(rows))
        taken, waiting = waiting[:ROWS_PER_STEP], waiting[ROWS_PER_STEP:]
        loss = model(**collate(tokenizer, taken)).loss
        loss.backward()
        for weight, copy in zip(weights, master, strict=True):
            copy.grad, weight.grad = weight.grad.float(), None
        torch.nn.utils.clip_grad_norm_(master, 1.0)
        optimizer.step()
        with torch.no_grad():
            for weight, copy in zip(weights, master, strict=True):
                weight.copy_(copy)  # rounds to the dtype of the weight
        losses.append(loss.item())
    return model, losses


@torch.no_grad()
def answers(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: list[Row], batch: int = 120) -> list[str]:
    """The model's answer to every row: the likeliest token each time, up to the end of text."""
    model.eval()
    answered = []
    for first in range(0, len(rows), batch):
        prompts = [alpaca_prompt(row["instruction"], row["input"]) for row in rows[first : first + batch]]
        inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
        out = model.generate(**inputs, max_new_tokens=LONGEST_ANSWER, do_sample=False)
        answered += tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return [text.strip() for text in answered]


@torch.no_grad()
def reference_loss(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: list[Row], batch: int = 120
) -> float:
    """Mean loss of the tokens of the rows' outputs, end of text included (nats per token)."""
    model.eval()
    total, count = 0.0, 0
    for first in range(0, len(rows), batch):
        inputs = collate(tokenizer, rows[first : first + batch])
        tokens = int((inputs["labels"] != -100).sum())
        total += model(**inputs).loss.item() * tokens
        count += tokens
    return total / count


def token_f1(answer: str, reference: str) -> float:
    """F1 of the words that both share, counted with repeats; words are cut at blanks, as they are written."""
    mine, theirs = answer.split(), reference.split()
    shared = sum((Counter(mine) & Counter(theirs)).values())
    return 2 * shared / (len(mine) + len(theirs)) if shared else 0.0


def compare(answered: list[str], references: list[str]) -> dict[str, float]:
    """Exact match and mean token F1, both from 0 to 1."""
    pairs = list(zip(answered, references, strict=True))
    return {
        "exact_match": round(sum(a == b for a, b in pairs) / len(pairs), 4),
        "token_f1": round(sum(token_f1(a, b) for a, b in pairs) / len(pairs), 4),
    }


def shuffled_outputs(rows: list[Row], seed: int = 0) -> list[Row]:
    """The same prompts in the same order, each with the output of another row of the set."""
    order = random.Random(seed).sample(range(len(rows)), len(rows))
    source = dict(zip(order, order[1:] + order[:1], strict=True))
    return [{**row, "output": rows[source[i]]["output"]} for i, row in enumerate(rows)]
