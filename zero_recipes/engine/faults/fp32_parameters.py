"""Under DeepSpeed a mixture's router rounds its bias to bf16, and other experts run than the model's class says.

transformers keeps some parameters of a 16-bit model in fp32 (`_keep_in_fp32_modules_strict`, and in fp16
`_keep_in_fp32_modules`). A router's bias near 8 whose differences are below 0.1 is one: bf16 has steps of 0.03 there.
DeepSpeed's engine, and zero.Init at stage 3, cast every parameter to the training dtype; runtime/keep_in_fp32.py
restores buffers alone. The optimizers flatten a group of parameters into one tensor of one dtype.

Library: DeepSpeed 0.19.8, runtime/engine.py (`_cast_module_mixed_precision`,
    `_configure_{zero,fp16,bf16}_optimizer`), runtime/zero/partition_parameters.py, runtime/zero/stage3.py.
Upstream: deepspeedai/DeepSpeed#7747.
Here: they stay in fp32 at every stage; frozen ones as they are, trained ones in a group of their own. Gradients are
    reduced in 16 bits, as all others.

See it: one CPU

    import deepspeed, torch
    from transformers import Ernie4_5_MoeConfig, Ernie4_5_MoeForCausalLM

    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "moe_intermediate_size": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model_config = Ernie4_5_MoeConfig(**sizes, **heads, num_hidden_layers=2, moe_num_experts=4, moe_k=2)
    model = Ernie4_5_MoeForCausalLM._from_config(model_config, dtype=torch.bfloat16)
    trained = [p for p in model.parameters() if p.requires_grad]
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
    deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(trained), config=config)
    router = next(p for name, p in model.named_parameters() if name.endswith("gate.weight"))
    assert model._keep_in_fp32_modules_strict and router.dtype == torch.bfloat16
"""

import re
from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedModel

from zero_recipes.engine.deepspeed import is_partitioned
from zero_recipes.engine.replacing import replaces

# what PEFT puts into the name of a parameter that was the model's own
OF_AN_ADAPTER = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.)")


def fp32_parameters(model: torch.nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield (name, parameter) of those that a model's class keeps in fp32 when it is loaded in `dtype`.

    `model`: with or without an adapter around it.

    Private: `_get_dtype_plan` and `build_glob_alternation` (transformers 5.23, modeling_utils.py and
    core_model_loading.py), by which from_pretrained matches names.
    """
    from transformers.core_model_loading import build_glob_alternation

    own = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    patterns = [] if own is None else list(own._get_dtype_plan(dtype))
    if not patterns:
        return
    matches = build_glob_alternation(patterns)[0]
    for name, p in own.named_parameters():
        name = OF_AN_ADAPTER.sub("", name)
        if p.is_floating_point() and matches.search(name):
            yield name, p


def apply() -> None:
    """Have DeepSpeed leave such parameters in fp32, at every stage.

    Its optimizers take groups of other dtypes: an fp32 group is its own master at stage 3, and a copy of it below.
    """
    from deepspeed.runtime.engine import DeepSpeedEngine

    @replaces(DeepSpeedEngine, "_cast_module_mixed_precision")
    def cast(cast_all, self, param_dtype, buffer_dtype, is_zero_init_model, *arguments):
        values = []
        if param_dtype is not None and not is_zero_init_model:
            values = [(p, p.data) for _, p in fp32_parameters(self.module, param_dtype)]
        cast_all(self, param_dtype, buffer_dtype, is_zero_init_model, *arguments)
        for p, value in values:
            p.data = value.float()

    for name in ("_configure_zero_optimizer", "_configure_fp16_optimizer", "_configure_bf16_optimizer"):

        @replaces(DeepSpeedEngine, name)
        def configure(configure_optimizer, self, optimizer, *arguments):
            if self.bfloat16_enabled() or self.fp16_enabled():
                group_by_dtype(optimizer)
            return configure_optimizer(self, optimizer, *arguments)

    _keep_them_at_stage_3()


def group_by_dtype(optimizer: torch.optim.Optimizer) -> None:
    """Move fp32 parameters of a 16-bit model to groups of their own, with the same hyperparameters, behind the others.

    DeepSpeed takes the first group's dtype for the model's.
    """
    dtypes = {p.dtype for group in optimizer.param_groups for p in group["params"]}
    if dtypes <= {torch.float32} or torch.float32 not in dtypes:
        return
    split = []
    for group in optimizer.param_groups:
        kept = [p for p in group["params"] if p.dtype == torch.float32]
        group["params"] = [p for p in group["params"] if p.dtype != torch.float32]
        if kept:
            split.append(group | {"params": kept})
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]] + split


def _keep_them_at_stage_3() -> None:
    """Have zero.Init make fp32 partitions of them, and the optimizer keep a flat tensor for each dtype.

    Private: `_keep_in_fp32` of zero.Init (DeepSpeed 0.19.8, runtime/zero/partition_parameters.py), called once a
    model's constructor has run and before its weights are loaded; `defragment`, `_set_fp16_partitioned_groups_flat` and
    `_create_param_groups_fp16_flat_cpu_memory` (runtime/zero/stage3.py), which know one dtype.
    """
    from deepspeed.runtime.zero import stage3
    from deepspeed.runtime.zero.partition_parameters import Init

    optimizer = stage3.DeepSpeedZeroOptimizer_Stage3

    @replaces(Init, "_keep_in_fp32")
    def keep_in_fp32(keep_buffers, self, module):
        keep_buffers(self, module)
        if isinstance(module, PreTrainedModel):
            for _, p in fp32_parameters(module, self.dtype):
                # int8 has a scale beside it, and what is on NVMe is swapped in as 16 bits
                if is_partitioned(p) and p.ds_tensor.dtype == self.dtype and p.ds_tensor.final_location is None:
                    p.data = p.data.float()
                    p.ds_tensor.data = p.ds_tensor.data.float()
                    if p.ds_secondary_tensor is not None:  # hpZ's
                        p.ds_secondary_tensor.data = p.ds_secondary_tensor.data.float()

    @replaces(stage3, "defragment")
    def defragment(defragment_all, tensors):
        """The buffer of the first tensor's dtype. The others have one of their own, which they hold alone."""
        by_dtype = partitions_by_dtype(tensors)
        buffers = [defragment_all(part) for part in by_dtype]
        return buffers[0]

    @replaces(optimizer, "_set_fp16_partitioned_groups_flat")
    def set_flat_groups(set_all, self):
        partitions = [[p.ds_tensor for p in sub_group] for sub_group in self.fp16_groups]
        if len({tensor.dtype for part in partitions for tensor in part}) == 1:
            set_all(self)
            return
        for part in partitions:
            size = sum(tensor.numel() for tensor in part)
            flat = part[0].as_strided((size,), (1,), part[0].storage_offset())
            self.fp16_partitioned_groups_flat.append(flat)

    @replaces(optimizer, "_create_param_groups_fp16_flat_cpu_memory")
    def create_flat_cpu_memory(create, self):
        from deepspeed.accelerator import get_accelerator

        create(self)
        buffers = self.param_groups_fp16_flat_cpu_memory
        for number, group in enumerate(self.trainable_param_groups):
            dtype = group["params"][0].ds_tensor.dtype
            if dtype != buffers[number].dtype:
                buffers[number] = get_accelerator().pin_memory(torch.empty_like(buffers[number], dtype=dtype))


def partitions_by_dtype(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group tensors by dtype, in the order in which each dtype comes first."""
    parts: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        parts.setdefault(tensor.dtype, []).append(tensor)
    return list(parts.values())
