"""One rank of one run, without numbers: the real Trainer and DeepSpeed engine take two steps under fake tensors.

For forks of a process of its own (parent.py `main`): no training may meet the replaced parts of stand_ins.py.
No thread may run and no process group may exist before the forks.
"""

import contextlib
import json
import os
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TextIO

import deepspeed
import deepspeed.runtime.zero.muon.muon_optimizer  # as every engine does, with torch's compiler
import peft  # noqa: F401
import psutil
import torch
from accelerate.state import PartialState
from datasets import Dataset
from tokenizers import Tokenizer, models
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, PreTrainedTokenizerFast, TrainerCallback
from transformers.modeling_utils import set_zero3_state
from trl import SFTTrainer, get_quantization_config

from zero_recipes.config.strategy import Strategy, resolve_strategy
from zero_recipes.config.trl_arguments import trl_arguments
from zero_recipes.core.findings import first_line
from zero_recipes.core.process import end_with_parent
from zero_recipes.engine.deepspeed import base_optimizer, gradient_tensors, optimizer_tensors, weight_tensors
from zero_recipes.engine.faults import adapters_rounded_at_stage_3
from zero_recipes.engine.faults.four_bit_on_cpu import keep_4bit_layout
from zero_recipes.engine.faults.leaf_modules_of_adapters import let_inputs_have_gradients
from zero_recipes.engine.faults.stage_3_one_dtype import one_dtype_of_what_trains
from zero_recipes.engine.huggingface import rows_are_cut
from zero_recipes.engine.speed import norms
from zero_recipes.engine.warnings import quieten
from zero_recipes.metrics.communication import CommunicationCounter
from zero_recipes.metrics.probe import StateProbe
from zero_recipes.model.meta import size_of
from zero_recipes.model.towers import adapter_of, auto_class, freeze_towers
from zero_recipes.model.trained import parameter_counts
from zero_recipes.tools.plan.job import Job
from zero_recipes.tools.plan.simulator import device, stand_ins
from zero_recipes.tools.plan.simulator.tracker import LiveStorages, Observed
from zero_recipes.training.token_loss import TokenWeights

STEPS = 2  # Adam's states appear in the first; the second is as all that follow
TRAINING = ("forward", "backward", "step", "between")

# Recipe keys without a part in a step's memory, which would ask for files, networks or numbers.
LEFT_OUT = {
    "assistant_only_loss": False,
    "attn_implementation": None,
    "chat_template_path": None,
    "completion_only_loss": None,
    "dataloader_num_workers": 0,
    "dataloader_prefetch_factor": None,
    "dataset_num_proc": None,
    "disable_tqdm": True,
    "eos_token": None,
    "eval_strategy": "no",
    "fsdp": None,
    "load_best_model_at_end": False,
    "logging_strategy": "no",
    "model_init_kwargs": None,
    "pad_token": None,
    "push_to_hub": False,
    "report_to": "none",
    "resume_from_checkpoint": None,
    "run_name": "plan",
    "save_model": False,
    "save_strategy": "no",
    "tf32": None,
    "use_cpu": True,  # the device is set later
}


def run(task: dict, answer: TextIO) -> NoReturn:
    """Simulate one task: a fork's whole life. `answer`: takes JSON; `error` in it says what went wrong."""
    end_with_parent()
    try:
        job = Job.from_dict(task["job"])
        if job.ds_config is None and job.settings.fp16:
            # the same bytes but for the loss scale: accelerate 1.15 (accelerator.py) has it for real devices alone
            job = job.changed(fp16=False, bf16=True)
        _start_group(job, task["rank"])
        with tempfile.TemporaryDirectory() as folder:
            found = train_two_steps(job, folder, task["masked"])
    except BaseException as error:  # the parent must hear of it
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {first_line(error)}"}
    json.dump(found, answer)
    answer.flush()
    sys.stderr.flush()
    os._exit(0)  # the group is a fake: nobody waits


def _start_group(job: Job, rank: int) -> None:
    """A process group of the job's size in which every collective succeeds and moves nothing."""
    if job.world_size == 1 and job.ds_config is None:  # nothing is wrapped
        return
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(job.world_size),
        LOCAL_RANK="0",
        LOCAL_WORLD_SIZE=str(job.ranks_per_node),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="1",
    )
    backend = "cpu:fake,gpu:fake" if job.device == "gpu" else "fake"
    torch.distributed.init_process_group(backend, store=FakeStore(), rank=rank, world_size=job.world_size)
    if job.ds_config is not None:
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        stand_ins.no_kernels()
        deepspeed.init_distributed("fake", auto_mpi_discovery=False, verbose=False)


def train_two_steps(job: Job, folder: str, masked: bool) -> dict:
    """Train two steps of a run that is built as run_sft.py builds it. Returns what a prediction is made of.

    `masked`: whether packed rows are computed under a mask.
    """
    quieten()
    settings = job.settings.replace(**LEFT_OUT, max_steps=STEPS, output_dir=folder, deepspeed=job.ds_config)
    settings = settings.replace(gradient_accumulation_steps=min(job.settings.gradient_accumulation_steps, 2))
    strategy = resolve_strategy(settings, {"WORLD_SIZE": str(job.world_size)}, size_of)
    _, training_args, model_args, _ = trl_arguments(settings, Path("plan.yaml"))
    # transformers and accelerate have taken the CPU
    on_gpu = job.device == "gpu"
    main_device = torch.device("gpu:0" if on_gpu else "cpu")
    PartialState._shared_state["device"] = main_device
    training_args.__dict__["_setup_devices"] = main_device

    host = LiveStorages("cpu")
    in_one = training_args.packing or training_args.padding_free
    full_rows = training_args.per_device_train_batch_size == 1 or in_one
    casts = job.zero.autocast or job.settings.precision  # without DeepSpeed, or by its torch_autocast
    stand_ins.replace_parts_of_libraries(on_gpu, full_rows, masked, host)
    if on_gpu and casts != "fp32":
        stand_ins.set_up_autocast(torch.bfloat16 if casts == "bf16" else torch.float16)
    imports = psutil.Process().memory_info().rss
    trackers = [LiveStorages("gpu", device.BLOCK), host] if on_gpu else [LiveStorages("cpu")]
    with FakeTensorMode(allow_non_fake_inputs=True), Observed(*trackers):
        trainer = _trainer(job, strategy, training_args, model_args)
        watch = Watch(trainer, strategy, trackers[0], host, job.settings.gradient_accumulation_steps)
        trainer.watch = watch
        trainer.add_callback(watch)
        trainer.train()
        if job.settings.evaluates:
            longest, with_loss = job.evaluated or (training_args.max_length, None)
            if on_gpu and with_loss:
                stand_ins.loss_of_some(with_loss)
            watch.evaluate(_rows(longest, training_args.world_size * training_args.per_device_eval_batch_size))
        if job.settings.load_best_model_at_end and strategy.is_deepspeed:
            watch.load_best_model()
    return watch.found() | {"imports": imports}


def _trainer(job: Job, strategy: Strategy, training_args, model_args) -> "WatchedSFTTrainer":
    if strategy.zero_stage == 3:
        adapters_rounded_at_stage_3.apply()
    if strategy.zero_stage in (1, 2):
        norms.apply_to_stages_1_and_2()
    model = _model(job, model_args, training_args.device)
    if job.device == "gpu" and strategy.zero_stage != 3:  # as DeepSpeed does: engine.py `_configure_distributed_model`
        if strategy.is_deepspeed and training_args.bf16:  # `to` refuses packed weights
            model.bfloat16()
        elif strategy.is_deepspeed and training_args.fp16:
            torch.nn.Module.half(model)  # transformers' own refuses packed weights; DeepSpeed does not call it
        model.to(training_args.device)
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}))  # the least that SFTTrainer takes
    count = STEPS * training_args.per_device_train_batch_size * training_args.gradient_accumulation_steps
    rows = _rows(training_args.max_length, count * job.world_size)
    with rows_are_cut(training_args):  # without max_length
        trainer = WatchedSFTTrainer(
            model=model,
            args=training_args,
            train_dataset=rows,
            processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"),
            peft_config=adapter_of(job.settings, model),
        )
    if strategy.zero_stage == 3 and (training_args.bf16 or training_args.fp16):
        one_dtype_of_what_trains(trainer.model)
    return trainer


def _model(job: Job, model_args, main_device: torch.device) -> torch.nn.Module:
    config = AutoConfig.for_model(**job.config)
    dtype = model_args.dtype
    dtype = (config.dtype or torch.float32) if dtype in ("auto", None) else getattr(torch, dtype)
    attention = stand_ins.attention_of(job.settings.attn_implementation, job.device == "gpu")
    packs = job.settings.load_in_4bit  # then transformers builds the model without deepspeed.zero.Init
    with set_zero3_state() if packs else contextlib.nullcontext():
        model = auto_class(config).from_config(config, dtype=dtype, attn_implementation=attention)
    freeze_towers(model)
    if packs:
        stand_ins.pack_in_4_bits(model, get_quantization_config(model_args), main_device)
        keep_4bit_layout(model)
    let_inputs_have_gradients(model, job.settings)
    return model


def _rows(length: int, count: int) -> Dataset:
    """What they say plays no part."""
    row = [1] * length
    return Dataset.from_dict({"input_ids": [row] * count, "labels": [row] * count})


class WatchedSFTTrainer(SFTTrainer):
    """TRL's trainer with a real run's token weights, which names the phases."""

    watch: "Watch"

    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        self.token_weights = TokenWeights(self)

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """Weigh the tokens of a step, as a real run does."""
        batches, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        return self.token_weights.of_step(batches, count, device, self._get_num_items_in_batch)

    def prediction_step(self, model, inputs, *arguments, **keywords):
        """Weigh the tokens of an evaluation, as a real run does."""
        return self.token_weights.predict(super().prediction_step, model, inputs, *arguments, **keywords)

    def compute_loss(self, model, inputs, *arguments, **keywords):
        """Name the phases forward and backward."""
        if not self.model.training:
            return super().compute_loss(model, inputs, *arguments, **keywords)
        self.watch.tracker.enter("forward")
        loss = super().compute_loss(model, inputs, *arguments, **keywords)
        self.watch.tracker.enter("backward")
        return loss

    def training_step(self, *arguments, **keywords):
        """Name the phase between two micro steps."""
        loss = super().training_step(*arguments, **keywords)
        self.watch.tracker.enter("between")
        self.watch.communication.end_step()  # of this micro step: only the last of a step steps
        return loss


@dataclass(eq=False)
class Watch(TrainerCallback):
    """Names the phases to the tracker, and reads the second step as a real run's metrics.json. Peaks are of both."""

    trainer: WatchedSFTTrainer
    strategy: Strategy
    tracker: LiveStorages
    host: LiveStorages
    accumulation: int  # micro steps of the recipe's step; at most two are simulated, others are as the first
    steps: int = 0  # done

    def __post_init__(self):
        self.parameters, self.trainable = parameter_counts(self.trainer.model)
        self.bytes = {}
        self.record("model_loaded")
        for parameter in self.trainer.model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._own_gradient)

    def record(self, name: str) -> None:
        """Keep the allocated bytes after a phase (in place of StageMetricsCallback.record)."""
        self.bytes[name] = self.tracker.live

    def _own_gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self.tracker.assign([parameter.grad], "grads")

    def on_train_begin(self, args, state, control, **kwargs):
        """Look at the engine that was built, and name the optimizer's step from now on."""
        self.record("engine_built")
        self.host_load = max(self.host.peaks.values())
        self.host.forget_peaks()
        self.probe = StateProbe(self.trainer.model, self.trainer.optimizer, self.strategy, self.record)
        self._assign()
        # accelerate's `backward` calls the engine's `step`; without DeepSpeed the Trainer calls the optimizer's
        owner = self.trainer.model_wrapped if self.strategy.is_deepspeed else self.trainer.optimizer
        step = owner.step

        def named(*arguments, **keywords):
            self.tracker.enter("step")
            return step(*arguments, **keywords)

        owner.step = named
        self.communication = CommunicationCounter(self.trainer.model_wrapped, self.strategy)
        self.communication.start()
        self.tracker.enter("between")
        self.tracker.forget_peaks()

    def on_step_begin(self, args, state, control, **kwargs):
        """Look at all states in the second step, when Adam has its own."""
        if self.steps == 1:
            self.probe.attach()

    def on_step_end(self, args, state, control, **kwargs):
        """Count a step, and keep its states."""
        self.tracker.enter("between")
        if self.steps == 1:
            self.states = self.probe.detach()
        self.steps += 1
        self._assign()

    def _assign(self) -> None:
        parameters = self.probe.parameters
        optimizer = self.probe.states_of
        for tracker in (self.tracker, self.host):
            tracker.assign(getattr(self.trainer.model_wrapped, "buckets", []), "buckets")  # of DistributedDataParallel
            tracker.assign(gradient_tensors(parameters, optimizer), "grads")
            tracker.assign(optimizer_tensors(parameters, optimizer), "optimizer")
            tracker.assign(weight_tensors(parameters, optimizer), "params")

    def evaluate(self, rows: Dataset) -> None:
        """Evaluate one batch, as the Trainer's loop takes it."""
        trainer = self.trainer
        trainer.token_weights.begin_evaluation()
        batch = trainer._prepare_inputs(next(iter(trainer.get_eval_dataloader(rows))))
        self.tracker.enter("evaluation")
        trainer.model_wrapped.eval()
        trainer.prediction_step(trainer.model_wrapped, batch, prediction_loss_only=True)
        trainer.model_wrapped.train()
        self.tracker.enter("between")

    def load_best_model(self) -> None:
        """Load the best model's states.

        torch's Optimizer.load_state_dict makes new states before it drops the old (deepspeedai/DeepSpeed#3938).
        """
        self.tracker.enter("best model")
        again = []
        for state in base_optimizer(self.trainer.optimizer).state.values():
            again += [value.clone() for value in state.values() if isinstance(value, torch.Tensor)]
        del again
        self.tracker.enter("between")

    def found(self) -> dict:
        """What this rank needs, by names of metrics/schema.py; `at_peaks`: `at_peak` of each phase."""
        return {
            "parameters": self.parameters,
            "trainable_parameters": self.trainable,
            "peaks": dict.fromkeys(TRAINING, 0) | self.tracker.peaks,
            "at_peaks": self.tracker.at_peak,
            "model_state_bytes": self.states,
            "memory_phases": self.bytes,
            "host_load": self.host_load,
            "host_training": max(self.host.peaks.values()),
            "communication_bytes_per_step": self._communication(),
        }

    def _communication(self) -> dict[str, int]:
        """Of one step: the last micro step, and as many of the others as the recipe has."""
        other, last = (everywhere for everywhere, _ in self.communication.steps[-2:])
        if self.accumulation == 1 or not self.strategy.is_deepspeed:
            return last  # DistributedDataParallel reduces in the last micro step only
        others = self.accumulation - 1
        return {name: last.get(name, 0) + others * other.get(name, 0) for name in sorted({*last, *other})}
