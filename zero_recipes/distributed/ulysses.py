"""Ulysses sequence parallelism (ALST): processes share each sequence, and swap its parts for heads in attention.

DeepSpeed 0.19.8, runtime/sequence_parallel/ulysses_sp.py (UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter), through
accelerate's ParallelismConfig and TRL. Jacobs et al., arXiv:2309.14509; ALST: arXiv:2506.13996.
"""

import torch


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


def loss_of_a_part(model, inputs: dict[str, torch.Tensor], count: torch.Tensor, processes: int) -> torch.Tensor:
    """This process's share of the step's loss, so that the mean over all processes is the mean over all tokens.

    transformers' own (integrations/deepspeed.py, deepspeed_sp_compute_loss) is a mean over each micro batch: a token
    would weigh more where rows are short, under accumulation or with several groups. `count`: tokens with loss in the
    whole step, over all processes.
    """
    outputs = model(**inputs, labels=inputs["shift_labels"], use_cache=False, fused_lm_head=True)
    return -outputs.log_probs.sum() / count.clamp(min=1) * processes
