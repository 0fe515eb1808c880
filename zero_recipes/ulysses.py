"""Ulysses sequence parallelism (ALST): processes share each sequence, and swap its parts for heads in attention.

DeepSpeed 0.19.8, runtime/sequence_parallel/ulysses_sp.py (UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter), through
accelerate's ParallelismConfig and TRL. Jacobs et al., arXiv:2309.14509; ALST: arXiv:2506.13996.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from zero_recipes.refusal import Finding, Refusal

SOURCE = "ulysses_sp.py"


def refuse_unshared(size: int, world_size: int) -> None:
    """Refuse groups that the processes cannot be dealt into."""
    if size < 1 or world_size % size:
        raise Refusal(
            f"sequence_parallel_size {size} with {world_size} process{'es' if world_size > 1 else ''}",
            "The processes are dealt into groups of that size.",
            f"Write a divisor of {world_size}, or launch with another --num_processes.",
        )


def findings(values: Mapping[str, Any], strategy, device: str, config) -> Iterator[Finding]:
    """What does not go with shared sequences. `config`: the model's, None where it is not at hand."""
    size = values["sequence_parallel_size"]
    if values["parallelism_config"] is not None:
        yield Finding(
            "parallelism_config in the recipe",
            "It changes how many rows a step has and which process gets which (accelerate, parallelism_config.py). "
            "Nothing here counts tokens under its tensor or context parallelism.",
            "Remove it. Sequence parallelism (Ulysses) has a key of its own: sequence_parallel_size.",
        )
    if size == 1:
        return
    if not strategy.is_deepspeed:
        yield Finding(
            f"sequence_parallel_size {size} under {strategy.name}",
            f"DeepSpeed does it ({SOURCE}), and accelerate sets it up with a DeepSpeed engine only.",
            "Launch with accelerate_configs/zero3.yaml, or remove it.",
        )
    heads, keys = (getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    if config is not None and keys is None:
        yield Finding(
            f"sequence_parallel_size {size} with a model of type {config.model_type}",
            f"DeepSpeed ({SOURCE}, register_with_transformers) reads num_key_value_heads of the model's configuration, "
            "and this one has none: AttributeError, once the model has been loaded.",
            "Use an architecture that has it (Llama, Qwen, Mistral), or remove sequence_parallel_size.",
        )
    elif config is not None and (heads % size or (keys % size and size % keys)):
        yield Finding(
            f"sequence_parallel_size {size} with {heads} attention heads and {keys} key-value heads",
            f"Each process takes a share of them; DeepSpeed ({SOURCE}, UlyssesSPAttentionHF) stops on a remainder.",
            "Write a common divisor.",
        )
    if values["attn_implementation"] not in (None, "sdpa", "flash_attention_2", "flash_attention_3"):
        yield Finding(
            f"sequence_parallel_size {size} with attn_implementation: {values['attn_implementation']}",
            f"DeepSpeed ({SOURCE}) drops the attention mask, which this implementation needs.",
            "Run with --attn_implementation sdpa.",
        )
    if values["packing"] or values["padding_free"]:
        yield Finding(
            f"{'packing' if values['packing'] else 'padding_free'} with sequence_parallel_size {size}",
            f"DeepSpeed ({SOURCE}, uattn_wrapper) drops the attention mask, so that packed rows attend to each other.",
            "Set packing: false and padding_free: false.",
        )
    if not values["dataloader_drop_last"]:
        yield Finding(
            f"sequence_parallel_size {size} without dataloader_drop_last",
            f"DeepSpeed ({SOURCE}, required_query_shape) takes batches of one size only: the last rows of an epoch "
            "stop the run, or are repetitions that count twice.",
            "Set dataloader_drop_last: true.",
        )
    multiple = values["pad_to_multiple_of"]
    if not multiple or multiple % size:
        yield Finding(
            f"sequence_parallel_size {size} with pad_to_multiple_of: {'unset' if multiple is None else multiple}",
            f"Each process takes an equal part of each row; DeepSpeed ({SOURCE}, refill) stops on a remainder.",
            f"Set pad_to_multiple_of: {size}, or a multiple of it.",
        )
    elif device == "cpu" and multiple != values["max_length"]:
        yield Finding(
            f"sequence_parallel_size {size} on a CPU with rows of several lengths",
            f"The processes hand each other whole batches first ({SOURCE}, refill), and gloo gathers tensors of one "
            "shape only; NCCL takes any.",
            f"Set pad_to_multiple_of: {values['max_length']}, the max_length.",
        )
    if values["sample_prompts"] not in (None, 0, "0"):
        yield Finding(
            f"sample_prompts with sequence_parallel_size {size}",
            f"DeepSpeed ({SOURCE}, uattn_wrapper) drops the attention mask in generation too: prompts that are padded "
            "on the left would attend to their padding.",
            "Set sample_prompts: 0; ask the saved model in a run without it.",
        )
    saves = values["save_strategy"] not in ("no", False)
    if saves or values["resume_from_checkpoint"] not in (None, False, "false"):
        yield Finding(
            f"checkpoints with sequence_parallel_size {size}",
            f"The data loader's adapter ({SOURCE}, UlyssesSPDataLoaderAdapter) holds rows in hand that no checkpoint "
            "keeps: a resumed run would train on others.",
            'Set save_strategy: "no" and keep save_model: true.',
        )
    if values["loss_type"] != "nll" or values["label_smoothing_factor"]:
        yield Finding(
            f"sequence_parallel_size {size} with another loss than nll",
            "TRL 1.16 (trainer/sft_trainer.py) stops on it, after loading the model.",
            "Remove loss_type and label_smoothing_factor.",
        )


def share_sequences(training_args, size: int, attn_implementation: str | None) -> None:
    """Hand the groups to the trainer. Call it once TrainingArguments exist and before the trainer does."""
    from accelerate import ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    if size > 1:
        training_args.parallelism_config = ParallelismConfig(
            sp_backend="deepspeed",
            sp_size=size,
            dp_shard_size=max(1, training_args.world_size // size),
            sp_handler=DeepSpeedSequenceParallelConfig(
                sp_seq_length_is_variable=True, sp_attn_implementation=attn_implementation or "sdpa"
            ),
        )


def shared_tokens(batches: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """Tokens with loss in this process's parts of some batches: labels come shifted from DeepSpeed's adapter."""
    return torch.stack([(batch["shift_labels"] != -100).sum() for batch in batches]).sum()


def loss_of_a_part(model, inputs: dict[str, torch.Tensor], count: torch.Tensor, processes: int) -> torch.Tensor:
    """This process's share of the step's loss, so that the mean over all processes is the mean over all tokens.

    transformers' own (integrations/deepspeed.py, deepspeed_sp_compute_loss) is a mean over each micro batch: a token
    would weigh more where rows are short, under accumulation or with several groups. `count`: tokens with loss in the
    whole step, over all processes.
    """
    outputs = model(**inputs, labels=inputs["shift_labels"], use_cache=False, fused_lm_head=True)
    return -outputs.log_probs.sum() / count.clamp(min=1) * processes
