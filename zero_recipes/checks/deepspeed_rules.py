"""Rules about the DeepSpeed configuration of a run. File names are those of DeepSpeed 0.19.8, under deepspeed/."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from torch import nn

from zero_recipes.checks.rule_set import RuleSet
from zero_recipes.checks.rules import bare_model
from zero_recipes.config.accelerate import ds_config_file, is_on
from zero_recipes.config.ds_config import FORCED, MAPPINGS, OF_CPU_ADAM, parsed_zero
from zero_recipes.config.run import Run
from zero_recipes.core.findings import Finding, finding
from zero_recipes.model.meta import decoder_layers

PREFETCH = 50_000_000  # elements: DeepSpeed's default of stage3_prefetch_bucket_size (runtime/zero/config.py)
ADAMS = ("adam", "adamw")  # those of a ds_config's optimizer block that become DeepSpeedCPUAdam
BLOCK = 25_000_000  # elements of a reduce bucket: below it messages are too small for the bandwidth of GPUs
MOSTLY_LOST = 1e-4  # learning rates up to here: benchmarks/results/bf16_states.json
MONITORS = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}  # blocks, and what they import
TESTED_OPTIMIZERS = ("adam", "adamw", "adagrad", "lion", "muon")  # with ZeRO: runtime/zero/utils.py
# schedulers whose warm-up is logarithmic where warmup_type does not say otherwise
LOGARITHMIC_WARMUPS = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
WITHOUT_EFFECT = {  # keys, and why they have none under the Trainer
    "activation_checkpointing": "the Trainer uses the recipe's activation_checkpointing instead",
    "aio.thread_count": "DeepSpeed reads aio.intra_op_parallelism",
    "zero_optimization.leaf_module": "only stage 3 gathers weights by module",
}
PROJECTS = "It projects gradients of matrices, and a piece is none."
KEEPS_FACTORS = "It keeps a factor for each dimension of a matrix."
QUANTIZES_BLOCKS = (
    "It quantizes a tensor's states in blocks, and keeps those of {kept} in 32 bits. Blocks now reach from one tensor "
    "into the next, and small tensors are quantized too."
)
# What optimizers with these words in their names do with a tensor's shape. ZeRO's partitions have one dimension.
# DeepSpeed's own Muon is given whole matrices.
BY_SHAPE = {
    "galore": PROJECTS,
    "apollo": PROJECTS,
    "adafactor": "It factors the second moments of matrices, and bounds an update by the tensor's own size. Nothing is "
    "factored, so the states take as much memory as unfactored ones.",
    "stable_adamw": "It bounds an update by the tensor's own size.",
    "lamb": "It scales an update by the tensor's own norm.",
    "shampoo": KEEPS_FACTORS,
    "soap": KEEPS_FACTORS,
    "8bit": QUANTIZES_BLOCKS.format(kept="small tensors and embeddings"),
    "4bit": QUANTIZES_BLOCKS.format(kept="small tensors"),
}


strategy_rules = RuleSet()


def deepspeed_findings(run: Run) -> list[Finding]:
    """What is wrong with the ds_config of a run, alone or with its recipe. Empty without DeepSpeed."""
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
    """Those of deepspeed_findings that a plan needs: they say whether the strategy can run at all."""
    return [*strategy_rules.findings(run), *_zero_plus_plus(run), *_nvme(run)]


# ---- with keys of the recipe


@strategy_rules.rule("ZR2001")
def _best_of_models_alone(run: Run) -> bool:
    return run.settings.save_only_model and run.settings.load_best_model_at_end


@strategy_rules.rule("ZR2002")
def _seeks_batch_size_at_stage_3(run: Run) -> bool:
    return run.stage == 3 and run.settings.auto_find_batch_size


@strategy_rules.rule("ZR2003")
def _monitor_without_its_package(run: Run) -> bool:
    return any(run.value(f"{name}.enabled") and not find_spec(package) for name, package in MONITORS.items())


# ---- ZeRO++


@strategy_rules.rule("ZR2004")
def _quantized_communication_on_a_cpu(run: Run) -> bool:
    quantizes = run.ds.quantizes_weights or run.ds.quantizes_gradients
    return run.stage == 3 and run.device == "cpu" and quantizes


@strategy_rules.rule("ZR2005")
def _quantized_weights_of_odd_sizes(run: Run) -> bool:
    return run.stage == 3 and run.ds.quantizes_weights and not _divides_by_8(run)


@strategy_rules.rule("ZR2006")
def _hpz_groups_are_uneven(run: Run) -> bool:
    size = run.ds.hpz_partition_size
    return run.stage == 3 and isinstance(size, int) and run.world_size % min(size, run.world_size) != 0


@strategy_rules.rule("ZR2022")
def _hpz_with_offload(run: Run) -> bool:
    return run.stage == 3 and run.ds.hpz_partition_size not in (1, "auto") and run.ds.offloads


@strategy_rules.rule("ZR2027")
def _quantizes_frozen_weights(run: Run) -> bool:
    return bool(run.ds.zero.get("zero_quantized_nontrainable_weights"))


# ---- offload


@strategy_rules.rule("ZR2007")
def _prefetches_from_nvme(run: Run) -> bool:
    return run.ds.offload_param == "nvme" and run.ds.zero.get("stage3_prefetch_bucket_size", PREFETCH) != 0


@strategy_rules.rule("ZR2014")
def _offload_that_accelerate_does_not_read(run: Run) -> bool:
    return bool(run.ds.zero.get("cpu_offload")) and not run.ds.optimizer


@strategy_rules.rule("ZR2023")
def _nvme_below_stage_3(run: Run) -> bool:
    return bool(run.ds.on_nvme) and run.stage != 3


@strategy_rules.rule("ZR2026")
def _super_offload(run: Run) -> bool:
    return bool(run.value("zero_optimization.offload_optimizer.super_offload"))


# ---- optimizers


@strategy_rules.rule("ZR2009")
def _muon_scatters(run: Run) -> bool:
    return run.stage == 3 and _optimizer_type(run) == "muon" and _scatters(run)


@strategy_rules.rule("ZR2010")
def _zenflow(run: Run) -> bool:
    return bool(run.ds.zero.get("zenflow"))


@strategy_rules.rule("ZR2012")
def _untested_optimizer(run: Run) -> bool:
    is_untested = bool(run.ds.optimizer) and _optimizer_type(run) not in TESTED_OPTIMIZERS
    return bool(run.stage) and is_untested and not run.ds.raw.get("zero_allow_untested_optimizer")


@strategy_rules.rule("ZR2016")
def _lion_on_a_cpu(run: Run) -> bool:
    return run.device == "cpu" and _optimizer_type(run) == "lion" and not run.ds.offload_optimizer


# ---- gradients


@strategy_rules.rule("ZR2008")
def _gradients_of_another_dtype_at_stage_0(run: Run) -> bool:
    return run.stage == 0 and run.ds.grad_accum_dtype not in (None, run.settings.precision)


@strategy_rules.rule("ZR2013")
def _script_counts_micro_batches(run: Run) -> bool:
    return run.value("managed_gradient_accumulation") is False


@strategy_rules.rule("ZR2015")
def _needs_the_norm_left_out(run: Run) -> bool:
    leaves_out = run.ds.zero.get("compute_grad_norm") is False
    return leaves_out and (run.settings.max_grad_norm > 0 or bool(run.ds.offload_optimizer))


@strategy_rules.rule("ZR2017")
def _scales_gradients_above_stage_1(run: Run) -> bool:
    divides = run.value("gradient_predivide_factor") not in (None, 1.0)
    scales = divides or bool(run.ds.raw.get("prescale_gradients"))
    return (run.stage > 1 and _scatters(run) and scales) or (run.stage == 3 and divides)


@strategy_rules.rule("ZR2033")
def _divides_gradients_by_0(run: Run) -> bool:
    return run.value("gradient_predivide_factor") == 0


@strategy_rules.rule("ZR2028")
def _sums_gradients(run: Run) -> bool:
    return run.stage < 3 and str(run.ds.raw.get("gradient_allreduce_op")).lower() == "sum"


# ---- precision


@strategy_rules.rule("ZR2018")
def _bf16_masters_without_bf16_states(run: Run) -> bool:
    ds = run.ds
    keeps_masters = ds.bf16_states or ds.on_nvme or (ds.offload_optimizer and _is_cpu_adam(run))
    return ds.bf16_masters and not keeps_masters


@strategy_rules.rule("ZR2019")
def _offloads_bf16_states_without_adam(run: Run) -> bool:
    ds = run.ds
    casts_states = ds.bf16_masters and ds.bf16_states and ds.offload_optimizer == "cpu"
    return casts_states and not _has_adam_block(run)


@strategy_rules.rule("ZR2029")
def _bf16_masters_of_another_precision(run: Run) -> bool:
    return run.ds.bf16_masters and run.settings.precision != "bf16"


@strategy_rules.rule("ZR2030")
def _masters_that_nobody_compared(run: Run) -> bool:
    in_fp16 = run.value("fp16.fp16_master_weights_and_grads")
    return bool(in_fp16 or (run.ds.bf16_masters and run.ds.on_nvme))


@strategy_rules.rule("ZR2021")
def _fp16_at_stage_0(run: Run) -> bool:
    return run.settings.fp16 and run.stage == 0 and run.value("fp16.loss_scale") != 1


@strategy_rules.rule("ZR2020")
def _autocast_of_quantized_weights(run: Run) -> bool:
    return run.ds.autocast is not None and run.ds.quantizes_weights


@strategy_rules.rule("ZR2031")
def _autocast_of_16_bit_weights(run: Run) -> bool:
    return run.ds.autocast is not None and run.settings.precision != "fp32"


@strategy_rules.rule("ZR2032")
def _autocast_to_fp16(run: Run) -> bool:
    # without a dtype torch takes fp16
    is_unnamed = run.ds.autocast is not None and run.value("torch_autocast.dtype") is None
    return run.ds.autocast == "fp16" or is_unnamed


# ---- other engines


@strategy_rules.rule("ZR2011")
def _drops_tokens_at_random(run: Run) -> bool:
    return bool(run.value("data_efficiency.enabled") and run.value("data_efficiency.data_routing.enabled"))


@strategy_rules.rule("ZR2024")
def _tensor_parallel(run: Run) -> bool:
    return run.value("tensor_parallel.autotp_size") not in (None, 0, 1)  # DeepSpeed takes "2" too


@strategy_rules.rule("ZR2025")
def _deepcompile(run: Run) -> bool:
    return bool(run.value("compile.deepcompile"))


@strategy_rules.rule("ZR239")
def _pipeline(run: Run) -> bool:
    return bool(run.ds.raw.get("pipeline"))


def _scatters(run: Run) -> bool:
    return run.ds.zero.get("reduce_scatter", True)


def _flat_pieces(run: Run) -> Iterator[Finding]:
    """An optimizer that looks at the shapes of tensors, under ZeRO, whose pieces have lost them."""
    name = _optimizer_type(run) if run.ds.optimizer else run.settings.optimizer_name
    for kind, why in BY_SHAPE.items():
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
    """Whether each tensor's part on a rank is a multiple of 8 elements; stage 3 rounds parts up."""
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
    """Names of the keys without which DeepSpeed trains with a default of its own, not with the recipe's value."""
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
    if kind in LOGARITHMIC_WARMUPS and "warmup_type" not in parameters:
        yield finding("ZR216", type=kind, source=source)
    if run.ds.bf16_masters and run.settings.learning_rate <= MOSTLY_LOST:
        yield finding("ZR294", learning_rate=run.settings.learning_rate)


def _without_effect(run: Run) -> Iterator[Finding]:
    unknown = sorted(run.ds.raw.keys() - top_level_keys())
    reasons = dict.fromkeys(unknown, "DeepSpeed has no such key")
    for key, reason in WITHOUT_EFFECT.items():
        has_effect = key.endswith("leaf_module") and run.stage == 3
        if run.value(key) is not None and not has_effect:
            reasons[key] = reason
    if reasons:
        named = "; ".join(f"{key} ({reason})" for key, reason in reasons.items())
        yield finding("ZR220", source=run.strategy.source, named=named)


def _small_buckets(run: Run) -> Iterator[Finding]:
    """Buckets too small for GPUs: transformers fills "auto" in with the square of the hidden size.

    See integrations/deepspeed.py there.
    """
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
    """A stage 3 that gathers the weights of each small module by themselves."""
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
    """The names of all keys that DeepSpeed reads at the top of its configuration."""
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
    """Mixtures of experts with a module for each, by a model's own code. transformers' hold a layer's in one tensor."""
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
