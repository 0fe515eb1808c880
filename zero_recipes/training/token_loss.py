"""One token, one weight: the loss is the mean over all tokens that count, whichever rank and micro batch has the row.

TRL 1.16 and transformers 5.23 do this in training for most models and rows. What they leave is done here.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from trl import SFTTrainer

from zero_recipes.engine.faults.rows_left_over import rows_left_over
from zero_recipes.engine.faults.token_counts import count_tokens_with_loss

ROW_LENGTHS = "row_lengths"
MOST_KEPT = 1000  # micro batches: a log that is far away must not fill the device
Batch = dict[str, Any]


class TokenWeights:
    """Makes a trainer's losses, in training and in evaluation, token-weighted means over all ranks.

    In training transformers counts a step's tokens by rules for the model's own loss, but SFTTrainer computes the loss:
    of some models nothing is counted (Gemma 3n, Gemma 4), of others each row's first token too (GPT-2). In evaluation
    the means of batches are weighted by their rows; under Ulysses micro batches weigh the same. Rows that accelerate
    repeats to fill an epoch's last batches have no loss. A mixture's auxiliary loss stays a mean over micro batches.
    """

    def __init__(self, trainer: SFTTrainer):
        self.trainer = trainer
        count_tokens_with_loss(trainer)
        if trainer.padding_free:
            trainer.data_collator = partial(collated_with_lengths, trainer.data_collator)
        self._repeated: tuple[Batch, torch.Tensor] | None = None  # an epoch's last batch, and which of its tokens
        self._evaluated = torch.zeros(2)  # summed loss, tokens

    @property
    def shares_sequences(self) -> bool:
        """Whether the processes share each sequence, by Ulysses."""
        parallelism = self.trainer.accelerator.parallelism_config
        return parallelism is not None and parallelism.sp_enabled

    def of_step(self, batches: list[Batch], count, device, count_again: Callable):
        """Prepare a step: (its micro batches, tokens with a loss in them on all ranks).

        `batches`, `count`: transformers' micro batches and its count. `count_again`: the trainer's own count.
        """
        lengths = [batch.pop(ROW_LENGTHS, None) for batch in batches]
        if self.shares_sequences and batches:
            own = sum((batch["shift_labels"] != -100).sum() for batch in batches)  # of its parts
            return batches, self.trainer.accelerator.gather(own.to(device)).sum()
        left_over = 0
        if batches:
            left_over = rows_left_over(self.trainer.callback_handler.train_dataloader)
        if self._ends_with_repeated_rows(left_over) and "labels" in batches[-1]:
            tokens = self._tokens_repeated(batches[-1], lengths[-1], left_over)
            self._repeated = (batches[-1], tokens)
            without_loss(batches[-1], tokens)
            count = count_again(batches, device)
        return batches, count

    def repeated_tokens(self, batch: Batch) -> torch.Tensor | None:
        """Which tokens of a micro batch the epoch had before. None where no row is repeated.

        Their labels are -100 by then.
        """
        if self._repeated is None or self._repeated[0] is not batch:
            return None
        return self._repeated[1]

    def begin_evaluation(self) -> None:
        """Count the losses of an evaluation from here on."""
        self._evaluated = torch.zeros(2, dtype=torch.float64, device=self.trainer.args.device)

    def predict(self, predict: Callable, model, inputs: Batch, *arguments, **keywords):
        """Evaluate a batch, and add its loss, weighted by its tokens, to the evaluation's.

        `predict`: the trainer's own prediction_step, whose result is returned.
        """
        lengths = inputs.pop(ROW_LENGTHS, None)
        left_over = self.trainer.accelerator.gradient_state.remainder
        if self._ends_with_repeated_rows(left_over) and "labels" in inputs:
            without_loss(inputs, self._tokens_repeated(inputs, lengths, left_over))
        result = predict(model, inputs, *arguments, **keywords)
        if "labels" in inputs and result[0] is not None:
            tokens = (inputs["labels"][..., 1:] != -100).sum().to(self._evaluated)
            loss = result[0].to(self._evaluated) * tokens  # NaN where label smoothing divides by no tokens
            self._evaluated += torch.stack([loss.masked_fill(tokens == 0, 0.0), tokens])
        return result

    def evaluated_loss(self) -> float | None:
        """The mean loss of the evaluation that has ended; None where no token had a loss. Collective."""
        loss, tokens = self.trainer.accelerator.reduce(self._evaluated).tolist()
        if not tokens:
            return None
        return loss / tokens

    def _ends_with_repeated_rows(self, left_over: int) -> bool:
        """Whether this is an epoch's last batch, with rows that accelerate has repeated. Agrees on all ranks.

        `left_over`: rows of all ranks' last batches that are no repetition; 0 or less where nothing is filled.
        """
        accelerator = self.trainer.accelerator
        return accelerator.gradient_state.end_of_dataloader and left_over > 0 and accelerator.num_processes > 1

    def _tokens_repeated(self, batch: Batch, lengths: list[int] | None, left_over: int) -> torch.Tensor:
        return tokens_repeated(batch["labels"], lengths, left_over, self.trainer.accelerator.process_index)


def without_loss(batch: Batch, tokens: torch.Tensor) -> None:
    """Take the loss of these tokens out of a batch. `tokens`: a mask of the shape of its labels."""
    batch["labels"].masked_fill_(tokens, -100)


def collated_with_lengths(collate: Callable[[list[dict]], Batch], rows: list[dict]) -> Batch:
    """Collate rows, and keep their lengths in tokens beside them. `collate`: the trainer's collator."""
    return collate(rows) | {ROW_LENGTHS: [len(row["input_ids"]) for row in rows]}


def tokens_repeated(labels: torch.Tensor, lengths: list[int] | None, left_over: int, rank: int) -> torch.Tensor:
    """Which tokens of a rank's last batch are of rows that the epoch had before: a mask of the shape of `labels`.

    `lengths`: of the rows joined in one line, in tokens; None where each has a line of its own.
    `left_over`: rows of all ranks that are no repetition; they come first, by rank.
    """
    rows = len(labels) if lengths is None else len(lengths)
    kept = max(0, min(rows, left_over - rows * rank))
    repeated = torch.zeros_like(labels, dtype=torch.bool)
    if lengths is None:
        repeated[kept:] = True
    else:
        repeated[:, sum(lengths[:kept]) :] = True
    return repeated


class TokenMetrics:
    """Entropy, token accuracy and tokens of the log, brought together once a log line instead of in every micro batch.

    TRL 1.16 gathers four numbers from all ranks and reads them in every micro batch. Here they stay on the device until
    they are logged, with the same values; only of an epoch's last rows, where they are fewer than the processes, TRL
    leaves out some (`gather_for_metrics`), and counts the tokens of repeated rows.
    """

    def __init__(self, trainer: SFTTrainer, when: str):
        """`when`: the recipe's token_metrics, "logging_steps" or "micro_batch" (TRL's own)."""
        self.trainer = trainer
        self.when = when
        self.repeated: torch.Tensor | None = None  # tokens of the micro batch at work that the epoch had before
        self._kept: list[torch.Tensor] = []  # per micro batch: supervised, entropy, right ones, tokens
        self._evaluated: torch.Tensor | int = 0  # the same, summed over an evaluation

    def are_put_off(self, is_vlm: bool) -> bool:
        """Whether the metrics of this training wait for the log; of no loss but cross-entropy."""
        trainer = self.trainer
        return (
            self.when == "logging_steps"
            and trainer.args.loss_type == "nll"
            and trainer.compute_loss_func is None
            and trainer.label_smoother is None
            and not trainer.aux_loss_enabled
            and not is_vlm  # TRL has a message of its own for images that max_length has cut
        )

    def loss(self, model, inputs: Batch, num_items_in_batch) -> torch.Tensor:
        """TRL's loss of a micro batch. Waits for no other rank and reads nothing back from the device."""
        trainer = self.trainer
        inputs["use_cache"] = False
        outputs = model(**inputs, fused_lm_head=True)
        supervised = outputs.label_mask.sum()
        tokens = supervised if num_items_in_batch is None else num_items_in_batch
        loss = (-outputs.log_probs).sum() / torch.as_tensor(tokens).clamp(min=1)  # 0 where no token has a loss
        if trainer.args.average_tokens_across_devices and num_items_in_batch is not None:
            loss = loss * (trainer.accelerator.num_processes // trainer.get_tp_size())  # gradients are averaged
        mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
        if self.repeated is not None:
            mask = mask & ~self.repeated
        counted = [supervised, outputs.entropy.detach().sum(), outputs.is_top1.sum(), mask.sum()]
        counted = torch.stack([number.double() for number in counted])
        if trainer.model.training:
            self._kept.append(counted)
        else:
            self._evaluated = self._evaluated + counted
        return loss

    @property
    def are_many(self) -> bool:
        """Whether so many micro batches are kept that they are to be taken before the next log line."""
        return len(self._kept) >= MOST_KEPT

    def take(self) -> list[tuple[float, float, int]]:
        """(entropy, token accuracy, tokens) of each micro batch since the last call. Collective where there are any."""
        if not self._kept:
            return []
        own = torch.stack(self._kept).unsqueeze(0)  # (1, micro batches, 4)
        self._kept = []
        taken = []
        for supervised, entropy, right, tokens in self.trainer.accelerator.gather(own).sum(0).tolist():
            count = supervised or 1.0  # where no token has a loss both sums are 0
            taken.append((entropy / count, right / count, int(tokens)))
        return taken

    def take_evaluated(self) -> tuple[float, float] | None:
        """(entropy, token accuracy) of an evaluation's tokens; TRL's are means of batches. Collective for any."""
        own = self._evaluated
        self._evaluated = 0
        if isinstance(own, int):
            return None
        supervised, entropy, right, _ = self.trainer.accelerator.reduce(own).tolist()
        count = supervised or 1.0
        return entropy / count, right / count


# Ulysses sequence parallelism (ALST): processes share each sequence, and swap its parts for heads in attention.
# DeepSpeed 0.19.8, runtime/sequence_parallel/ulysses_sp.py (UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter), through
# accelerate's ParallelismConfig and TRL. Jacobs et al., arXiv:2309.14509; ALST: arXiv:2506.13996.


def share_sequences(training_args, size: int, attn_implementation: str | None) -> None:
    """Let processes share sequences by Ulysses. Call it once TrainingArguments exist and before the trainer does.

    `size`: processes to a sequence; 1 changes nothing. `attn_implementation`: None is sdpa.
    """
    from accelerate import ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    if size > 1:
        training_args.parallelism_config = ParallelismConfig(
            sp_backend="deepspeed",
            sp_size=size,
            dp_shard_size=max(1, training_args.world_size // size),
            sp_handler=DeepSpeedSequenceParallelConfig(
                sp_seq_length_is_variable=True, sp_attn_implementation=attn_implementation or "sdpa"
            ),
        )
