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


def train_and_keep_states(argv: list[str], step: int, path: str) -> dict:
    """`train`; what DeepSpeed itself gathers of masters and Adam's states when `step` is saved goes to `path`."""
    import torch

    original = StageMetricsCallback.on_save

    def keep(self, args, state, control, **kwargs):
        if state.global_step == step:
            states = gathered_states(self.trainer)
            if args.process_index == 0:
                torch.save(states, path)
        return original(self, args, state, control, **kwargs)

    StageMetricsCallback.on_save = keep
    try:
        return train(argv)
    finally:
        StageMetricsCallback.on_save = original


def train_and_compare_states(argv: list[str], path: str) -> dict:
    """`train` from a resharded checkpoint; how the states after loading, before any step, differ from those at `path`.

    "different": names whose masters, moments or weights for the forward pass are not the same bits.
    "steps": Adam's counters before and after the run; "counters": how many tensors they are, "groups": of how many.
    """
    import torch

    original, seen = StageMetricsCallback.on_train_begin, {}

    def counters(trainer) -> list:
        return [state["step"] for state in model_states.base_optimizer(trainer.optimizer).state.values()]

    def compare(self, args, state, control, **kwargs):
        wanted, found = torch.load(path), gathered_states(self.trainer)
        assert wanted.keys() == found.keys() and wanted
        seen["different"] = sorted(
            f"{name} {key}"
            for name in wanted
            for key in wanted[name]
            if wanted[name][key].dtype != found[name][key].dtype or not wanted[name][key].equal(found[name][key])
        )
        seen["steps"] = [{int(step) for step in counters(self.trainer)}.pop()]
        return original(self, args, state, control, **kwargs)

    StageMetricsCallback.on_train_begin = compare
    try:
        run = run_sft.prepare(argv)
        trainer = run_sft.train(run)
        trainer.accelerator.wait_for_everyone()
    finally:
        StageMetricsCallback.on_train_begin = original
    steps = counters(trainer)
    assert len({int(step) for step in steps}) == 1
    shared = {step.data_ptr() if torch.is_tensor(step) else number for number, step in enumerate(steps)}
    return {
        "different": seen["different"],
        "steps": [*seen["steps"], int(steps[0])],
        "counters": len(shared),
        "groups": len(trainer.optimizer.param_groups),
        "losses": json.loads((run.output_dir / "metrics.json").read_text())["loss_history"],
    }


def gathered_states(trainer) -> dict:
    """{name: {"fp32", "exp_avg", "exp_avg_sq", "weight"}} of what is trained, whole, gathered by DeepSpeed."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    optimizer, states = trainer.optimizer.optimizer, {}
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
        # DeepSpeed 0.19.8, zero/stage_1_and_2.py `_optimizer_step` links all groups after the first one's step: the
        # moments of the others do not exist yet, and safe_get_full_optimizer_state does not find them
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
    for name, p in trainer.model.named_parameters():
        if p.requires_grad:
            states[name] = {"fp32": safe_get_full_fp32_param(p).clone()}
            states[name] |= {key: safe_get_full_optimizer_state(p, key).clone() for key in ("exp_avg", "exp_avg_sq")}
            with deepspeed.zero.GatheredParameters([p] if hasattr(p, "ds_id") else []):
                states[name]["weight"] = p.data.clone()
    return states


def masters_read_through_round_robin() -> list[bool]:
    """Whether DeepSpeed's safe_get_full_fp32_param gives each weight of a fresh stage 2 engine, by round_robin."""
    import deepspeed
    import torch
    from deepspeed.utils import safe_get_full_fp32_param

    right = []
    for round_robin in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(size, size) for size in (3, 5, 7)))
        deepspeed.initialize(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters()),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "zero_optimization": {"stage": 2, "round_robin_gradients": round_robin},
                "zero_allow_untested_optimizer": True,
            },
        )
        right.append(all(safe_get_full_fp32_param(p).equal(p.data) for p in model.parameters()))
    return right


def set_whole_at_stage_3() -> str:
    """What DeepSpeed's safe_set_full_fp32_param says, at stage 3, to a parameter that two ranks do not divide."""
    import deepspeed
    import torch
    from deepspeed.utils import safe_set_full_fp32_param

    layer = torch.nn.Linear(3, 3)
    deepspeed.initialize(
        model=layer,
        optimizer=torch.optim.AdamW(layer.parameters()),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 3},
            "zero_allow_untested_optimizer": True,
        },
    )
    try:
        safe_set_full_fp32_param(layer.weight, torch.ones(3, 3))
        return "no error"
    except RuntimeError as error:
        return str(error)
