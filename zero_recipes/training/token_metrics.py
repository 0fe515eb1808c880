"""Entropy, token accuracy and tokens of the log, brought together once a log line instead of in every micro batch."""

from __future__ import annotations

import torch
from trl import SFTTrainer

MOST_KEPT = 1000  # micro batches: a log that is far away must not fill the device


class TokenMetricsSFTTrainer(SFTTrainer):
    """SFTTrainer whose training loss waits for no other rank and reads nothing back from the device.

    TRL 1.16, trainer/sft_trainer.py `compute_loss` gathers four numbers from all ranks and reads each of them in every
    micro batch. Here they stay on the device until they are logged; the log has the same values. One exception: of
    an epoch's last rows, where they are fewer than the processes, TRL leaves out the numbers of some processes
    (`gather_for_metrics`), here all are counted.
    """

    token_metrics = "logging_steps"  # the recipe's key; "micro_batch": TRL's own

    def __init__(self, *arguments, **keywords):
        self._not_gathered: list[torch.Tensor] = []  # per micro batch: supervised, entropy, right ones, tokens
        super().__init__(*arguments, **keywords)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if return_outputs or not self._trains_on_plain_nll:
            self._gather_token_metrics()  # an evaluation's log has the tokens trained on so far
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        inputs["use_cache"] = False
        outputs = model(**inputs, fused_lm_head=True)
        supervised = outputs.label_mask.sum()
        tokens = supervised if num_items_in_batch is None else num_items_in_batch
        loss = (-outputs.log_probs).sum() / torch.as_tensor(tokens).clamp(min=1)  # 0 where no token has a loss
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            loss = loss * (self.accelerator.num_processes // self.get_tp_size())  # gradients are averaged over ranks
        counted = supervised, outputs.entropy.detach().sum(), outputs.is_top1.sum(), _tokens(inputs)
        self._not_gathered.append(torch.stack([number.double() for number in counted]))
        if len(self._not_gathered) >= MOST_KEPT:
            self._gather_token_metrics()
        return loss

    @property
    def _trains_on_plain_nll(self) -> bool:
        """Whether `compute_loss` here is TRL's: neither in evaluation nor for any loss but cross-entropy alone."""
        return (
            self.token_metrics == "logging_steps"
            and self.model.training
            and self.args.loss_type == "nll"
            and self.compute_loss_func is None
            and self.label_smoother is None
            and not self.aux_loss_enabled
            and not self._is_vlm  # TRL has a message of its own for images that max_length has cut
        )

    def log(self, logs, start_time=None):
        self._gather_token_metrics()
        super().log(logs, start_time)

    def _gather_token_metrics(self) -> None:
        """Hand TRL its numbers of the micro batches since the last call. Collective where there are any."""
        if not self._not_gathered:
            return
        own = torch.stack(self._not_gathered).unsqueeze(0)  # (1, micro batches, 4)
        self._not_gathered = []
        metrics, parallel = self._metrics["train"], self._tp_size
        for supervised, entropy, right, tokens in self.accelerator.gather(own).sum(0).tolist():
            metrics["entropy"].append(entropy / supervised if supervised else 0.0)
            metrics["mean_token_accuracy"].append(right / supervised if supervised else 0.0)
            self._total_train_tokens += int(tokens) // parallel
        metrics["num_tokens"] = [self._total_train_tokens]


def _tokens(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Non-padding tokens of a batch; rows that stand one after the other have no mask and no padding."""
    if "attention_mask" in inputs:
        return inputs["attention_mask"].sum()
    ids = inputs["position_ids"]
    return torch.tensor(ids.size(1), device=ids.device)
