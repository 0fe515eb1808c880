"""What the workers of tests/group.py run. Every case is called on all ranks; arguments and results are JSON."""

from __future__ import annotations

import json

import run_sft
from zero_recipes import model_states
from zero_recipes.metrics import StageMetricsCallback


def train(argv: list[str]) -> dict:
    """One whole run of run_sft.py in this process group; what the engine really was, and metrics.json."""
    run = run_sft.prepare(argv)
    trainer = run_sft.train(run)
    trainer.accelerator.wait_for_everyone()  # rank 0 writes the files
    engine = trainer.model_wrapped
    optimizer = getattr(engine, "optimizer", None)
    return {
        "engine": type(engine).__name__,
        "optimizer": type(optimizer).__name__,
        "stage": engine.zero_optimization_stage() if hasattr(engine, "zero_optimization_stage") else None,
        "world_size": trainer.accelerator.num_processes,
        "metrics": json.loads((run.output_dir / "metrics.json").read_text()),
        "groups": parameter_groups(trainer),
        "hpz_groups": hpz_groups(trainer.model),
    }


def hpz_groups(model) -> list[list[int]]:
    """At stage 3, [number of groups that hold the model whole, ranks in each]: one entry if all parameters agree."""
    partitioned = [p for p in model.parameters() if hasattr(p, "ds_id")]
    return sorted({(p.ds_secondary_tensor_num_of_groups, p.ds_secondary_tensor_group_size) for p in partitioned})


def parameter_groups(trainer) -> list[list[int]]:
    """Sizes (elements) of the trainable tensors by the Trainer's optimizer groups: weight decay, then none."""
    names = set(trainer.get_decay_parameter_names(trainer.model))
    groups: tuple[list[int], list[int]] = ([], [])
    for name, p in trainer.model.named_parameters():
        if p.requires_grad:
            groups[name not in names].append(getattr(p, "ds_numel", p.numel()))
    return list(groups)


def train_with_stowaway(argv: list[str]) -> dict:
    """`train`, with a tensor of 1 MiB hidden in the optimizer's states before the first step."""
    import torch

    original = StageMetricsCallback.on_train_begin

    def hide(self, args, state, control, **kwargs):
        inner = model_states.base_optimizer(self.trainer.optimizer)
        inner.state[torch.nn.Parameter(torch.zeros(1))] = {"hidden": torch.ones(2**18).clone()}
        return original(self, args, state, control, **kwargs)

    StageMetricsCallback.on_train_begin = hide
    try:
        return train(argv)
    finally:
        StageMetricsCallback.on_train_begin = original


def train_without_fresh_adam(argv: list[str]) -> dict:
    """`train` at stage 0 with DeepSpeed's own step before training left in place."""
    from zero_recipes.faults import FreshAdamAtStage0

    seen: dict = {}
    original = FreshAdamAtStage0.on_train_begin

    def look(self, args, state, control, model=None, optimizer=None, **kwargs):
        inner = optimizer.optimizer
        states = model_states.base_optimizer(inner).state.values()
        seen["adam_steps_before_training"] = max(int(tensors["step"]) for tensors in states)
        seen["masters_moved"] = any(
            not (master == weight.float()).all()
            for masters, weights in zip(inner.fp32_groups, inner.fp16_groups, strict=True)
            for master, weight in zip(masters, weights, strict=True)
        )

    FreshAdamAtStage0.on_train_begin = look
    try:
        return seen | {"loss_history": train(argv)["metrics"]["loss_history"]}
    finally:
        FreshAdamAtStage0.on_train_begin = original


def fresh_adam_on_resume() -> dict:
    """The step counter that FreshAdamAtStage0 leaves on a fresh and on a resumed run, from 7."""
    from types import SimpleNamespace

    import deepspeed
    import torch

    from zero_recipes.faults import FreshAdamAtStage0

    left = {}
    for name, resumes in (("fresh", False), ("resumed", True)):
        layer = torch.nn.Linear(3, 3)
        _, optimizer, _, _ = deepspeed.initialize(
            model=layer,
            optimizer=torch.optim.AdamW(layer.parameters()),
            config={"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 0}},
        )
        for tensors in optimizer.state.values():
            tensors["step"].fill_(7.0)
        FreshAdamAtStage0(resumes).on_train_begin(None, None, None, optimizer=SimpleNamespace(optimizer=optimizer))
        left[name] = max(float(tensors["step"]) for tensors in optimizer.state.values())
    return left


def train_without_forgetting(argv: list[str]) -> str:
    """The error of a stage 3 run that generates before training and keeps the trace."""
    from zero_recipes import generation

    original = generation.forget_trace_of_generation
    generation.forget_trace_of_generation = lambda engine: None
    try:
        train(argv)
        return "no error"
    except AssertionError as error:
        return str(error)[-200:]
    finally:
        generation.forget_trace_of_generation = original


def names_lost_on_resume(folder: str) -> list[str]:
    """Tensors that transformers' own Trainer leaves as they were when it loads a checkpoint of a GPTNeoX."""
    import os

    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained("tiny_world/base")
    if os.environ["RANK"] == "0":
        model.save_pretrained(folder)
        return model.load_state_dict(load_file(f"{folder}/model.safetensors"), False).missing_keys
    return []


def engine_config(argv: list[str]) -> dict:
    """The configuration that the DeepSpeed engine of a finished run was built from."""
    run = run_sft.prepare(argv)
    trainer = run_sft.train(run)
    return json.loads(json.dumps(trainer.model_wrapped.config, default=str))


def splits_tokenised(argv: list[str], cache: str) -> int:
    """How many splits this process tokenised in one run, with the datasets library's cache in `cache`."""
    import datasets

    from zero_recipes import preparation

    original, kept, calls = preparation.tokenise, datasets.config.HF_DATASETS_CACHE, []
    preparation.tokenise = lambda *arguments: calls.append(1) or original(*arguments)
    datasets.config.HF_DATASETS_CACHE = cache
    try:
        train(argv)
        return len(calls)
    finally:
        preparation.tokenise, datasets.config.HF_DATASETS_CACHE = original, kept


def refusal_of(argv: list[str]) -> str:
    """What a run is refused for, on this rank."""
    from zero_recipes.refusal import Refusal

    try:
        train(argv)
        return "not refused"
    except Refusal as refusal:
        return refusal.what


def refusal_in(folder: str, argv: list[str], environment: dict[str, str]) -> str:
    """What a run started in `folder`, with a launcher's `environment`, is refused for, on this rank."""
    import os
    from contextlib import chdir

    kept = dict(os.environ)
    os.environ.update(environment)
    try:
        with chdir(folder):
            return refusal_of(argv)
    finally:
        os.environ.clear()
        os.environ.update(kept)


def train_unchecked(argv: list[str]) -> dict:
    """`train` with the check of combinations switched off."""
    from deepspeed.utils import groups

    from zero_recipes import preflight

    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None  # one process makes it once only
    original = preflight.combination_findings
    preflight.combination_findings = lambda *_: []
    try:
        return train(argv)
    finally:
        preflight.combination_findings = original
