"""What does not go with sequences that several processes share (Ulysses, distributed/ulysses.py)."""

from __future__ import annotations

from collections.abc import Iterator

from zero_recipes.config.settings import Settings
from zero_recipes.core.findings import Finding, finding, refusal


def refuse_uneven_groups(size: int, world_size: int) -> None:
    """Refuse groups that the processes cannot be divided into."""
    if size < 1 or world_size % size:
        raise refusal("ZR243", size=size, world_size=world_size)


def sequence_parallel_findings(settings: Settings, strategy, device: str, config) -> Iterator[Finding]:
    """What does not go with shared sequences. `config`: the model's, None where it is not at hand."""
    size = settings.sequence_parallel_size
    if settings.parallelism_config is not None:
        yield finding("ZR244")
    if size == 1:
        return
    if not strategy.is_deepspeed:
        yield finding("ZR245", size=size, name=strategy.name)
    heads, keys = (getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    if config is not None and (keys is None or heads % size or (keys % size and size % keys)):
        yield finding("ZR247", size=size, model_type=config.model_type, heads=heads, keys=keys)
    attention = str(settings.attn_implementation)
    kernel = "/" in attention and "flash-attn" in attention  # as accelerate
    if not kernel and attention not in ("None", "sdpa", "flash_attention_2", "flash_attention_3"):
        yield finding("ZR248", size=size, attn_implementation=attention)
    if settings.packing or settings.padding_free:
        yield finding("ZR249", key="packing" if settings.packing else "padding_free", size=size)
    multiple = settings.pad_to_multiple_of
    uneven = not isinstance(multiple, int) or not multiple or multiple % size  # TRL also takes text
    if uneven or not settings.dataloader_drop_last or (device == "cpu" and multiple != settings.max_length):
        yield finding("ZR251", size=size, multiple="unset" if multiple is None else multiple, device=device)
    if settings.sample_prompts not in (None, 0, "0"):
        yield finding("ZR253", size=size)
    if settings.saves_checkpoints or settings.resume_from_checkpoint not in (None, False, "false"):
        yield finding("ZR254", size=size)
    if settings.loss_type != "nll" or settings.label_smoothing_factor:
        yield finding("ZR255", size=size)
