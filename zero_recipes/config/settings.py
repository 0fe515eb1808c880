"""The keys of a run by name, each with its value in force."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import FrozenInstanceError
from typing import Any


class Settings:
    """Every key of TRL's dataclasses and of ours, by its own name; read-only.

    The keys that this repository's code reads stand below with the types that they have after TRL's parser; the others
    can be read as well. A key that does not exist raises AttributeError.
    """

    # model
    model_name_or_path: str | None
    model_revision: str
    trust_remote_code: bool
    attn_implementation: str | None
    dtype: str
    model_init_kwargs: dict[str, Any] | None
    random_weights: bool
    load_in_4bit: bool
    load_in_8bit: bool
    bnb_4bit_quant_storage: str | None
    use_peft: bool
    lora_target_modules: list[str] | str | None
    # data
    dataset_name: str | None
    dataset_config: str | None
    dataset_train_split: str
    dataset_format: str | None
    dataset_streaming: bool
    datasets: list[dict[str, Any]]
    streaming: bool
    test_split_size: float | None
    max_length: int | None  # tokens
    packing: bool
    packing_strategy: str
    padding_free: bool
    pad_to_multiple_of: int | None  # tokens
    assistant_only_loss: bool
    chat_template_path: str | None
    dataloader_drop_last: bool
    dataloader_num_workers: int
    dataloader_prefetch_factor: int | None
    train_sampling_strategy: str
    # a step
    per_device_train_batch_size: int  # rows
    gradient_accumulation_steps: int
    global_batch_size: int | None  # rows, over all processes
    sequence_parallel_size: int
    average_tokens_across_devices: bool
    auto_find_batch_size: bool
    max_grad_norm: float
    loss_type: str
    supervised_logits_only: bool
    label_smoothing_factor: float
    bf16: bool | None
    fp16: bool
    tf32: bool | None
    activation_checkpointing: bool
    use_liger_kernel: bool
    torch_compile: bool
    # optimizer and schedule
    optim: str
    warmup_steps: float  # below 1: a share of all steps
    max_steps: int  # -1: by epochs
    num_train_epochs: float
    # how it is spread over processes
    deepspeed: dict[str, Any] | str | None
    fsdp: Any
    fsdp_config: dict[str, Any] | str | None
    accelerator_config: dict[str, Any] | str | None
    parallelism_config: Any
    use_cpu: bool
    ddp_timeout: int  # seconds
    nvme_path: str | None
    # what is written
    output_dir: str | None
    overwrite: bool
    resume_from_checkpoint: str | bool | None
    save_strategy: str
    save_steps: float
    save_total_limit: int | None
    skip_checksums: bool
    trust_checkpoint: bool
    save_only_model: bool
    save_model: bool
    load_best_model_at_end: bool
    eval_strategy: str
    per_device_eval_batch_size: int
    sample_prompts: int | str | list[str] | None
    predict: bool
    skip_plan: bool
    ignore: list[str] | None  # codes of findings
    disable_tqdm: bool | None

    def __init__(self, values: Mapping[str, Any]):
        vars(self).update(values)

    def __setattr__(self, key: str, value: Any) -> None:
        raise FrozenInstanceError(f"cannot assign to {key}: settings are made once")

    def __repr__(self) -> str:
        return f"Settings({vars(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Settings) and vars(self) == vars(other)

    def replace(self, **changes: Any) -> Settings:
        return Settings(vars(self) | changes)

    def as_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    @property
    def precision(self) -> str:
        """ "bf16", "fp16" or "fp32"."""
        return precision_of(self)

    @property
    def evaluates(self) -> bool:
        """Whether the run evaluates while it trains; YAML's bare `no` is False."""
        return str(getattr(self.eval_strategy, "value", self.eval_strategy)) not in ("no", "False", "None")

    @property
    def saves_checkpoints(self) -> bool:
        """YAML's bare `no` is False."""
        return str(getattr(self.save_strategy, "value", self.save_strategy)) not in ("no", "False")


def precision_of(arguments: Any) -> str:
    """ "bf16", "fp16" or "fp32" of anything with those attributes: TRL takes bf16 where neither is named."""
    bf16 = arguments.bf16 if arguments.bf16 is not None else not arguments.fp16
    return "bf16" if bf16 else "fp16" if arguments.fp16 else "fp32"
