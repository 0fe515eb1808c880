"""The keys that a recipe may have: TRL's and ours, with their types and choices. Tables about them: keys.yaml."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass, field
from enum import EnumType
from functools import cache
from importlib import resources
from typing import Any

import yaml


@dataclass
class RecipeArguments:
    """The keys that TRL does not have. The table in docs/recipe.md is made from this class."""

    dataset_format: str | None = field(
        default=None,
        metadata={
            "help": "How rows become prompt and completion: `alpaca` (columns instruction, input, output; loss on the "
            "answer only). Unset: TRL's own behaviour.",
            "choices": ["alpaca"],
        },
    )
    global_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Sequences per optimizer step over all processes. gradient_accumulation_steps is derived from it: "
            "global_batch_size / (world_size * per_device_train_batch_size) must be a whole number."
        },
    )
    sample_prompts: str | None = field(
        default=None,
        metadata={
            "help": "What the model is asked before and after training: a number (that many rows of the evaluation "
            "split), a JSON Lines file of rows in the recipe's format, or a YAML list of prompts. Unset: nothing."
        },
    )
    sample_max_new_tokens: int = field(
        default=128, metadata={"help": "Longest answer to a sample prompt, in tokens (greedy decoding)."}
    )
    sequence_parallel_size: int = field(
        default=1,
        metadata={
            "help": "Processes that share each sequence (Ulysses, under DeepSpeed): for sequences whose activations do "
            "not fit into one GPU. 1: every process has sequences of its own."
        },
    )
    random_weights: bool = field(
        default=False,
        metadata={
            "help": "Build the model from its config alone, with seeded random weights: measurements without a "
            "download of weights."
        },
    )
    allow_keys: list[str] | None = field(
        default=None,
        metadata={
            "help": "Names of tensors that the checkpoint may lack, have too many or have in another shape. Any other "
            "refuses the run: transformers would begin with random numbers there, or drop them."
        },
    )
    save_model: bool = field(
        default=True, metadata={"help": "Save the model to output_dir after training and check that it is whole."}
    )
    stop_after_nonfinite_steps: int = field(
        default=3,
        metadata={
            "help": "Steps in a row whose loss or gradient norm is NaN or infinite, after which the run ends as "
            "`diverged`, without a model. In fp16 the loss alone counts: its loss scaling skips steps."
        },
    )
    token_metrics: str = field(
        default="logging_steps",
        metadata={
            "help": "When entropy, token accuracy and tokens are brought together from all processes: `logging_steps`, "
            "once a log line; `micro_batch`, as TRL does, which waits for the others and for the device four times in "
            "every micro batch. The log is the same.",
            "choices": ["logging_steps", "micro_batch"],
        },
    )
    supervised_logits_only: bool = field(
        default=False,
        metadata={
            "help": "On CPUs too, as TRL does on GPUs, compute logits only where a token has a loss, not for prompts "
            "and padding. The loss is the same; gradients may differ in their last digits, for sums are of other rows."
        },
    )
    nvme_path: str | None = field(
        default=None,
        metadata={
            "help": 'The folder that ZeRO-Infinity swaps to, where the ds_config has "nvme_path": "auto". Unset: the '
            "environment's ZERO_RECIPES_NVME_PATH."
        },
    )
    ignore: list[str] | None = field(
        default=None,
        metadata={
            "help": "Codes of errors that become warnings, e.g. `[ZR608]`. Only codes that docs/codes.md marks as "
            "ignorable; any other is refused."
        },
    )
    overwrite: bool = field(
        default=False,
        metadata={
            "help": "Start over in a folder that holds an earlier run: it is renamed to OUTPUT_DIR.previous, and what "
            "was kept so before is deleted. Without it such a folder is refused."
        },
    )
    skip_checksums: bool = field(
        default=False,
        metadata={
            "help": "Neither compute checksums of the files of a checkpoint nor compare them when a run goes on from "
            "it: damage inside a file is then not found."
        },
    )
    trust_checkpoint: bool = field(
        default=False,
        metadata={
            "help": "Load a checkpoint from outside output_dir also where its pickles hold more than data: whoever "
            "wrote it can run any program here. Without it such a checkpoint is refused."
        },
    )
    predict: bool = field(
        default=False,
        metadata={
            "help": "On CPUs too, plan the run before it starts: `predicted` in metrics.json. On a GPU it is always "
            "planned."
        },
    )
    skip_plan: bool = field(
        default=False,
        metadata={"help": "Start on a GPU without a plan, also where the plan would say that the run does not fit."},
    )


@cache
def tables() -> dict[str, Any]:
    """What keys.yaml holds."""
    return yaml.safe_load(resources.files(__package__).joinpath("keys.yaml").read_text(encoding="utf-8"))


def dataclasses_of_a_recipe() -> tuple[type, ...]:
    from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, SFTConfig

    return ScriptArguments, SFTConfig, ModelConfig, DatasetMixtureConfig, RecipeArguments


def key_types() -> dict[str, Any]:
    """{every key that a recipe may have: its type hint}."""
    hints: dict[str, Any] = {}
    for cls in dataclasses_of_a_recipe():
        resolved = typing.get_type_hints(cls)
        hints |= {f.name: resolved[f.name] for f in dataclasses.fields(cls) if f.init}
    return hints


def key_choices() -> dict[str, list[str]]:
    """{key: the only values that it takes}, for keys that say so by an enumeration or in their help."""
    choices = {}
    for cls in dataclasses_of_a_recipe():
        resolved = typing.get_type_hints(cls)
        for f in dataclasses.fields(cls):
            kinds = [kind for kind in typing.get_args(resolved[f.name]) if isinstance(kind, EnumType)]
            if f.metadata.get("choices"):
                choices[f.name] = list(f.metadata["choices"])
            elif kinds:
                choices[f.name] = [member.value for member in kinds[0]]
    return choices
