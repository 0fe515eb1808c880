"""The same prompts before and after training: answered by all ranks under every strategy, scored on rank 0."""

import math
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch.nn.functional import cross_entropy
from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase, Trainer

from zero_recipes.core.files import strict_json, write_text
from zero_recipes.core.tables import plain, print_texts, terminal
from zero_recipes.data.samples import Sample
from zero_recipes.engine import fsdp
from zero_recipes.engine.deepspeed import forget_trace_of_generation
from zero_recipes.metrics.read_runs import SampleRow, mean_scores, question, short


@dataclass
class Answers:
    """What the model answered, in the order of the samples; losses: mean over the reference's tokens, None without."""

    texts: list[str]
    reference_losses: list[float | None]


@torch.no_grad()
def generate_texts(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, samples: list[Sample], max_new_tokens: int, device
) -> list[str]:
    """Greedy answers to one batch of samples, without blanks around them. Collective where the model is sharded (ZeRO
    stage 3, FSDP): transformers keeps the ranks together then."""
    room, max_new_tokens = places(model, max_new_tokens)
    rows = [(prompt_ids(tokenizer, sample) or _start(tokenizer))[-room:] for sample in samples]
    inputs = _padded(tokenizer, rows, "left").to(device)
    answered = model.generate(
        **inputs,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
    )
    new = answered[:, inputs["input_ids"].shape[1] :]
    return [text.strip() for text in tokenizer.batch_decode(new, skip_special_tokens=True)]


@torch.no_grad()
def reference_losses(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, samples: list[Sample], device
) -> list[float | None]:
    """Mean negative log-likelihood per reference token, in nats; None where a row has none. A forward pass runs even
    where no row has any, for the other ranks need it under stage 3."""
    inputs = _padded(tokenizer, [list(sample.ids) or _start(tokenizer) for sample in samples], "right")
    logits = model(**inputs.to(device), use_cache=False).logits
    targets = [torch.tensor(sample.labels[1:], device=device) for sample in samples]  # the first is never predicted
    return [
        cross_entropy(line[: len(target)].float(), target).item() if (target != -100).any() else None
        for line, target in zip(logits, targets, strict=True)
    ]


def places(model: PreTrainedModel, max_new_tokens: int) -> tuple[int, int]:
    """(tokens of a prompt, of its answer) that the model has places for; at least half of them are the prompt's."""
    count = getattr(model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
    room = max(count - max_new_tokens, count // 2, 1)
    return room, max(1, min(max_new_tokens, count - room))


def print_prompts_cut(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, samples: list[Sample], max_new_tokens: int
) -> None:
    room, _ = places(model, max_new_tokens)
    longer = sum(len(prompt_ids(tokenizer, sample)) > room for sample in samples)
    if longer:
        print(f"sample prompts: {longer} are longer than the model's limit; only their last {room:,} tokens are used")


def prompt_ids(tokenizer: PreTrainedTokenizerBase, sample: Sample) -> list[int]:
    return tokenizer(sample.prompt, add_special_tokens=not sample.templated)["input_ids"]


def _start(tokenizer) -> list[int]:
    """The ids of an empty prompt: one token to start from."""
    return [tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id]


def _padded(tokenizer: PreTrainedTokenizerBase, rows: list[list[int]], side: str) -> BatchEncoding:
    """input_ids and attention_mask, both (rows, longest row)."""
    return tokenizer.pad({"input_ids": rows}, padding_side=side, return_attention_mask=True, return_tensors="pt")


def answer(
    trainer: Trainer, samples: list[Sample], max_new_tokens: int, before_batch: Callable[[], None] = lambda: None
) -> Answers:
    """Greedy answers to all samples. Collective: every rank calls it, each answers its share. Under ZeRO stage 3 every
    forward pass gathers parameters from all ranks, so all take the same number of batches and `synced_gpus` keeps them
    generating until the slowest has ended."""
    if not samples:
        return Answers([], [])
    world, rank = trainer.accelerator.num_processes, trainer.accelerator.process_index
    share = -(-len(samples) // world)
    mine = [(i % len(samples)) for i in range(rank * share, (rank + 1) * share)]  # the last share wraps around
    model, batch = trainer.model, trainer.args.per_device_eval_batch_size
    tokenizer, device = trainer.processing_class, trainer.accelerator.device
    was_training = model.training
    model.eval()
    answered = []
    for start in range(0, share, batch):
        before_batch()
        chosen = mine[start : start + batch]
        part = [samples[i] for i in chosen]
        texts = generate_texts(model, tokenizer, part, max_new_tokens, device)
        losses = reference_losses(model, tokenizer, part, device)
        answered += list(zip(chosen, texts, losses, strict=True))
    model.train(was_training)
    forget_trace_of_generation(trainer.model_wrapped)
    fsdp.reshard_model(trainer.model)
    everyone = {i: (text, loss) for i, text, loss in gather_object(answered)}
    return Answers([everyone[i][0] for i in range(len(samples))], [everyone[i][1] for i in range(len(samples))])


def answer_before(trainer: Trainer, samples: list[Sample], max_new_tokens: int) -> Answers:
    """`answer` before the first step of this process, with what is worth knowing on rank 0. Collective."""
    if trainer.args.process_index == 0 and samples:
        if trainer.state.global_step:
            print(f"sample prompts: `before` has the answers after step {trainer.state.global_step}", flush=True)
        print_prompts_cut(trainer.model, trainer.processing_class, samples, max_new_tokens)
    return answer(trainer, samples, max_new_tokens)


def answers_carried(history: dict[str, Any], samples: list[Sample]) -> Answers | None:
    """The answers that a checkpoint's history carries; None where it has none or was given other prompts."""
    before = history.get("answers_before") or {}
    if before.get("prompts") != [sample.prompt for sample in samples]:
        return None
    return Answers(before["texts"], before["reference_losses"])


def text_scores(answer: str, reference: str) -> dict[str, float]:
    """exact_match, but for white space at both ends; token_f1: of bags of words, as SQuAD's but case sensitive."""
    words, expected = answer.split(), reference.split()
    common = sum((Counter(words) & Counter(expected)).values())
    f1 = 2 * common / (len(words) + len(expected)) if words or expected else 1.0
    return {"exact_match": float(answer.strip() == reference.strip()), "token_f1": f1}


def sample_rows(
    samples: list[Sample],
    before: Answers | None,
    after: Answers,
    compare: Callable[[str, str], dict[str, float]] = text_scores,
) -> list[SampleRow]:
    """Rows of samples.jsonl. `before`: None where there is no base answer. No scores where there is no reference."""

    def scores(sample: Sample, answers: Answers, number: int) -> dict[str, float | None]:
        if sample.reference is None:
            return {}
        loss = answers.reference_losses[number]
        loss = loss if loss is not None and math.isfinite(loss) else None
        return compare(answers.texts[number], sample.reference) | {"reference_loss": loss}

    return [
        SampleRow(
            prompt=sample.prompt,
            before=None if before is None else before.texts[i],
            after=after.texts[i],
            reference=sample.reference,
            scores_before={} if before is None else scores(sample, before, i),
            scores_after=scores(sample, after, i),
        )
        for i, sample in enumerate(samples)
    ]


def write_rows(path: Path, rows: list[SampleRow]) -> None:
    """samples.jsonl: one line per prompt, whole or not at all."""
    write_text(path, "".join(strict_json(row.model_dump()) + "\n" for row in rows))


def show_samples(rows: list[SampleRow], source: str, most: int = 6) -> None:
    """Print the first rows and the mean scores as tables. `source`: where the prompts come from."""
    console = terminal()
    columns = {name: [getattr(row, name) for row in rows[:most]] for name in ("prompt", "before", "after", "reference")}
    columns["prompt"] = [question(prompt) for prompt in columns["prompt"]]
    columns = {name: texts for name, texts in columns.items() if any(text is not None for text in texts)}
    texts = [[*map(short, row)] for row in zip(*columns.values(), strict=True)]
    print_texts(f"Before and after ({len(texts)} of {len(rows)} prompts, {source})", tuple(columns), texts, console)
    for name, (before, after, count) in mean_scores(rows).items():
        line = "" if before is None else f"{before:#8.4g} before  "
        console.print(plain(f"  {name:15s} {line}{after:#8.4g} after  ({count} rows)"), soft_wrap=True)
