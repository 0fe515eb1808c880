"""The model as the recipe says."""

import contextlib
import copy
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import get_keys_to_not_convert

from zero_recipes.config.ds_config import ModelSize
from zero_recipes.config.settings import Settings
from zero_recipes.core.findings import Finding, Refusal, finding, raise_errors, refusal
from zero_recipes.core.library_errors import library_error_as_finding
from zero_recipes.engine.deepspeed import is_partitioned, packed_weights, whole_shape, whole_size
from zero_recipes.engine.huggingface import dtypes_of_the_file, other_attention, without_deepspeed_announcement
from zero_recipes.engine.patches import freeze_as_the_class_does, keep_4bit_layout, let_inputs_have_gradients

# what transformers reports of a load, and what it would have done about it
KEY_PROBLEMS = {
    "missing_keys": ("The model has these tensors but the checkpoint does not. They would be initialized randomly."),
    "unexpected_keys": "The checkpoint has these tensors but the model does not. They would be dropped.",
    "mismatched_keys": "They have another shape in the checkpoint. They would be initialized randomly.",
}


def load_config(settings: Settings) -> PretrainedConfig:
    """Read the model's configuration. Raises Refusal."""
    name = settings.model_name_or_path
    if name is None:
        raise refusal("ZR401")
    trust = settings.trust_remote_code
    with library_error_as_finding(f"reading the configuration of {name}"):
        return AutoConfig.from_pretrained(name, revision=settings.model_revision, trust_remote_code=trust)


# of a config.json, which say nothing of the model
_NOTES = ("transformers_version", "_name_or_path", "_commit_hash")


def config_of_file(settings: Settings) -> dict[str, Any] | None:
    """The model's config.json as it is written, without notes; None where it is not at hand."""
    try:
        written, _ = PretrainedConfig.get_config_dict(settings.model_name_or_path, revision=settings.model_revision)
    except (OSError, ValueError, TypeError):  # load_config has refused it
        return None
    return {key: value for key, value in written.items() if key not in _NOTES}


def adapter_config(settings: Settings, has_weights: bool = False) -> Any:
    """The PeftConfig of TRL's keys, with those of `peft_config` over them; None without `use_peft`.

    Without `has_weights` no start of the adapter is computed from the model's weights.

    TRL 1.16 (trainer/model_config.py) makes a text of a list with one name: "all-linear", or what PEFT takes for a
    pattern that the module's whole name must match. `lora_target_modules: [q_proj]` would match none.
    """
    import peft
    from trl import ModelConfig, get_peft_config

    known = ModelConfig.__dataclass_fields__
    of_trl = {key: value for key, value in settings.as_dict().items() if key in known}
    config = get_peft_config(ModelConfig(**of_trl))
    if config is None:
        return None
    values = config.to_dict()
    if isinstance(config.target_modules, str) and config.target_modules.isidentifier():
        values["target_modules"] = [config.target_modules]
    own = dict(settings.peft_config or {})
    if own.get("peft_type", "LORA") != "LORA":
        values = {key: values[key] for key in ("task_type", "target_modules", "modules_to_save")}
    if not has_weights:
        own.pop("init_lora_weights", None)
    return peft.get_peft_config(values | own)


def packed_elements(model: PreTrainedModel) -> int:
    """Weights that bitsandbytes packs: of torch's linear layers and Conv1D, but the LM head's."""
    kept = get_keys_to_not_convert(model)
    others = [module for name, module in model.named_modules() if name not in kept]
    return sum(module.weight.numel() for module in others if type(module) in (torch.nn.Linear, Conv1D))


def packed_share(model: PreTrainedModel) -> float:
    """Of the weights without embeddings and LM head, which are most of a small model."""
    ends = {end.weight for end in (model.get_input_embeddings(), model.get_output_embeddings()) if end is not None}
    return packed_elements(model) / (model.num_parameters() - sum(weight.numel() for weight in ends))


def build_on_meta(config: PretrainedConfig, trust_remote_code: bool = False) -> PreTrainedModel:
    """Without memory."""
    with torch.device("meta"), without_deepspeed_announcement():  # one rank alone may build it
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)


def built_or_none(config: PretrainedConfig, trust_remote_code: bool) -> PreTrainedModel | None:
    """None where the model's class raises: the rehearsal reports that."""
    try:
        return build_on_meta(config, trust_remote_code)
    except Exception:  # a model's own code may raise anything
        return None


def refuse_other_keys(config: PretrainedConfig, settings: Settings) -> None:
    """Refuse a checkpoint whose tensors are not the model's, by name; no weight is read.

    transformers fills what is missing with random numbers and drops what is unexpected, with a warning; at ZeRO stage 3
    it does not even know what is unexpected or of another shape (5.23, modeling_utils.py `_load_pretrained_model`).
    """
    if settings.random_weights or _quantization(settings, config) is not None:  # load_model looks at the load itself
        return
    name = settings.model_name_or_path
    with library_error_as_finding(f"reading the names of {name}'s tensors"), without_deepspeed_announcement():
        _, report = _from_pretrained(config, settings, device_map="meta")
    _refuse_keys(report, name, settings.allow_keys)


def report_of_folder(folder: Path, config: PretrainedConfig, trust_remote_code: bool) -> dict[str, Any]:
    """transformers' report on the names and shapes of a folder's safetensors, for the model of `config`.

    No weight is read, nor the folder's own config.json.
    """
    with without_deepspeed_announcement():  # one rank alone may look
        _, report = AutoModelForCausalLM.from_pretrained(
            folder,
            config=copy.deepcopy(config),
            device_map="meta",
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=trust_remote_code,
        )
    return report


def load_model(config: PretrainedConfig, settings: Settings) -> PreTrainedModel:
    """On CPU or (stage 3) already partitioned by deepspeed.zero.Init, in the recipe's dtype."""
    name = settings.model_name_or_path
    with library_error_as_finding(f"loading {name}", vars(settings)):
        if settings.random_weights:
            model = _from_config(config, settings)
        else:
            model, report = _from_pretrained(config, settings)
    if settings.random_weights:
        draw_weights(model, settings.seed)
    else:
        _refuse_keys(report, name, settings.allow_keys)
        freeze_as_the_class_does(model, build_on_meta(config, settings.trust_remote_code))
        if _quantization(settings, config) is not None:
            keep_4bit_layout(model)
    let_inputs_have_gradients(model, settings)
    requested = _keywords(settings)["attn_implementation"]
    got = other_attention(model, requested)
    if got is not None:
        raise refusal("ZR406", requested=requested, name=type(model).__name__, got=got)
    return model


def refuse_unknown_tokens(config: PretrainedConfig | None, settings: Settings, largest_id: int) -> None:
    """Of rows. Where TRL adds tokens it resizes the model, too."""
    size = None if config is None else getattr(config.get_text_config(), "vocab_size", None)
    if size is not None and largest_id >= size and not settings.clones_tokenizer:
        raise refusal("ZR557", largest_id=largest_id, name=settings.model_name_or_path, size=size)


def position_findings(config: PretrainedConfig, settings: Settings, longest: int) -> Iterator[Finding]:
    """Of rows longer than the model's positions. `longest`: tokens of the longest that is trained on or evaluated."""
    limit = position_limit(config)
    if limit is None or longest <= limit:
        return
    about = {"longest": longest, "name": settings.model_name_or_path, "limit": limit}
    model = built_or_none(config, settings.trust_remote_code)
    if model is not None and has_position_table(model, limit):
        yield finding("ZR175", **about)
    else:
        yield finding("ZR176", **about)


def position_limit(config: PretrainedConfig) -> int | None:
    """Positions that the model was made for; None where they have no end."""
    text = config.get_text_config()
    named = getattr(text, "max_position_embeddings", None)
    if named is None or getattr(text, "alibi", False):
        return None
    limit = named
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = [kind for kind in rope.values() if isinstance(kind, dict)] or [rope]  # of each type of layer, or of all
    for kind in kinds:
        if kind.get("rope_type") == "dynamic":  # stretched as far as a row is long
            return None
        factor = kind.get("factor") or 1.0
        original = kind.get("original_max_position_embeddings") or named
        limit = max(limit, int(factor * original))
    return limit


def has_position_table(model: PreTrainedModel, limit: int) -> bool:
    """Whether a vector is looked up for each position (GPT-2, OPT, GPT-J), which fails for one beyond the last.

    Rotary and sinusoidal positions are computed for any. OPT's table has two rows more than positions.
    """
    tokens = model.get_input_embeddings()
    for module in model.modules():
        is_other = isinstance(module, torch.nn.Embedding) and module is not tokens
        if is_other and limit <= module.num_embeddings <= limit + 2:
            return True
    for name, buffer in model.named_buffers():
        if "pos" in name.rpartition(".")[2] and buffer.dim() == 2 and len(buffer) == limit:
            return True
    return False


def rehearse_model(config: PretrainedConfig, settings: Settings) -> PreTrainedModel:
    """As `load_model` makes it, without memory and weights."""
    is_folder = Path(str(settings.model_name_or_path)).is_dir()
    with torch.device("meta"), without_deepspeed_announcement():  # one rank alone may build it
        if is_folder and settings.model_init_kwargs and not settings.random_weights:
            return _from_pretrained(config, settings, device_map="meta")[0]
        return _from_config(config, settings)


def _keywords(settings: Settings) -> dict[str, Any]:
    dtype = settings.dtype
    if dtype not in ("auto", None):
        dtype = getattr(torch, dtype)
    keywords = {"dtype": dtype, "attn_implementation": settings.attn_implementation}
    return keywords | (settings.model_init_kwargs or {})


def _from_config(config: PretrainedConfig, settings: Settings) -> PreTrainedModel:
    keywords = _keywords(settings)
    if keywords["dtype"] == "auto":  # from_config does not know it
        keywords["dtype"] = config.dtype or torch.float32
    return AutoModelForCausalLM.from_config(config, trust_remote_code=settings.trust_remote_code, **keywords)


def _quantization(settings: Settings, config: PretrainedConfig):
    from trl import get_quantization_config

    return get_quantization_config(settings) or getattr(config, "quantization_config", None)


def _from_pretrained(config: PretrainedConfig, settings: Settings, **more) -> tuple[PreTrainedModel, dict]:
    """(the model, transformers' report on its keys). With device_map "meta" no weight is read."""
    from trl import get_quantization_config

    keywords = _keywords(settings) | more
    quantization = get_quantization_config(settings)
    if quantization is not None:
        keywords["quantization_config"] = quantization
    keywords["ignore_mismatched_sizes"] = True  # refused by name instead
    return AutoModelForCausalLM.from_pretrained(
        settings.model_name_or_path,
        config=config,
        revision=settings.model_revision,
        trust_remote_code=settings.trust_remote_code,
        output_loading_info=True,
        **keywords,
    )


def _refuse_keys(report: dict, name: str, allowed: list[str] | None) -> None:
    """`allowed`: by the recipe's `allow_keys`."""
    findings = []
    for problem, consequence in KEY_PROBLEMS.items():
        found = {key if isinstance(key, str) else key[0] for key in report[problem]}
        keys = sorted(found.difference(allowed or ()))
        if keys:
            shown = ", ".join(keys[:5])
            if len(keys) > 5:
                shown += f" and {len(keys) - 5} more"
            kind = problem.replace("_", " ")
            findings.append(finding("ZR408", keys=shown, name=name, problem=kind, consequence=consequence))
    raise_errors(findings)


def draw_weights(model: PreTrainedModel, seed: int) -> None:
    """Fill every matrix with normal numbers from a seed of its own name.

    The same under every strategy: deepspeed.zero.Init draws others than the plain constructor does.
    Biases and norms keep the constructor's constants.
    """
    for name, p in model.named_parameters():
        if len(whole_shape(p)) < 2:
            continue
        whole = contextlib.nullcontext()
        if is_partitioned(p):
            import deepspeed

            whole = deepspeed.zero.GatheredParameters(p, modifier_rank=0)
        with whole, torch.no_grad():
            if p.numel():  # under stage 3 rank 0 alone fills; the exit of the context hands it to the others
                p.copy_(_drawn(name, p.shape, seed, model.config))


def _drawn(name: str, shape: torch.Size, seed: int, config: PretrainedConfig) -> torch.Tensor:
    deviation = getattr(config.get_text_config(), "initializer_range", 0.02)
    generator = torch.Generator().manual_seed(seed * 1_000_003 + zlib.crc32(name.encode()))
    return torch.empty(shape).normal_(0.0, deviation, generator=generator)


def loaded_values(model: PreTrainedModel, config: PretrainedConfig, settings: Settings) -> Iterator[tuple]:
    """(parameter, its whole value before anything has rounded it) of each one that is trained.

    None if the checkpoint lacks it, on the meta device if it is 16 bits itself.
    Random weights are drawn again, but not biases and norms: 0 and 1.
    """
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if settings.random_weights:
        for name, p in trained:
            shape = whole_shape(p)
            if len(shape) >= 2:
                yield p, _drawn(name, shape, settings.seed, config)
        return
    with dtypes_of_the_file(settings.precision), without_deepspeed_announcement():
        whole, _ = _from_pretrained(config, settings)
    weights = dict(whole.named_parameters())
    for name, p in trained:
        yield p, weights.get(name)


def size_of(settings: Settings) -> ModelSize | None:
    """None without a model, which is refused elsewhere."""
    try:
        config = load_config(settings)
    except Refusal:
        return None
    model = built_or_none(config, settings.trust_remote_code)
    if model is None:
        return None
    hidden = getattr(config.get_text_config(), "hidden_size", 0)
    sizes = [p.numel() for p in model.parameters()]
    return ModelSize(hidden, max(sizes), decoder_layers(model), sum(sizes))


def decoder_layers(model: PreTrainedModel) -> tuple[str, ...]:
    """Classes of the layers that the decoder repeats. None where layers share weights, whose gradients come later."""
    count = getattr(model.config.get_text_config(), "num_hidden_layers", 0)
    for module in model.get_decoder().children():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            named = list(module.named_parameters(remove_duplicate=False))
            is_shared = len(named) > len(list(module.parameters()))
            return () if is_shared else tuple(sorted({type(layer).__name__ for layer in module}))
    return ()


def parameter_counts(model: torch.nn.Module) -> tuple[int, int]:
    """(all, trainable): also those that ZeRO stage 3 has partitioned or 4 bit has packed; tied ones once."""
    packed = {id(weight): state.shape.numel() for weight, state in packed_weights(model)}
    total = 0
    trainable = 0
    for p in model.parameters():
        size = packed.get(id(p), whole_size(p))
        total += size
        if p.requires_grad:
            trainable += size
    return total, trainable


def trained_parts(model: torch.nn.Module) -> str:
    """What trains, and how many parameters: "LoRA on 24 query_key_value, 24 dense; 185,088 of 12,345,678 parameters".

    The same on every rank, and under every strategy: by names and `requires_grad` alone.
    """
    total, trainable = parameter_counts(model)
    counts = f"{trainable:,} of {total:,} parameters"
    wrappers = _wrappers(model)
    if wrappers:
        return f"{_adapted_parts(model, wrappers)}; {counts}"
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    if not frozen:
        return f"all {total:,} parameters"
    kinds = Counter(".".join(name.split(".")[-2:]) for name in frozen)
    return f"{counts}, all but {_counted(kinds)}"


def _wrappers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """PEFT's modules around those of the model, by name."""
    if not hasattr(model, "peft_config"):
        return {}
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper

    kinds = (BaseTunerLayer, ModulesToSaveWrapper)
    return {name: module for name, module in model.named_modules() if isinstance(module, kinds)}


def _adapted_parts(model: torch.nn.Module, wrappers: dict[str, torch.nn.Module]) -> str:
    """By what PEFT has done to them: a trained parameter belongs to the innermost wrapper around it."""
    trained: dict[str, list[str]] = {}  # {"LoRA on": names of modules}, in the model's order
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        owner = name
        while owner and owner not in wrappers:
            owner = owner.rpartition(".")[0]
        how, part = _how_trained(model, name, owner, wrappers.get(owner))
        parts = trained.setdefault(how, [])
        if part not in parts[-1:]:
            parts.append(part)
    texts = []
    for how, parts in trained.items():
        kinds = Counter(part.rpartition("/")[2] for part in dict.fromkeys(parts))
        texts.append(f"{how} {_counted(kinds)}")
    return "; ".join(texts)


def _how_trained(model, name: str, owner: str, wrapper: torch.nn.Module | None) -> tuple[str, str]:
    """("LoRA on", "model.layers.0.dense/dense"): how, and a module's whole name with its last one.

    `name`: of the parameter. `owner`: of the wrapper around it, if there is one.
    """
    from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
    from peft.utils.other import ModulesToSaveWrapper

    if wrapper is None:
        return "as they are", f"{name}/{'.'.join(name.split('.')[-2:])}"
    place = owner.replace(".base_layer", "").removesuffix(".token_adapter")
    kind = place.rpartition(".")[2]
    if isinstance(wrapper, TrainableTokensLayer):
        (indices,) = wrapper.token_indices.values()
        return f"{len(indices)} tokens of", f"{place}/{kind}"
    if isinstance(wrapper, ModulesToSaveWrapper):
        return "whole", f"{place}/{kind}"
    if hasattr(wrapper, "parameter_name"):  # target_parameters
        place = f"{place}.{wrapper.parameter_name}"
        kind = f"{kind}.{wrapper.parameter_name}"
    (adapter,) = model.peft_config.values()
    method = {"LORA": "LoRA"}.get(adapter.peft_type.value, adapter.peft_type.value)
    return f"{method} on", f"{place}/{kind}"


def _counted(kinds: Counter) -> str:
    return ", ".join(f"{number} {kind}" for kind, number in kinds.items())
