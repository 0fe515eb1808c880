"""The same prompts before and after training: answered by all ranks under every strategy, scored on rank 0."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
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
from zero_recipes.engine.faults.trace_of_generation import forget_trace_of_generation
from zero_recipes.engine.faults.weights_read_in_generation import gather_where_read
from zero_recipes.metrics.read_runs import SampleRow, mean_scores, metric_errors, question, short
from zero_recipes.metrics.scores import scores_of


@dataclass
class Answers:
    """Answers to the sample prompts, in their order; losses: mean over the reference's tokens, None without."""

    texts: list[str]
    reference_losses: list[float | None]


@torch.no_grad()
def generate_texts(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, samples: list[Sample], max_new_tokens: int, device
) -> list[str]:
    """Answer one batch of prompts greedily.

    Collective where the model is sharded (ZeRO stage 3, FSDP): transformers keeps the ranks together then.
    """
    room, max_new_tokens = places(model, max_new_tokens)
    rows = []
    for sample in samples:
        ids = prompt_ids(tokenizer, sample) or _start(tokenizer)
        rows.append(ids[-room:])
    inputs = _padded(tokenizer, rows, "left").to(device)
    answered = model.generate(
        **inputs,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
    )
    new = answered[:, inputs["input_ids"].shape[1] :].tolist()
    # `decode` leaves out only those special tokens that the tokenizer was saved with: not an eos_token of the recipe
    special = set(tokenizer.all_special_ids)
    texts = []
    for ids in new:
        words = [token for token in ids if token not in special]
        texts.append(tokenizer.decode(words, skip_special_tokens=True).strip())
    return texts


@torch.no_grad()
def reference_losses(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, samples: list[Sample], device
) -> list[float | None]:
    """The mean negative log-likelihood per reference token of each sample, in nats; None where it has none.

    Collective where the model is sharded.
    """
    inputs = _padded(tokenizer, [list(sample.ids) or _start(tokenizer) for sample in samples], "right")
    logits = model(**inputs.to(device), use_cache=False).logits
    losses: list[float | None] = []
    for line, sample in zip(logits, samples, strict=True):
        target = torch.tensor(sample.labels[1:], device=device)  # the first is never predicted
        if (target != -100).any():
            losses.append(cross_entropy(line[: len(target)].float(), target).item())
        else:
            losses.append(None)
    return losses


def places(model: PreTrainedModel, max_new_tokens: int) -> tuple[int, int]:
    """How many tokens fit into the model: (of a prompt, of its answer). At least half of them are the prompt's."""
    count = getattr(model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
    room = max(count - max_new_tokens, count // 2, 1)
    return room, max(1, min(max_new_tokens, count - room))


def print_prompts_cut(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, samples: list[Sample], max_new_tokens: int
) -> None:
    """Say how many prompts are longer than the model has places for, if any is."""
    room, _ = places(model, max_new_tokens)
    longer = sum(len(prompt_ids(tokenizer, sample)) > room for sample in samples)
    if longer:
        print(f"sample prompts: {longer} are longer than the model's limit; only their last {room:,} tokens are used")


def prompt_ids(tokenizer: PreTrainedTokenizerBase, sample: Sample) -> list[int]:
    """The token ids of a sample's prompt; a chat template has put its special tokens in already."""
    return tokenizer(sample.prompt, add_special_tokens=not sample.templated)["input_ids"]


def _start(tokenizer) -> list[int]:
    """One token to start from, for an empty prompt."""
    return [tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id]


def _padded(tokenizer: PreTrainedTokenizerBase, rows: list[list[int]], side: str) -> BatchEncoding:
    """input_ids and attention_mask, both (rows, longest row)."""
    return tokenizer.pad({"input_ids": rows}, padding_side=side, return_attention_mask=True, return_tensors="pt")


def answer(
    trainer: Trainer, samples: list[Sample], max_new_tokens: int, before_batch: Callable[[], None] = lambda: None
) -> Answers:
    """Let the trainer's model answer the samples, each rank its share. Collective.

    Under ZeRO stage 3 every forward pass gathers parameters from all ranks: all take the same number of batches, and
    `synced_gpus` keeps them generating until the slowest has ended. `before_batch`: called before each batch.
    """
    if not samples:
        return Answers([], [])
    share = math.ceil(len(samples) / trainer.accelerator.num_processes)
    first = trainer.accelerator.process_index * share
    mine = [number % len(samples) for number in range(first, first + share)]  # the last share wraps around
    model = trainer.model
    tokenizer = trainer.processing_class
    device = trainer.accelerator.device
    batch = trainer.args.per_device_eval_batch_size
    was_training = model.training
    model.eval()
    answered = []
    gather_where_read(model, is_answering=True)
    for start in range(0, share, batch):
        before_batch()
        chosen = mine[start : start + batch]
        part = [samples[i] for i in chosen]
        texts = generate_texts(model, tokenizer, part, max_new_tokens, device)
        losses = reference_losses(model, tokenizer, part, device)
        answered += list(zip(chosen, texts, losses, strict=True))
    gather_where_read(model, is_answering=False)
    model.train(was_training)
    forget_trace_of_generation(trainer.model_wrapped)
    fsdp.reshard_model(trainer.model)
    texts = [""] * len(samples)
    losses: list[float | None] = [None] * len(samples)
    for number, text, loss in gather_object(answered):
        texts[number] = text
        losses[number] = loss
    return Answers(texts, losses)


def sample_rows(
    samples: list[Sample], before: Answers | None, after: Answers, metrics: Mapping[str, Any]
) -> list[SampleRow]:
    """The rows of samples.jsonl. A prompt without a reference has no scores.

    `before`: None where there is no base answer. `metrics`: {name: metric}.
    """

    def scored(sample: Sample, answers: Answers, number: int) -> tuple[dict[str, float | None], dict[str, str]]:
        if sample.reference is None:
            return {}, {}
        return scores_of(metrics, answers.texts[number], sample.reference, answers.reference_losses[number])

    rows = []
    for number, sample in enumerate(samples):
        scores, errors = scored(sample, after, number)
        row = {"prompt": sample.prompt, "reference": sample.reference, "scores_before": {}}
        row |= {"after": after.texts[number], "scores_after": scores}
        if before is not None:
            scores, errors_before = scored(sample, before, number)
            errors = errors_before | errors
            row |= {"before": before.texts[number], "scores_before": scores}
        rows.append(SampleRow(**row, errors=errors))
    return rows


def write_rows(path: Path, rows: list[SampleRow]) -> None:
    """Write samples.jsonl, one row a line."""
    lines = [strict_json(row.model_dump()) for row in rows]
    write_text(path, "".join(f"{line}\n" for line in lines))


def show_samples(rows: list[SampleRow], source: str, most: int = 6) -> None:
    """Print the first rows as a table, and the mean of each score over all rows. `source`: of the prompts."""
    console = terminal()
    shown = rows[:most]
    columns = ["prompt", "before", "after", "reference"]
    for name in ("before", "reference"):
        if all(getattr(row, name) is None for row in shown):
            columns.remove(name)
    texts = []
    for row in shown:
        cells = row.model_dump() | {"prompt": question(row.prompt)}
        texts.append([short(cells[name]) for name in columns])
    print_texts(f"Before and after ({len(texts)} of {len(rows)} prompts, {source})", tuple(columns), texts, console)
    for name, (before, after, count) in mean_scores(rows).items():
        line = f"{after:#8.4g} after  ({count} rows)"
        if before is not None:
            line = f"{before:#8.4g} before  {line}"
        console.print(plain(f"  {name:15s} {line}"), soft_wrap=True)
    for name, (error, count) in metric_errors(rows).items():
        line = f"no score of {count} of {len(rows)} rows, where it fails: {error}"
        console.print(plain(f"  {name:15s} {line}"), soft_wrap=True)


class SamplePrompts:
    """The prompts that a model answers before and after training, and its answers from before.

    A checkpoint carries those answers, since a resumed run's model is trained.

    Args:
        samples: the prompts, with references where there are any.
        max_new_tokens: of an answer.
        metrics: {name: metric} that answers are scored with.
    """

    def __init__(self, samples: Sequence[Sample], max_new_tokens: int, metrics: Mapping[str, Any]):
        self.samples = samples
        self.max_new_tokens = max_new_tokens
        self.metrics = metrics
        self.before: Answers | None = None

    @property
    def _prompts(self) -> list[str]:
        return [sample.prompt for sample in self.samples]

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps for `load_state_dict`, as JSON can hold it."""
        return {"prompts": self._prompts} | vars(self.before)

    def load_state_dict(self, carried: Mapping[str, Any] | None) -> None:
        """Take up the answers that a checkpoint carries; not where it has none, or those to other prompts."""
        self.before = None
        if carried and carried.get("prompts") == self._prompts:
            self.before = Answers(carried["texts"], carried["reference_losses"])

    def ask_before(self, trainer: Trainer) -> None:
        """Let the model answer before the first step of this process. Collective."""
        if trainer.args.process_index == 0 and self.samples:
            if trainer.state.global_step:
                print(f"sample prompts: `before` has the answers after step {trainer.state.global_step}", flush=True)
            print_prompts_cut(trainer.model, trainer.processing_class, self.samples, self.max_new_tokens)
        self.before = answer(trainer, self.samples, self.max_new_tokens)

    def ask_after(self, trainer: Trainer, before_batch: Callable[[], None]) -> None:
        """Let the trained model answer; rank 0 writes samples.jsonl and prints a table. Collective.

        `before_batch`: called before each batch of prompts; what it raises cuts the answers short.
        """
        after = answer(trainer, self.samples, self.max_new_tokens, before_batch)
        if trainer.args.process_index == 0 and self.samples:
            rows = sample_rows(self.samples, self.before, after, self.metrics)
            write_rows(Path(trainer.args.output_dir, "samples.jsonl"), rows)
            show_samples(rows, f"from {self.samples[0].source}")
