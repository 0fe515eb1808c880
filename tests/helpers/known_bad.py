"""The known-bad recipes, their fixed twins and what is found in each. The cases can be read without torch."""

from __future__ import annotations

import json
from pathlib import Path

from zero_recipes.core.findings import Finding

ROOT = Path(__file__).resolve().parents[2]
TWO_NODES = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}


def ds_config(stage: int, **zero) -> dict:
    config = json.loads((ROOT / "ds_configs" / f"zero{stage}.json").read_text())
    config["zero_optimization"] |= zero
    return config


def argv_of(folder: Path, **keys) -> list[str]:
    from tests.helpers.tiny import write_recipe

    return [str(write_recipe(folder, **keys)), "--output_dir", str(folder / "out")]


def findings_in(
    path: Path, changes: dict, environment: dict[str, str] | None = None, device: str = "cuda"
) -> list[Finding]:
    """What is found in a recipe with changes, on two processes of one node by default."""
    from zero_recipes.checks import combination_findings
    from zero_recipes.config import recipe as recipes
    from zero_recipes.config import strategy as strategies
    from zero_recipes.config.run import settings_in_force
    from zero_recipes.model import sizes_of

    environment = environment or {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    recipe = recipes.parse_recipe(path, recipes.read_recipe_file(path) | changes, [])
    strategy = strategies.resolve_strategy(recipe.settings, environment, sizes_of)
    settings, _ = settings_in_force(recipe, strategy, device, None)
    given = combination_findings(settings, strategy, device, environment)
    assert all(finding.why and finding.fix for finding in given)
    return given


def found_in(path: Path, changes: dict, **launch) -> list[tuple[str, str]]:
    """`findings_in` as [(level, code)]."""
    return [(finding.level, finding.code) for finding in findings_in(path, changes, **launch)]


PEFT = {"use_peft": True, "lora_target_modules": "all-linear"}
ONE = {"WORLD_SIZE": "1"}
NVME = {"device": "nvme", "nvme_path": str(ROOT)}
ON_NVME = {"offload_optimizer": NVME}
NO_PREFETCH = {"stage3_prefetch_bucket_size": 0}
MUON = {"optimizer": {"type": "Muon", "params": {"lr": 1e-3}}}
FP32_GRADIENTS = {"data_types": {"grad_accum_dtype": "fp32"}}
BF16_MASTERS = {"bf16": {"enabled": "auto", "bf16_master_weights_and_grads": True}}
BF16_STATES = {"bf16": BF16_MASTERS["bf16"] | {"bf16_optimizer_states": True}}
FP16_MASTERS = {"fp16": {"enabled": "auto", "fp16_master_weights_and_grads": True}}
CPU = {"offload_optimizer": {"device": "cpu"}}
ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}


def autocast(stage: int = 2, **block) -> dict:
    """In a run with bf16: false, whose ds_config leaves the precision to the recipe."""
    return ds_config(stage) | {"torch_autocast": {"enabled": True, "dtype": "bfloat16"} | block}


ZENFLOW = {"topk_ratio": 0.1, "update_interval": 2, "full_warm_up_rounds": 0, "overlap_step": False}
SHARED = {"sequence_parallel_size": 2, "pad_to_multiple_of": 128, "dataloader_drop_last": True}
SHARED |= {"max_length": 128, "deepspeed": ds_config(3)}
# name: (bad recipe, its fixed twin, the code of what is found, and what is not the default: level, environment,
# device; names: what its message must hold)
CASES = {
    "QLoRA in 4 bit at stage 3": (
        {"load_in_4bit": True, **PEFT, "deepspeed": ds_config(3)},
        {"load_in_4bit": True, **PEFT, "deepspeed": ds_config(2)},
        "ZR416",
        {"level": "warning"},
    ),
    "QLoRA in 8 bit at stage 3": (
        {"load_in_8bit": True, **PEFT, "deepspeed": ds_config(3)},
        {"load_in_8bit": True, **PEFT, "deepspeed": ds_config(2)},
        "ZR412",
    ),
    "QLoRA in 8 bit under FSDP2": (
        {"load_in_8bit": True, **PEFT, "fsdp": True},
        {"load_in_8bit": True, **PEFT, "deepspeed": ds_config(2)},
        "ZR413",
    ),
    "QLoRA packed into integers under FSDP2": (
        {"load_in_4bit": True, **PEFT, "fsdp": True},
        {"load_in_4bit": True, **PEFT, "fsdp": True, "bnb_4bit_quant_storage": "bfloat16"},
        "ZR414",
        {"names": "uint8 in bf16"},
    ),
    "QLoRA packed into another float": (
        {"load_in_4bit": True, **PEFT, "deepspeed": ds_config(2), "bnb_4bit_quant_storage": "float16"},
        {"load_in_4bit": True, **PEFT, "deepspeed": ds_config(2), "bnb_4bit_quant_storage": "bfloat16"},
        "ZR415",
        {"names": "float16 in bf16"},
    ),
    "QLoRA and ZeRO++'s own quantisation": (
        {"load_in_4bit": True, **PEFT, "deepspeed": ds_config(3, zero_quantized_weights=True)},
        {"load_in_4bit": True, **PEFT, "deepspeed": ds_config(3)},
        "ZR417",
        {"names": "zero_quantized_weights"},
    ),
    "quantised without LoRA": ({"load_in_8bit": True}, {"load_in_8bit": True, **PEFT}, "ZR410"),
    "quantised random weights": (
        {"load_in_8bit": True},
        {"load_in_8bit": True, "random_weights": False},
        "ZR411",
    ),
    "a single LoRA name": (
        {"use_peft": True, "lora_target_modules": ["query_key_value"]},
        {"use_peft": True, "lora_target_modules": [".*query_key_value"]},
        "ZR128",
        {"names": "query_key_value"},
    ),
    "Liger's own fused loss": (
        {"use_liger_kernel": True, "liger_kernel_config": {"fused_linear_cross_entropy": True}},
        {"use_liger_kernel": True, "liger_kernel_config": {"fused_linear_cross_entropy": False, "rope": True}},
        "ZR190",
    ),
    "hpZ that does not divide": (
        {"deepspeed": ds_config(3, zero_hpz_partition_size=3)},
        {"deepspeed": ds_config(3, zero_hpz_partition_size=2)},
        "ZR222",
        {"environment": TWO_NODES, "names": "zero_hpz_partition_size 3 does not divide 4 processes"},
    ),
    "hpZ with one group": (
        {"deepspeed": ds_config(3, zero_hpz_partition_size=8)},
        {"deepspeed": ds_config(3)},
        "ZR223",
        {"names": "zero_hpz_partition_size 8 with 2 processes"},
    ),
    "hpZ on one node": (
        {"deepspeed": ds_config(3, zero_hpz_partition_size=2)},
        {"deepspeed": ds_config(3)},
        "ZR224",
        {
            "environment": {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"},
            "level": "warning",
            "names": "zero_hpz_partition_size 2",
        },
    ),
    "hpZ with offload": (
        {"deepspeed": ds_config(3, zero_hpz_partition_size=2, offload_param={"device": "cpu"})},
        {"deepspeed": ds_config(3, zero_hpz_partition_size=2, offload_param={"device": "none"})},
        "ZR225",
        {"environment": TWO_NODES, "names": "offload_param"},
    ),
    "qwZ on a CPU": (
        {"deepspeed": ds_config(3, zero_quantized_weights=True)},
        {"deepspeed": ds_config(3)},
        "ZR227",
        {"device": "cpu", "names": "zero_quantized_weights"},
    ),
    "qwZ at stage 2": (
        {"deepspeed": ds_config(2, zero_quantized_weights=True)},
        {"deepspeed": ds_config(3, zero_quantized_weights=True)},
        "ZR226",
        {"names": "zero_quantized_weights at stage 2"},
    ),
    "qgZ on one node": (
        {"deepspeed": ds_config(3, zero_quantized_gradients=True)},
        {"deepspeed": ds_config(3)},
        "ZR228",
        {"level": "warning"},
    ),
    "NVMe with checkpoints": (
        {"deepspeed": ds_config(3, **ON_NVME), "save_strategy": "epoch"},
        {"deepspeed": ds_config(3, **ON_NVME), "save_strategy": "no"},
        "ZR230",
        {"level": "warning", "names": "save_strategy: epoch"},
    ),
    "NVMe at stage 2": (
        {"deepspeed": ds_config(2, **ON_NVME)},
        {"deepspeed": ds_config(3, **ON_NVME)},
        "ZR229",
        {"names": "offload_optimizer on NVMe at stage 2"},
    ),
    "NVMe without a folder": (
        {"deepspeed": ds_config(3, **NO_PREFETCH, offload_param=NVME | {"nvme_path": str(ROOT / "nowhere")})},
        {"deepspeed": ds_config(3, **NO_PREFETCH, offload_param=NVME)},
        "ZR233",
        {"names": f"offload_param.nvme_path {ROOT / 'nowhere'}"},
    ),
    "NVMe without a name": (
        {"deepspeed": ds_config(3, offload_optimizer=NVME | {"nvme_path": "auto"})},
        {"deepspeed": ds_config(3, offload_optimizer=NVME | {"nvme_path": "auto"}), "nvme_path": str(ROOT)},
        "ZR232",
        {"names": "offload_optimizer.nvme_path"},
    ),
    "NVMe with prefetching": (
        {"deepspeed": ds_config(3, offload_param=NVME)},
        {"deepspeed": ds_config(3, **NO_PREFETCH, offload_param=NVME)},
        "ZR231",
        {"names": "stage3_prefetch_bucket_size auto"},
    ),
    "gradients in fp32 at stage 0": (
        {"deepspeed": ds_config(0) | FP32_GRADIENTS},
        {"deepspeed": ds_config(2) | FP32_GRADIENTS},
        "ZR235",
        {"names": "fp32 at stage 0 with a model in bf16"},
    ),
    "bf16 masters in an fp32 run": (
        {"deepspeed": ds_config(2) | BF16_STATES, "bf16": False},
        {"deepspeed": ds_config(2) | BF16_STATES},
        "ZR274",
    ),
    "bf16 masters with fp32 states": (
        {"deepspeed": ds_config(2) | BF16_MASTERS},
        {"deepspeed": ds_config(2, **CPU) | BF16_MASTERS},
        "ZR275",
    ),
    "bf16 masters of another offloaded optimizer": (
        {"deepspeed": ds_config(3, **CPU) | BF16_MASTERS, "optim": "adagrad"},
        {"deepspeed": ds_config(3, **CPU) | BF16_MASTERS | ADAM},
        "ZR275",
    ),
    "bf16 states, offloaded": (
        {"deepspeed": ds_config(2, **CPU) | BF16_STATES},
        {"deepspeed": ds_config(2, **CPU) | BF16_STATES | ADAM},
        "ZR276",
    ),
    "bf16 masters on NVMe": (
        {"deepspeed": ds_config(3, offload_optimizer=NVME) | BF16_STATES | ADAM},
        {"deepspeed": ds_config(3, offload_optimizer=NVME) | ADAM},
        "ZR287",
    ),
    "fp16 masters": (
        {"deepspeed": ds_config(2, **CPU) | FP16_MASTERS},
        {"deepspeed": ds_config(2, **CPU)},
        "ZR277",
    ),
    "autocast of bf16 weights": ({"deepspeed": autocast()}, {"deepspeed": autocast(), "bf16": False}, "ZR278"),
    "autocast to no dtype": (
        {"deepspeed": autocast(dtype=None), "bf16": False},
        {"deepspeed": autocast(), "bf16": False},
        "ZR279",
    ),
    "autocast to fp16": (
        {"deepspeed": autocast(dtype="fp16"), "bf16": False},
        {"deepspeed": autocast(dtype="bf16"), "bf16": False},
        "ZR280",
    ),
    "autocast of classes that are not there": (
        {"deepspeed": autocast(lower_precision_safe_modules=["torch.nn.Liner"]), "bf16": False},
        {"deepspeed": autocast(lower_precision_safe_modules=["torch.nn.Linear"]), "bf16": False},
        "ZR281",
        {"names": "torch.nn.Liner"},
    ),
    "autocast with qwZ": (
        {"deepspeed": autocast() | {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, "bf16": False},
        {"deepspeed": autocast(3), "bf16": False},
        "ZR282",
    ),
    "leaf modules that are not there": (
        {"deepspeed": ds_config(3, leaf_module={"classes": ["GPTNeoXMoe"], "name_suffixes": ["mlp"]})},
        {"deepspeed": ds_config(3, leaf_module={"classes": "GPTNeoXMLP", "name_suffixes": ["mlp"]})},
        "ZR283",
        {"names": "GPTNeoXMoe"},
    ),
    "leaf modules at stage 2": (
        {"deepspeed": ds_config(2, leaf_module={"classes": ["GPTNeoXMLP"]})},
        {"deepspeed": ds_config(3, leaf_module={"classes": ["GPTNeoXMLP"]})},
        "ZR284",
        {"level": "warning"},
    ),
    "Muon at stage 3": (
        {"deepspeed": ds_config(3) | MUON},
        {"deepspeed": ds_config(3, reduce_scatter=False) | MUON},
        "ZR236",
    ),
    "AutoTP": (
        {"deepspeed": ds_config(1) | {"tensor_parallel": {"autotp_size": 2}}},
        {"deepspeed": ds_config(1)},
        "ZR237",
    ),
    "ZenFlow": (
        {"deepspeed": ds_config(2, offload_optimizer={"device": "cpu"}, zenflow=ZENFLOW)},
        {"deepspeed": ds_config(2, offload_optimizer={"device": "cpu"})},
        "ZR238",
        {"names": "stage 2"},
    ),
    "ZenFlow at stage 3": (
        {"deepspeed": ds_config(3, offload_optimizer={"device": "cpu"}, zenflow=ZENFLOW)},
        {"deepspeed": ds_config(3, offload_optimizer={"device": "cpu"})},
        "ZR238",
        {"names": "stage 3"},
    ),
    "a pipeline": (
        {"deepspeed": ds_config(1) | {"pipeline": {"stages": 2}}},
        {"deepspeed": ds_config(3)},
        "ZR239",
    ),
    "DeepCompile": (
        {"deepspeed": ds_config(3) | {"compile": {"deepcompile": True}}},
        {"deepspeed": ds_config(3)},
        "ZR241",
    ),
    "compiled at stage 3": (
        {"deepspeed": ds_config(3), "torch_compile": True},
        {"deepspeed": ds_config(2), "torch_compile": True},
        "ZR242",
    ),
    "SuperOffload on a CPU": (
        {"deepspeed": ds_config(3, offload_optimizer={"device": "cpu", "super_offload": True})},
        {"deepspeed": ds_config(3, offload_optimizer={"device": "cpu"})},
        "ZR240",
        {"device": "cpu"},
    ),
    "bf16 masters at a small learning rate": (
        {"deepspeed": ds_config(2) | BF16_STATES, "bf16": True, "learning_rate": 2e-5},
        {"deepspeed": ds_config(2) | BF16_STATES, "bf16": True, "learning_rate": 5e-4},
        "ZR294",
        {"level": "warning"},
    ),
    "SuperOffload on a GPU": (
        {"deepspeed": ds_config(3, offload_optimizer={"device": "cpu", "super_offload": True})},
        {"deepspeed": ds_config(3, offload_optimizer={"device": "cpu"})},
        "ZR293",
    ),
    "frozen weights packed by DeepSpeed": (
        {"deepspeed": ds_config(3, zero_quantized_nontrainable_weights=True)} | PEFT,
        {"deepspeed": ds_config(3, zero_quantized_nontrainable_weights=False)} | PEFT,
        "ZR292",
    ),
    "frozen weights packed by DeepSpeed at stage 2": (
        {"deepspeed": ds_config(2, zero_quantized_nontrainable_weights=True)} | PEFT,
        {"deepspeed": ds_config(2)} | PEFT,
        "ZR292",
    ),
    "the caller's own accumulation": (
        {"deepspeed": ds_config(2) | {"managed_gradient_accumulation": False}},
        {"deepspeed": ds_config(2) | {"managed_gradient_accumulation": True}},
        "ZR295",
    ),
    "gradients summed": (
        {"deepspeed": ds_config(2) | {"gradient_allreduce_op": "SUM"}},
        {"deepspeed": ds_config(2) | {"gradient_allreduce_op": "mean"}},
        "ZR296",
    ),
    "gradients scaled before the sum": (
        {"deepspeed": ds_config(2, reduce_scatter=True) | {"prescale_gradients": True}},
        {"deepspeed": ds_config(1) | {"prescale_gradients": True}},
        "ZR297",
    ),
    "gradients divided before the sum": (
        {"deepspeed": ds_config(3) | {"gradient_predivide_factor": 2.0}},
        {"deepspeed": ds_config(3) | {"gradient_predivide_factor": 1.0}},
        "ZR297",
    ),
    "gradients divided twice": (
        {"deepspeed": ds_config(3, reduce_scatter=False) | {"gradient_predivide_factor": 2.0}},
        {"deepspeed": ds_config(3, reduce_scatter=False) | {"prescale_gradients": True}},
        "ZR297",
    ),
    "only the model, and the best one": (
        {"deepspeed": ds_config(2), "save_only_model": True, "load_best_model_at_end": True},
        {"save_only_model": True, "load_best_model_at_end": True},
        "ZR139",
    ),
    "batches sought at stage 3": (
        {"deepspeed": ds_config(3), "auto_find_batch_size": True},
        {"deepspeed": ds_config(2), "auto_find_batch_size": True},
        "ZR140",
    ),
    "uneven batches": (
        {"accelerator_config": {"even_batches": False}},
        {"accelerator_config": {"even_batches": True}},
        "ZR134",
        {"names": "2 processes"},
    ),
    "a mean for each rank": (
        {"average_tokens_across_devices": False},
        {"average_tokens_across_devices": True},
        "ZR136",
        {"names": "2 processes"},
    ),
    "one process": (
        {"deepspeed": ds_config(2)},
        {"deepspeed": ds_config(2, offload_optimizer={"device": "cpu"})},
        "ZR138",
        {"environment": ONE, "level": "warning", "names": "ZeRO stage 2"},
    ),
    "packing in one stream": (
        {"packing": True, "packing_strategy": "wrapped"},
        {"packing": True},
        "ZR132",
        {"level": "warning"},
    ),
    "packs beside each other under sdpa": (
        {"packing": True, "max_length": 2048, "per_device_train_batch_size": 2},
        {"packing": True, "max_length": 2048, "per_device_train_batch_size": 1},
        "ZR464",
        {"level": "warning", "names": "packing with per_device_train_batch_size 2"},
    ),
    "long rows in one sequence under sdpa": (
        {"padding_free": True, "max_length": 1024, "per_device_train_batch_size": 4},
        {"padding_free": True, "max_length": 128, "per_device_train_batch_size": 4},
        "ZR464",
        {"level": "warning", "names": "padding_free with per_device_train_batch_size 4"},
    ),
    "padding_free with a max_length that nothing cuts rows to": (
        {"padding_free": True, "dataset_kwargs": {"skip_prepare_dataset": True}},
        {"padding_free": True},
        "ZR131",
    ),
    "padding_free with a max_length on a stream": (
        {"padding_free": True, "dataset_streaming": True, "max_steps": 3},
        {"padding_free": True, "dataset_streaming": True, "max_steps": 3, "max_length": None},
        "ZR131",
    ),
    "parallelism by accelerate": (
        SHARED | {"parallelism_config": {"cp_size": 2}},
        SHARED,
        "ZR244",
    ),
    "shared sequences without DeepSpeed": (
        {key: value for key, value in SHARED.items() if key != "deepspeed"},
        SHARED,
        "ZR245",
        {"names": "sequence_parallel_size 2 under ddp"},
    ),
    "shared sequences of a GPT-NeoX": (
        SHARED,
        SHARED | {"sequence_parallel_size": 1},
        "ZR247",
        {"names": "gpt_neox"},
    ),
    "shared sequences, eager attention": (
        SHARED | {"attn_implementation": "eager"},
        SHARED | {"attn_implementation": "sdpa"},
        "ZR248",
        {"names": "eager"},
    ),
    "shared sequences, packed": (SHARED | {"packing": True}, SHARED, "ZR249", {"names": "sequence_parallel_size 2"}),
    "shared sequences, the last rows": (
        SHARED | {"dataloader_drop_last": False},
        SHARED,
        "ZR251",
    ),
    "shared sequences without padding": (
        SHARED | {"pad_to_multiple_of": "auto"},
        SHARED,
        "ZR251",
        {"names": "pad_to_multiple_of: auto"},
    ),
    "shared sequences that do not divide": (
        SHARED | {"pad_to_multiple_of": 3},
        SHARED,
        "ZR251",
        {"names": "pad_to_multiple_of: 3"},
    ),
    "shared sequences of several lengths": (
        SHARED | {"pad_to_multiple_of": 2},
        SHARED,
        "ZR251",
        {"device": "cpu"},
    ),
    "shared sequences, samples": (
        SHARED | {"sample_prompts": "3"},
        SHARED | {"sample_prompts": "0"},
        "ZR253",
    ),
    "shared sequences, checkpoints": (
        SHARED | {"save_strategy": "epoch"},
        SHARED,
        "ZR254",
    ),
    "shared sequences, another loss": (
        SHARED | {"loss_type": "dft"},
        SHARED,
        "ZR255",
    ),
    "assistant's turns in Alpaca": (
        {"assistant_only_loss": True},
        {},
        "ZR418",
    ),
}


MARKED = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
    "{{ eos_token }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}\n{% endfor %}"
)
UNMARKED = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
ENDLESS = MARKED.replace("{{ eos_token }}{% endgeneration %}", "{% endgeneration %}{{ eos_token }}")
