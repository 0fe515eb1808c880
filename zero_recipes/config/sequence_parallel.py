"""What does not go with sequences that several processes share (Ulysses, distributed/ulysses.py)."""

from __future__ import annotations

from collections.abc import Iterator

from zero_recipes.config.settings import Settings
from zero_recipes.core.findings import Finding, finding, refusal

SOURCE = "ulysses_sp.py"


def refuse_uneven_groups(size: int, world_size: int) -> None:
    """Refuse groups that the processes cannot be dealt into."""
    if size < 1 or world_size % size:
        raise refusal("ZR243", size=size, world_size=world_size, what="es" if world_size > 1 else "")


def sequence_parallel_findings(settings: Settings, strategy, device: str, config) -> Iterator[Finding]:
    """What does not go with shared sequences. `config`: the model's, None where it is not at hand."""
    size = settings.sequence_parallel_size
    if settings.parallelism_config is not None:
        yield finding("ZR244")
    if size == 1:
        return
    if not strategy.is_deepspeed:
        yield finding("ZR245", size=size, name=strategy.name, source=SOURCE)
    heads, keys = (getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    if config is not None and keys is None:
        yield finding("ZR246", size=size, model_type=config.model_type, source=SOURCE)
    elif config is not None and (heads % size or (keys % size and size % keys)):
        yield finding("ZR247", size=size, heads=heads, keys=keys, source=SOURCE)
    kernel = "/" in str(settings.attn_implementation) and "flash-attn" in settings.attn_implementation  # as accelerate
    if not kernel and settings.attn_implementation not in (None, "sdpa", "flash_attention_2", "flash_attention_3"):
        yield finding("ZR248", size=size, attn_implementation=settings.attn_implementation, source=SOURCE)
    if settings.packing or settings.padding_free:
        yield finding("ZR249", what="packing" if settings.packing else "padding_free", size=size, source=SOURCE)
    if not settings.dataloader_drop_last:
        yield finding("ZR250", size=size, source=SOURCE)
    multiple = settings.pad_to_multiple_of
    if not isinstance(multiple, int) or not multiple or multiple % size:  # TRL also takes text
        yield finding("ZR251", size=size, what="unset" if multiple is None else multiple, source=SOURCE)
    elif device == "cpu" and multiple != settings.max_length:
        yield finding("ZR252", size=size, source=SOURCE, max_length=settings.max_length)
    if settings.sample_prompts not in (None, 0, "0"):
        yield finding("ZR253", size=size, source=SOURCE)
    saves = settings.save_strategy not in ("no", False)
    if saves or settings.resume_from_checkpoint not in (None, False, "false"):
        yield finding("ZR254", size=size, source=SOURCE)
    if settings.loss_type != "nll" or settings.label_smoothing_factor:
        yield finding("ZR255", size=size)
