"""What does not go with sequences that several processes share (Ulysses, distributed/ulysses.py)."""

from __future__ import annotations

from collections.abc import Iterator

from zero_recipes.config.settings import Settings
from zero_recipes.core.errors import Finding, Refusal

SOURCE = "ulysses_sp.py"


def refuse_uneven_groups(size: int, world_size: int) -> None:
    """Refuse groups that the processes cannot be dealt into."""
    if size < 1 or world_size % size:
        raise Refusal(
            "ZR243",
            f"sequence_parallel_size {size} with {world_size} process{'es' if world_size > 1 else ''}",
            "world_size must be divisible by sequence_parallel_size.",
            f"Write a divisor of {world_size}, or launch with another --num_processes.",
        )


def sequence_parallel_findings(settings: Settings, strategy, device: str, config) -> Iterator[Finding]:
    """What does not go with shared sequences. `config`: the model's, None where it is not at hand."""
    size = settings.sequence_parallel_size
    if settings.parallelism_config is not None:
        yield Finding(
            "ZR244",
            "parallelism_config in the recipe",
            "It changes how many rows a step has and which process gets which (accelerate, parallelism_config.py). "
            "Nothing here counts tokens under its tensor or context parallelism.",
            "Remove it. Sequence parallelism (Ulysses) has a key of its own: sequence_parallel_size.",
        )
    if size == 1:
        return
    if not strategy.is_deepspeed:
        yield Finding(
            "ZR245",
            f"sequence_parallel_size {size} under {strategy.name}",
            f"DeepSpeed does it ({SOURCE}), and accelerate sets it up with a DeepSpeed engine only.",
            "Launch with accelerate_configs/zero3.yaml, or remove it.",
        )
    heads, keys = (getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    if config is not None and keys is None:
        yield Finding(
            "ZR246",
            f"sequence_parallel_size {size} with a model of type {config.model_type}",
            f"DeepSpeed ({SOURCE}, register_with_transformers) reads num_key_value_heads of the model's configuration, "
            "and this one has none: AttributeError, once the model has been loaded.",
            "Use an architecture that has it (Llama, Qwen, Mistral), or remove sequence_parallel_size.",
        )
    elif config is not None and (heads % size or (keys % size and size % keys)):
        yield Finding(
            "ZR247",
            f"sequence_parallel_size {size} with {heads} attention heads and {keys} key-value heads",
            f"Each process takes a share of them; DeepSpeed ({SOURCE}, UlyssesSPAttentionHF) stops on a remainder.",
            "Write a common divisor.",
        )
    kernel = "/" in str(settings.attn_implementation) and "flash-attn" in settings.attn_implementation  # as accelerate
    if not kernel and settings.attn_implementation not in (None, "sdpa", "flash_attention_2", "flash_attention_3"):
        yield Finding(
            "ZR248",
            f"sequence_parallel_size {size} with attn_implementation: {settings.attn_implementation}",
            f"DeepSpeed ({SOURCE}) drops the attention mask, which this implementation needs.",
            "Run with --attn_implementation sdpa.",
        )
    if settings.packing or settings.padding_free:
        yield Finding(
            "ZR249",
            f"{'packing' if settings.packing else 'padding_free'} with sequence_parallel_size {size}",
            f"DeepSpeed ({SOURCE}, uattn_wrapper) drops the attention mask, so that packed rows attend to each other.",
            "Set packing: false and padding_free: false.",
        )
    if not settings.dataloader_drop_last:
        yield Finding(
            "ZR250",
            f"sequence_parallel_size {size} without dataloader_drop_last",
            f"DeepSpeed ({SOURCE}, required_query_shape) takes batches of one size only: the last rows of an epoch "
            "stop the run, or are repetitions that count twice.",
            "Set dataloader_drop_last: true.",
        )
    multiple = settings.pad_to_multiple_of
    if not isinstance(multiple, int) or not multiple or multiple % size:  # TRL also takes text
        yield Finding(
            "ZR251",
            f"sequence_parallel_size {size} with pad_to_multiple_of: {'unset' if multiple is None else multiple}",
            f"Each process takes an equal part of each row; DeepSpeed ({SOURCE}, refill) stops on a remainder.",
            f"Set pad_to_multiple_of: {size}, or a multiple of it.",
        )
    elif device == "cpu" and multiple != settings.max_length:
        yield Finding(
            "ZR252",
            f"sequence_parallel_size {size} on a CPU with rows of several lengths",
            f"The processes hand each other whole batches first ({SOURCE}, refill), and gloo gathers tensors of one "
            "shape only; NCCL takes any.",
            f"Set pad_to_multiple_of: {settings.max_length}, the max_length.",
        )
    if settings.sample_prompts not in (None, 0, "0"):
        yield Finding(
            "ZR253",
            f"sample_prompts with sequence_parallel_size {size}",
            f"DeepSpeed ({SOURCE}, uattn_wrapper) drops the attention mask in generation too: prompts that are padded "
            "on the left would attend to their padding.",
            "Set sample_prompts: 0; generate from the saved model in a run without it.",
        )
    saves = settings.save_strategy not in ("no", False)
    if saves or settings.resume_from_checkpoint not in (None, False, "false"):
        yield Finding(
            "ZR254",
            f"checkpoints with sequence_parallel_size {size}",
            f"The data loader's adapter ({SOURCE}, UlyssesSPDataLoaderAdapter) holds rows in hand that no checkpoint "
            "keeps: a resumed run would train on others.",
            'Set save_strategy: "no" and keep save_model: true.',
        )
    if settings.loss_type != "nll" or settings.label_smoothing_factor:
        yield Finding(
            "ZR255",
            f"sequence_parallel_size {size} with another loss than nll",
            "TRL 1.16 (trainer/sft_trainer.py) stops on it, after loading the model.",
            "Remove loss_type and label_smoothing_factor.",
        )
