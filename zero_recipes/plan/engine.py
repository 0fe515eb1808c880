"""One rank of one run, without numbers: the real Trainer and DeepSpeed engine take two steps under fake tensors.

Runs in a process of its own (simulation.py starts it), for it replaces parts of the libraries (patches.py) that no
training may meet:

    python -m zero_recipes.plan.engine RANK ANSWER.json < job.json
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

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


def main(rank: int, answer: Path) -> None:
    """Simulate the job on standard input as `rank`; write what was counted to `answer`."""
    started = time.perf_counter()
    job = Job(**json.load(sys.stdin))
    _environment(job, rank)
    on_gpu = job.device == "gpu"
    if on_gpu:
        import torch

        from zero_recipes.plan import autocast, pretend_gpu

        pretend_gpu.set_up()
        if job.ds_config is None and (job.values["bf16"] or job.values["fp16"]):
            autocast.set_up(torch.bfloat16 if job.values["bf16"] else torch.float16)
    _start_group(job, rank)
    with tempfile.TemporaryDirectory() as folder:
        found = simulate(job, folder)
    answer.write_text(json.dumps(found | {"seconds": time.perf_counter() - started}))


def _environment(job: Job, rank: int) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(job.world_size),
        LOCAL_RANK="0",  # of the one device there is
        LOCAL_WORLD_SIZE=str(min(job.gpus_per_node, job.world_size)),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="1",
        DS_ACCELERATOR="cpu",
        OMP_NUM_THREADS="1",
        HF_HUB_OFFLINE="1",
    )
    if job.ds_config is not None:
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"


def _start_group(job: Job, rank: int) -> None:
    """A process group of the job's size in which every collective succeeds and moves nothing."""
    import torch
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if job.world_size == 1 and job.ds_config is None:
        return
    backend = "cpu:fake,gpu:fake" if job.device == "gpu" else "fake"
    torch.distributed.init_process_group(backend, store=FakeStore(), rank=rank, world_size=job.world_size)
    if job.ds_config is not None:
        import deepspeed

        deepspeed.init_distributed("fake", auto_mpi_discovery=False, verbose=False)


def simulate(job: Job, folder: str) -> dict:
    """Build the run as run_sft.py does, under fake tensors, train two steps, and say what was counted (watch.py)."""
    import psutil
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from zero_recipes import calm

    calm.quieten()
    torch.set_num_threads(1)
    from zero_recipes import recipe as recipes
    from zero_recipes import strategy as strategies
    from zero_recipes.plan import patches, pretend_gpu
    from zero_recipes.plan.tracker import CUDA_BLOCK, LiveStorages

    on_gpu = job.device == "gpu"
    device = torch.device("gpu:0" if on_gpu else "cpu")
    values = dict.fromkeys(recipes.key_types()) | job.values | LEFT_OUT
    values |= {"output_dir": folder, "deepspeed": job.ds_config}
    recipe = recipes.Recipe(Path("plan.yaml"), values, {}, "")
    recipes.derive_accumulation(recipe, job.world_size)
    strategy = strategies.resolve(recipe, {"WORLD_SIZE": str(job.world_size)})
    _, training_args, model_args, _, _ = recipes.instances(recipe)
    _train_on(device, training_args)

    full_rows = training_args.per_device_train_batch_size == 1 or training_args.packing
    patches.apply(on_gpu, full_rows, training_args.packing)
    imports = psutil.Process().memory_info().rss
    tracker = LiveStorages(device.type, CUDA_BLOCK if on_gpu else 1, pretend_gpu.stream if on_gpu else None)
    host = LiveStorages("cpu")
    with FakeTensorMode(allow_non_fake_inputs=True), patches.AnswersForNumbers(), host, tracker:
        trainer, watch = _trainer(job, strategy, training_args, model_args, tracker, host)
        trainer.train()
        return watch.found() | {"imports": imports}


def _train_on(device, training_args) -> None:
    """transformers and accelerate have taken the CPU for want of anything else."""
    from accelerate.state import PartialState

    PartialState._shared_state["device"] = device
    training_args.__dict__["_setup_devices"] = device


def _trainer(job: Job, strategy, training_args, model_args, tracker, host):
    """(the trainer as run_sft.py builds it, what watches it)."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from trl import get_peft_config

    from zero_recipes.faults import FreshAdamAtStage0
    from zero_recipes.plan.watch import Watch, WatchedSFTTrainer

    config = dict(job.config)
    config = AutoConfig.for_model(config.pop("model_type"), **config)
    dtype = model_args.dtype
    dtype = (config.dtype or torch.float32) if dtype in ("auto", None) else getattr(torch, dtype)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if job.device == "gpu" and strategy.zero_stage != 3:  # as DeepSpeed does: engine.py `_configure_distributed_model`
        if strategy.is_deepspeed and training_args.bf16:
            model.bfloat16()
        model.to(training_args.device)
    watch = Watch(strategy, tracker, host)
    trainer = WatchedSFTTrainer(
        model=model,
        args=training_args,
        train_dataset=_rows(training_args),
        processing_class=_tokenizer(),
        peft_config=get_peft_config(model_args),
        callbacks=[FreshAdamAtStage0(False), watch],
    )
    watch.join(trainer)
    return trainer, watch


def _rows(training_args):
    """Tokenised rows of the recipe's full length, enough for all steps; what they say plays no part."""
    from datasets import Dataset

    count = STEPS * training_args.per_device_train_batch_size * training_args.gradient_accumulation_steps
    row = [1] * training_args.max_length
    count *= training_args.world_size
    return Dataset.from_dict({"input_ids": [row] * count, "labels": [row] * count})


def _tokenizer():
    """The least that SFTTrainer takes; the rows are tokens already."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # the pretended group has nobody to say goodbye to
