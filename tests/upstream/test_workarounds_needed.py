"""Faults of libraries that are worked around: each test fails when its fault is gone. Private names that are read."""

import importlib
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from accelerate.state import GradientState
from deepspeed.runtime.lr_schedules import WarmupDecayLR
from deepspeed.runtime.zero import partitioned_param_coordinator
from deepspeed.runtime.zero.utils import defragment
from deepspeed.utils import nvtx
from peft import LoraConfig, get_peft_model
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from zero_recipes.engine.deepspeed import _LAYOUTS, state_bytes
from zero_recipes.engine.patches import mark_calls_for_profilers_alone, walk_through_modules_once

pytestmark = pytest.mark.private
SITE = Path(transformers.__file__).parents[1]
SMALL = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}

# (file, a line of the fault, what may go): what needs several processes to be seen
CITED = [
    ("transformers/trainer.py", "                use_mtime=True,\n", "training/trainer.py rotate"),
    ("transformers/trainer.py", "            rotate_checkpoints(\n", "training/trainer.py `_save_checkpoint`"),
    ("transformers/modeling_utils.py", "                unexpected_keys=set(),\n", "model.py refuse_other_keys"),
    ("deepspeed/runtime/zero/stage3.py", "fp32_opt_state_partition.numel() * my_rank,", "checkpoint/resume.py _set"),
    ("deepspeed/runtime/zero/partition_parameters.py", 'print_rank_0(f"Before Partitioning Param {param.ds_id}", force',
     "engine/patches.py release_without_messages"),
    ("torch/distributed/run.py", "        omp_num_threads = 1\n", "distributed/group.py set_host_threads"),
    # it takes a local rank for a process group
    ("accelerate/state.py", 'elif int(os.environ.get("LOCAL_RANK", -1)) != -1 and not cpu:', "start_process_group"),
    ("torch/include/ATen/core/CachingHostAllocator.h", "size <= pinned_max_cached_size()", "allocator.py the limit"),
    ("deepspeed/runtime/comm/coalesced_collectives.py", "max(tensor.shape[0], tensor.shape[1], global_world_size)\n",
     "engine/patches.py quantized_shape"),
    ("deepspeed/ops/csrc/quantization/swizzled_quantize.cu", "= groups / (nodes * devices_per_node);\n",
     "engine/patches.py quantized_shape: groups that the ranks do not divide"),
    ("deepspeed/ops/csrc/quantization/quant_reduce.cu", "= (one_step_threads < 1024) ? one_step_threads : 1024;\n",
     "engine/patches.py quantized_shape: groups of up to 128"),
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


class Stream(IterableDataset):
    def __iter__(self):
        return iter([{"x": torch.ones(1)}] * 3)


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


def test_what_a_streams_end_leaves_over_is_added_to_the_next_step(tmp_path):
    """training/token_loss.py EndlessRows: two steps of two rows take five, of a stream of three."""
    found = trainer(tmp_path, Stream(), max_steps=2, gradient_accumulation_steps=2, save_strategy="no")
    found.train()
    assert found.model.calls > 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is what it asks for")
def test_new_tokens_at_stage_3_ask_for_cuda():
    """engine/patches.py read_new_tokens_without_cuda."""
    method = TrainableTokensLayer._collect_token_weights
    with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA"):
        getattr(method, "unpatched", method)(None, torch.zeros(2, 2), [0], 2)


def test_what_stage_3_lays_side_by_side_has_one_dtype():
    """engine/patches.py one_dtype_of_what_trains."""
    with pytest.raises(AssertionError):
        defragment([torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16)])


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


def test_a_sampler_by_length_draws_from_the_global_generator():
    """training/token_loss.py begin_epoch."""
    args = SimpleNamespace(train_sampling_strategy="group_by_length", length_column_name="length", train_batch_size=1)
    args.gradient_accumulation_steps = 1
    rows = [{"input_ids": [1] * n} for n in range(1, 5)]
    sampler = Trainer._get_train_sampler(SimpleNamespace(args=args, processing_class=None, train_dataset=rows), rows)
    assert sampler.generator is None and not hasattr(sampler, "set_epoch")


def test_a_tied_head_that_is_a_copy_is_saved_twice():
    """engine/patches.py without_aliases."""
    model = LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=True))
    copies = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert "lm_head.weight" in remove_tied_weights_from_state_dict(copies, model)


def test_rows_left_over_are_not_known_where_batches_are_skipped():
    """engine/huggingface.py rows_left_over: of 5 rows in batches of 2 on 2 processes one is left over."""
    loader = prepare_data_loader(DataLoader(range(5), batch_size=2), num_processes=2, process_index=0)
    known = []
    for each in (loader, skip_first_batches(loader, 1)):
        for _ in each:
            known.append(GradientState().remainder)
    assert known[0] == 1 and known[-1] == -1


def test_tokens_are_counted_by_rules_for_the_models_own_loss(tmp_path):
    """engine/huggingface.py count_tokens_with_loss."""
    assert not transformers.Gemma3nForConditionalGeneration.accepts_loss_kwargs  # counts nothing
    model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=8, n_layer=1, n_head=2))
    args = TrainingArguments(str(tmp_path), report_to="none", use_cpu=True)
    assert not Trainer(model, args)._loss_shifts_labels, "a row's first token is counted"


def test_an_order_by_the_epoch_is_hidden_where_batches_are_skipped():
    """training/token_loss.py begin_epoch: batch_rebalance in an epoch that a run is resumed in."""
    sampler = BatchSampler(range(8), 2, False)
    sampler.set_epoch = None
    loader = prepare_data_loader(DataLoader(range(8), batch_sampler=sampler), num_processes=1, process_index=0)
    assert not hasattr(skip_first_batches(loader, 1).batch_sampler, "set_epoch")


def test_deepspeed_marks_its_calls_where_no_profiler_is(monkeypatch):
    """engine/patches.py mark_calls_for_profilers_alone."""
    marked = []
    monkeypatch.setattr(nvtx, "_range_push", lambda accelerator, name: marked.append(name))
    monkeypatch.setattr(nvtx, "_range_pop", lambda accelerator: None)
    monkeypatch.setattr(nvtx, "enable_nvtx", nvtx.enable_nvtx)  # put back at the end
    for expected, is_patched, variable in ((1, False, None), (1, True, None), (2, True, "NVTX_INJECTION64_PATH")):
        if variable:
            monkeypatch.setenv(variable, "libToolsInjection64.so")
        if is_patched:
            mark_calls_for_profilers_alone()
        nvtx.instrument_w_nvtx(len)(())
        assert len(marked) == expected


def test_deepspeed_walks_through_a_module_each_time(monkeypatch):
    """engine/patches.py walk_through_modules_once."""
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
    walk_through_modules_once()
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
