"""A model with its weights, as a recipe asks for it."""

import contextlib
import copy
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from zero_recipes.config.settings import Settings
from zero_recipes.core.findings import finding, raise_errors, refusal
from zero_recipes.core.library_errors import library_error_as_finding
from zero_recipes.engine.deepspeed import is_partitioned, whole_shape
from zero_recipes.engine.faults.four_bit_on_cpu import keep_4bit_layout
from zero_recipes.engine.faults.leaf_modules_of_adapters import let_inputs_have_gradients
from zero_recipes.engine.faults.unfrozen_parameters import freeze_as_the_class_does
from zero_recipes.engine.huggingface import dtypes_of_the_file, other_attention, without_deepspeed_announcement
from zero_recipes.model.build import build_on_meta, from_config, from_pretrained
from zero_recipes.model.config import loading_keywords, quantization_of
from zero_recipes.model.towers import auto_class

# what transformers reports of a load, and what it would have done about it
KEY_PROBLEMS = {
    "missing_keys": "The model has these tensors but the checkpoint does not. They would be initialized randomly.",
    "unexpected_keys": "The checkpoint has these tensors but the model does not. They would be dropped.",
    "mismatched_keys": "They have another shape in the checkpoint. They would be initialized randomly.",
}


def refuse_other_keys(config: PretrainedConfig, settings: Settings) -> None:
    """Refuse a checkpoint whose tensors are not the model's, by name; no weight is read.

    transformers fills what is missing with random numbers and drops what is unexpected, with a warning; at ZeRO stage 3
    it does not even know what is unexpected or of another shape (5.23, modeling_utils.py `_load_pretrained_model`).
    """
    if settings.random_weights or quantization_of(settings, config) is not None:  # load_model looks at the load itself
        return
    name = settings.model_name_or_path
    with library_error_as_finding(f"reading the names of {name}'s tensors"), without_deepspeed_announcement():
        _, report = from_pretrained(config, settings, device_map="meta")
    _refuse_keys(report, name, settings.allow_keys)


def report_of_folder(folder: Path, config: PretrainedConfig, trust_remote_code: bool) -> dict[str, Any]:
    """transformers' report on the names and shapes of a folder's safetensors, for the model of `config`.

    No weight is read, nor the folder's own config.json.
    """
    with without_deepspeed_announcement():  # one rank alone may look
        _, report = auto_class(config).from_pretrained(
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


def load_model(
    config: PretrainedConfig, settings: Settings, of_the_class: PreTrainedModel | None = None
) -> PreTrainedModel:
    """Load a recipe's model in its dtype, on the CPU; at stage 3 deepspeed.zero.Init has partitioned it.

    `of_the_class`: the model without weights, where it is at hand.
    Raises Refusal.
    """
    name = settings.model_name_or_path
    with library_error_as_finding(f"loading {name}", vars(settings)):
        if settings.random_weights:
            model = from_config(config, settings)
        else:
            model, report = from_pretrained(config, settings)
    if settings.random_weights:
        draw_weights(model, settings.seed)
    else:
        _refuse_keys(report, name, settings.allow_keys)
        freeze_as_the_class_does(model, of_the_class or build_on_meta(config, settings.trust_remote_code))
        if quantization_of(settings, config) is not None:
            keep_4bit_layout(model)
    let_inputs_have_gradients(model, settings)
    requested = loading_keywords(settings)["attn_implementation"]
    got = other_attention(model, requested)
    if got is not None:
        raise refusal("ZR406", requested=requested, name=type(model).__name__, got=got)
    return model


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
        whole, _ = from_pretrained(config, settings)
    weights = dict(whole.named_parameters())
    for name, p in trained:
        yield p, weights.get(name)
