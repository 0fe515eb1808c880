"""Keys that do not go together: what is silent, hangs, loses work, or stops only once the weights are loaded.

What a library refuses before weights are loaded has no rule: the rehearsal makes the library's own objects. The texts
of rules that are no more than a condition are in options.yaml.
"""

import functools
import importlib.util
import math
import re
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from huggingface_hub import constants, get_token
from transformers import PreTrainedModel

from zero_recipes.config.accelerate import is_on
from zero_recipes.config.recipe import Settings, loaded_dtype
from zero_recipes.config.run import Run
from zero_recipes.core.files import package_yaml
from zero_recipes.core.findings import Finding, finding
from zero_recipes.data.audit import RowKeys
from zero_recipes.engine.faults.fp32_parameters import fp32_parameters
from zero_recipes.engine.fsdp import has_final_norm
from zero_recipes.engine.huggingface import attention_kernel
from zero_recipes.model import adapter_config, built_or_none, packed_share

# the texts of rules that are no more than a condition, and tables of values
options = partial(package_yaml, __package__, "options.yaml")

LITTLE = 0.2  # of the layers' weights
LOUD = 0.1  # a coefficient; most models have 0.001 to 0.02
QUADRATIC = 4096  # tokens of a micro batch from which attention that sdpa computes in vain is a good part of a step


@functools.lru_cache(maxsize=1)
def bare_model(run: Run) -> PreTrainedModel | None:
    """Without memory. None where its configuration is not at hand, or its class cannot be built so."""
    if run.config is None:
        return None
    return built_or_none(run.config, run.settings.trust_remote_code)


def rule_findings(run: Run) -> Iterator[Finding]:
    """Those of the ds_config are deepspeed_findings."""
    settings = run.settings
    epochs = settings.num_train_epochs
    for point in settings.open_points or ():
        yield finding("ZR823", point=point)
    yield from conditions(stops_late(run), silent(run))
    if settings.max_steps <= 0 and not 0 < epochs < math.inf:
        # a run of no step saves the model as it was; one without end never saves it
        yield finding("ZR162", epochs=epochs)
    if settings.streams and RowKeys.of(settings).drops(settings.max_length):
        yield finding("ZR896")
    yield from _best_metric(settings)
    resumes = str(settings.resume_from_checkpoint).lower() == "true"
    if resumes and settings.save_only_model and settings.saves_checkpoints:
        yield finding("ZR179")
    yield from packing(run)
    yield from own_forward(run)
    balancing = getattr(run.config, "router_aux_loss_coef", 0.0)
    if settings.router_aux_loss_coef is None and balancing >= LOUD:
        yield finding("ZR466", coefficient=balancing)
    yield from processes(run)
    if run.world_size > 1 and not settings.average_tokens_across_devices:
        yield finding("ZR194")
    if settings.load_in_4bit and run.stage == 3:
        yield finding("ZR416")
    if run.config is not None and _frozen_in_float32(run):
        yield finding("ZR417")
    yield from sequence_parallelism(run)
    yield from rounded_parameters(run)
    if run.strategy.is_fsdp and run.world_size > 1:
        yield from trained_heads(run)


def _best_metric(settings: Settings) -> Iterator[Finding]:
    named = settings.metric_for_best_model
    given = options()["evaluation_gives"]
    if settings.evaluates and named is not None and named.removeprefix("eval_") not in given:
        yield finding("ZR871", named=named, given=", ".join(f"eval_{name}" for name in given))


def _frozen_in_float32(run: Run) -> bool:
    """Under DeepSpeed and FSDP2 only 4-bit layers multiply in it."""
    settings = run.settings
    converts = run.strategy.is_deepspeed or run.strategy.is_fsdp
    if not settings.use_peft or settings.precision == "fp32" or (converts and not settings.load_in_4bit):
        return False
    return loaded_dtype(settings, run.config.dtype) == "float32"


def conditions(stops: dict[str, Any], silently: dict[str, Any]) -> Iterator[Finding]:
    texts = options()
    for name, holds in stops.items():
        if holds:
            yield finding("ZR192", **texts["stops_late"][name])
    for name, holds in silently.items():
        if holds:
            yield finding("ZR193", **texts["silent"][name])


def _has_embed_tokens(run: Run) -> bool:
    model = bare_model(run)
    return model is None or any(name.endswith("embed_tokens") for name, _ in model.named_modules())


def stops_late(run: Run) -> dict[str, Any]:
    """{name in options.yaml: whether the run would stop on it once the weights are loaded}."""
    settings = run.settings
    fsdp = run.strategy.is_fsdp
    quantized = settings.load_in_4bit or settings.load_in_8bit
    liger = settings.use_liger_kernel
    stops_early = settings.early_stopping_patience is not None
    new_tokens = settings.use_peft and settings.clones_tokenizer
    packed = getattr(run.config, "quantization_config", None) or {}
    loading = _loading(settings)
    joins = loading.get("dispatch_batches") and not loading.get("split_batches")
    return {
        "save_steps": settings.save_strategy == "steps" and settings.save_steps <= 0,
        "eval_on_start": settings.eval_on_start and not settings.evaluates,
        "early_stopping": stops_early and not (settings.evaluates and settings.load_best_model_at_end),
        "push_to_hub": settings.push_to_hub
        and (constants.is_offline_mode() or not (settings.hub_token or get_token())),
        "liger_package": liger and importlib.util.find_spec("liger_kernel") is None,
        "liger_loss": liger and (settings.liger_kernel_config or {}).get("fused_linear_cross_entropy"),
        "lora_template": new_tokens and getattr(run.config, "tie_word_embeddings", False),
        "lora_embeddings": new_tokens and not _has_embed_tokens(run),
        "quantized_without_lora": quantized and not settings.use_peft,
        "mxfp4_kernels": packed.get("quant_method") == "mxfp4" and importlib.util.find_spec("kernels"),
        "eight_bit_fsdp": fsdp and settings.load_in_8bit,
        "fsdp_offload_on_cpu": fsdp and run.strategy.fsdp_config.get("cpu_offload") and run.device == "cpu",
        "fp16_on_cpu": settings.fp16 and run.device == "cpu",
        "activation_offloading": settings.activation_offloading and run.device == "cpu",
        # for a stream TRL turns it off
        "dispatch_batches": joins and not settings.streams and run.world_size > 1,
    }


def _loading(settings: Settings) -> dict[str, Any]:
    """accelerator_config; empty where it is a path."""
    return settings.accelerator_config if isinstance(settings.accelerator_config, dict) else {}


def silent(run: Run) -> dict[str, Any]:
    """{name in options.yaml: whether the run would go on, and be another one than the recipe says}."""
    settings = run.settings
    eval_steps = settings.eval_steps or settings.logging_steps
    keeps_best = settings.load_best_model_at_end and settings.evaluates
    loads_uneven = _loading(settings).get("even_batches") is False
    return {
        "hub_strategy": settings.push_to_hub and settings.hub_strategy not in ("every_save", "end"),
        "jit_checkpoint": settings.enable_jit_checkpoint,
        "best_between_saves": keeps_best and settings.save_strategy == "steps" and settings.save_steps != eval_steps,
        "early_stopping_threshold": settings.early_stopping_threshold and settings.early_stopping_patience is None,
        "even_batches": loads_uneven and run.world_size > 1 and not settings.streams,
        "stream_workers": settings.streams and settings.dataloader_num_workers > 1,
        "eval_packing": settings.eval_packing and settings.evaluates and not settings.joined_by,
        **silent_about_adapters(run),
        **silent_about_quantization(run),
    }


def silent_about_adapters(run: Run) -> dict[str, Any]:
    settings = run.settings
    adapter = {"peft_type": "LORA", "init_lora_weights": True} | (settings.peft_config or {})
    is_lora = adapter["peft_type"] == "LORA"
    tried_types = ["LORA", "OFT"]
    if run.stage != 3:
        tried_types.append("MISS")
    is_tried = adapter["peft_type"] in tried_types
    begins_as_tried = str(adapter["init_lora_weights"]) in ("True", "gaussian", "orthogonal")
    has_own_groups = re.search("galore|apollo|lomo", str(settings.optim).lower())
    takes_groups = settings.use_peft and is_lora and not run.value("optimizer") and not has_own_groups
    return {
        "adapter_alone": settings.peft_config and not settings.use_peft,
        "adapter_not_tried": not (is_tried and begins_as_tried),
        "loraplus": settings.loraplus_lr_ratio is not None and not takes_groups,
    }


def silent_about_quantization(run: Run) -> dict[str, Any]:
    settings = run.settings
    if not (settings.load_in_4bit or settings.load_in_8bit):
        return {}
    model = bare_model(run)
    storage = str(settings.bnb_4bit_quant_storage or "uint8")
    dtype = {"bf16": "bfloat16", "fp16": "float16"}.get(settings.precision)
    is_other_storage = settings.load_in_4bit and storage != dtype
    return {
        "quantizes_little": model is not None and packed_share(model) < LITTLE,
        "quantized_random": settings.random_weights,
        "eight_bit_stage_3": settings.load_in_8bit and run.stage == 3,
        "four_bit_fsdp": is_other_storage and run.strategy.is_fsdp,
        "four_bit_storage": is_other_storage and run.strategy.is_deepspeed and dtype and storage != "uint8",
        "quantized_twice": run.ds.offload_param == "nvme" or run.ds.quantizes_weights or run.ds.hpz_partition_size != 1,
    }


def told_where_rows_begin() -> set[str]:
    """Model types whose packs need no mask (engine/attention.py)."""
    kinds = options()["packing"]
    return {*kinds["apart"]} - {*kinds["not_told"]}


def packs_without_mask(settings: Settings, precision: str, kind: str | None) -> bool:
    """On CUDA, from Ampere on. `kind`: the model's type."""
    if precision == "fp32" or settings.torch_compile:
        return False
    return settings.attn_implementation in ("sdpa", None) and kind in told_where_rows_begin()


def rounded_parameters(run: Run) -> Iterator[Finding]:
    """Of those that the model's class keeps in fp32 (engine/faults/fp32_parameters.py)."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(run.precision)
    model = bare_model(run)
    if dtype is None or model is None:
        return
    kept = list(fp32_parameters(model, dtype))
    trained = [] if run.settings.use_peft else [(name, p) for name, p in kept if p.requires_grad]
    if kept and run.strategy.is_fsdp:
        yield finding("ZR434", names=_by_layer(kept), precision=run.precision)
    if trained and run.ds.bf16_masters:
        yield finding("ZR435", names=_by_layer(trained))
    if kept and run.ds.offload_param == "nvme":
        yield finding("ZR436", names=_by_layer(kept), precision=run.precision)


def _by_layer(parameters: Iterable[tuple[str, Any]]) -> str:
    """Their names, with * for the number of a layer."""
    return ", ".join(sorted({re.sub(r"\.\d+\.", ".*.", name) for name, _ in parameters}))


def trained_heads(run: Run) -> Iterator[Finding]:
    """LM heads whose gradient FSDP2 would not reduce, or that it cannot shard."""
    model = bare_model(run)
    if model is None or model.get_output_embeddings() is None:
        return
    settings = run.settings
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    is_tied = head.weight is embedding.weight
    if settings.use_peft:
        saved = adapter_config(settings).modules_to_save or []
        trained = [name for name, module in model.named_modules() if module in (head, embedding)]
        trained = [name for name in trained if any(f".{name}".endswith(f".{key}") for key in saved)]
        if is_tied and trained:
            yield finding("ZR438", name=", ".join(trained))
            return
        if head not in [model.get_submodule(name) for name in trained] and not settings.clones_tokenizer:
            return
    if not is_tied and not has_final_norm(model):
        yield finding("ZR437", kind=type(model).__name__)


def packing(run: Run) -> Iterator[Finding]:
    """Whether rows that share one sequence see each other, and what that costs."""
    settings = run.settings
    key = settings.joined_by
    if key is None or (key == "packing" and settings.packing_strategy == "wrapped"):
        return  # wrapped: one stream without boundaries is what the recipe asks for
    kinds = options()["packing"]
    kind = getattr(run.config, "model_type", None)
    leaking = {*kinds["without_positions"], *kinds["recurrent"]}
    if attention_kernel(settings.attn_implementation) is not None:
        leaking -= {*kinds["apart_in_flash"]}
    if importlib.util.find_spec("causal_conv1d") is None:
        leaking |= {*kinds["convolving"]}
    known = set().union(*kinds.values())
    if kind in leaking:
        yield finding("ZR133", key=key, kind=kind)
    elif kind is not None and kind not in known:
        yield finding("ZR460", key=key, kind=kind)
    rows = settings.per_device_train_batch_size
    tokens = rows * (settings.max_length or 0)
    masked = settings.attn_implementation in ("eager", "sdpa", None)
    masked = masked and not packs_without_mask(settings, run.precision, kind)
    if masked and rows > 1 and tokens >= QUADRATIC:
        yield finding("ZR464", key=key, rows=rows, tokens=tokens)


def own_forward(run: Run) -> Iterator[Finding]:
    """Of a model's own code, which TRL's fused LM head replaces."""
    if not run.settings.trust_remote_code:
        return
    kind = type(bare_model(run))
    if kind.__module__.startswith("transformers_modules.") and "forward" in vars(kind):
        yield finding("ZR469", model=run.settings.model_name_or_path, name=kind.__name__)


def processes(run: Run) -> Iterator[Finding]:
    if run.world_size > 1:
        return
    environment = run.environment
    by_mpi = any(name.startswith(("OMPI_COMM_WORLD", "PMI_", "MV2_COMM_WORLD")) for name in environment)
    by_accelerate = "ACCELERATE_USE_CPU" in environment and "MASTER_ADDR" in environment and "RANK" not in environment
    if by_accelerate and not by_mpi:
        # distributed_type NO may mean one process; MULTI_CPU does not
        is_multi_cpu = environment["ACCELERATE_USE_CPU"].lower() == "true"
        yield finding("ZR137", level="error" if is_multi_cpu else "warning")
    elif run.stage and not run.ds.offloads:
        yield finding("ZR138", zero_stage=run.stage)


def sequence_parallelism(run: Run) -> Iterator[Finding]:
    settings = run.settings
    size = settings.sequence_parallel_size
    if settings.parallelism_config is not None or is_on(run.environment, "PARALLELISM_CONFIG"):
        yield finding("ZR244")
    if size == 1:
        return
    if not run.strategy.is_deepspeed:
        yield finding("ZR245", size=size, name=run.strategy.name)
    yield from _attention_findings(settings, size, run.config)
    if settings.joined_by:
        yield finding("ZR249", key=settings.joined_by, size=size)
    multiple = str(settings.pad_to_multiple_of)  # that of the command line is text
    number = int(multiple) if multiple.isdigit() else 0
    uneven = number == 0 or number % size
    varies = run.device == "cpu" and number != settings.max_length
    if uneven or varies or not settings.dataloader_drop_last:
        shown = multiple.replace("None", "unset")
        yield finding("ZR251", size=size, multiple=shown, device=run.device)
    if settings.sample_prompts not in (None, 0, "0"):
        yield finding("ZR253", size=size)
    if settings.saves_checkpoints or settings.resume_from_checkpoint not in (None, False, "false"):
        yield finding("ZR254", size=size)
    if settings.loss_type != "nll" or settings.label_smoothing_factor:
        yield finding("ZR255", size=size)


def _attention_findings(settings, size: int, config) -> Iterator[Finding]:
    """Each process gets a part of the heads, and must see whole sequences."""
    heads = getattr(config, "num_attention_heads", None)
    keys = getattr(config, "num_key_value_heads", None)
    if config is not None and (keys is None or heads % size or (keys % size and size % keys)):
        yield finding("ZR247", size=size, model_type=config.model_type, heads=heads, keys=keys)
    attention = str(settings.attn_implementation)
    is_kernel = "/" in attention and "flash-attn" in attention  # as accelerate
    if not is_kernel and attention not in ("None", "sdpa", "flash_attention_2", "flash_attention_3"):
        yield finding("ZR248", size=size, attn_implementation=attention)
    exact = {"full_attention"}
    window = getattr(config, "sliding_window", None) or 0
    if "flash" in attention or (settings.max_length or math.inf) <= window:
        exact.add("sliding_attention")
    layers = set(getattr(config, "layer_types", None) or ()) - exact
    if layers:
        yield finding("ZR298", size=size, model_type=config.model_type, layers=", ".join(sorted(layers)))
