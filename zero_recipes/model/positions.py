"""How many positions and tokens a model has."""

from collections.abc import Iterator

import torch
from transformers import PretrainedConfig, PreTrainedModel

from zero_recipes.config.settings import Settings
from zero_recipes.core.findings import Finding, finding, refusal
from zero_recipes.model.meta import MetaModel


def refuse_unknown_tokens(config: PretrainedConfig | None, settings: Settings, largest_id: int) -> None:
    """Refuse rows with token ids that the model lacks. Where TRL adds tokens it resizes the model, too."""
    size = None if config is None else getattr(config.get_text_config(), "vocab_size", None)
    if size is not None and largest_id >= size and not settings.clones_tokenizer:
        raise refusal("ZR557", largest_id=largest_id, name=settings.model_name_or_path, size=size)


def position_findings(meta: MetaModel, longest: int) -> Iterator[Finding]:
    """What is wrong with rows that are longer than the model's positions.

    `longest`: tokens of the longest row that is trained on or evaluated.
    """
    limit = position_limit(meta.config)
    if limit is None or longest <= limit:
        return
    about = {"longest": longest, "name": meta.settings.model_name_or_path, "limit": limit}
    if meta.model is not None and has_position_table(meta.model, limit):
        yield finding("ZR175", **about)
    else:
        yield finding("ZR176", **about)


def position_limit(config: PretrainedConfig) -> int | None:
    """How many positions the model was made for; None where they have no end."""
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
