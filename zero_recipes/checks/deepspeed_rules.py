"""Rules about the DeepSpeed configuration of a run. File names are those of DeepSpeed 0.19.8, under deepspeed/."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn

from zero_recipes.checks.rules import bare_model, conditions, options
from zero_recipes.config.accelerate import ds_config_file, is_on
from zero_recipes.config.ds_config import FORCED, MAPPINGS, OF_CPU_ADAM, parsed_zero
from zero_recipes.config.run import Run
from zero_recipes.core.findings import Finding, finding
from zero_recipes.model import decoder_layers

PREFETCH = 50_000_000  # elements: DeepSpeed's default of stage3_prefetch_bucket_size (runtime/zero/config.py)
ADAMS = ("adam", "adamw")  # those of a ds_config's optimizer block that become DeepSpeedCPUAdam
BLOCK = 25_000_000  # elements of a reduce bucket: below it messages are too small for the bandwidth of GPUs
MOSTLY_LOST = 1e-4  # learning rates up to here: benchmarks/results/bf16_states.json


def deepspeed_findings(run: Run) -> list[Finding]:
    if not run.strategy.is_deepspeed:
        return []
    return [
        *_left_out(run),
        *_flat_pieces(run),
        *_replaced_optimizer(run),
        *_schedule(run),
        *_without_effect(run),
        *_separate_experts(run),
        *_small_buckets(run),
        *_many_gathers(run),
        *strategy_findings(run),
    ]


def strategy_findings(run: Run) -> list[Finding]:
    """Those that a plan needs."""
    return [*conditions(_stops(run), _silent(run)), *_zero_plus_plus(run), *_nvme(run)]


def _stops(run: Run) -> dict[str, Any]:
    settings = run.settings
    ds = run.ds
    zero = ds.zero
    at_3 = run.stage == 3
    on_cpu = run.device == "cpu"
    optimizer = _optimizer_type(run)
    scatters = zero.get("reduce_scatter", True)
    divides = run.value("gradient_predivide_factor") not in (None, 1.0)
    scales = divides or ds.raw.get("prescale_gradients")
    quantizes = ds.quantizes_weights or ds.quantizes_gradients
    hpz = ds.hpz_partition_size
    without_norm = zero.get("compute_grad_norm") is False
    keeps_masters = ds.bf16_states or ds.on_nvme or (ds.offload_optimizer and _is_cpu_adam(run))
    casts_states = ds.bf16_masters and ds.bf16_states and ds.offload_optimizer == "cpu"
    routing = run.value("data_efficiency.data_routing.enabled")
    return {
        "best_of_models_only": settings.save_only_model and settings.load_best_model_at_end,
        "auto_find_batch_size": at_3 and settings.auto_find_batch_size,
        "quantized_communication_on_cpu": at_3 and on_cpu and quantizes,
        "quantized_sizes": at_3 and ds.quantizes_weights and not _divides_by_8(run),
        "hpz_partition": at_3 and isinstance(hpz, int) and run.world_size % min(hpz, run.world_size),
        "nvme_prefetch": ds.offload_param == "nvme" and zero.get("stage3_prefetch_bucket_size", PREFETCH) != 0,
        "grad_accum_dtype": run.stage == 0 and ds.grad_accum_dtype not in (None, settings.precision),
        "muon": at_3 and optimizer == "muon" and scatters,
        "zenflow": zero.get("zenflow"),
        "legacy_stage1": zero.get("legacy_stage1"),
        "data_routing": run.value("data_efficiency.enabled") and routing,
        "monitor_package": any(
            run.value(f"{name}.enabled") and not find_spec(package) for name, package in options()["monitors"].items()
        ),
        "untested_optimizer": run.stage
        and ds.optimizer
        and optimizer not in options()["tested_optimizers"]
        and not ds.raw.get("zero_allow_untested_optimizer"),
        "managed_accumulation": run.value("managed_gradient_accumulation") is False,
        "deprecated_offload": zero.get("cpu_offload") and not ds.optimizer,
        "no_gradient_norm": without_norm and (settings.max_grad_norm > 0 or ds.offload_optimizer),
        "lion_on_cpu": on_cpu and optimizer == "lion" and not ds.offload_optimizer,
        "zero_predivide": run.value("gradient_predivide_factor") == 0,
        "gradient_scaling": (run.stage > 1 and scatters and scales) or (at_3 and divides),
        "bf16_masters": ds.bf16_masters and not keeps_masters,
        "bf16_states": casts_states and not _has_adam_block(run),
        "autocast_quantized": ds.autocast and ds.quantizes_weights,
    }


def _silent(run: Run) -> dict[str, Any]:
    settings = run.settings
    ds = run.ds
    at_3 = run.stage == 3
    hpz = at_3 and ds.hpz_partition_size not in (1, "auto")
    fp16_masters = run.value("fp16.fp16_master_weights_and_grads")
    unnamed_dtype = ds.autocast and run.value("torch_autocast.dtype") is None
    return {
        "fp16_stage_0": settings.fp16 and run.stage == 0 and run.value("fp16.loss_scale") != 1,
        "hpz_offload": hpz and ds.offloads,
        "nvme_stage": ds.on_nvme and not at_3,
        "autotp": run.value("tensor_parallel.autotp_size") not in (None, 0, 1),  # DeepSpeed takes "2" too
        "deepcompile": run.value("compile.deepcompile"),
        "super_offload": run.value("zero_optimization.offload_optimizer.super_offload"),
        "quantized_frozen": ds.zero.get("zero_quantized_nontrainable_weights"),
        "summed_gradients": run.stage < 3 and str(ds.raw.get("gradient_allreduce_op")).lower() == "sum",
        "bf16_masters_precision": ds.bf16_masters and settings.precision != "bf16",
        "masters_never_compared": fp16_masters or (ds.bf16_masters and ds.on_nvme),
        "autocast_16_bit": ds.autocast and settings.precision != "fp32",
        "autocast_dtype": ds.autocast == "fp16" or unnamed_dtype,
    }


def _flat_pieces(run: Run) -> Iterator[Finding]:
    """Of an optimizer that looks at the shapes of tensors."""
    name = _optimizer_type(run) if run.ds.optimizer else run.settings.optimizer_name
    for kind, why in options()["shapes"].items():
        if run.stage and kind in name:
            yield finding("ZR270", optimizer=name, why=why, stage=run.stage)
            return  # galore_adafactor is of the first alone


def _replaced_optimizer(run: Run) -> Iterator[Finding]:
    """What DeepSpeed or accelerate would put in the place of the recipe's optimizer."""
    is_forced = run.ds.offload_optimizer and not run.ds.optimizer and run.ds.raw.get(FORCED, True)
    if is_forced and run.settings.optimizer_name not in OF_CPU_ADAM:
        yield finding("ZR269", optim=run.settings.optimizer_name, source=run.strategy.source)
    decay = (run.value("optimizer.params") or {}).get("weight_decay", 0)
    if decay == "auto":
        decay = run.settings.weight_decay
    if decay and not run.settings.use_peft:
        yield finding("ZR196", decay=decay, source=run.strategy.source)
    is_adagrad = run.settings.optimizer_name == "adagrad"
    if run.ds.optimizer:
        is_adagrad = _optimizer_type(run) == "adagrad" and not run.ds.offload_optimizer  # offloaded, it is DeepSpeed's
    if run.stage and is_adagrad:
        yield finding("ZR299", stage=run.stage)


def _optimizer_type(run: Run) -> str:
    return str((run.ds.optimizer or {}).get("type")).lower()


def _has_adam_block(run: Run) -> bool:
    return _optimizer_type(run) in ADAMS and not run.value("optimizer.params.torch_adam")


def _is_cpu_adam(run: Run) -> bool:
    if run.ds.optimizer is not None:
        return _has_adam_block(run)
    return bool(run.ds.raw.get(FORCED, True)) and run.settings.optimizer_name in OF_CPU_ADAM


def _divides_by_8(run: Run) -> bool:
    """Whether each tensor's part on a rank does; stage 3 rounds parts up."""
    if bare_model(run) is None:
        return True
    return all(-(-p.numel() // run.world_size) % 8 == 0 for p in bare_model(run).parameters())


def _left_out(run: Run) -> Iterator[Finding]:
    settings = run.settings
    source = run.strategy.source
    saves = settings.save_model or settings.saves_checkpoints
    if run.stage == 3 and saves and not parsed_zero(run.ds.zero).gather_16bit_weights_on_model_save:
        yield finding("ZR206", source=source)  # it would end without a model
    written = run.ds.raw
    missing = [key for key in _needed(run) if key not in written]
    if "stage" not in written.get("zero_optimization", {"stage": 0}):
        missing.append("zero_optimization.stage")
    if "enabled" not in written.get(settings.precision, {"enabled": False}):  # "fp32" is none
        missing.append(f"{settings.precision}.enabled")
    if run.ds.optimizer is not None and run.value("optimizer.params.lr") is None:
        missing.append("optimizer.params.lr")
    if run.value("scheduler.type") == "WarmupDecayLR" and "warmup_max_lr" not in (run.value("scheduler.params") or {}):
        missing.append("scheduler.params.warmup_max_lr")
    if missing:
        yield finding("ZR213", source=source, missing=", ".join(missing))


def _needed(run: Run) -> Iterator[str]:
    """Keys without which DeepSpeed has a default of its own."""
    from deepspeed.runtime.constants import GRADIENT_CLIPPING_DEFAULT

    settings = run.settings
    yield "zero_optimization"
    if "train_batch_size" not in run.ds.raw:
        yield "train_micro_batch_size_per_gpu"
    if settings.gradient_accumulation_steps > 1:
        yield "gradient_accumulation_steps"
    if settings.max_grad_norm != GRADIENT_CLIPPING_DEFAULT:
        yield "gradient_clipping"
    # below, accelerate adds it in time (utils/dataclasses.py, set_mixed_precision)
    if run.stage == 3 and settings.precision != "fp32":
        yield settings.precision


def _schedule(run: Run) -> Iterator[Finding]:
    source = run.strategy.source
    kind = run.value("scheduler.type")
    parameters = run.value("scheduler.params") or {}
    if kind in options()["logarithmic_warmups"] and "warmup_type" not in parameters:
        yield finding("ZR216", type=kind, source=source)
    if run.ds.bf16_masters and run.settings.learning_rate <= MOSTLY_LOST:
        yield finding("ZR294", learning_rate=run.settings.learning_rate)


def _without_effect(run: Run) -> Iterator[Finding]:
    unknown = sorted(run.ds.raw.keys() - top_level_keys())
    reasons = dict.fromkeys(unknown, "DeepSpeed has no such key")
    for key, reason in options()["without_effect"].items():
        has_effect = key.endswith("leaf_module") and run.stage == 3
        if run.value(key) is not None and not has_effect:
            reasons[key] = reason
    if reasons:
        named = "; ".join(f"{key} ({reason})" for key, reason in reasons.items())
        yield finding("ZR220", source=run.strategy.source, named=named)
    if run.ds.raw.get("pipeline"):
        yield finding("ZR239")


def _small_buckets(run: Run) -> Iterator[Finding]:
    """transformers fills "auto" in with the square of the hidden size (integrations/deepspeed.py)."""
    square = getattr(run.config, "hidden_size", BLOCK) ** 2
    filled = {}
    if run.stage and not run.settings.use_peft:
        filled["reduce_bucket_size"] = square
    if run.stage == 3:
        filled["stage3_prefetch_bucket_size"] = int(0.9 * square)
    for key, elements in filled.items():
        is_small = run.ds.zero.get(key) == "auto" and run.world_size > 1 and elements < BLOCK
        if is_small and bare_model(run) is not None:
            yield finding("ZR860", key=key, source=run.strategy.source, elements=elements)


def _many_gathers(run: Run) -> Iterator[Finding]:
    """Of a stage 3 that gathers the weights of each small module by themselves."""
    is_inline = is_on(run.environment, "DEEPSPEED") and ds_config_file(run.environment) is None
    if run.stage != 3 or "leaf_module" in run.ds.zero or run.ds.offload_param == "nvme" or is_inline:
        return  # where it need not or cannot be written
    layers = () if bare_model(run) is None else decoder_layers(bare_model(run))
    if layers:
        yield finding("ZR864", layers=" and ".join(layers), source=run.strategy.source)


# keys at the top of a configuration that DeepSpeed 0.19.8 names outside runtime/constants.py
OTHER_KEYS = (
    "autotuning",
    "data_efficiency",
    "hybrid_engine",
    "pipeline",
    "expert_parallel",
    "weight_quantization",
    "monitor_config",
)


def top_level_keys() -> set[str]:
    """What DeepSpeed reads at the top of its configuration."""
    from deepspeed.runtime import constants

    named = {value for value in vars(constants).values() if isinstance(value, str)}
    return named.union(MAPPINGS, OTHER_KEYS)


def _zero_plus_plus(run: Run) -> Iterator[Finding]:
    """ZeRO++ where it does nothing. The group of hpZ is cut to the processes as in utils/groups.py."""
    world_size = run.world_size
    here = run.ranks_per_node
    keys = [key for key in ("zero_quantized_weights", "zero_quantized_gradients") if run.ds.zero.get(key)]
    one_node = here >= world_size
    useless = one_node and run.device != "cpu" and run.ds.quantizes_gradients
    if (keys and run.stage != 3) or useless:
        where = f"at stage {run.stage}, with {world_size} processes of which {here} are on one node"
        level = "warning" if run.stage == 3 else "error"
        yield finding("ZR226", level=level, keys=" and ".join(keys), where=where)
    hpz = run.ds.hpz_partition_size
    if run.stage == 3 and isinstance(hpz, int) and hpz > 1 and (hpz >= world_size or one_node):
        yield finding("ZR224", size=hpz, world_size=world_size)


def _nvme(run: Run) -> Iterator[Finding]:
    on_nvme = run.ds.on_nvme
    for key in on_nvme:
        path = run.ds.offload_block(key).get("nvme_path")
        if path in (None, "auto") or not Path(path).is_dir():
            yield finding("ZR233", key=key, path=path)
    if on_nvme and run.settings.saves_checkpoints:
        yield finding("ZR230", save_strategy=run.settings.save_strategy, named=" and ".join(on_nvme))


def _separate_experts(run: Run) -> Iterator[Finding]:
    """Mixtures of a model's own code with a module for each expert; transformers' hold a layer's in one tensor."""
    if not run.stage or run.world_size == 1 or bare_model(run) is None:
        return
    layers = {type(module).__name__ for module in bare_model(run).modules() if _has_separate_experts(module)}
    kinds = ", ".join(sorted(layers))
    names_leaves = run.ds.zero.get("leaf_module") or run.environment.get("ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES")
    if kinds and run.stage < 3:
        yield finding("ZR285", kinds=kinds, stage=run.stage)
    elif kinds and not names_leaves:
        yield finding("ZR286", kinds=kinds)


def _has_separate_experts(module) -> bool:
    for name, child in module.named_children():
        if "expert" in name and isinstance(child, (nn.ModuleList, nn.ModuleDict)) and len(child) > 1:
            return True
    return False
