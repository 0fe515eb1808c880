"""One token, one weight: the loss is the mean over all tokens that count, however rows lie on ranks and micro batches.

TRL 1.16 and transformers 5.23 do this in training for most models and rows. What they leave is fixed here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from trl import SFTTrainer

from zero_recipes.distributed import ulysses
from zero_recipes.libs.huggingface import count_tokens_with_loss, rows_left_over

ROW_LENGTHS = "row_lengths"


class TokenWeightedSFTTrainer(SFTTrainer):
    """SFTTrainer whose losses, in training and in evaluation, are token-weighted means over all ranks.

    Training: transformers counts the tokens of a step (trainer.py, `_get_num_items_in_batch`) by rules for the model's
    own loss, but SFTTrainer computes the loss itself (`compute_loss`). Of models with `accepts_loss_kwargs = False`
    (Gemma 3n, Gemma 4) nothing is counted, and each micro batch of each rank weighs the same; of models without a
    `loss_type` of their own (GPT-2) the first token of each row is counted, which has no loss.

    Evaluation: SFTTrainer's `prediction_step` passes no count, and the evaluation loop weights the means of each rank's
    batches by their rows.

    Ulysses: transformers weighs each micro batch of each group the same (integrations/deepspeed.py).

    Rows that accelerate repeats to fill the last batches of an epoch (data_loader.py, BatchSamplerShard) have no loss.
    A mixture of experts' auxiliary loss stays a mean over micro batches.
    """

    _repeated: tuple[dict, torch.Tensor] | None = None  # the last batch of an epoch, and which of its tokens

    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        count_tokens_with_loss(self)
        if self.padding_free:
            self.data_collator = CollatorWithRowLengths(self.data_collator)

    @property
    def _shares_sequences(self) -> bool:
        """Whether each row is shared by several processes (zero_recipes/distributed/ulysses.py)."""
        parallelism = self.accelerator.parallelism_config
        return parallelism is not None and parallelism.sp_enabled

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        batches, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        lengths = [batch.pop(ROW_LENGTHS, None) for batch in batches]
        if self._shares_sequences and batches:
            return batches, self.accelerator.gather(ulysses.shared_tokens(batches).to(device)).sum()
        if batches and self._ends_with_repeated_rows(left_over := rows_left_over(self._whole_epoch)):
            self._repeated = batches[-1], self._tokens_repeated(batches[-1], lengths[-1], left_over)
            without_loss(*self._repeated)
            count = self._get_num_items_in_batch(batches, device)
        return batches, count

    def repeated_tokens(self, batch: dict[str, torch.Tensor]) -> torch.Tensor | None:
        """Which tokens of a batch that `training_step` is given are of rows that the epoch had before.

        A mask of the shape of `labels`; None where there is no such row. Their labels are -100 by then.
        """
        return self._repeated[1] if self._repeated is not None and self._repeated[0] is batch else None

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if not (self._shares_sequences and self.model.training):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return ulysses.loss_of_a_part(model, inputs, num_items_in_batch, self.accelerator.num_processes)

    def evaluation_loop(self, *arguments, metric_key_prefix="eval", **keywords):
        self._evaluated = torch.zeros(2, dtype=torch.float64, device=self.args.device)  # summed loss, tokens
        output = super().evaluation_loop(*arguments, metric_key_prefix=metric_key_prefix, **keywords)
        loss, tokens = self.accelerator.reduce(self._evaluated).tolist()
        if tokens:
            output.metrics[f"{metric_key_prefix}_loss"] = loss / tokens
        return output

    def prediction_step(self, model, inputs, *arguments, **keywords):
        lengths = inputs.pop(ROW_LENGTHS, None)
        left_over = self.accelerator.gradient_state.remainder
        if self._ends_with_repeated_rows(left_over):
            without_loss(inputs, self._tokens_repeated(inputs, lengths, left_over))
        result = super().prediction_step(model, inputs, *arguments, **keywords)
        tokens = (inputs["labels"][..., 1:] != -100).sum().to(self._evaluated)
        self._evaluated += torch.stack([result[0].to(self._evaluated) * tokens, tokens])
        return result

    @property
    def _whole_epoch(self):
        """The training data loader before any batch is skipped."""
        return self.callback_handler.train_dataloader

    def _ends_with_repeated_rows(self, left_over: int) -> bool:
        """Whether this is the last batch of a data loader, filled with rows that it had before. Agrees on all ranks.

        `left_over`: rows of all ranks' last batches that are no repetition; 0 or less where nothing is filled.
        """
        return (
            self.accelerator.gradient_state.end_of_dataloader and left_over > 0 and self.accelerator.num_processes > 1
        )

    def _tokens_repeated(self, batch, lengths: list[int] | None, left_over: int) -> torch.Tensor:
        """Which tokens of this rank's last batch are of repeated rows. What is no repetition stands first, by rank."""
        rows = len(batch["labels"]) if lengths is None else len(lengths)
        return tokens_after(batch["labels"], kept_rows(rows, left_over, self.accelerator.process_index), lengths)


class CollatorWithRowLengths:
    """TRL's padding-free collator, which puts rows one after the other, with how long each of them is."""

    def __init__(self, collate: Callable[[list[dict]], dict]):
        self.collate = collate

    def __call__(self, rows: list[dict]) -> dict:
        return self.collate(rows) | {ROW_LENGTHS: [len(row["input_ids"]) for row in rows]}


def kept_rows(rows: int, left_over: int, rank: int) -> int:
    """How many of the `rows` of a rank's last batch are no repetition, of `left_over` over all ranks."""
    return max(0, min(rows, left_over - rows * rank))


def tokens_after(labels: torch.Tensor, kept: int, lengths: list[int] | None) -> torch.Tensor:
    """Which tokens stand after the first `kept` rows: a mask of the shape of `labels`.

    `lengths`: those of the rows that stand in one, in tokens; None where each has a line of its own.
    """
    after = torch.zeros_like(labels, dtype=torch.bool)
    if lengths is None:
        after[kept:] = True
    else:
        after[:, sum(lengths[:kept]) :] = True
    return after


def without_loss(batch: dict[str, torch.Tensor], tokens: torch.Tensor) -> None:
    """Take the loss of some tokens away; `tokens`: a mask of the shape of `labels`."""
    batch["labels"].masked_fill_(tokens, -100)
