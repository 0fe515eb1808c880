"""One token, one weight: the loss is the mean over all tokens that count, however rows lie on ranks and micro batches.

TRL 1.16 and transformers 5.23 do this in training for most models and rows. What they leave is fixed here.
"""

from __future__ import annotations

import torch
from trl import SFTTrainer

from zero_recipes.compat.huggingface import count_tokens_with_loss
from zero_recipes.distributed import ulysses


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
    Not so with padding_free: rows stand in one then, and the repeated ones cannot be told by their place.
    A mixture of experts' auxiliary loss stays a mean over micro batches.
    """

    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        count_tokens_with_loss(self)

    @property
    def _shares_sequences(self) -> bool:
        """Whether each row is shared by several processes (zero_recipes/distributed/ulysses.py)."""
        parallelism = self.accelerator.parallelism_config
        return parallelism is not None and parallelism.sp_enabled

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        batches, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self._shares_sequences and batches:
            return batches, self.accelerator.gather(ulysses.shared_tokens(batches).to(device)).sum()
        if batches and self._repeats():
            without_loss(batches[-1], self._train_batch_size, self._kept(self._train_batch_size))
            count = self._get_num_items_in_batch(batches, device)
        return batches, count

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
        if self._repeats():
            without_loss(inputs, self.args.eval_batch_size, self._kept(self.args.eval_batch_size))
        result = super().prediction_step(model, inputs, *arguments, **keywords)
        tokens = (inputs["labels"][..., 1:] != -100).sum().to(self._evaluated)
        self._evaluated += torch.stack([result[0].to(self._evaluated) * tokens, tokens])
        return result

    def _repeats(self) -> bool:
        """Whether this is the last batch of a data loader, filled with rows that it had before. Agrees on all ranks."""
        state = self.accelerator.gradient_state
        return state.end_of_dataloader and state.remainder > 0 and self.accelerator.num_processes > 1

    def _kept(self, size: int) -> int:
        """How many of the `size` rows of this rank's last batch are no repetition: those stand first, by rank."""
        before = size * self.accelerator.process_index
        return max(0, min(size, self.accelerator.gradient_state.remainder - before))


def without_loss(batch: dict[str, torch.Tensor], size: int, kept: int) -> None:
    """Take the loss of all rows after the first `kept` away; a batch of another number of rows than `size` stays."""
    if len(batch["labels"]) == size:
        batch["labels"][kept:] = -100
