"""TRL's SFTTrainer whose losses are token-weighted means over all ranks, and whose steps are measured."""

from collections.abc import Callable

import datasets
from trl import SFTTrainer

from zero_recipes.core.process import PhaseClock
from zero_recipes.engine.faults.end_of_stream import EndlessRows
from zero_recipes.engine.faults.sampler_epochs import begin_epoch
from zero_recipes.engine.faults.ulysses_loss import loss_of_a_part
from zero_recipes.metrics.callback import StageMetricsCallback
from zero_recipes.training.token_loss import TokenMetrics, TokenWeights


class TokenWeightedTrainer(SFTTrainer):
    """TRL's SFTTrainer with one weight for every token, in training and in evaluation, and with metrics.json.

    Args:
        arguments, keywords: SFTTrainer's.
        clock: counts the seconds of the run's phases.
        token_metrics: when entropy and accuracy are brought together: "logging_steps" or "micro_batch" (TRL's own).
        building: a context around TRL's own constructor.

    Private: the methods of the Trainer (transformers 5.23, trainer.py) and of SFTTrainer (TRL 1.16) with an underscore
    that are overridden here: no public event comes before an epoch's sampler, or carries a step's gradient norm.
    """

    def __init__(self, *arguments, clock: PhaseClock, token_metrics: str, building: Callable, **keywords):
        self._flops_per_token = None
        self._train_sampler = None
        with building(), clock.phase("model"):
            super().__init__(*arguments, **keywords)
        self.stage_metrics = self._find_or_add_metrics()
        self.stage_metrics.clock = clock
        self.stage_metrics.identify(self.args, self.model)
        self.token_metrics = TokenMetrics(self, token_metrics)
        self.token_weights = TokenWeights(self)
        if isinstance(self.train_dataset, datasets.IterableDataset):
            if self.args.dataloader_num_workers > 1:
                raise ValueError("rows of a stream are trained unequally often with dataloader_num_workers above 1")
            self.train_dataset = EndlessRows(self.train_dataset)

    def _find_or_add_metrics(self) -> StageMetricsCallback:
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, StageMetricsCallback):
                return callback
        added = StageMetricsCallback()
        self.add_callback(added)
        return added

    def _get_train_sampler(self, train_dataset=None):
        self._train_sampler = super()._get_train_sampler(train_dataset)
        return self._train_sampler

    def _run_epoch(self, *arguments, epoch: int, **keywords) -> None:
        """The order of an epoch's rows follows from the seed and the epoch alone."""
        begin_epoch(self._train_sampler, epoch, self.args.seed if self.args.data_seed is None else self.args.data_seed)
        super()._run_epoch(*arguments, epoch=epoch, **keywords)

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """The micro batches of a step, and the number of tokens with a loss in them on all ranks."""
        batches, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        return self.token_weights.of_step(batches, count, device, self._get_num_items_in_batch)

    def training_step(self, model, inputs, num_items_in_batch=None):
        """One micro batch, whose tokens and loss are counted. Returns its part of the step's loss."""
        repeated = self.token_metrics.repeated = self.token_weights.repeated_tokens(inputs)
        if "input_ids" in inputs:
            self.stage_metrics.count_tokens(inputs, repeated)
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.stage_metrics.add_loss(loss)
        return loss

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """The loss of a micro batch: TRL's, or the same without its waiting for other ranks."""
        if self.model.training and self.token_weights.shares_sequences:
            return loss_of_a_part(model, inputs, num_items_in_batch, self.accelerator.num_processes)
        if not return_outputs and self.token_metrics.are_put_off(self._is_vlm):
            loss = self.token_metrics.loss(model, inputs, num_items_in_batch)
            if self.token_metrics.are_many:
                self._hand_over_token_metrics()
            return loss
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def _clip_grad_norm(self, model):
        return None if self.is_deepspeed_enabled else super()._clip_grad_norm(model)  # the engine clips

    def _get_grad_norm(self, model, grad_norm=None):
        if self.is_deepspeed_enabled:  # accelerate and transformers would wait for it
            norm = self.model_wrapped.get_global_grad_norm()
        else:
            norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if norm is not None:  # DeepSpeed keeps none at stage 0 in fp32 (engine.py `clip_fp32_gradients`)
            self.stage_metrics.add_norm(norm)
        return norm

    def floating_point_ops(self, inputs):
        """The floating point operations of a micro batch, from a count per token that is made once.

        transformers 5.23 counts the parameters anew in every micro batch, through all modules.
        """
        if "input_ids" not in inputs:
            return super().floating_point_ops(inputs)
        tokens = inputs["input_ids"].numel()
        if self._flops_per_token is None:
            self._flops_per_token = super().floating_point_ops(inputs) // max(1, tokens)
        return self._flops_per_token * tokens

    def log(self, logs, start_time=None):
        """transformers', with what was measured since the last line."""
        if "loss" in logs:  # of training; evaluations have their own
            logs |= self.stage_metrics.since_last_log()
        self._hand_over_token_metrics()
        super().log(logs, start_time)

    def _hand_over_token_metrics(self) -> None:
        """Put the token metrics where TRL logs them from. Collective where there are any.

        Private: `_metrics`, `_total_train_tokens`, `_tp_size` and, in `compute_loss`, `_is_vlm` of SFTTrainer (TRL
        1.16, trainer/sft_trainer.py). No public method adds to what is logged.
        """
        evaluated = self.token_metrics.take_evaluated()
        if evaluated is not None:
            entropy, accuracy = evaluated
            self._metrics["eval"] |= {
                "entropy": [entropy],
                "mean_token_accuracy": [accuracy],
                "num_tokens": [self._total_train_tokens],
            }
        metrics = self._metrics["train"]
        for entropy, accuracy, tokens in self.token_metrics.take():
            metrics["entropy"].append(entropy)
            metrics["mean_token_accuracy"].append(accuracy)
            self._total_train_tokens += tokens // self._tp_size
            metrics["num_tokens"] = [self._total_train_tokens]

    def evaluation_loop(self, *arguments, metric_key_prefix="eval", **keywords):
        """transformers', whose loss is the mean over all tokens instead of over batches."""
        self._hand_over_token_metrics()  # an evaluation's log has the tokens trained on so far
        self.token_weights.begin_evaluation()
        self.token_metrics.repeated = None
        output = super().evaluation_loop(*arguments, metric_key_prefix=metric_key_prefix, **keywords)
        loss = self.token_weights.evaluated_loss()
        if loss is not None:
            output.metrics[f"{metric_key_prefix}_loss"] = loss
        return output

    def prediction_step(self, model, inputs, *arguments, **keywords):
        """transformers', whose losses are counted by token."""
        return self.token_weights.predict(super().prediction_step, model, inputs, *arguments, **keywords)
