"""ZeroSFTTrainer: TRL's SFTTrainer with token-weighted losses, whole checkpoints and measurements."""

import contextlib
import functools
import shutil
from pathlib import Path
from typing import Any, NoReturn, Self

import torch
from accelerate.optimizer import AcceleratedOptimizer
from peft.optimizers import create_loraplus_optimizer
from transformers import PreTrainedModel, PrinterCallback, ProgressCallback
from trl import SFTTrainer

from zero_recipes.checkpoint.checksums import write_checksums
from zero_recipes.checkpoint.manager import CheckpointManager
from zero_recipes.checkpoint.saved_model import bytes_of, compare_with_class, refuse_bad_numbers
from zero_recipes.config.run import Run
from zero_recipes.core.measured_on import library_versions
from zero_recipes.core.process import say
from zero_recipes.core.run_end import Preempted
from zero_recipes.engine.faults import (
    adapter_loaded_in_fp32,
    failed_shards,
    fsdp_absent_layers,
    fsdp_saved_names,
    renamed_weights,
    stage_3_one_dtype,
    tied_weights_saved_twice,
    trained_modules_saved_twice,
)
from zero_recipes.engine.faults.optimizer_without_defaults import give_defaults
from zero_recipes.engine.group import rank_0_writes
from zero_recipes.engine.huggingface import without_deepspeed_announcement
from zero_recipes.engine.libraries import patch_libraries
from zero_recipes.metrics.callback import StageMetricsCallback
from zero_recipes.training.answers import SamplePrompts
from zero_recipes.training.as_asked import OptimizerProof
from zero_recipes.training.card import write_card
from zero_recipes.training.divergence import Diverged, has_nonfinite_weights, not_finite
from zero_recipes.training.extras import Extras, callbacks_of, extras_of
from zero_recipes.training.inputs import Inputs
from zero_recipes.training.masters import exact_masters
from zero_recipes.training.signals import CutShort, Signals
from zero_recipes.training.steps import TokenWeightedTrainer


class ZeroSFTTrainer(TokenWeightedTrainer):
    """A drop-in replacement for TRL's SFTTrainer. Its losses are token-weighted means over all ranks, its checkpoints
    are whole or not there, and it writes metrics.json. It never saves NaN or infinite weights.

    Args:
        arguments, keywords: SFTTrainer's.
        extras: what a recipe asks for beside TRL's arguments; run_sft.py alone gives it.

    Private: the methods of the Trainer (transformers 5.23, trainer.py) and of SFTTrainer (TRL 1.16) with an underscore
    that are overridden here: no public event comes before a checkpoint's first file or an engine's first step.
    """

    @functools.wraps(SFTTrainer.__init__)
    def __init__(self, *arguments, extras: Extras | None = None, **keywords):
        is_library = extras is None
        self.extras = Extras() if is_library else extras
        self.signals = Signals(self.extras.saves_on_signals)
        self.sample_prompts = SamplePrompts(self.extras.samples, self.extras.max_new_tokens, self.extras.metrics)
        self.optimizer_proof = OptimizerProof()
        own = {name: getattr(self.extras, name) for name in ("clock", "token_metrics", "building")}
        super().__init__(*arguments, **own, **keywords)
        self.checkpoints = CheckpointManager(self.args, self.extras.with_checksums, self.extras.refuses_code)
        if is_library:
            patch_libraries(self.stage_metrics.strategy, self.args.device.type, self.args.ddp_timeout)

    @classmethod
    def for_run(cls, run: Run, inputs: Inputs, model: PreTrainedModel, metrics: StageMetricsCallback, clock) -> Self:
        """The trainer of a recipe's run.

        Args:
            run: what recipe and command line ask for.
            inputs: what the run was prepared with.
            model: the loaded model.
            metrics: measures the run.
            clock: the session's, which counts the seconds of the run's phases.
        """
        if run.strategy.is_fsdp:
            fsdp_saved_names.keep_names_of_the_file(model)
            fsdp_absent_layers.name_layers_at_hand(model)
        trainer = cls(
            model=model,
            args=inputs.arguments,
            train_dataset=inputs.data.train,
            eval_dataset=inputs.data.evaluation,
            processing_class=inputs.data.tokenizer,
            callbacks=callbacks_of(run, metrics),
            peft_config=inputs.peft_config,
            extras=extras_of(run, inputs, clock),
        )
        for shown_by_default in (PrinterCallback, ProgressCallback):  # RunProgress shows what they do, and more
            trainer.remove_callback(shown_by_default)
        return trainer

    # training

    def train(self, resume_from_checkpoint=None, *arguments, **keywords):
        """Train as SFTTrainer does, and complete metrics.json. Collective.

        Args:
            resume_from_checkpoint: a checkpoint, or True for the last one of args.output_dir that is whole.
            arguments, keywords: SFTTrainer's.

        Returns:
            transformers' TrainOutput.

        Raises:
            Refusal: on all ranks, before anything is loaded, where a checkpoint holds code.
            Diverged: on all ranks, where loss or weights are not finite.
            Preempted: on all ranks, after a signal, if `extras` obeys signals.
        """
        resume_from_checkpoint = self.checkpoints.choose(resume_from_checkpoint)
        if self.stage_metrics.finished:  # of an earlier training
            self.stage_metrics.begin()
        self._load_history(resume_from_checkpoint)
        with self.stage_metrics.clock.phase("train"), failed_shards.failures_raised():
            try:
                trained = super().train(resume_from_checkpoint, *arguments, **keywords)
                self._evaluate_if_due()  # no epoch was left
                return trained
            except Exception as error:  # DeepSpeed's, on every rank: its loss scale cannot go lower
                if "loss scale already at minimum" not in str(error):
                    raise
                step = self.state.global_step + 1
                raise Diverged(f"the gradients of step {step} overflow fp16 at the smallest loss scale") from error

    def create_optimizer(self, model=None):
        """The optimizer that was asked for. With LoRA+, the groups of PEFT's have learning rates of their own."""
        ratio = self.extras.loraplus_lr_ratio
        if ratio is not None and self.optimizer is None:
            kind, keywords = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            keywords |= {"loraplus_lr_ratio": ratio, "loraplus_weight_decay": self.args.weight_decay}
            self.optimizer = create_loraplus_optimizer(model or self.model, kind, **keywords)
            groups = self.optimizer.param_groups
            groups[:] = [one for one in groups if one["params"]]  # FSDP2 resumes with at most one empty group
        is_wrapped = isinstance(self.optimizer, AcceleratedOptimizer)
        optimizer = super().create_optimizer(model)
        if not is_wrapped:
            self.optimizer_proof.ask(optimizer, model or self.model)
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None):
        """transformers' schedule, over an optimizer whose groups have all their defaults."""
        give_defaults(optimizer or self.optimizer)
        return super().create_scheduler(num_training_steps, optimizer)

    def _prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint):
        """The engine is built and, in a resumed run, filled; a fresh run in 16 bits gets exact masters."""
        resharded = self.checkpoints.is_resharded(resume_from_checkpoint)
        in_16_bits = self.is_deepspeed_enabled and (self.args.bf16 or self.args.fp16)
        masters = contextlib.nullcontext()
        if in_16_bits and resume_from_checkpoint is None:
            masters = exact_masters(self, self.extras.loaded_values)
        with self.stage_metrics.clock.phase("model"), masters:
            if in_16_bits and self.stage_metrics.strategy.zero_stage == 3:
                stage_3_one_dtype.one_dtype_of_what_trains(self.model)
            of_libraries = None if resharded else resume_from_checkpoint
            prepared = super()._prepare_for_training(max_steps, train_dataloader, of_libraries)
            if resume_from_checkpoint is not None:
                self.checkpoints.load(resume_from_checkpoint, self.model_wrapped, self.optimizer)
            if resharded:
                self._load_optimizer_and_scheduler(resume_from_checkpoint)
        self.stage_metrics.engine = self.model_wrapped
        self.hold_optimizer(max_steps)
        if self.sample_prompts.before is None:  # no checkpoint has carried the answers
            with self.stage_metrics.clock.phase("eval"):
                self.sample_prompts.ask_before(self)
        self.signals.listen()
        return prepared

    def hold_optimizer(self, max_steps: int) -> None:
        """Compare the optimizer that will step with the one that was asked for. Raises NotAsAsked on every rank."""
        block = None
        if self.is_deepspeed_enabled:
            block = self.accelerator.state.deepspeed_plugin.hf_ds_config.config.get("optimizer")
        self.optimizer_proof.hold(self.optimizer, self.model, block, self.lr_scheduler, self.args, max_steps)

    def _run_epoch(self, *arguments, **keywords) -> None:
        """Nothing where no step is left. transformers 5.23, trainer.py `_run_epoch` looks at max_steps after a step
        only: a run resumed from its last step within an epoch takes one more, past the schedule."""
        if self.control.should_training_stop or self.state.global_step >= self.state.max_steps:
            self._evaluate_if_due()
            self.control.should_training_stop = True
            return
        super()._run_epoch(*arguments, **keywords)

    # signals

    def _maybe_log_save_evaluate(self, *arguments, **keywords) -> None:
        """Where a signal has come to any rank by the end of a step, or while it is evaluated, the run ends here."""
        was_skipped = self.accelerator.optimizer_step_was_skipped
        self.optimizer_proof.hold_rates(self.optimizer, self.model, self.state.global_step, was_skipped)
        ends = self.signals.are_heard and self.stage_metrics.signalled
        if ends:
            self.signals.evaluation_due = self.control.should_evaluate
            self.control.should_evaluate = False
            self.control.should_save = False
        try:
            super()._maybe_log_save_evaluate(*arguments, **keywords)
        except CutShort:
            ends = True
            self.signals.evaluation_due = True
        if ends:
            self._save_and_end()

    def _save_and_end(self) -> NoReturn:
        """Save what a signal has ended, unless it is saved. Raises Preempted. Collective."""
        step = self.state.global_step
        carries = {"evaluation_due": self.signals.evaluation_due}
        if not self.checkpoints.is_saved(step, carries):
            self.args.save_only_model = False
            self._save_checkpoint(self.model, None)
        is_there = self.checkpoints.is_saved(step, carries)
        saved = f"saved as {self.checkpoints.of_step(step)}" if is_there else "not saved"
        raise Preempted(f"a signal ended the run; it is {saved}. The same command resumes it.")

    def _leave_if_signalled(self) -> None:
        """Raises CutShort on all ranks. Collective."""
        if self.signals.are_heard:
            self.signals.raise_if_any(self.accelerator.device)

    # evaluation and samples

    def evaluate(self, *arguments, **keywords):
        """Evaluate as SFTTrainer does, unless a signal cuts it short. Collective.

        Args:
            arguments, keywords: SFTTrainer's.

        Returns:
            {name: value} of the metrics.
        """
        random_state = torch.get_rng_state()
        with self.stage_metrics.clock.phase("eval"):
            try:
                return super().evaluate(*arguments, **keywords)
            except CutShort:  # the run that goes on evaluates again: its data loader draws from here
                torch.set_rng_state(random_state)
                raise

    def prediction_step(self, model, inputs, *arguments, **keywords):
        """One batch of an evaluation. A signal ends it before the next one."""
        self._leave_if_signalled()
        return super().prediction_step(model, inputs, *arguments, **keywords)

    def _determine_best_metric(self, metrics, trial):
        with self.stage_metrics.clock.phase("eval"):
            return super()._determine_best_metric(metrics, trial)

    def _load_rng_state(self, checkpoint) -> None:
        super()._load_rng_state(checkpoint)
        self._evaluate_if_due()  # it draws random numbers, as it would have before the signal

    def _evaluate_if_due(self) -> None:
        """The evaluation that a signal has cut short, in the run that goes on from there. Collective."""
        if self.signals.evaluation_due:
            try:
                self._determine_best_metric(self._evaluate(None, None), None)
            except CutShort:
                self._save_and_end()
            self.signals.evaluation_due = False

    def sample_after(self) -> None:
        """Let the trained model answer the sample prompts: samples.jsonl and a table on rank 0. Collective.

        A signal cuts the answers short. Raises Preempted then.
        """
        if self.args.load_best_model_at_end:
            self.signals.are_heard = False  # the optimizer is of another step
        with self.stage_metrics.clock.phase("eval"):
            try:
                self.sample_prompts.ask_after(self, self._leave_if_signalled)
            except CutShort:
                self._save_and_end()

    # checkpoints

    def _save_checkpoint(self, model, trial) -> None:
        """None of weights that are not finite: it would push out the last one that can be gone on from. Collective."""
        if not_finite(self.stage_metrics) or has_nonfinite_weights(self.model):
            say(f"no checkpoint at step {self.state.global_step}: loss or weights are not finite")
            return
        with self.stage_metrics.clock.phase("save"):
            if self.args.save_only_model or trial is not None:  # nothing goes on from it
                super()._save_checkpoint(model, trial)
                return
            write = functools.partial(self._write_states, model, trial)
            self.checkpoints.save(self.state.global_step, write, self._manifest_facts())
            self.checkpoints.rotate(self.state.best_model_checkpoint)

    def _write_states(self, model, trial) -> dict[str, Any]:
        """Let the libraries write their files, without their rotation; returns `_history`. Collective."""
        limit = self.args.save_total_limit
        self.args.save_total_limit = None
        try:
            with failed_shards.failures_raised():
                super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        return self._history()

    def _history(self) -> dict[str, Any]:
        """What a checkpoint carries for `_load_history`. Collective."""
        history = self.stage_metrics.history()
        history["answers_before"] = self.sample_prompts.state_dict()
        history["evaluation_due"] = self.signals.evaluation_due
        return history

    def _load_history(self, checkpoint: str | bool | None) -> None:
        """Take up what a checkpoint carries. From here on metrics.json says what a killed run leaves."""
        carried = self.checkpoints.carried(checkpoint)
        if carried is not None:
            self.stage_metrics.load_state_dict(carried.history, carried.step)
            self.sample_prompts.load_state_dict(carried.history.get("answers_before"))
            self.signals.evaluation_due = carried.history.get("evaluation_due", False)
        self.stage_metrics.write("running")

    def _manifest_facts(self) -> dict[str, Any]:
        """What a manifest keeps of the run; without a recipe only what the trainer knows."""
        keys = ("strategy", "zero_stage", "world_size", "precision", "micro_batch_size", "gradient_accumulation_steps")
        facts = {key: getattr(self.stage_metrics.identity, key) for key in keys}
        facts |= {"step": self.state.global_step, "versions": library_versions()}
        return facts | self.extras.manifest_facts

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        model = self.model if model is None else model
        if isinstance(model, PreTrainedModel) and not self.is_fsdp_enabled:
            renamed_weights.load_weights_by_class(model, resume_from_checkpoint)
        else:
            with adapter_loaded_in_fp32.adapter_dtypes_kept(model):
                super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self):
        by_names_of_the_file = not (self.is_deepspeed_enabled or self.is_fsdp_enabled)
        if by_names_of_the_file and isinstance(self.model, PreTrainedModel):
            renamed_weights.load_weights_by_class(self.model, self.state.best_model_checkpoint)
        else:
            super()._load_best_model()
        metric = f"eval_{self.args.metric_for_best_model.removeprefix('eval_')}"
        checkpoint = self.state.best_model_checkpoint
        say(f"the model is that of the best checkpoint: {checkpoint} ({metric} {self.state.best_metric:.4g})")

    # the model

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model as SFTTrainer does; all ranks wait for rank 0, which also writes the card. Collective.

        Args:
            output_dir: args.output_dir where it is None.
        """
        with rank_0_writes():
            super().save_model(output_dir, _internal_call=_internal_call)
            if Path(output_dir or self.args.output_dir) == self.stage_metrics.output_dir:
                self.create_model_card()

    def _save(self, output_dir=None, state_dict=None) -> None:
        token = self.args.hub_token
        self.args.hub_token = None  # transformers pickles the arguments into training_args.bin
        try:
            with trained_modules_saved_twice.trained_modules_saved_once():
                super()._save(output_dir, tied_weights_saved_twice.without_aliases(self.model, state_dict))
        finally:
            self.args.hub_token = token
        for file in self.extras.processor_files:
            shutil.copy(file, output_dir or self.args.output_dir)

    def save_verified(self, trust_remote_code: bool = False) -> str:
        """Save the model into args.output_dir, read it again, and write its checksums. Collective.

        Args:
            trust_remote_code: for the comparison with the model's class, which may be code that comes with it.

        Returns:
            What is known of the saved model, in a sentence.

        Raises:
            NotWhole: on every rank, where a weight is missing or not finite.
        """
        folder = Path(self.args.output_dir)
        with self.stage_metrics.clock.phase("save"):
            self.save_model(str(folder))
            with rank_0_writes():
                if self.args.process_index == 0:
                    self._verify(folder, trust_remote_code)
        return f"the model in {folder} is saved and complete"

    def _verify(self, folder: Path, trust_remote_code: bool) -> None:
        with without_deepspeed_announcement():  # from_pretrained would take the check for a collective load
            tensors = compare_with_class(folder, trust_remote_code)
        refuse_bad_numbers(tensors)
        if self.extras.with_checksums:
            write_checksums(folder)
        print(f"saved {folder}: complete, {len(tensors)} tensors, {bytes_of(tensors):,} bytes", flush=True)

    def create_model_card(self, *_arguments, **_keywords) -> None:
        """Write README.md with the figures so far. TRL's names no base that is a folder, and no figure."""
        if self.args.process_index == 0:
            write_card(self.stage_metrics.output_dir)
