"""The trainer of a run: TRL's SFTTrainer with token weights, checkpoints and measurements."""

from __future__ import annotations

import os

from accelerate.utils import broadcast_object_list
from transformers import PreTrainedModel

from zero_recipes.checkpoint import resharded
from zero_recipes.checkpoint.saved_model import NotWhole, compare_with_class, refuse_nonfinite, write_checksums
from zero_recipes.config.run import RunConfig
from zero_recipes.data.prepare import Prepared
from zero_recipes.distributed import ulysses
from zero_recipes.distributed.init import set_host_threads
from zero_recipes.distributed.writer import rank_0_writes
from zero_recipes.libs import attention, fsdp, patches
from zero_recipes.libs.huggingface import rows_are_cut, without_deepspeed_announcement
from zero_recipes.libs.patches import FreshAdamAtStage0, adapter_dtypes_kept, load_weights_by_class
from zero_recipes.training.checkpointing import CheckpointingSFTTrainer, carry_on
from zero_recipes.training.divergence import StopAtDivergence
from zero_recipes.training.recorder import RunRecorder
from zero_recipes.training.row_order import SeededOrderSFTTrainer
from zero_recipes.training.samples import AnswersBeforeTraining, answer, show_samples, write_samples
from zero_recipes.training.token_metrics import TokenMetricsSFTTrainer
from zero_recipes.training.token_weighting import TokenWeightedSFTTrainer


def prepare_libraries(run: RunConfig, args) -> int | None:
    """Set the libraries up for this run, once TrainingArguments exist and before model and trainer do.

    Returns the threads that each process's optimizer on the host was given; None where nothing was changed.
    """
    patches.patch_libraries(run.strategy, run.settings.ddp_timeout)
    patches.score_supervised_positions_only(run.settings.supervised_logits_only)
    if run.strategy.is_fsdp:
        fsdp.fix_arguments(args, run.device)
    attn_implementation = attention.name_in_force(run.settings.attn_implementation)
    ulysses.share_sequences(args, run.strategy.sequence_parallel, attn_implementation)
    return set_host_threads(run.strategy, run.device, os.environ)


class RecipeTrainer(TokenWeightedSFTTrainer, TokenMetricsSFTTrainer, CheckpointingSFTTrainer, SeededOrderSFTTrainer):
    """TRL's SFTTrainer for one run: it asks the sample prompts, tells the metrics of each micro batch and gradient norm
    (which no callback event carries), and goes on from the run's checkpoint."""

    _flops_per_token: int | None = None

    def __init__(self, model, tokenizer, args, rows: Prepared, run: RunConfig, recorder: RunRecorder, peft_config=None):
        self.run_config, self.samples = run, rows.samples
        self.token_metrics = run.settings.token_metrics
        self.clock = recorder.clock
        self.stage_metrics = recorder.measure(model, args)
        self.answers_before = AnswersBeforeTraining(self.samples, run.settings.sample_max_new_tokens, self.clock)
        self.divergence = StopAtDivergence(self.stage_metrics, run.settings.stop_after_nonfinite_steps)
        sharded = [fsdp.RefuseUnsharded()] if run.strategy.is_fsdp else []
        if sharded:
            fsdp.keep_names_of_the_file(model)
        with self.clock.phase("model"), rows_are_cut(args):
            super().__init__(
                model=model,
                args=args,
                train_dataset=rows.train,
                eval_dataset=rows.evaluation,
                processing_class=tokenizer,
                peft_config=peft_config,
                callbacks=[
                    *sharded,
                    FreshAdamAtStage0(run.checkpoint is not None),
                    self.answers_before,
                    self.stage_metrics,
                    self.divergence,
                ],
            )
        self.answers_before.trainer = self
        self.stage_metrics.watch(self)
        carry_on(self, run, rows.data_sha256, self.answers_before, self.stage_metrics)
        recorder.progress()  # what a killed run leaves

    def train_to_the_end(self) -> None:
        """All steps, from the run's checkpoint on. The metrics are complete then. Raises Diverged on all ranks."""
        with self.clock.phase("train"):
            with self.divergence.at_the_smallest_scale(self):
                self.train(resume_from_checkpoint=self.run_config.checkpoint)
            self.stage_metrics.end_steps()
            self.divergence.raise_if_diverged(self)

    def answer_samples(self) -> None:
        """The sample prompts once more; samples.jsonl and a table on rank 0. Collective."""
        with self.clock.phase("eval"):
            after = answer(self, self.samples, self.run_config.settings.sample_max_new_tokens)
            if self.args.process_index == 0 and self.samples:
                path = self.run_config.output_dir / "samples.jsonl"
                rows = write_samples(path, self.samples, self.answers_before.answers, after)
                show_samples(rows, f"from {self.samples[0].source}")

    def save_and_verify(self) -> str:
        """The model in output_dir, whole; nothing with save_model: false. Returns how it stands with it.

        Collective. Raises NotWhole on every rank.
        """
        folder = self.run_config.output_dir
        with self.clock.phase("save"):
            if not self.run_config.settings.save_model:
                return "no model was to be saved"
            self.save_model(str(folder))
            fault = [None]
            with rank_0_writes():
                if self.args.process_index == 0:
                    try:
                        self._verify()
                    except NotWhole as error:
                        fault = [str(error)]
            broadcast_object_list(fault)
            if fault[0] is not None:
                raise NotWhole(fault[0])
        return f"the model in {folder} is saved and whole"

    def _verify(self) -> None:
        """Raises NotWhole."""
        folder, trusted = self.run_config.output_dir, self.run_config.settings.trust_remote_code
        with without_deepspeed_announcement():  # from_pretrained would take the check for a collective load
            tensors = compare_with_class(folder, trusted)
        refuse_nonfinite(tensors)
        if self.with_checksums:
            write_checksums(folder)
        size = sum(path.stat().st_size for path in {tensor.file for tensor in tensors.values()})
        print(f"saved {folder}: whole, {len(tensors)} tensors, {size:,} bytes", flush=True)

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.stage_metrics.count_tokens(inputs, self.repeated_tokens(inputs))
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.stage_metrics.add_loss(loss)
        return loss

    def evaluate(self, *arguments, **keywords):
        with self.clock.phase("eval"):
            return super().evaluate(*arguments, **keywords)

    def floating_point_ops(self, inputs):
        """transformers 5.23 counts the parameters anew in every micro batch, through all modules."""
        tokens = inputs["input_ids"].numel()
        if self._flops_per_token is None:
            self._flops_per_token = super().floating_point_ops(inputs) // max(1, tokens)
        return self._flops_per_token * tokens

    def _prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint):
        with self.clock.phase("model"):
            return self._build_engine(max_steps, train_dataloader, resume_from_checkpoint)

    def _build_engine(self, max_steps, train_dataloader, resume_from_checkpoint):
        """A resharded checkpoint has no files of DeepSpeed's: the engine is built fresh, then filled by parameter."""
        if resume_from_checkpoint is None or not resharded.is_resharded(resume_from_checkpoint):
            return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
        resharded.load(self.model_wrapped, resume_from_checkpoint)
        self._load_optimizer_and_scheduler(resume_from_checkpoint)
        return prepared

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        model = self.model if model is None else model
        if isinstance(model, PreTrainedModel) and not self.is_fsdp_enabled:
            load_weights_by_class(model, resume_from_checkpoint)
        else:
            with adapter_dtypes_kept(model):
                super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _save_checkpoint(self, model, trial):
        """None of weights that are not finite: it would push out the last one that can be gone on from."""
        if self.divergence.spoiled(self):
            if self.args.process_index == 0:
                print(f"no checkpoint is saved at step {self.state.global_step}: it is not finite", flush=True)
            return
        with self.clock.phase("save"):
            super()._save_checkpoint(model, trial)

    def _load_best_model(self):
        by_names_of_the_file = not (self.is_deepspeed_enabled or self.is_fsdp_enabled)
        if by_names_of_the_file and isinstance(self.model, PreTrainedModel):
            load_weights_by_class(self.model, self.state.best_model_checkpoint)
        else:
            super()._load_best_model()

    def log(self, logs, start_time=None):
        if "loss" in logs:  # of training; evaluations have their own
            logs |= self.stage_metrics.since_last_log()
        super().log(logs, start_time)

    def _get_grad_norm(self, model, grad_norm=None):
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if norm is not None:  # DeepSpeed keeps none at stage 0 in fp32 (engine.py `clip_fp32_gradients`)
            self.stage_metrics.add_norm(norm)
        return norm
