"""Rules about the DeepSpeed configuration of a run. File names are those of DeepSpeed 0.19.8, under deepspeed/."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from zero_recipes.checks.rules import bare_model, conditions, options
from zero_recipes.config.ds_config import BLOCKS, parsed_zero, quiet
from zero_recipes.config.run import Run
from zero_recipes.core.findings import Finding, finding

# blocks that DeepSpeed names outside runtime/constants.py
OTHER_BLOCKS = ("autotuning", "data_efficiency", "hybrid_engine", "pipeline", "expert_parallel", "weight_quantization")
OTHER_BLOCKS += ("monitor_config",)
MONITORS = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}  # blocks and their packages
LOG_WARMUP = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
PREFETCH = 50_000_000  # elements: DeepSpeed's default of stage3_prefetch_bucket_size (runtime/zero/config.py)
ADAMS = ("adam", "adamw")  # those of a ds_config's optimizer block that become DeepSpeedCPUAdam
BLOCK = 25_000_000  # elements of a reduce bucket: below it messages are too small for the bandwidth of GPUs
MOSTLY_LOST = 1e-4  # learning rates up to here: benchmarks/results/bf16_states.json


def deepspeed_findings(run: Run) -> list[Finding]:
    """All findings about the DeepSpeed configuration."""
    if not run.strategy.is_deepspeed:
        return []
    found = [*_left_out(run), *_schedule(run), *_without_effect(run), *_separate_experts(run), *_small_buckets(run)]
    return found + strategy_findings(run)


def strategy_findings(run: Run) -> list[Finding]:
    """Those that a plan needs: about the DeepSpeed configuration, without a model or a folder to save to."""
    return [*conditions(_stops(run), _silent(run)), *_zero_plus_plus(run), *_nvme(run)]


def _stops(run: Run) -> dict[str, Any]:
    """{name in options.yaml: whether the run would stop on it once the weights are loaded}."""
    settings, ds, stage = run.settings, run.ds, run.stage
    scatters = ds.zero.get("reduce_scatter", True)
    divides = run.value("gradient_predivide_factor") not in (None, 1.0)
    compiles = settings.torch_compile or settings.torch_compile_backend or settings.torch_compile_mode
    hpz = ds.hpz_partition_size
    return {
        "best_of_models_only": settings.save_only_model and settings.load_best_model_at_end,
        "auto_find_batch_size": stage == 3 and settings.auto_find_batch_size,
        "torch_compile": stage == 3 and compiles,
        "quantized_communication_on_cpu": run.device == "cpu"
        and stage == 3
        and (ds.quantizes_weights or ds.quantizes_gradients),
        "quantized_sizes": stage == 3 and ds.quantizes_weights and not _divides_by_8(run),
        "hpz_partition": stage == 3 and isinstance(hpz, int) and run.world_size % min(hpz, run.world_size),
        "nvme_prefetch": ds.offload_param == "nvme" and ds.zero.get("stage3_prefetch_bucket_size", PREFETCH) != 0,
        "grad_accum_dtype": stage == 0 and ds.grad_accum_dtype not in (None, settings.precision),
        "muon": stage == 3 and _optimizer_type(run) == "muon" and scatters,
        "zenflow": ds.zero.get("zenflow"),
        "legacy_stage1": ds.zero.get("legacy_stage1"),
        "data_routing": run.value("data_efficiency.enabled") and run.value("data_efficiency.data_routing.enabled"),
        "monitor_package": any(run.value(f"{block}.enabled") and not find_spec(MONITORS[block]) for block in MONITORS),
        "managed_accumulation": run.value("managed_gradient_accumulation") is False,
        "deprecated_offload": ds.zero.get("cpu_offload") and not ds.optimizer,
        "no_gradient_norm": ds.zero.get("compute_grad_norm") is False
        and (settings.max_grad_norm > 0 or ds.offload_optimizer),
        "lion_on_cpu": run.device == "cpu" and _optimizer_type(run) == "lion" and not ds.offload_optimizer,
        "zero_predivide": run.value("gradient_predivide_factor") == 0,
        "gradient_scaling": (stage > 1 and scatters and (divides or ds.raw.get("prescale_gradients")))
        or (stage == 3 and divides),
        "bf16_masters": ds.bf16_masters
        and not (ds.bf16_states or ds.on_nvme or (ds.offload_optimizer and _is_cpu_adam(run))),
        "bf16_states": ds.bf16_masters
        and ds.bf16_states
        and ds.offload_optimizer == "cpu"
        and not _has_adam_block(run),
        "autocast_quantized": ds.autocast and ds.quantizes_weights,
    }


def _silent(run: Run) -> dict[str, Any]:
    """{name in options.yaml: whether the run would be another one than the recipe says}."""
    settings, ds, stage = run.settings, run.ds, run.stage
    hpz = ds.hpz_partition_size not in (1, "auto") and stage == 3
    return {
        "fp16_stage_0": settings.fp16 and stage == 0 and run.value("fp16.loss_scale") != 1,
        "hpz_offload": hpz and ds.offloads,
        "nvme_stage": ds.on_nvme and stage != 3,
        "autotp": run.value("tensor_parallel.autotp_size") not in (None, 0, 1),  # DeepSpeed takes "2" too
        "deepcompile": run.value("compile.deepcompile"),
        "super_offload": run.value("zero_optimization.offload_optimizer.super_offload"),
        "quantized_frozen": ds.zero.get("zero_quantized_nontrainable_weights"),
        "summed_gradients": stage < 3 and str(ds.raw.get("gradient_allreduce_op")).lower() == "sum",
        "bf16_masters_precision": ds.bf16_masters and settings.precision != "bf16",
        "masters_never_compared": run.value("fp16.fp16_master_weights_and_grads") or (ds.bf16_masters and ds.on_nvme),
        "autocast_16_bit": ds.autocast and settings.precision != "fp32",
        "autocast_dtype": ds.autocast == "fp16" or (ds.autocast and run.value("torch_autocast.dtype") is None),
    }


def _optimizer_type(run: Run) -> str:
    return str((run.ds.optimizer or {}).get("type")).lower()


def _has_adam_block(run: Run) -> bool:
    return _optimizer_type(run) in ADAMS and not run.value("optimizer.params.torch_adam")


def _is_cpu_adam(run: Run) -> bool:
    if run.ds.optimizer is not None:
        return _has_adam_block(run)
    optim = run.settings.optim
    forced = run.ds.raw.get("zero_force_ds_cpu_optimizer", True)
    return bool(forced) and str(getattr(optim, "value", optim)).startswith("adamw_torch")


def _divides_by_8(run: Run) -> bool:
    """Whether each tensor's part on a rank does; stage 3 rounds parts up."""
    sizes = [] if bare_model(run) is None else [p.numel() for p in bare_model(run).parameters()]
    return not any(-(-size // run.world_size) % 8 for size in sizes)


def _left_out(run: Run) -> Iterator[Finding]:
    """What the ds_config leaves out, where DeepSpeed would do otherwise than the recipe in silence, or stop late. A
    precision's block at stage 3 only: below, accelerate (utils/dataclasses.py, set_mixed_precision) adds it in time."""
    from deepspeed.runtime.constants import GRADIENT_CLIPPING_DEFAULT

    settings, written = run.settings, run.ds.raw
    needed = ["zero_optimization"]
    needed += ["train_micro_batch_size_per_gpu"] if "train_batch_size" not in written else []
    needed += ["gradient_accumulation_steps"] if settings.gradient_accumulation_steps > 1 else []
    needed += ["gradient_clipping"] if settings.max_grad_norm != GRADIENT_CLIPPING_DEFAULT else []
    needed += [settings.precision] if run.stage == 3 and settings.precision != "fp32" else []
    missing = [key for key in needed if key not in written]
    missing += ["zero_optimization.stage"] if "stage" not in written.get("zero_optimization", {"stage": 0}) else []
    block = written.get(settings.precision, {"enabled": False})  # "fp32" is none
    missing += [] if "enabled" in block else [f"{settings.precision}.enabled"]
    without_rate = run.ds.optimizer is not None and run.value("optimizer.params.lr") is None
    missing += ["optimizer.params.lr"] if without_rate else []
    saves = settings.save_model or settings.saves_checkpoints
    if run.stage == 3 and saves and not parsed_zero(run.ds.zero).gather_16bit_weights_on_model_save:
        yield finding("ZR206", source=run.strategy.source)  # it would end without a model
    if missing:
        yield finding("ZR213", source=run.strategy.source, missing=", ".join(missing))


def _schedule(run: Run) -> Iterator[Finding]:
    parameters, steps = run.value("scheduler.params") or {}, run.settings.max_steps
    if run.value("scheduler.type") in LOG_WARMUP and "warmup_type" not in parameters:
        yield finding("ZR216", type=run.value("scheduler.type"), source=run.strategy.source)
    warmup = parameters.get("warmup_num_steps")
    if isinstance(warmup, int) and 0 < steps <= warmup:
        yield finding("ZR217", source=run.strategy.source, warmup=warmup, steps=steps)
    if run.ds.bf16_masters and run.settings.learning_rate <= MOSTLY_LOST:
        yield finding("ZR294", learning_rate=run.settings.learning_rate)


def _without_effect(run: Run) -> Iterator[Finding]:
    found = {key: "DeepSpeed has no such key" for key in sorted(set(run.ds.raw) - top_level_keys())}
    found |= {
        key: reason
        for key, reason in options()["without_effect"].items()
        if run.value(key) is not None and not (key.endswith("leaf_module") and run.stage == 3)
    }
    if found:
        named = "; ".join(f"{key} ({reason})" for key, reason in found.items())
        yield finding("ZR220", source=run.strategy.source, named=named)
    if run.ds.raw.get("pipeline"):
        yield finding("ZR239")


def _small_buckets(run: Run) -> Iterator[Finding]:
    """Of "auto", which transformers fills in with the square of the hidden size (integrations/deepspeed.py)."""
    square = getattr(run.config, "hidden_size", BLOCK) ** 2
    filled = {} if run.settings.use_peft or not run.stage else {"reduce_bucket_size": square}
    filled |= {"stage3_prefetch_bucket_size": int(0.9 * square)} if run.stage == 3 else {}
    for key, elements in filled.items():
        if run.ds.zero.get(key) == "auto" and run.world_size > 1 and elements < BLOCK and bare_model(run) is not None:
            yield finding("ZR860", key=key, source=run.strategy.source, elements=elements)


def top_level_keys() -> set[str]:
    """What DeepSpeed reads at the top of its configuration."""
    from deepspeed.runtime import constants

    return {*BLOCKS, *OTHER_BLOCKS} | {value for value in vars(constants).values() if isinstance(value, str)}


def zero_keys() -> set[str]:
    """What DeepSpeed reads in zero_optimization."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    fields = DeepSpeedZeroConfig.model_fields.items()
    return {alias for name, field in fields for alias in (name, field.alias) if alias}


def _zero_plus_plus(run: Run) -> Iterator[Finding]:
    """ZeRO++ where it does nothing. The group of hpZ is cut to the processes as in utils/groups.py."""
    keys = [key for key in ("zero_quantized_weights", "zero_quantized_gradients") if run.ds.zero.get(key)]
    one_node = run.ranks_per_node >= run.world_size
    useless = one_node and run.device != "cpu" and run.ds.quantizes_gradients
    if (keys and run.stage != 3) or useless:
        where = f"at stage {run.stage}, with {run.world_size} processes of which {run.ranks_per_node} are on one node"
        level = "warning" if run.stage == 3 else "error"
        yield finding("ZR226", level=level, keys=" and ".join(keys), where=where)
    hpz = run.ds.hpz_partition_size
    if run.stage == 3 and isinstance(hpz, int) and hpz > 1 and (hpz >= run.world_size or one_node):
        yield finding("ZR224", size=hpz, world_size=run.world_size)


def _nvme(run: Run) -> Iterator[Finding]:
    for key in run.ds.on_nvme:
        path = run.ds.offload_block(key).get("nvme_path")
        if path in (None, "auto") or not Path(path).is_dir():
            yield finding("ZR233", key=key, path=path)
    if run.ds.on_nvme and run.settings.saves_checkpoints:
        yield finding("ZR230", save_strategy=run.settings.save_strategy, named=" and ".join(run.ds.on_nvme))


def _separate_experts(run: Run) -> Iterator[Finding]:
    """Mixtures that have a module for each expert; transformers' own hold a layer's experts in one tensor. A layer that
    DeepSpeed or accelerate knows for a leaf module is gathered whole. They mark it by the same functions."""
    mixture = run.config is not None and any("expert" in key for key in run.config.to_dict())
    if not (run.stage and run.world_size > 1 and mixture) or bare_model(run) is None:
        return
    layers = [module for module in bare_model(run).modules() if _has_separate_experts(module)]
    if run.stage == 3:
        from deepspeed.utils import z3_leaf_module

        _mark_leaf_modules(run)
        layers = [layer for layer in layers if not z3_leaf_module(layer)]
    kinds = ", ".join(sorted({type(layer).__name__ for layer in layers}))
    if kinds and run.stage == 3:
        yield finding("ZR286", kinds=kinds)
    elif kinds:
        yield finding("ZR285", kinds=kinds, stage=run.stage)


def _has_separate_experts(module) -> bool:
    import torch

    lists = (torch.nn.ModuleList, torch.nn.ModuleDict)
    return any("expert" in name and isinstance(c, lists) and len(c) > 1 for name, c in module.named_children())


def _mark_leaf_modules(run: Run) -> None:
    from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
    from deepspeed.utils.z3_leaf_module import apply_zero_leaf_module_config

    leaf = DeepSpeedZeroLeafModuleConfig(**run.ds.zero.get("leaf_module") or {})
    launched = run.environment.get("ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES", "")
    classes = [*leaf.classes, *(name.strip() for name in launched.split(",") if name.strip())]
    names = [name.removeprefix("base_model.model.") for name in leaf.names]  # LoRA's, whose modules are not here
    with quiet():  # it warns of classes that only other models have
        apply_zero_leaf_module_config(bare_model(run), leaf.model_copy(update={"classes": classes, "names": names}))
