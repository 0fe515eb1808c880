"""Cases of tests/helpers/group.py for checkpoints: states before saving and after loading, what files hold."""

import json
from pathlib import Path

import deepspeed
import numpy
import torch
from datasets import Dataset
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from safetensors.torch import load_file
from torch.utils._pytree import tree_leaves
from transformers import AutoTokenizer, LlamaForCausalLM
from trl import SFTConfig

import run_sft
from tests.helpers.cases import train
from tests.helpers.tiny import ROOT, llama_config
from tests.helpers.tools import before
from zero_recipes.core.findings import Refusal
from zero_recipes.engine.deepspeed import base_optimizer, flat_masters
from zero_recipes.metrics.callback import StageMetricsCallback
from zero_recipes.tools.reshard import open_checkpoint, read_parameter
from zero_recipes.training.extras import Extras
from zero_recipes.training.trainer import ZeroSFTTrainer


def train_and_keep_states(argv: list[str], step: int, path: str) -> dict:
    """`train`; what DeepSpeed itself gathers of masters and Adam's states when `step` is saved goes to `path`."""

    def keep(self, args, state, control, model=None, optimizer=None, **_) -> None:
        if state.global_step == step:
            states = gathered_states(model, optimizer)
            if args.process_index == 0:
                torch.save(states, path)

    with before(StageMetricsCallback, "on_save", keep):
        return train(argv)


def train_and_compare_states(argv: list[str], path: str) -> dict:
    """`train` from a resharded checkpoint; how the states after loading, before any step, differ from those at `path`.

    "different": names whose masters, moments or weights for the forward pass are not the same bits.
    "dtypes": of masters and moments.
    "steps": Adam's counters before and after the run; "counters": how many tensors they are, "groups": of how many.
    """
    seen = {}

    def counters(optimizer) -> list:
        return [state["step"] for state in base_optimizer(optimizer).state.values()]

    def compare(*_, model=None, optimizer=None, **__) -> None:
        wanted, found = torch.load(path), gathered_states(model, optimizer)
        assert wanted.keys() == found.keys() and wanted
        seen["different"] = sorted(
            f"{name} {key}"
            for name in wanted
            for key in wanted[name]
            if wanted[name][key].dtype != found[name][key].dtype or not wanted[name][key].equal(found[name][key])
        )
        seen["steps"] = [{int(step) for step in counters(optimizer)}.pop()]

    with before(StageMetricsCallback, "on_train_begin", compare):
        run = run_sft.read_run(argv)
        trainer = run_sft.train(run)
        trainer.accelerator.wait_for_everyone()
    steps = counters(trainer.optimizer)
    assert len({int(step) for step in steps}) == 1
    shared = {step.data_ptr() if torch.is_tensor(step) else number for number, step in enumerate(steps)}
    return {
        "different": seen["different"],
        "steps": [*seen["steps"], int(steps[0])],
        "counters": len(shared),
        "groups": len(trainer.optimizer.param_groups),
        "dtypes": state_dtypes(trainer.optimizer.optimizer),
        "losses": json.loads((run.output_dir / "metrics.json").read_text())["loss_history"],
    }


def gathered_states(model, optimizer) -> dict:
    """{name: {"fp32", "exp_avg", "exp_avg_sq", "weight"}} of what is trained, whole, gathered by DeepSpeed.

    States in bf16 come in fp32 from stages 1 and 2 and in bf16 from stage 3: all are given in fp32, exactly.
    """
    optimizer, states = optimizer.optimizer, {}
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
        # DeepSpeed 0.19.8, zero/stage_1_and_2.py `_optimizer_step` links all groups after the first one's step: the
        # moments of the others do not exist yet, and safe_get_full_optimizer_state does not find them
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
    for name, p in model.named_parameters():
        if p.requires_grad:
            states[name] = {"fp32": safe_get_full_fp32_param(p).float().clone()}
            for key in ("exp_avg", "exp_avg_sq"):
                states[name][key] = safe_get_full_optimizer_state(p, key).float().clone()
            with deepspeed.zero.GatheredParameters([p] if hasattr(p, "ds_id") else []):
                states[name]["weight"] = p.data.clone()
    return states


def state_dtypes(optimizer) -> list[str]:
    """Of masters and moments together, as this rank holds them."""
    moments = base_optimizer(optimizer).state.values()
    held = [state[key] for state in moments for key in ("exp_avg", "exp_avg_sq")]
    return sorted({str(tensor.dtype) for tensor in (*held, *flat_masters(optimizer))})


def checkpoint_gaps(one: str, other: str) -> dict[str, float]:
    """Largest absolute difference of two checkpoints' tensors: {"weights", "states"}, and how many were compared.

    Of every file of tensors: the model or adapter; optimizer, fp32 masters, schedule and random numbers of each rank.
    What the ZeRO stages cut is compared by parameter: the padding of the parts is memory that nobody has written.
    """
    gaps = {"weights": 0.0, "states": 0.0, "tensors": 0}
    names = [
        {
            p.relative_to(folder).as_posix()
            for p in Path(folder).rglob("*")
            if p.suffix in (".pt", ".pth", ".bin", ".safetensors") and p.name != "training_args.bin"
        }
        for folder in (one, other)
    ]
    assert names[0] == names[1], names
    cut = {name for name in names[0] if name.endswith("_optim_states.pt") and "zero_pp_rank" in name}
    if cut:
        cut |= {name for name in names[0] if "zero_pp_rank" in name}
        mine, wanted = open_checkpoint(Path(one)), open_checkpoint(Path(other))
        assert (mine.adam_step, mine.engine, mine.groups) == (wanted.adam_step, wanted.engine, wanted.groups)
        for name in mine.places:
            states, others = read_parameter(mine, name), read_parameter(wanted, name)
            for key, state in states.items():
                gaps["states"] = max(gaps["states"], (state.double() - others[key].double()).abs().max().item())
                gaps["tensors"] += 1
    for name in sorted(names[0] - cut):
        kind = "weights" if name.endswith(".safetensors") else "states"
        read = load_file if kind == "weights" else lambda path: torch.load(path, weights_only=False, map_location="cpu")
        for mine, wanted in zip(_tensors(read(f"{one}/{name}")), _tensors(read(f"{other}/{name}")), strict=True):
            assert mine.shape == wanted.shape, name
            gap = (mine.double() - wanted.double()).abs().max().item() if mine.numel() else 0.0
            gaps[kind] = max(gaps[kind], gap)
            gaps["tensors"] += 1
    return gaps


def _tensors(value) -> list:
    """Every tensor in a loaded file, numbers as tensors, in the order of the file."""
    numbers = (torch.Tensor, numpy.ndarray, bool, int, float)
    return [torch.as_tensor(leaf) for leaf in tree_leaves(value) if isinstance(leaf, numbers)]


def train_as_library(folder: str, steps: int, resume: str | None = None, **extras) -> list[str] | int:
    """A ZeroSFTTrainer in a program of somebody's own, under ZeRO stage 2, which saves after every step.

    `extras`: fields of Extras. Returns the codes of a refusal, or the steps that were trained in all.
    """
    keys = {"use_cpu": True, "bf16": False, "report_to": [], "max_steps": steps, "save_steps": 1}
    args = SFTConfig(folder, deepspeed=str(ROOT / "ds_configs" / "zero2.json"), **keys)
    rows = Dataset.from_list([{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}] * 16)
    trainer = ZeroSFTTrainer(
        LlamaForCausalLM(llama_config(num_hidden_layers=1)),
        args,
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(ROOT / "tiny_world" / "base"),
        extras=Extras(**extras) if extras else None,
    )
    try:
        trainer.train(resume)
    except Refusal as refusal:
        return refusal.codes
    return trainer.state.global_step
