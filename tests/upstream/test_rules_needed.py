"""Why rules of zero_recipes/checks are needed: each fails when a library no longer does what the rule says of it."""

import inspect
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from deepspeed.runtime import config as deepspeed_config
from deepspeed.runtime.zero import stage3, stage_1_and_2
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.utils import groups

pytestmark = pytest.mark.private
SITE = Path(os.path.dirname(torch.__file__)).parent

# What is cited and cannot be run here (GPUs, NVMe, bitsandbytes): (file, a line that says so)
CITED = [
    ("deepspeed/runtime/engine.py", "if load_zero_checkpoint and not self.zero_nvme_offload_optimizer():"),
    ("deepspeed/runtime/engine.py", "executing without DeepCompile until compile() runs."),
    ("deepspeed/runtime/engine.py", "if p.dtype in CASTABLE_DTYPES and p.dtype != param_dtype:"),
    ("deepspeed/runtime/zero/stage3.py", "if self.all2all_process_group is not None and num_nodes > 1:"),
    ("deepspeed/runtime/zero/stage3.py", "os.makedirs(nvme_swap_folder, exist_ok=True)"),
    ("deepspeed/runtime/zero/stage_1_and_2.py", "offload_optimizer_config.device != OffloadDeviceEnum.none:"),
    ("transformers/modeling_utils.py", "if not is_quantized and not _is_ds_init_called:"),
    ("transformers/trainer.py", "`auto_find_batch_size` isn't supported yet with DeepSpeed Zero-3."),
    ("transformers/trainer_utils.py", "You cannot perform fine-tuning on purely quantized models."),
    ("accelerate/utils/fsdp_utils.py", "Exclude non-floating frozen Params4bit from FSDP sharding."),
    ("trl/trainer/sft_trainer.py", "When `padding_free=True` without packing, `max_length` is not enforced."),
    ("trl/trainer/sft_trainer.py", 'inputs["use_cache"] = False'),  # else transformers would not look for boundaries
]


@pytest.mark.parametrize("file, line", CITED, ids=[file for file, _ in CITED])
def test_the_cited_lines_are_there(file, line):
    assert line in (SITE / file).read_text()


def test_which_gradients_deepspeed_sums_or_scales():
    assert deepspeed_config.get_gradient_allreduce_op({"gradient_allreduce_op": "SUM"}) == "sum"
    assert deepspeed_config.get_gradient_allreduce_op({}) == "mean" and DeepSpeedZeroConfig().reduce_scatter
    assert "if self.reduce_scatter and self.partition_gradients:" in inspect.getsource(stage_1_and_2)
    for source in map(inspect.getsource, (stage_1_and_2, stage3)):
        assert "assert self.gradient_predivide_factor == 1.0" in source and "assert self.postscale_gradients" in source


def test_quantized_gradients_take_the_gpus_of_a_machine_for_its_processes(monkeypatch):
    """Groups within machines only where each GPU has its process: else groups that span machines, or an assertion."""
    made = []
    monkeypatch.setattr(groups.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(groups.dist, "get_world_size", lambda *_: 8)
    monkeypatch.setattr(groups.dist, "new_group", lambda ranks: made.append(ranks))
    for here, count, sound in ((4, 4, True), (4, 8, False), (2, 4, False), (4, 6, False)):
        monkeypatch.setattr(groups, "_ALL_TO_ALL_GROUP", {})
        accelerator = SimpleNamespace(device_count=lambda count=count: count)
        monkeypatch.setattr(groups, "get_accelerator", lambda accelerator=accelerator: accelerator)
        made.clear()
        try:
            groups._get_local_all_to_all_group()
            local = sum(ranks == list(range(first, first + here)) for ranks in made for first in range(0, 8, here))
        except AssertionError:
            local = 0
        assert (local == 8 // here) is sound


def test_a_launcher_still_leaves_each_rank_one_thread(monkeypatch):
    """Fails when torchrun gives ranks their share of the cores: then set_host_threads may go."""
    from torch.distributed.run import config_from_args, get_args_parser

    monkeypatch.setenv("OMP_NUM_THREADS", "3")  # what the launcher sets is undone with this one
    monkeypatch.delenv("OMP_NUM_THREADS")
    config_from_args(get_args_parser().parse_args(["--nproc_per_node", "2", "run_sft.py"]))
    assert os.environ["OMP_NUM_THREADS"] == "1"


def test_torch_still_rounds_pinned_memory_and_still_has_the_limit():
    """ATen/core/CachingHostAllocator.h and c10/core/AllocatorConfig.h of torch 2.13 (core/host.py)."""
    headers = Path(torch.__file__).parent / "include"
    allocator = (headers / "ATen" / "core" / "CachingHostAllocator.h").read_text()
    assert "size <= pinned_max_cached_size()" in allocator and "return c10::llvm::PowerOf2Ceil(size);" in allocator
