"""How a model is asked: greedy answers, and the loss of the answers wanted; in a run, and of a saved model (ask/)."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from zero_recipes.data.samples import Sample


@torch.no_grad()
def generate_texts(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, samples: list[Sample], max_new_tokens: int, device
) -> list[str]:
    """Greedy answers to one batch of samples, without blanks around them.

    Collective where the model is sharded (ZeRO stage 3, FSDP): transformers keeps the ranks together then.
    """
    room, max_new_tokens = places(model, max_new_tokens)
    rows = [(prompt_ids(tokenizer, s) or _start(tokenizer))[-room:] for s in samples]
    ids, mask = _pad(rows, tokenizer.pad_token_id, left=True)
    answered = model.generate(
        input_ids=ids.to(device),
        attention_mask=mask.to(device),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
        synced_gpus=None,  # transformers turns it on where ranks must move together (ZeRO stage 3, FSDP)
    )
    return [text.strip() for text in tokenizer.batch_decode(answered[:, ids.shape[1] :], skip_special_tokens=True)]


@torch.no_grad()
def reference_losses(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, samples: list[Sample], device
) -> list[float | None]:
    """Mean negative log-likelihood per reference token, in nats; None where a row has none. A forward pass runs even
    where no row has any, for the other ranks need it under stage 3."""
    ids, mask = _pad([s.ids or _start(tokenizer) for s in samples], tokenizer.pad_token_id, left=False)
    logits = model(input_ids=ids.to(device), attention_mask=mask.to(device), use_cache=False).logits
    losses: list[float | None] = []
    for sample, line in zip(samples, logits, strict=True):
        target = torch.tensor(sample.labels[1:], device=device)  # a row's first token is never predicted
        if not (target != -100).any():
            losses.append(None)
            continue
        losses.append(torch.nn.functional.cross_entropy(line[: len(target)].float(), target).item())
    return losses


def places(model: PreTrainedModel, max_new_tokens: int) -> tuple[int, int]:
    """(tokens of a prompt, tokens of its answer) that the model has places for. At least half of them are the
    prompt's: one that is longer loses its beginning."""
    count = getattr(model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
    room = max(count - max_new_tokens, count // 2, 1)
    return room, max(1, min(max_new_tokens, count - room))


def prompts_cut(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, samples: list[Sample], max_new_tokens: int
) -> str | None:
    """How many prompts are longer than what the model takes beside its answer, in words; None where none is."""
    room, _ = places(model, max_new_tokens)
    longer = sum(len(prompt_ids(tokenizer, sample)) > room for sample in samples)
    if not longer:
        return None
    return (
        f"sample prompts: of {longer} the last {room:,} tokens are asked, more the model does not take with its answer"
    )


def prompt_ids(tokenizer: PreTrainedTokenizerBase, sample: Sample) -> list[int]:
    return tokenizer(sample.prompt, add_special_tokens=not sample.templated)["input_ids"]


def _start(tokenizer) -> list[int]:
    """What a model is asked that is asked nothing."""
    return [tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id]


def _pad(rows: Sequence[Sequence[int]], pad: int, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, mask), both (rows, longest row)."""
    width = max(map(len, rows))
    fill = [[pad] * (width - len(row)) for row in rows]
    gap = [[0] * len(f) for f in fill]
    ones = [[1] * len(row) for row in rows]
    rows = [list(row) for row in rows]
    join = (lambda a, b: b + a) if left else (lambda a, b: a + b)
    ids = [join(row, f) for row, f in zip(rows, fill, strict=True)]
    mask = [join(one, g) for one, g in zip(ones, gap, strict=True)]
    return torch.tensor(ids), torch.tensor(mask)
