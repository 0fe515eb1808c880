"""One rank of one run, without numbers: the real Trainer and DeepSpeed engine take two steps under fake tensors.

Runs in processes of its own (parent.py starts them), for it replaces parts of the libraries (patches.py) that no
training may meet. Tasks come as JSON on standard input: [{"job", "rank", "answer": path}], all of one device. The
libraries are imported once; each task runs in a fork. A line of JSON on standard output for each: {"answer", "error"}.

    python -m zero_recipes.plan.simulator.worker AT_ONCE < tasks.json
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import NoReturn

from zero_recipes.core.findings import first_line
from zero_recipes.core.process import end_with_parent
from zero_recipes.plan.job import Job

STEPS = 2  # Adam's states appear in the first; the second is as all that follow

# Of a recipe's keys, what has no part in a step's memory and would ask for files, networks or numbers.
LEFT_OUT = {
    "max_steps": STEPS,
    "use_cpu": True,  # the device is set below
    "tf32": None,
    "report_to": "none",
    "logging_strategy": "no",
    "eval_strategy": "no",
    "save_strategy": "no",
    "load_best_model_at_end": False,
    "resume_from_checkpoint": None,
    "save_model": False,
    "push_to_hub": False,
    "disable_tqdm": True,
    "dataloader_num_workers": 0,
    "dataloader_prefetch_factor": None,
    "dataset_num_proc": None,
    "model_init_kwargs": None,
    "chat_template_path": None,
    "eos_token": None,
    "pad_token": None,
    "assistant_only_loss": False,
    "completion_only_loss": None,
    "attn_implementation": None,
    "run_name": "plan",
}


def main(at_once: int) -> None:
    """Run the tasks of standard input, so many at once."""
    end_with_parent()  # a run that is killed leaves no plan behind
    tasks = json.load(sys.stdin)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to stderr
    _import(tasks[0]["job"]["device"] == "gpu")
    running: dict[int, dict] = {}
    while tasks or running:
        while tasks and len(running) < at_once:
            task = tasks.pop(0)
            child = os.fork()
            if child == 0:
                _run(task)
            running[child] = task
        ended, status = os.wait()
        task = running.pop(ended)
        error = None
        if status:
            trace = Path(task["answer"] + ".error")
            error = trace.read_text() if trace.exists() else f"its process ended with status {status}"
        print(json.dumps({"answer": task["answer"], "error": error}), file=answers, flush=True)


def _import(on_gpu: bool) -> None:
    """All that the tasks need; no thread may run and no process group may exist before the forks."""
    gc.disable()  # a million objects that stay: to look through them again and again takes a second, in each fork too
    os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TORCHINDUCTOR_COMPILE_THREADS="1")
    import torch

    torch.set_num_threads(1)
    if on_gpu:
        from zero_recipes.plan.simulator import fake_device

        fake_device.set_up_fake_gpu()  # before others take names out of torch
    import datasets  # noqa: F401
    import deepspeed
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401 (every engine does, and torch's compiler with it)
    import peft  # noqa: F401
    import trl  # noqa: F401

    gc.freeze()
    gc.enable()


def _run(task: dict) -> NoReturn:
    """The child's whole life."""
    end_with_parent()
    started = time.perf_counter()
    try:
        job = Job.from_dict(task["job"])
        if job.ds_config is None and job.settings.fp16:
            # the same bytes but for the loss scale, which accelerate 1.15 (accelerator.py) has for real devices alone
            job = job.changed(fp16=False, bf16=True)
        _environment(job, task["rank"])
        _start_group(job, task["rank"])
        with tempfile.TemporaryDirectory() as folder:
            found = train_two_steps(job, folder)
        found["seconds"] = time.perf_counter() - started
        found["resident_bytes"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        Path(task["answer"]).write_text(json.dumps(found))
        code = 0
    except BaseException as error:  # whatever it is, the parent must hear of it
        Path(task["answer"] + ".error").write_text(f"{type(error).__name__}: {first_line(error)}")
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)  # the pretended group has nobody to say goodbye to


def _environment(job: Job, rank: int) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):  # of the run that is being planned
        os.environ.pop(name, None)
    if job.is_alone:
        _set_up_autocast(job)
        return
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(job.world_size),
        LOCAL_RANK="0",  # of the one device there is
        LOCAL_WORLD_SIZE=str(min(job.gpus_per_node, job.world_size)),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="1",
    )
    if job.ds_config is not None:
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    else:
        _set_up_autocast(job)


def _set_up_autocast(job: Job) -> None:
    """Without DeepSpeed the model computes in 16 bits by torch.autocast."""
    if job.device == "gpu" and (job.settings.bf16 or job.settings.fp16):
        import torch

        from zero_recipes.plan.simulator import autocast

        autocast.set_up_autocast(torch.bfloat16 if job.settings.bf16 else torch.float16)


def _start_group(job: Job, rank: int) -> None:
    """A process group of the job's size in which every collective succeeds and moves nothing."""
    import torch
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if job.is_alone:
        return
    backend = "cpu:fake,gpu:fake" if job.device == "gpu" else "fake"
    torch.distributed.init_process_group(backend, store=FakeStore(), rank=rank, world_size=job.world_size)
    if job.ds_config is not None:
        import deepspeed

        from zero_recipes.plan.simulator import patches

        patches.no_kernels()
        deepspeed.init_distributed("fake", auto_mpi_discovery=False, verbose=False)


def train_two_steps(job: Job, folder: str) -> dict:
    """Build the run as run_sft.py does, under fake tensors, train two steps, and return what was counted."""
    import psutil
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from zero_recipes.libs.warnings import quieten

    quieten()
    from zero_recipes.config import keys
    from zero_recipes.config import recipe as recipes
    from zero_recipes.config import strategy as strategies
    from zero_recipes.config.settings import Settings
    from zero_recipes.model import sizes_of
    from zero_recipes.plan.simulator import fake_device, patches
    from zero_recipes.plan.simulator.allocator import kMinBlockSize, reserved_peak
    from zero_recipes.plan.simulator.callback import TRAINING, Watch
    from zero_recipes.plan.simulator.tracker import LiveStorages, Observed

    on_gpu = job.device == "gpu"
    if on_gpu:
        fake_device.emptied.append(lambda: tracker.events.append(("empty",)))
    device = torch.device("gpu:0" if on_gpu else "cpu")
    settings = Settings(dict.fromkeys(keys.key_types()) | job.settings.as_dict() | LEFT_OUT)
    settings = settings.replace(output_dir=folder, deepspeed=job.ds_config)
    derived = recipes.derive_accumulation(settings, {}, job.world_size)
    accumulation = settings.gradient_accumulation_steps if derived is None else derived
    settings = settings.replace(gradient_accumulation_steps=min(accumulation, 2))
    strategy = strategies.resolve_strategy(settings, {"WORLD_SIZE": str(job.world_size)}, sizes_of)
    decided = {} if strategy.ds_config is None else {"deepspeed": strategy.ds_config.raw}
    decided |= {"fsdp": True, "fsdp_config": strategy.fsdp_config} if strategy.is_fsdp else {"fsdp": None}
    _, training_args, model_args, _ = recipes.trl_arguments(settings.replace(**decided), Path("plan.yaml"))
    _train_on(device, training_args)

    host = LiveStorages("cpu")
    in_one = training_args.packing or training_args.padding_free
    full_rows = training_args.per_device_train_batch_size == 1 or in_one
    patches.replace_parts_of_libraries(on_gpu, full_rows, in_one, host.pinning)
    imports = psutil.Process().memory_info().rss
    tracker = LiveStorages(device.type, kMinBlockSize if on_gpu else 1, fake_device.stream if on_gpu else None)
    observed = Observed(tracker, host) if on_gpu else Observed(tracker)
    with FakeTensorMode(allow_non_fake_inputs=True), observed:
        watch = Watch(strategy, observed, tracker, host, accumulation)
        trainer = _trainer(job, strategy, training_args, model_args, watch)
        trainer.train()
        if job.settings.evaluates:
            watch.evaluate(_rows(training_args, training_args.world_size * training_args.per_device_eval_batch_size))
        if job.settings.load_best_model_at_end and strategy.is_deepspeed:
            watch.load_best_model()
    found = watch.found() | {"imports": imports}
    found["gradient_accumulation_steps"] = accumulation
    found["reserved_peak_bytes"] = reserved_peak(tracker.events, TRAINING[0]) if on_gpu else 0
    return found


def _train_on(device, training_args) -> None:
    """transformers and accelerate have taken the CPU for want of anything else."""
    from accelerate.state import PartialState

    PartialState._shared_state["device"] = device
    training_args.__dict__["_setup_devices"] = device


def _trainer(job: Job, strategy, training_args, model_args, watch):
    """The trainer as run_sft.py builds it, watched."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from trl import get_peft_config

    from zero_recipes.libs.huggingface import rows_are_cut
    from zero_recipes.libs.patches import FreshAdamAtStage0
    from zero_recipes.plan.simulator.callback import WatchedSFTTrainer
    from zero_recipes.plan.simulator.patches import attention_of

    config = dict(job.config)
    config = AutoConfig.for_model(config.pop("model_type"), **config)
    dtype = model_args.dtype
    dtype = (config.dtype or torch.float32) if dtype in ("auto", None) else getattr(torch, dtype)
    attention = attention_of(job.settings.attn_implementation, job.device == "gpu")
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    if job.device == "gpu" and strategy.zero_stage != 3:  # as DeepSpeed does: engine.py `_configure_distributed_model`
        if strategy.is_deepspeed and (training_args.bf16 or training_args.fp16):
            model.to(torch.bfloat16 if training_args.bf16 else torch.float16)
        model.to(training_args.device)
    rows = _rows(training_args)
    with rows_are_cut(training_args):
        trainer = WatchedSFTTrainer(
            model=model,
            args=training_args,
            train_dataset=rows,
            processing_class=_tokenizer(),
            peft_config=get_peft_config(model_args),
            callbacks=[FreshAdamAtStage0(), watch],
        )
    watch.join(trainer)
    return trainer


def _rows(training_args, count: int | None = None):
    """So many tokenised rows of the recipe's full length, or enough for all steps; what they say plays no part."""
    from datasets import Dataset

    if count is None:
        count = STEPS * training_args.per_device_train_batch_size * training_args.gradient_accumulation_steps
        count *= training_args.world_size
    row = [1] * training_args.max_length
    return Dataset.from_dict({"input_ids": [row] * count, "labels": [row] * count})


def _tokenizer():
    """The least that SFTTrainer takes; the rows are tokens already."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


if __name__ == "__main__":
    main(int(sys.argv[1]))
