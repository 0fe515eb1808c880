"""Keys that do not go together: what is silent, hangs, loses work, or stops only once the weights are loaded.

What a library refuses before weights are loaded has no rule: trl_objects.py makes the library's own objects. A rule
that is no more than a condition stands beside its code; the texts of all codes are in core/findings.yaml.
File names in their sources are those of transformers 5.23, TRL 1.16, accelerate 1.15 and bitsandbytes 0.50.
"""

import importlib.util
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from zero_recipes.checks.adapter_names import tails
from zero_recipes.checks.capacity import LITTLE
from zero_recipes.checks.rule_set import RuleSet
from zero_recipes.config.accelerate import is_on
from zero_recipes.config.run import Run
from zero_recipes.config.settings import Settings, loaded_dtype
from zero_recipes.core.findings import Finding, finding
from zero_recipes.core.units import size
from zero_recipes.data.audit import RowKeys
from zero_recipes.engine.faults.fp32_parameters import fp32_parameters
from zero_recipes.engine.fsdp import has_final_norm
from zero_recipes.engine.linear_attention import kernels_of
from zero_recipes.model.config import adapter_config
from zero_recipes.model.experts import fused_experts
from zero_recipes.model.fused_head import fused_head_fits
from zero_recipes.model.layer_configs import configs_of_layers
from zero_recipes.model.meta import packed_elements, packed_share
from zero_recipes.model.packed import packed_rows

LOUD = 0.1  # a coefficient; most models have 0.001 to 0.02
# what an evaluation gives, as eval_NAME: transformers' trainer.py `evaluate`, and TRL's trainer/sft_trainer.py `log`
EVALUATION_GIVES = (
    "loss",
    "mean_token_accuracy",
    "entropy",
    "aux_loss",
    "num_tokens",
    "runtime",
    "samples_per_second",
    "steps_per_second",
    "model_preparation_time",
)
QUADRATIC = 4096  # tokens of a micro batch from which attention that sdpa computes in vain is a good part of a step


def bare_model(run: Run) -> PreTrainedModel | None:
    """The run's model without weights. None where its configuration is not at hand, or its class raises."""
    return None if run.meta is None else run.meta.model


recipe_rules = RuleSet()


def rule_findings(run: Run) -> Iterator[Finding]:
    """What is wrong with a run, whatever its strategy. Rules about a ds_config are in deepspeed_rules.py."""
    settings = run.settings
    for point in settings.open_points or ():
        yield finding("ZR823", point=point)
    yield from recipe_rules.findings(run)
    yield from _endless(settings)
    yield from _best_metric(settings)
    yield from packing(run)
    yield from slow_layers(run)
    yield from own_head(run)
    yield from own_forward(run)
    yield from _loud_routers(run)
    yield from processes(run)
    yield from sequence_parallelism(run)
    yield from rounded_parameters(run)
    yield from _experts_in_16_bits(run)
    yield from recomputation(run)
    if run.strategy.is_fsdp and run.world_size > 1:
        yield from trained_heads(run)
        yield from torn_parameters(run)


# ---- saving, evaluating, ending


@recipe_rules.rule("ZR824")
def _saves_every_0_steps(run: Run) -> bool:
    return run.settings.save_strategy == "steps" and run.settings.save_steps <= 0


@recipe_rules.rule("ZR825")
def _evaluates_no_rows_on_start(run: Run) -> bool:
    return run.settings.eval_on_start and not run.settings.evaluates


@recipe_rules.rule("ZR826")
def _stops_early_without_the_best_model(run: Run) -> bool:
    settings = run.settings
    knows_the_best = settings.evaluates and settings.load_best_model_at_end
    return settings.early_stopping_patience is not None and not knows_the_best


@recipe_rules.rule("ZR827")
def _threshold_without_patience(run: Run) -> bool:
    return bool(run.settings.early_stopping_threshold) and run.settings.early_stopping_patience is None


@recipe_rules.rule("ZR828")
def _best_model_between_saves(run: Run) -> bool:
    settings = run.settings
    eval_steps = settings.eval_steps or settings.logging_steps
    keeps_best = settings.load_best_model_at_end and settings.evaluates
    return keeps_best and settings.save_strategy == "steps" and settings.save_steps != eval_steps


@recipe_rules.rule("ZR829")
def _only_evaluation_packs(run: Run) -> bool:
    return bool(run.settings.eval_packing) and run.settings.evaluates and not run.settings.joined_by


@recipe_rules.rule("ZR179")
def _resumes_from_models_alone(run: Run) -> bool:
    settings = run.settings
    resumes = str(settings.resume_from_checkpoint).lower() == "true"
    return resumes and settings.save_only_model and settings.saves_checkpoints


@recipe_rules.rule("ZR459")
def _pushes_checkpoints(run: Run) -> bool:
    return run.settings.push_to_hub and run.settings.hub_strategy not in ("every_save", "end")


# ---- several processes, and their rows


@recipe_rules.rule("ZR369")
def _uneven_batches(run: Run) -> bool:
    is_uneven = _loading(run.settings).get("even_batches") is False
    return is_uneven and run.world_size > 1 and not run.settings.streams


@recipe_rules.rule("ZR370")
def _rank_0_joins_batches(run: Run) -> bool:
    loading = _loading(run.settings)
    joins = loading.get("dispatch_batches") and not loading.get("split_batches")
    # for a stream TRL turns it off
    return bool(joins) and not run.settings.streams and run.world_size > 1


@recipe_rules.rule("ZR371")
def _workers_read_a_stream(run: Run) -> bool:
    return run.settings.streams and run.settings.dataloader_num_workers > 1


@recipe_rules.rule("ZR372")
def _each_process_saves_at_its_own_signal(run: Run) -> bool:
    return run.settings.enable_jit_checkpoint


@recipe_rules.rule("ZR194")
def _loss_by_tokens_of_one_process(run: Run) -> bool:
    return run.world_size > 1 and not run.settings.average_tokens_across_devices


@recipe_rules.rule("ZR896")
def _drops_rows_of_a_stream(run: Run) -> bool:
    return run.settings.streams and RowKeys.of(run.settings).drops(run.settings.max_length)


# ---- what a CPU cannot do


@recipe_rules.rule("ZR373")
def _fp16_on_a_cpu(run: Run) -> bool:
    return run.settings.fp16 and run.device == "cpu"


@recipe_rules.rule("ZR374")
def _offloads_activations_on_a_cpu(run: Run) -> bool:
    return run.settings.activation_offloading and run.device == "cpu"


@recipe_rules.rule("ZR375")
def _fsdp_offloads_on_a_cpu(run: Run) -> bool:
    return run.strategy.is_fsdp and bool(run.strategy.fsdp_config.get("cpu_offload")) and run.device == "cpu"


# ---- kernels


@recipe_rules.rule("ZR470")
def _liger_is_missing(run: Run) -> bool:
    return run.settings.use_liger_kernel and importlib.util.find_spec("liger_kernel") is None


@recipe_rules.rule("ZR471")
def _liger_computes_the_loss(run: Run) -> bool:
    settings = run.settings
    return settings.use_liger_kernel and bool((settings.liger_kernel_config or {}).get("fused_linear_cross_entropy"))


@recipe_rules.rule("ZR472")
def _mxfp4_stays_packed(run: Run) -> bool:
    packed = getattr(run.config, "quantization_config", None) or {}
    return packed.get("quant_method") == "mxfp4" and importlib.util.find_spec("kernels") is not None


# ---- adapters


@recipe_rules.rule("ZR450")
def _adapter_without_use_peft(run: Run) -> bool:
    return bool(run.settings.peft_config) and not run.settings.use_peft


@recipe_rules.rule("ZR451")
def _adapter_is_not_tried(run: Run) -> bool:
    adapter = _adapter(run.settings)
    tried_types = ["LORA", "OFT"]
    if run.stage != 3:
        tried_types.append("MISS")
    begins_as_tried = str(adapter["init_lora_weights"]) in ("True", "gaussian", "orthogonal")
    return adapter["peft_type"] not in tried_types or not begins_as_tried


@recipe_rules.rule("ZR452")
def _loraplus_has_no_groups(run: Run) -> bool:
    settings = run.settings
    has_own_groups = re.search("galore|apollo|lomo", str(settings.optim).lower())
    is_lora = settings.use_peft and _adapter(settings)["peft_type"] == "LORA"
    takes_groups = is_lora and not run.value("optimizer") and not has_own_groups
    return settings.loraplus_lr_ratio is not None and not takes_groups


@recipe_rules.rule("ZR453")
def _lora_adds_tokens_to_a_tied_head(run: Run) -> bool:
    return _lora_adds_tokens(run.settings) and getattr(run.config, "tie_word_embeddings", False)


@recipe_rules.rule("ZR454")
def _lora_adds_tokens_to_embeddings_of_another_name(run: Run) -> bool:
    if not _lora_adds_tokens(run.settings) or bare_model(run) is None:
        return False
    return not any(name.endswith("embed_tokens") for name, _ in bare_model(run).named_modules())


def _lora_adds_tokens(settings: Settings) -> bool:
    return settings.use_peft and settings.clones_tokenizer


@recipe_rules.rule("ZR417")
def _frozen_in_float32(run: Run) -> bool:
    settings = run.settings
    # under DeepSpeed and FSDP2 only 4-bit layers multiply in it
    converts = run.strategy.is_deepspeed or run.strategy.is_fsdp
    if not settings.use_peft or settings.precision == "fp32" or (converts and not settings.load_in_4bit):
        return False
    return run.config is not None and loaded_dtype(settings, run.config.dtype) == "float32"


# ---- quantized weights


@recipe_rules.rule("ZR473")
def _quantized_without_lora(run: Run) -> bool:
    return _quantizes(run.settings) and not run.settings.use_peft


@recipe_rules.rule("ZR474")
def _quantizes_little(run: Run) -> bool:
    model = bare_model(run) if _quantizes(run.settings) else None
    return model is not None and packed_share(model) < LITTLE and not fused_experts(model)


def _experts_in_16_bits(run: Run) -> Iterator[Finding]:
    """Quantized weights without those of the experts. An error where these are nearly all of the model."""
    model = bare_model(run) if _quantizes(run.settings) else None
    experts = {} if model is None else fused_experts(model)
    if not experts:
        return
    elements = sum(weight.numel() for weight in experts.values())
    packed = packed_elements(model)
    others = model.num_parameters() - packed
    rest = 2 * others + packed / (2 if run.settings.load_in_4bit else 1)
    level = "error" if packed_share(model) < LITTLE else "warning"
    names = ", ".join(tails(experts, 2))
    yield finding("ZR481", level=level, names=names, size=size(2 * elements), total=size(rest))


@recipe_rules.rule("ZR475")
def _quantizes_random_weights(run: Run) -> bool:
    return _quantizes(run.settings) and run.settings.random_weights


@recipe_rules.rule("ZR476")
def _quantizes_twice(run: Run) -> bool:
    ds = run.ds
    changes_weights = ds.offload_param == "nvme" or ds.quantizes_weights or ds.hpz_partition_size != 1
    return _quantizes(run.settings) and changes_weights


@recipe_rules.rule("ZR477")
def _eight_bits_under_fsdp(run: Run) -> bool:
    return run.strategy.is_fsdp and run.settings.load_in_8bit


@recipe_rules.rule("ZR478")
def _eight_bits_at_stage_3(run: Run) -> bool:
    return run.settings.load_in_8bit and run.stage == 3


@recipe_rules.rule("ZR479")
def _four_bits_of_another_storage_under_fsdp(run: Run) -> bool:
    return run.strategy.is_fsdp and run.settings.load_in_4bit and _storage(run.settings) != _dtype(run.settings)


@recipe_rules.rule("ZR480")
def _four_bits_of_another_storage_under_deepspeed(run: Run) -> bool:
    storage = _storage(run.settings)
    dtype = _dtype(run.settings)
    casts = run.strategy.is_deepspeed and dtype is not None and storage not in ("uint8", dtype)
    return casts and run.settings.load_in_4bit


@recipe_rules.rule("ZR416")
def _four_bits_at_stage_3(run: Run) -> bool:
    return run.settings.load_in_4bit and run.stage == 3


def _quantizes(settings: Settings) -> bool:
    return settings.load_in_4bit or settings.load_in_8bit


def _storage(settings: Settings) -> str:
    """The dtype in which 4-bit weights are packed."""
    return str(settings.bnb_4bit_quant_storage or "uint8")


def _dtype(settings: Settings) -> str | None:
    """The 16-bit dtype of the run; None in fp32."""
    return {"bf16": "bfloat16", "fp16": "float16"}.get(settings.precision)


def _loading(settings: Settings) -> dict[str, Any]:
    """accelerator_config; empty where it is a path."""
    return settings.accelerator_config if isinstance(settings.accelerator_config, dict) else {}


def _adapter(settings: Settings) -> dict[str, Any]:
    """peft_config, with the defaults of the two keys that rules look at."""
    return {"peft_type": "LORA", "init_lora_weights": True} | (settings.peft_config or {})


def _endless(settings: Settings) -> Iterator[Finding]:
    """A run of no step saves the model as it was; one without end never saves it."""
    epochs = settings.num_train_epochs
    if settings.max_steps <= 0 and not 0 < epochs < math.inf:
        yield finding("ZR162", epochs=epochs)


def _best_metric(settings: Settings) -> Iterator[Finding]:
    named = settings.metric_for_best_model
    if settings.evaluates and named is not None and named.removeprefix("eval_") not in EVALUATION_GIVES:
        given = ", ".join(f"eval_{name}" for name in EVALUATION_GIVES)
        yield finding("ZR871", named=named, given=given)


def _loud_routers(run: Run) -> Iterator[Finding]:
    """A loss of the routers that the model's configuration weighs as much as the loss of the rows."""
    balancing = getattr(run.config, "router_aux_loss_coef", 0.0)
    if run.settings.router_aux_loss_coef is None and balancing >= LOUD:
        yield finding("ZR466", coefficient=balancing)


def packs_without_mask(settings: Settings, precision: str, config: Any) -> bool:
    """Whether attention takes packed rows one by one, without a mask (CUDA, from Ampere on). `config`: the model's."""
    if precision == "fp32" or settings.torch_compile:
        return False
    return settings.attn_implementation in ("sdpa", None) and bool(packed_rows(config, settings).told)


def rounded_parameters(run: Run) -> Iterator[Finding]:
    """Parameters that the model's class keeps in fp32 (engine/faults/fp32_parameters.py), and this run rounds."""
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
    """The names of parameters, each once, with * for the number of a layer."""
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


def recomputation(run: Run) -> Iterator[Finding]:
    """A model whose class cannot compute its layers again in the backward pass."""
    model = bare_model(run)
    if model is not None and run.settings.recomputes and not model.supports_gradient_checkpointing:
        yield finding("ZR440", kind=type(model).__name__)


def torn_parameters(run: Run) -> Iterator[Finding]:
    """Parameters that two modules share, which FSDP2 shards apart: BERT's LM heads have their bias twice.

    FSDP2 shards each layer, the LM head and the rest for themselves. accelerate takes care of a tied embedding alone.
    """
    model = bare_model(run)
    if model is None or run.settings.use_peft:
        return
    embedding = model.get_input_embeddings()
    layers = set(getattr(model, "_no_split_modules", None) or ())
    sharded = [
        name
        for name, module in model.named_modules()
        if type(module).__name__ in layers or module is model.get_output_embeddings()
    ]
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if embedding is None or parameter is not embedding.weight:
            names.setdefault(id(parameter), []).append(name)
    torn = []
    for shared in names.values():
        places = {
            max((part for part in sharded if name.startswith(f"{part}.")), key=len, default="") for name in shared
        }
        if len(places) > 1:
            torn.append(" and ".join(shared[:2]))
    if torn:
        yield finding("ZR439", names=", ".join(torn[:3]))


def packing(run: Run) -> Iterator[Finding]:
    """Whether rows that share one sequence see each other, and what that costs."""
    settings = run.settings
    key = settings.joined_by
    if key is None or (key == "packing" and settings.packing_strategy == "wrapped"):
        return  # wrapped: one stream without boundaries is what the recipe asks for
    kind = getattr(run.config, "model_type", None)
    found = packed_rows(run.config, settings)
    if found.are_apart is False:
        yield finding("ZR133", key=key, kind=kind)
    elif found.missing:
        yield finding("ZR441", key=key, kind=kind, packages=" ".join(found.missing))
    elif found.are_apart is None and kind is not None:
        yield finding("ZR460", key=key, kind=kind)
    rows = settings.per_device_train_batch_size
    tokens = rows * (settings.max_length or 0)
    masked = settings.attn_implementation in ("eager", "sdpa", None)
    masked = masked and not packs_without_mask(settings, run.precision, run.config)
    if masked and rows > 1 and tokens >= QUADRATIC:
        yield finding("ZR464", key=key, rows=rows, tokens=tokens)


def slow_layers(run: Run) -> Iterator[Finding]:
    """Layers that a GPU computes in plain torch, because the package with their kernel is not installed."""
    model = bare_model(run)
    if run.device != "cuda" or run.gpu is not None or model is None:
        return
    if (run.settings.model_init_kwargs or {}).get("use_kernels"):  # they come from the Hub
        return
    if all(kernel.is_installed for kernel in kernels_of(model)):
        return
    packages = packed_rows(run.config, run.settings).slow
    if packages:
        yield finding("ZR442", kind=run.config.model_type, packages=" ".join(packages))


def own_head(run: Run) -> Iterator[Finding]:
    """An LM head that TRL's fused one does not compute: the model's own forward does, for all positions at once."""
    if run.config is None or fused_head_fits(run.config, run.settings.trust_remote_code) is not False:
        return
    tokens = run.settings.per_device_train_batch_size * (run.settings.max_length or 0)
    vocabulary = run.config.get_text_config().vocab_size
    gib = tokens * vocabulary * 4 / 2**30
    yield finding("ZR443", name=type(bare_model(run)).__name__, tokens=tokens, vocabulary=vocabulary, gib=gib)


def own_forward(run: Run) -> Iterator[Finding]:
    """A forward of the model's own code, which TRL's fused LM head replaces."""
    if not run.settings.trust_remote_code:
        return
    kind = type(bare_model(run))
    if kind.__module__.startswith("transformers_modules.") and "forward" in vars(kind):
        yield finding("ZR469", model=run.settings.model_name_or_path, name=kind.__name__)


def processes(run: Run) -> Iterator[Finding]:
    """A run of one process that was to have several, or has nobody to share its model states with."""
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
    """What does not go with sequences that several processes share (Ulysses), and other kinds of parallelism."""
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
    """Attention that cannot be shared: each process gets a part of the heads, and must see whole sequences."""
    says_layers = getattr(config, "num_hidden_layers", None) is not None  # a composite model's says none
    alike = [] if config is None else [config]
    for layer in configs_of_layers(config) if says_layers else alike:
        heads = getattr(layer, "num_attention_heads", None)
        keys = getattr(layer, "num_key_value_heads", None)
        if keys is None or heads % size or (keys % size and size % keys):
            yield finding("ZR247", size=size, model_type=config.model_type, heads=heads, keys=keys)
            break
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
