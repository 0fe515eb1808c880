"""The trainer of a run: TRL's SFTTrainer with token weights, checkpoints and measurements."""

from __future__ import annotations

from transformers import PreTrainedModel

from zero_recipes.checkpoint.reshard import load as reshard_load
from zero_recipes.compat.patches import adapter_dtypes_kept, load_weights_by_class
from zero_recipes.metrics.callback import StageMetricsCallback
from zero_recipes.trainer.checkpointing import CheckpointingSFTTrainer
from zero_recipes.trainer.token_weighting import TokenWeightedSFTTrainer


class MeasuredSFTTrainer(TokenWeightedSFTTrainer, CheckpointingSFTTrainer):
    """A trainer that tells the callback of each micro batch and gradient norm, which no callback event carries."""

    stage_metrics: StageMetricsCallback

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.stage_metrics.count_tokens(inputs)
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.stage_metrics.add_loss(loss)
        return loss

    def _prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint):
        """A resharded checkpoint has no files of DeepSpeed's: the engine is built fresh, then filled by parameter."""
        if resume_from_checkpoint is None or not reshard_load.is_resharded(resume_from_checkpoint):
            return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
        reshard_load.load(self.model_wrapped, resume_from_checkpoint)
        self._load_optimizer_and_scheduler(resume_from_checkpoint)
        return prepared

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        model = self.model if model is None else model
        if isinstance(model, PreTrainedModel) and not self.is_fsdp_enabled:
            load_weights_by_class(model, resume_from_checkpoint)
        else:
            with adapter_dtypes_kept(model):
                super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self):
        by_names_of_the_file = not (self.is_deepspeed_enabled or self.is_fsdp_enabled)
        if by_names_of_the_file and isinstance(self.model, PreTrainedModel):
            load_weights_by_class(self.model, self.state.best_model_checkpoint)
        else:
            super()._load_best_model()

    def _get_grad_norm(self, model, grad_norm=None):
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if norm is not None:  # DeepSpeed keeps none at stage 0 in fp32 (engine.py `clip_fp32_gradients`)
            self.stage_metrics.grad_norms.append(float(norm))
        return norm
