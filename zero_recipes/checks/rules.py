"""Keys that do not go together: what is silent, hangs, loses work, or stops only once the weights are loaded.

What a library refuses before weights are loaded has no rule: the rehearsal makes the library's own objects. The texts
of rules that are no more than a condition are in options.yaml.
"""

import importlib.util
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from huggingface_hub import constants, get_token
from torch import nn
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import get_keys_to_not_convert

from zero_recipes.config.ds_config import DsConfig
from zero_recipes.config.recipe import Settings
from zero_recipes.config.strategy import Strategy, sequence_parallel_findings
from zero_recipes.core.files import package_yaml
from zero_recipes.core.findings import Finding, finding
from zero_recipes.core.process import local_world_size
from zero_recipes.engine.huggingface import attention_kernel
from zero_recipes.model import built_or_none

# the texts of rules that are no more than a condition, and tables of values
options = partial(package_yaml, __package__, "options.yaml")


@dataclass(frozen=True)
class Candidate:
    settings: Settings  # the keys in force
    strategy: Strategy
    device: str  # "cpu" or "cuda"
    environment: Mapping[str, str]  # the launcher's
    config: Any = None  # the model's configuration; None where it is not at hand, which is refused elsewhere

    @property
    def ds(self) -> DsConfig:
        return self.strategy.ds

    @property
    def stage(self) -> int | None:
        """None without DeepSpeed."""
        return self.strategy.zero_stage

    @property
    def world_size(self) -> int:
        return self.strategy.world_size

    @property
    def ranks_per_node(self) -> int:
        return local_world_size(self.environment, self.world_size)

    @cached_property
    def model(self):
        """The model without memory; None where its configuration is not at hand, or its class cannot be built so."""
        return None if self.config is None else built_or_none(self.config, self.settings.trust_remote_code)

    def value(self, path: str) -> Any:
        """What the DeepSpeed configuration has at "zero_optimization.stage"; None where it has nothing."""
        block: Any = self.ds.raw
        for key in path.split("."):
            block = block.get(key) if isinstance(block, Mapping) else None
        return block


QUADRATIC = 4096  # tokens of a micro batch from which attention that sdpa computes in vain is a good part of a step
RUN_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


def rule_findings(run: Candidate) -> list[Finding]:
    """All findings about keys that do not go together; those of the ds_config are deepspeed_findings."""
    settings, epochs = run.settings, run.settings.num_train_epochs
    return [
        *conditions(stops_late(run), silent(run)),
        # a run of no step saves the model as it was; one without end never saves it
        *([] if settings.max_steps > 0 or 0 < epochs < math.inf else [finding("ZR162", epochs=epochs)]),
        *packing(run),
        *processes(run),
        *([] if settings.average_tokens_across_devices or run.world_size == 1 else [finding("ZR194")]),
        *([finding("ZR318")] if run.device != "cpu" and (run.strategy.fsdp_config or {}).get("cpu_offload") else []),
        *([finding("ZR416")] if settings.load_in_4bit and run.stage == 3 else []),
        *sequence_parallel_findings(settings, run.strategy, run.device, run.config),
    ]


def conditions(stops: dict[str, Any], silently: dict[str, Any]) -> Iterator[Finding]:
    """The findings whose condition holds, with the texts of options.yaml."""
    for text in (options()["stops_late"][name] for name, holds in stops.items() if holds):
        yield finding("ZR192", option=text["option"], why=text["why"], fix=text["fix"])
    for text in (options()["silent"][name] for name, holds in silently.items() if holds):
        yield finding("ZR193", option=text["option"], why=text["why"], fix=text["fix"])


def stops_late(run: Candidate) -> dict[str, Any]:
    """{name in options.yaml: whether the run would stop on it once the weights are loaded}."""
    settings, fsdp = run.settings, run.strategy.is_fsdp
    quantized = settings.load_in_4bit or settings.load_in_8bit
    liger = settings.use_liger_kernel
    template = settings.chat_template_path
    return {
        "save_steps": settings.save_strategy == "steps" and settings.save_steps <= 0,
        "eval_on_start": settings.eval_on_start and not settings.evaluates,
        "push_to_hub": settings.push_to_hub
        and (constants.is_offline_mode() or not (settings.hub_token or get_token())),
        "liger_package": liger and importlib.util.find_spec("liger_kernel") is None,
        "liger_loss": liger and (settings.liger_kernel_config or {}).get("fused_linear_cross_entropy"),
        "lora_template": settings.use_peft
        and template
        and not template.endswith((".jinja", ".j2"))
        and getattr(run.config, "tie_word_embeddings", False),
        "quantized_without_lora": quantized and not settings.use_peft,
        "eight_bit_fsdp": fsdp and settings.load_in_8bit,
        "fsdp_offload_on_cpu": fsdp and run.strategy.fsdp_config.get("cpu_offload") and run.device == "cpu",
        "fp16_on_cpu": settings.fp16 and run.device == "cpu",
        "activation_offloading": settings.activation_offloading and run.device == "cpu",
    }


def silent(run: Candidate) -> dict[str, Any]:
    """{name in options.yaml: whether the run would go on, and be another one than the recipe says}."""
    settings, storage = run.settings, str(run.settings.bnb_4bit_quant_storage or "uint8")
    quantized = settings.load_in_4bit or settings.load_in_8bit
    dtype, loading = RUN_DTYPES.get(settings.precision), settings.accelerator_config
    adapter = {"peft_type": "LORA", "init_lora_weights": True} | (settings.peft_config or {})
    own_groups = re.search("galore|apollo|lomo", str(settings.optim).lower())
    return {
        "hub_strategy": settings.push_to_hub and settings.hub_strategy not in ("every_save", "end"),
        "jit_checkpoint": settings.enable_jit_checkpoint,
        "even_batches": run.world_size > 1
        and not settings.dataset_streaming
        and isinstance(loading, dict)  # or a path
        and loading.get("even_batches") is False,
        "stream_workers": (settings.dataset_streaming or settings.streaming) and settings.dataloader_num_workers > 1,
        "eval_packing": settings.eval_packing and settings.evaluates and not settings.joined_by,
        "adapter_alone": settings.peft_config and not settings.use_peft,
        "adapter_not_tried": adapter["peft_type"] not in ("LORA", "OFT", "MISS" if run.stage != 3 else None)
        or str(adapter["init_lora_weights"]) not in ("True", "gaussian", "orthogonal"),
        "loraplus": settings.loraplus_lr_ratio is not None
        and (not settings.use_peft or adapter["peft_type"] != "LORA" or run.value("optimizer") or own_groups),
        "quantizes_nothing": quantized and run.model is not None and not has_quantizable_layers(run.model),
        "quantized_random": quantized and settings.random_weights,
        "eight_bit_stage_3": settings.load_in_8bit and run.stage == 3,
        "four_bit_fsdp": settings.load_in_4bit and run.strategy.is_fsdp and storage != dtype,
        "four_bit_storage": settings.load_in_4bit
        and run.strategy.is_deepspeed
        and dtype
        and storage not in ("uint8", dtype),
        "quantized_twice": quantized
        and (run.ds.offload_param == "nvme" or run.ds.quantizes_weights or run.ds.hpz_partition_size != 1),
    }


def has_quantizable_layers(model: nn.Module) -> bool:
    """Whether bitsandbytes replaces a layer: none of a class derived from torch's, nor the LM head."""
    kept = get_keys_to_not_convert(model)
    return any(type(m) in (nn.Linear, Conv1D) and name not in kept for name, m in model.named_modules())


def packing(run: Candidate) -> Iterator[Finding]:
    """Whether rows that share one sequence see each other, and what that costs."""
    settings, key, kinds = run.settings, run.settings.joined_by, options()["packing"]
    if key is None or (key == "packing" and settings.packing_strategy == "wrapped"):
        return  # wrapped: one stream without boundaries is what the recipe asks for
    kind = getattr(run.config, "model_type", None)
    flash = attention_kernel(settings.attn_implementation) is not None
    leaking = {*kinds["without_positions"], *kinds["recurrent"]} - {*(kinds["apart_in_flash"] if flash else [])}
    without_package = importlib.util.find_spec("causal_conv1d") is None
    if kind in leaking or (kind in kinds["convolving"] and without_package):
        yield finding("ZR133", key=key, kind=kind)
    elif kind is not None and kind not in {name for names in kinds.values() for name in names}:
        yield finding("ZR460", key=key, kind=kind)
    rows = settings.per_device_train_batch_size
    tokens = rows * (settings.max_length or 0)
    if settings.attn_implementation in (None, "sdpa", "eager") and rows > 1 and tokens >= QUADRATIC:
        yield finding("ZR464", key=key, rows=rows, tokens=tokens)


def processes(run: Candidate) -> Iterator[Finding]:
    """A launch of one process where several were requested, or where ZeRO has nothing to partition."""
    environment = run.environment
    by_mpi = any(name.startswith(("OMPI_COMM_WORLD", "PMI_", "MV2_COMM_WORLD")) for name in environment)
    by_accelerate = "ACCELERATE_USE_CPU" in environment and "MASTER_ADDR" in environment and "RANK" not in environment
    if run.world_size > 1:
        return
    if by_accelerate and not by_mpi:  # distributed_type NO may mean one process; MULTI_CPU does not
        yield finding("ZR137", level="error" if environment["ACCELERATE_USE_CPU"].lower() == "true" else "warning")
    elif run.stage and not run.ds.offloads:
        yield finding("ZR138", zero_stage=run.stage)
