"""Case of tests/engine/test_masters.py: where fp32 masters begin."""

from unittest import mock

import torch
from deepspeed import utils
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from transformers import AutoModelForCausalLM

import run_sft
from tests.helpers.tools import before, without
from zero_recipes.engine import deepspeed as internals
from zero_recipes.engine.huggingface import without_deepspeed_announcement
from zero_recipes.training.trainer import ZeroSFTTrainer


def beginning(argv: list[str], patched: bool = True) -> dict:
    """Of a run's weights that are trained, before the first step: how many there are, the names of those whose master
    is not the loaded value, and of those whose 16-bit weight is not that value rounded; how many masters were set;
    how many values bf16 cannot hold. Unless `patched`: with PEFT's own way to make an adapter."""
    values, found, calls = {}, {"masters": [], "weights": [], "set": 0}, []

    def remember(self, *_, **__) -> None:
        with without_deepspeed_announcement():
            folder = self.extras.loaded_values.keywords["settings"].model_name_or_path
            whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        weights = dict(whole.named_parameters())
        for name, p in self.model.named_parameters():
            if p.requires_grad:
                values[name] = weights[name].data if name in weights else p.data.float().clone()

    def compare(self, *_, **__) -> None:
        masters = internals._masters_at_stage_0(self.model_wrapped.optimizer)
        for name, p in self.model.named_parameters():
            if name not in values:
                continue
            master = masters.get(id(p))
            if master is None:
                master = utils.safe_get_full_fp32_param(p)
            if not torch.equal(master.view(values[name].shape), values[name]):
                found["masters"].append(name)
            part = internals.own_part(p, values[name]).to(p.dtype)
            weight = p.ds_tensor if internals.is_partitioned(p) else p.flatten()
            if not torch.equal(weight.data[: part.numel()], part):
                found["weights"].append(name)

    def counted(*arguments) -> None:
        calls.append(arguments)
        set_state(*arguments)

    set_state = internals.set_state
    counting = mock.patch.object(internals, "set_state", counted)
    remembering = before(ZeroSFTTrainer, "_prepare_for_training", remember)
    left_out = without(None if patched else "zero_recipes.engine.faults.adapters_rounded_at_stage_3.apply")
    with left_out, counting, remembering, before(ZeroSFTTrainer, "_run_epoch", compare):
        trainer = run_sft.train(run_sft.read_run(argv))
    trainer.accelerator.wait_for_everyone()
    exact = trainer.stage_metrics.exact_master_weights
    found["lossy"] = sum(not torch.equal(value.bfloat16().float(), value) for value in values.values())
    return found | {"trained": len(values), "set": len(calls), "exact": exact}


def flat_masters_at_stage_0() -> dict:
    """Whether `set_masters` finds each weight's part of the flat master that DeepSpeed's FusedAdam steps."""
    layer = torch.nn.Linear(5, 3)
    values = [p.detach().clone() for p in layer.parameters()]
    layer.bfloat16()
    adam = torch.optim.AdamW(layer.parameters(), lr=0.1, weight_decay=0.5)
    optimizer = FP16_Optimizer(adam, low_precision_dtype=torch.bfloat16)
    exact = internals.set_masters(optimizer, zip(layer.parameters(), values, strict=True))
    wanted = torch.cat([value.flatten() for value in values])
    return {"exact": exact, "same": torch.equal(optimizer.fp32_groups_flat[0], wanted)}
