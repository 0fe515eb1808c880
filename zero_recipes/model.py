"""The model as the recipe says: its weights or random ones, its attention implementation and never another."""

from __future__ import annotations

import contextlib
import importlib.util
import zlib

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from zero_recipes.refusal import Refusal

# attention implementation: (module that it needs, how to install it)
_ATTENTION_PACKAGES = {
    "flash_attention_2": ("flash_attn", "pip install flash-attn --no-build-isolation"),
    "flash_attention_3": ("flash_attn_interface", "build it from the hopper/ folder of the flash-attention sources"),
}


def load_config(model_args, training_args) -> PretrainedConfig:
    """The model's configuration; refuses a model that is neither a folder here nor in the cache or on the hub."""
    name = model_args.model_name_or_path
    if name is None:
        raise Refusal(
            "the recipe names no model",
            "`model_name_or_path` is not set.",
            "Add e.g. model_name_or_path: EleutherAI/pythia-410m",
        )
    try:
        return AutoConfig.from_pretrained(
            name, revision=model_args.model_revision, trust_remote_code=training_args.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise Refusal(
            f"the model {name} cannot be found",
            (str(error).strip() or type(error).__name__).splitlines()[0],
            "Check the name (a folder is relative to the working directory); zero-recipes fetch RECIPE.yaml downloads "
            "a model of the hub once, before anything is timed.",
        ) from error


def refuse_missing_attention(attn_implementation: str | None, device: str) -> None:
    """Refuse an attention implementation whose package or device is missing."""
    if attn_implementation not in _ATTENTION_PACKAGES:
        return
    module, install = _ATTENTION_PACKAGES[attn_implementation]
    if device == "cpu":
        raise Refusal(
            f"attn_implementation: {attn_implementation} on a CPU",
            "Its kernels exist for GPUs only.",
            "Run with --attn_implementation sdpa.",
        )
    if importlib.util.find_spec(module) is None:
        raise Refusal(
            f"attn_implementation: {attn_implementation}, but the package {module} is not installed",
            "Another implementation would change speed and memory without a word.",
            f"{install}, or run with --attn_implementation sdpa.",
        )


def load_model(config: PretrainedConfig, model_args, training_args, random_weights: bool) -> PreTrainedModel:
    """The model, on CPU or (stage 3) already partitioned by deepspeed.zero.Init, in the recipe's dtype."""
    dtype = model_args.dtype if model_args.dtype in ("auto", None) else getattr(torch, model_args.dtype)
    keywords = dict(training_args.model_init_kwargs or {})
    keywords.setdefault("dtype", dtype)
    keywords.setdefault("attn_implementation", model_args.attn_implementation)
    training_args.model_init_kwargs = None  # used here; SFTTrainer would warn that it ignores them
    if random_weights:
        if keywords["dtype"] == "auto":
            keywords["dtype"] = config.dtype or torch.float32
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=training_args.trust_remote_code, **keywords)
        draw_weights(model, training_args.seed)
    else:
        model = _pretrained(config, model_args, training_args, keywords)
    asked, got = keywords["attn_implementation"], model.config._attn_implementation
    if asked is not None and got != asked:
        raise Refusal(
            f"attn_implementation: {asked} was asked for, {type(model).__name__} took {got}",
            "The architecture does not have it; speed and memory would be another's.",
            f"Run with --attn_implementation {got}.",
        )
    return model


def _pretrained(config: PretrainedConfig, model_args, training_args, keywords: dict) -> PreTrainedModel:
    from trl import get_quantization_config

    quantization = get_quantization_config(model_args)
    if quantization is not None:
        keywords = keywords | {"quantization_config": quantization}
    try:
        return AutoModelForCausalLM.from_pretrained(
            model_args.model_name_or_path,
            config=config,
            revision=model_args.model_revision,
            trust_remote_code=training_args.trust_remote_code,
            **keywords,
        )
    except OSError as error:
        raise Refusal(
            f"{model_args.model_name_or_path} has a config, but no weights can be read",
            (str(error).strip() or type(error).__name__).splitlines()[0],
            "zero-recipes fetch RECIPE.yaml downloads them; random_weights: true builds a model from its config alone.",
        ) from error


def draw_weights(model: PreTrainedModel, seed: int) -> None:
    """Fill every matrix with normal numbers (deviation: config.initializer_range) from a seed of its own name.

    The same weights under every strategy: under ZeRO stage 3 deepspeed.zero.Init draws others than the plain
    constructor does. One tensor is whole at a time; biases and norms keep the constructor's constants.
    """
    deviation = getattr(model.config.get_text_config(), "initializer_range", 0.02)
    for name, p in model.named_parameters():
        if len(getattr(p, "ds_shape", p.shape)) < 2:
            continue
        generator = torch.Generator().manual_seed(seed * 1_000_003 + zlib.crc32(name.encode()))
        with _whole(p), torch.no_grad():
            if p.numel():  # under stage 3 rank 0 alone fills; the exit of the context hands it to the others
                p.copy_(torch.empty(p.shape).normal_(0.0, deviation, generator=generator))


def _whole(p: torch.nn.Parameter):
    if not hasattr(p, "ds_id"):
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(p, modifier_rank=0)


def parameter_counts(model: torch.nn.Module) -> tuple[int, int]:
    """(all, trainable) parameters, whole also where ZeRO stage 3 has partitioned them (tied ones count once)."""
    sizes = [(getattr(p, "ds_numel", p.numel()), p.requires_grad) for p in model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, trainable in sizes if trainable)
