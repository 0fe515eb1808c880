"""Faults of libraries that are worked around: each test fails when its fault is gone. Private names that are read."""

import importlib
import re
from pathlib import Path

import pytest
import torch
import transformers
from deepspeed.runtime.lr_schedules import WarmupDecayLR
from deepspeed.runtime.zero import partitioned_param_coordinator
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from zero_recipes.engine.deepspeed import _LAYOUTS, state_bytes
from zero_recipes.engine.speed import module_walks

pytestmark = pytest.mark.private
SITE = Path(transformers.__file__).parents[1]
SMALL = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}

# (file, a line of the fault, what may go): what needs several processes to be seen
CITED = [
    ("transformers/trainer.py", "                use_mtime=True,\n", "training/trainer.py rotate"),
    ("transformers/trainer.py", "            rotate_checkpoints(\n", "training/trainer.py `_save_checkpoint`"),
    ("transformers/modeling_utils.py", "                unexpected_keys=set(),\n", "model/load.py refuse_other_keys"),
    ("deepspeed/runtime/zero/stage3.py", "fp32_opt_state_partition.numel() * my_rank,", "checkpoint/resharded.py _set"),
    ("deepspeed/runtime/zero/partition_parameters.py", 'print_rank_0(f"Before Partitioning Param {param.ds_id}", force',
     "speed/releases.py"),
    ("torch/distributed/run.py", "        omp_num_threads = 1\n", "speed/host_threads.py"),
    # it takes a local rank for a process group
    ("accelerate/state.py", 'elif int(os.environ.get("LOCAL_RANK", -1)) != -1 and not cpu:', "ddp_of_one_process"),
    ("torch/include/ATen/core/CachingHostAllocator.h", "size <= pinned_max_cached_size()", "allocator.py the limit"),
    ("deepspeed/runtime/comm/coalesced_collectives.py", "max(tensor.shape[0], tensor.shape[1], global_world_size)\n",
     "faults/quantized_gradients.py"),
    ("deepspeed/ops/csrc/quantization/swizzled_quantize.cu", "= groups / (nodes * devices_per_node);\n",
     "faults/quantized_gradients.py: groups that the ranks do not divide"),
    ("deepspeed/ops/csrc/quantization/quant_reduce.cu", "= (one_step_threads < 1024) ? one_step_threads : 1024;\n",
     "faults/quantized_gradients.py: groups of up to 128"),
    ("torch/include/ATen/core/CachingHostAllocator.h", "return c10::llvm::PowerOf2Ceil(size);", "allocator.py pinned"),
]  # fmt: skip


@pytest.mark.parametrize("file, line, workaround", CITED, ids=[workaround for *_, workaround in CITED])
def test_the_line_of_the_fault_is_there(file, line, workaround):
    assert line in (SITE / file).read_text(), f"{workaround} may go"


class Line(torch.nn.Module):
    """The least that a Trainer trains; counts its forward passes."""

    def __init__(self):
        super().__init__()
        self.weight, self.calls = torch.nn.Parameter(torch.zeros(1)), 0

    def forward(self, x, labels=None):
        self.calls += 1
        return {"loss": (self.weight * x).sum()}


def trainer(folder, rows, **arguments) -> Trainer:
    plain = {"report_to": "none", "use_cpu": True, "per_device_train_batch_size": 1, "disable_tqdm": True}
    args = TrainingArguments(str(folder), remove_unused_columns=False, **plain, **arguments)
    return Trainer(Line(), args, train_dataset=rows)


def test_a_run_resumed_from_its_last_step_takes_one_more(tmp_path):
    """training/trainer.py `_run_epoch`."""
    rows = [{"x": torch.ones(1)}] * 4
    trainer(tmp_path, rows, max_steps=2, save_steps=2).train()
    resumed = trainer(tmp_path, rows, max_steps=2, save_steps=2)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 3


def test_deepspeeds_warm_up_gives_all_groups_one_rate():
    """config/ds_config.py _fill_rates: the number that transformers fills in; null is each group's own."""
    rates = {}
    for largest in (1e-3, None):
        groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in (1e-3, 16e-3)]
        optimizer = torch.optim.SGD(groups)
        schedule = WarmupDecayLR(optimizer, 9, warmup_max_lr=largest, warmup_num_steps=2)
        for _ in range(2):
            schedule.step()
        rates[largest] = [group["lr"] for group in optimizer.param_groups]
    assert rates[1e-3][0] == rates[1e-3][1]
    assert rates[None][1] == pytest.approx(16 * rates[None][0]) and rates[None][0] > 0


def test_a_name_that_matches_nothing_is_passed_over():
    """checks/adapter_rules.py."""
    config = LoraConfig(target_modules=["q_proj", "nope"], modules_to_save=["lm_head", "nowhere"])
    model = get_peft_model(LlamaForCausalLM(LlamaConfig(**SMALL)), config)
    assert model.base_model.targeted_module_names == ["model.layers.0.self_attn.q_proj"]


def test_deepspeed_walks_through_a_module_each_time(monkeypatch):
    """engine/speed/module_walks.py."""
    name = "get_all_parameters"
    monkeypatch.setattr(partitioned_param_coordinator, name, getattr(partitioned_param_coordinator, name))
    walks = []

    class Walked(torch.nn.Sequential):
        def named_parameters(self, *arguments, **keywords):
            walks.append(keywords)
            return super().named_parameters(*arguments, **keywords)

    module = Walked(torch.nn.Linear(2, 2))
    external = torch.nn.Parameter(torch.zeros(1))
    module.ds_external_parameters = lambda: [("external", external)]

    def twice(recurse: bool) -> list[tuple[int, int]]:
        """(walks so far, parameters) of each call."""
        found = []
        for _ in range(2):
            parameters = list(partitioned_param_coordinator.iter_params(module, recurse))
            assert parameters[-1] is external
            found.append((len(walks), len(parameters)))
        return found

    assert twice(recurse=True) == [(1, 3), (2, 3)]
    module_walks.apply()
    assert twice(recurse=True) == [(3, 3), (3, 3)]
    assert twice(recurse=False) == [(4, 1), (5, 1)]


# private attributes of DeepSpeed's optimizers, renamed in a new version, are not counted as 0 bytes


DEEPSPEED = {
    "DeepSpeedZeroOptimizer": "deepspeed.runtime.zero.stage_1_and_2",
    "DeepSpeedZeroOptimizer_Stage3": "deepspeed.runtime.zero.stage3",
    "FP16_Optimizer": "deepspeed.runtime.fp16.fused_optimizer",
    "FP16_UnfusedOptimizer": "deepspeed.runtime.fp16.unfused_optimizer",
    "BF16_Optimizer": "deepspeed.runtime.bf16_optimizer",
}


@pytest.mark.parametrize("name", DEEPSPEED)
def test_every_tensor_of_a_deepspeed_optimizer_is_counted(name):
    module = importlib.import_module(DEEPSPEED[name])
    source = Path(module.__file__).read_text()
    layout = _LAYOUTS[name]
    made = object.__new__(getattr(module, name))
    made.partition_gradients, made.ipg_buckets = False, {}
    made.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    for attribute in (name for part in layout for name in part):
        assert re.search(rf"self\.{attribute}\b", source), attribute
        with pytest.raises(AttributeError, match=attribute):  # a renamed one
            state_bytes(torch.nn.Module(), [], made, False, False)
        setattr(made, attribute, [torch.zeros(16)])
    counted = state_bytes(torch.nn.Module(), [], made, False, False)
    found = [counted[part] for part in ("params", "grads", "optimizer")]
    assert found == [64 * len(attributes) for attributes in layout]
