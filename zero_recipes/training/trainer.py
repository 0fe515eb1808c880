"""TRL's SFTTrainer with token-weighted losses, whole checkpoints and measurements."""

import contextlib
import functools
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Self

import datasets
import torch
from accelerate.optimizer import AcceleratedOptimizer
from peft.optimizers import create_loraplus_optimizer
from transformers import PreTrainedModel
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import sort_checkpoints
from trl import SFTTrainer

from zero_recipes.checkpoint import save
from zero_recipes.checkpoint.compatibility import recipe_facts
from zero_recipes.checkpoint.resume import (
    forget_resharded,
    load_resharded,
    numbered,
    requested_batch,
    whole_checkpoints,
)
from zero_recipes.config.run import Run
from zero_recipes.core.files import write_json
from zero_recipes.core.findings import ending
from zero_recipes.core.measured_on import library_versions
from zero_recipes.core.process import PhaseClock, say
from zero_recipes.core.run_end import PeerFailed, Preempted, RunFailed
from zero_recipes.data.samples import Sample
from zero_recipes.engine import fsdp, patches
from zero_recipes.engine.cpu_adam import repeat_steps_of_cpu_adam
from zero_recipes.engine.cpu_products import multiply_in_fp32
from zero_recipes.engine.deepspeed import is_partitioned, set_masters
from zero_recipes.engine.fp32_parameters import keep_parameters_in_fp32
from zero_recipes.engine.group import agree, once, rank_0_writes
from zero_recipes.engine.huggingface import rows_are_cut, without_deepspeed_announcement
from zero_recipes.engine.optimizers import give_defaults
from zero_recipes.metrics.callback import StageMetricsCallback
from zero_recipes.metrics.failure import is_disk_full, is_echo, is_out_of_memory, is_unwritten
from zero_recipes.metrics.scores import load_metrics
from zero_recipes.model import config_of_file, loaded_values
from zero_recipes.training import answers
from zero_recipes.training.as_asked import OptimizerProof
from zero_recipes.training.card import write_card
from zero_recipes.training.divergence import (
    Diverged,
    StopAtDivergence,
    StopWithoutProgress,
    has_nonfinite_weights,
    not_finite,
)
from zero_recipes.training.inputs import Inputs
from zero_recipes.training.signals import CutShort, Signals
from zero_recipes.training.token_loss import EndlessRows, TokenMetrics, TokenWeights, begin_epoch, loss_of_a_part


@dataclass(frozen=True)
class Extras:
    """The defaults are those of a trainer without a recipe."""

    clock: PhaseClock = field(default_factory=PhaseClock)
    samples: Sequence[Sample] = ()
    max_new_tokens: int = 0  # of an answer to a sample
    metrics: Mapping[str, Any] = field(default_factory=dict)  # of answers
    saves_on_signals: bool = False
    with_checksums: bool = True
    token_metrics: str = "logging_steps"
    loraplus_lr_ratio: float | None = None
    manifest_facts: Mapping[str, Any] = field(default_factory=dict)
    loaded_values: Callable | None = None  # of the model, read again from its files: (parameter, values)
    building: Callable = contextlib.nullcontext  # around TRL's own constructor


class NotSaved(RunFailed):
    """The run ends; the checkpoints before it are as they were. Of the rank that could not write."""

    scope = "rank"


def not_saved(checkpoint: Path, error: Exception) -> Exception:
    """What a failed save ends the run with: the error itself where neither files nor other ranks are its cause."""
    about = {"checkpoint": checkpoint, "kind": type(error).__name__, "error": error}
    if is_echo(error):
        return PeerFailed(ending("peer_in_save", **about))
    if is_disk_full(error, checkpoint.parent):
        about["free"] = shutil.disk_usage(checkpoint.parent).free
        save.empty_unfinished(checkpoint)  # the record of the failure needs room
        return NotSaved(ending("disk_full", **about))
    if is_unwritten(error):
        return NotSaved(ending("not_saved", **about))
    return error


def rotate(folder: Path, limit: int | None, best: str | None) -> None:
    """Never the newest, nor the best. By step, where transformers goes by time.

    Each one's manifest goes first: one that is half deleted is unfinished.
    """
    if limit is None or limit <= 0:
        return
    numbered_names = {path.name for path in numbered(folder)}
    ordered = []
    for path in map(Path, sort_checkpoints(str(folder), best_model_checkpoint=best)):
        if path.name in numbered_names:
            ordered.append(path)
    fewest = 1
    if best is not None and Path(best) != ordered[-1]:
        fewest = 2
    for checkpoint in ordered[: -max(limit, fewest)]:
        save.begin_checkpoint(checkpoint)
        shutil.rmtree(checkpoint)


class ZeroSFTTrainer(SFTTrainer):
    """A drop-in replacement for TRL's SFTTrainer. Its losses are token-weighted means over all ranks, it detects
    incomplete checkpoints, and it writes metrics.json. It never saves NaN or infinite weights.

    `extras`: what a recipe asks for beside TRL's arguments; run_sft.py alone gives it.

    Private: the methods of the Trainer (transformers 5.23, trainer.py) and of SFTTrainer (TRL 1.16) with an underscore
    that are overridden here: no public event comes before a checkpoint's first file, an epoch's sampler or an engine's
    first step, or carries a step's gradient norm.
    """

    @functools.wraps(SFTTrainer.__init__)
    def __init__(self, *arguments, extras: Extras | None = None, **keywords):
        is_library = extras is None
        self.extras = Extras() if is_library else extras
        self.signals = Signals(self.extras.saves_on_signals)
        self.answers_before: answers.Answers | None = None
        self._flops_per_token = None
        self._train_sampler = None
        self.optimizer_proof = OptimizerProof()
        with self.extras.building(), self.extras.clock.phase("model"):
            super().__init__(*arguments, **keywords)
        self.stage_metrics = self._find_or_add_metrics()
        self.stage_metrics.clock = self.extras.clock
        self.stage_metrics.identify(self.args, self.model)
        if is_library:
            patches.patch_libraries(self.stage_metrics.strategy, self.args.ddp_timeout)
            if self.stage_metrics.strategy.is_deepspeed:
                keep_parameters_in_fp32()
            if self.args.device.type == "cpu":
                multiply_in_fp32()
        self.token_metrics = TokenMetrics(self, self.extras.token_metrics)
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

    @classmethod
    def for_run(cls, run: Run, inputs: Inputs, model: PreTrainedModel, metrics: StageMetricsCallback, clock) -> Self:
        """Of a recipe. `clock`: the session's."""
        settings = run.settings
        if run.strategy.is_fsdp:
            fsdp.keep_names_of_the_file(model)
        facts = {
            "asked": requested_batch(run.recipe.settings),
            "recipe": recipe_facts(settings, run.strategy),
            "recipe_sha256": run.recipe.sha256,
            "data_sha256": inputs.data.data_sha256,
            "evaluation_sha256": inputs.data.evaluation_sha256,
            "model_config": config_of_file(settings),
        }
        extras = Extras(
            clock=clock,
            samples=inputs.data.samples,
            max_new_tokens=settings.sample_max_new_tokens,
            metrics=load_metrics(settings),
            saves_on_signals=run.saves_on_signals,
            with_checksums=not settings.skip_checksums,
            token_metrics=settings.token_metrics,
            loraplus_lr_ratio=settings.loraplus_lr_ratio,
            manifest_facts=facts,
            loaded_values=functools.partial(loaded_values, config=inputs.config, settings=settings),
            building=functools.partial(rows_are_cut, inputs.arguments),
        )
        callbacks = [metrics, StopAtDivergence(metrics, settings.stop_after_nonfinite_steps)]
        patience = settings.early_stopping_patience
        if patience is not None:
            callbacks.append(StopWithoutProgress(metrics, patience, settings.early_stopping_threshold))
        return cls(
            model=model,
            args=inputs.arguments,
            train_dataset=inputs.data.train,
            eval_dataset=inputs.data.evaluation,
            processing_class=inputs.data.tokenizer,
            callbacks=callbacks,
            peft_config=inputs.peft_config,
            extras=extras,
        )

    # training

    def train(self, resume_from_checkpoint=None, *arguments, **keywords):
        """As SFTTrainer; `resume_from_checkpoint=True` is the last checkpoint of args.output_dir that is whole.

        The metrics are complete then. Raises Diverged on all ranks.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = next(map(str, whole_checkpoints(Path(self.args.output_dir))), True)
        if self.stage_metrics.finished:  # of an earlier training
            self.stage_metrics.begin()
        self._load_history(resume_from_checkpoint)
        with self.stage_metrics.clock.phase("train"), fsdp.failures_raised():
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
        """LoRA+: PEFT's groups of parameters have learning rates of their own."""
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
        give_defaults(optimizer or self.optimizer)
        return super().create_scheduler(num_training_steps, optimizer)

    def _load_history(self, checkpoint: str | bool | None) -> None:
        """Then metrics.json says what a killed run leaves."""
        folder = Path(str(checkpoint))
        if (folder / TRAINER_STATE_NAME).is_file():
            carried = folder / save.HISTORY  # another program's has none
            history = json.loads(carried.read_text()) if carried.is_file() else {}
            step = json.loads((folder / TRAINER_STATE_NAME).read_text())["global_step"]
            self.stage_metrics.load_state_dict(history, step)
            self.answers_before = answers.answers_carried(history, self.extras.samples)
            self.signals.evaluation_due = history.get("evaluation_due", False)
        self.stage_metrics.write("running")

    def _prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint):
        """A resharded checkpoint has no files of DeepSpeed's: the engine is built fresh, then filled by parameter."""
        resharded = resume_from_checkpoint is not None and save.is_resharded(resume_from_checkpoint)
        in_16_bits = self.is_deepspeed_enabled and (self.args.bf16 or self.args.fp16)
        begins = in_16_bits and resume_from_checkpoint is None
        with self.stage_metrics.clock.phase("model"), self._own_masters() if begins else contextlib.nullcontext():
            if in_16_bits and self.stage_metrics.strategy.zero_stage == 3:
                patches.one_dtype_of_what_trains(self.model)
            checkpoint = None if resharded else resume_from_checkpoint
            prepared = super()._prepare_for_training(max_steps, train_dataloader, checkpoint)
            if resharded:
                load_resharded(self.model_wrapped, resume_from_checkpoint)
                self._load_optimizer_and_scheduler(resume_from_checkpoint)
        self.stage_metrics.engine = self.model_wrapped
        if resume_from_checkpoint is not None:
            repeat_steps_of_cpu_adam(self.optimizer)
        self.hold_optimizer(max_steps)
        if self.answers_before is None:
            with self.stage_metrics.clock.phase("eval"):
                self.answers_before = answers.answer_before(self, self.extras.samples, self.extras.max_new_tokens)
        self.signals.listen()
        return prepared

    def hold_optimizer(self, max_steps: int) -> None:
        """Compare the optimizer that will step with the one that was asked for. Raises NotAsAsked on every rank."""
        block = None
        if self.is_deepspeed_enabled:
            block = self.accelerator.state.deepspeed_plugin.hf_ds_config.config.get("optimizer")
        self.optimizer_proof.hold(self.optimizer, self.model, block, self.lr_scheduler)
        self.optimizer_proof.begin_schedule(self.lr_scheduler, self.args, max_steps)

    @contextlib.contextmanager
    def _own_masters(self) -> Iterator[None]:
        """DeepSpeed, whose engine is built within, copies fp32 masters from 16-bit weights: let them be the values
        before that. A recipe's checkpoint is read again, which takes no host memory; other weights are kept, unless
        they are rounded already. Not on NVMe, where each would read and write a whole group."""
        is_first = self.stage_metrics.engine is None
        trained = [p for p in self.model.parameters() if p.requires_grad]
        values = [(p, p.data if is_first and not is_partitioned(p) else None) for p in trained]
        if self.extras.loaded_values is not None and isinstance(self.model, PreTrainedModel):
            values = self.extras.loaded_values(self.model)
        yield
        optimizer, ds_config = self.model_wrapped.optimizer, self.stage_metrics.strategy.ds_config
        patches.fresh_adam_at_stage_0(optimizer)
        can_be_set = not (ds_config.on_nvme or ds_config.bf16_masters)
        every_rank = agree(functools.partial(set_masters, optimizer, values, can_be_set))
        self.stage_metrics.exact_master_weights = all(every_rank)

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
        """Raises Preempted. Collective."""
        checkpoint = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        due = self.signals.evaluation_due

        def is_saved() -> bool:
            history = checkpoint / save.HISTORY
            if not history.is_file() or save.checkpoint_fault(checkpoint) is not None:
                return False
            return json.loads(history.read_text()).get("evaluation_due", False) == due

        if not once(is_saved, "looks at the checkpoint"):
            self.args.save_only_model = False
            self._save_checkpoint(self.model, None)
        is_there = once(is_saved, "looks at the checkpoint")
        saved = f"saved as {checkpoint}" if is_there else "not saved"
        raise Preempted(ending("signalled", saved=saved))

    def _determine_best_metric(self, metrics, trial):
        with self.stage_metrics.clock.phase("eval"):
            return super()._determine_best_metric(metrics, trial)

    def _load_rng_state(self, checkpoint) -> None:
        super()._load_rng_state(checkpoint)
        self._evaluate_if_due()  # it draws random numbers, as it would have before the signal

    def _evaluate_if_due(self) -> None:
        """The one that a signal has cut short, in the run that goes on from there. Collective."""
        if self.signals.evaluation_due:
            try:
                self._determine_best_metric(self._evaluate(None, None), None)
            except CutShort:
                self._save_and_end()
            self.signals.evaluation_due = False

    def _leave_if_signalled(self) -> None:
        """Raises CutShort on all ranks. Collective."""
        if self.signals.are_heard:
            self.signals.raise_if_any(self.accelerator.device)

    def _get_train_sampler(self, train_dataset=None):
        self._train_sampler = super()._get_train_sampler(train_dataset)
        return self._train_sampler

    def _run_epoch(self, *arguments, epoch: int, **keywords) -> None:
        """Nothing where no step is left. transformers 5.23, trainer.py `_run_epoch` looks at max_steps after a step
        only: a run resumed from its last step within an epoch takes one more, past the schedule."""
        if self.control.should_training_stop or self.state.global_step >= self.state.max_steps:
            self._evaluate_if_due()
            self.control.should_training_stop = True
            return
        begin_epoch(self._train_sampler, epoch, self.args.seed if self.args.data_seed is None else self.args.data_seed)
        super()._run_epoch(*arguments, epoch=epoch, **keywords)

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        batches, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        return self.token_weights.of_step(batches, count, device, self._get_num_items_in_batch)

    def training_step(self, model, inputs, num_items_in_batch=None):
        repeated = self.token_metrics.repeated = self.token_weights.repeated_tokens(inputs)
        if "input_ids" in inputs:
            self.stage_metrics.count_tokens(inputs, repeated)
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.stage_metrics.add_loss(loss)
        return loss

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
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
        """transformers 5.23 counts the parameters anew in every micro batch, through all modules."""
        if "input_ids" not in inputs:
            return super().floating_point_ops(inputs)
        tokens = inputs["input_ids"].numel()
        if self._flops_per_token is None:
            self._flops_per_token = super().floating_point_ops(inputs) // max(1, tokens)
        return self._flops_per_token * tokens

    def log(self, logs, start_time=None):
        if "loss" in logs:  # of training; evaluations have their own
            logs |= self.stage_metrics.since_last_log()
        self._hand_over_token_metrics()
        super().log(logs, start_time)

    def _hand_over_token_metrics(self) -> None:
        """TRL logs what is in `_metrics`. Collective where there are any.

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

    # evaluation

    def evaluate(self, *arguments, **keywords):
        random_state = torch.get_rng_state()
        with self.stage_metrics.clock.phase("eval"):
            try:
                return super().evaluate(*arguments, **keywords)
            except CutShort:  # the run that goes on evaluates again: its data loader draws from here
                torch.set_rng_state(random_state)
                raise

    def evaluation_loop(self, *arguments, metric_key_prefix="eval", **keywords):
        self._hand_over_token_metrics()  # an evaluation's log has the tokens trained on so far
        self.token_weights.begin_evaluation()
        self.token_metrics.repeated = None
        output = super().evaluation_loop(*arguments, metric_key_prefix=metric_key_prefix, **keywords)
        loss = self.token_weights.evaluated_loss()
        if loss is not None:
            output.metrics[f"{metric_key_prefix}_loss"] = loss
        return output

    def prediction_step(self, model, inputs, *arguments, **keywords):
        self._leave_if_signalled()
        return self.token_weights.predict(super().prediction_step, model, inputs, *arguments, **keywords)

    def sample_after(self) -> None:
        """samples.jsonl and a table on rank 0. Collective. A signal cuts the answers short."""
        if self.args.load_best_model_at_end:
            self.signals.are_heard = False  # the optimizer is of another step
        with self.stage_metrics.clock.phase("eval"):
            try:
                after = answers.answer(self, self.extras.samples, self.extras.max_new_tokens, self._leave_if_signalled)
            except CutShort:
                self._save_and_end()
            if self.args.process_index == 0 and self.extras.samples:
                rows = answers.sample_rows(self.extras.samples, self.answers_before, after, self.extras.metrics)
                answers.write_rows(Path(self.args.output_dir, "samples.jsonl"), rows)
                answers.show_samples(rows, f"from {self.extras.samples[0].source}")

    # checkpoints and the model

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        with rank_0_writes():
            super().save_model(output_dir, _internal_call=_internal_call)
            if Path(output_dir or self.args.output_dir) == self.stage_metrics.output_dir:
                self.create_model_card()

    def _save(self, output_dir=None, state_dict=None) -> None:
        token = self.args.hub_token
        self.args.hub_token = None  # transformers pickles the arguments into training_args.bin
        try:
            with patches.trained_modules_saved_once():
                super()._save(output_dir, patches.without_aliases(self.model, state_dict))
        finally:
            self.args.hub_token = token

    def _save_checkpoint(self, model, trial) -> None:
        """With the run's history and a manifest. None of weights that are not finite: it would push out the last one
        that can be gone on from. Collective.

        transformers 5.23 deletes the oldest checkpoints while other ranks still write their files: a run killed there
        has lost the last whole one under save_total_limit: 1. Here rotation comes after the manifest.
        """
        if not_finite(self.stage_metrics) or has_nonfinite_weights(self.model):
            say(f"no checkpoint at step {self.state.global_step}: loss or weights are not finite")
            return
        with self.stage_metrics.clock.phase("save"):
            if self.args.save_only_model or trial is not None:  # nothing goes on from it
                super()._save_checkpoint(model, trial)
                return
            folder = Path(self.args.output_dir)
            checkpoint = folder / f"checkpoint-{self.state.global_step}"
            limit = self.args.save_total_limit
            self.args.save_total_limit = None
            try:
                with fsdp.failures_raised():
                    self._write_checkpoint(checkpoint, model, trial)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                failure = not_saved(checkpoint, error)
                if failure is error:
                    raise
                raise failure from error
            finally:
                self.args.save_total_limit = limit
            with rank_0_writes():
                if self.args.should_save:
                    rotate(folder, limit, self.state.best_model_checkpoint)
                    forget_resharded(folder)

    def _write_checkpoint(self, checkpoint: Path, model, trial) -> None:
        if self.args.should_save:
            save.begin_checkpoint(checkpoint)
        self.accelerator.wait_for_everyone()  # no rank writes before the mark is there
        super()._save_checkpoint(model, trial)
        history = self.stage_metrics.history()
        prompts = [sample.prompt for sample in self.extras.samples]
        history["answers_before"] = {"prompts": prompts} | vars(self.answers_before)  # a resumed run's model is trained
        history["evaluation_due"] = self.signals.evaluation_due
        self.accelerator.wait_for_everyone()  # all ranks have written
        with rank_0_writes():
            if self.args.should_save:
                write_json(checkpoint / save.HISTORY, history)
                save.write_manifest(checkpoint, self._manifest_facts(), self.extras.with_checksums)

    def _manifest_facts(self) -> dict:
        """Without a recipe only what the trainer knows."""
        keys = ("strategy", "zero_stage", "world_size", "precision", "micro_batch_size", "gradient_accumulation_steps")
        facts = {key: getattr(self.stage_metrics.identity, key) for key in keys}
        facts |= {"step": self.state.global_step, "versions": library_versions()}
        return facts | self.extras.manifest_facts

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        model = self.model if model is None else model
        if isinstance(model, PreTrainedModel) and not self.is_fsdp_enabled:
            patches.load_weights_by_class(model, resume_from_checkpoint)
        else:
            with patches.adapter_dtypes_kept(model):
                super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self):
        by_names_of_the_file = not (self.is_deepspeed_enabled or self.is_fsdp_enabled)
        if by_names_of_the_file and isinstance(self.model, PreTrainedModel):
            patches.load_weights_by_class(self.model, self.state.best_model_checkpoint)
        else:
            super()._load_best_model()

    def save_verified(self, trust_remote_code: bool = False) -> str:
        """Into args.output_dir; returns what is known of it. Collective. Raises NotWhole on every rank.

        `trust_remote_code`: for the comparison with the model's class.
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
            tensors = save.compare_with_class(folder, trust_remote_code)
        save.refuse_bad_numbers(tensors)
        if self.extras.with_checksums:
            save.write_checksums(folder)
        files = {tensor.file for tensor in tensors.values()}
        size = sum(path.stat().st_size for path in files)
        print(f"saved {folder}: complete, {len(tensors)} tensors, {size:,} bytes", flush=True)

    def create_model_card(self, *_arguments, **_keywords) -> None:
        """Of the figures so far. TRL's names no base that is a folder, and no figure."""
        if self.args.process_index == 0:
            write_card(self.stage_metrics.output_dir)
