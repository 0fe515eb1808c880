"""What a recipe's run is made of before there is a trainer. All of it may refuse, and touches nothing on disk."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from trl import SFTConfig, get_peft_config

from zero_recipes import model as models
from zero_recipes.checkpoint.compatibility import refuse_other_data
from zero_recipes.config.run import RunConfig
from zero_recipes.core.process import CLOCK
from zero_recipes.data.load import load_tokenizer
from zero_recipes.data.prepare import Prepared, prepare_rows
from zero_recipes.distributed import ulysses
from zero_recipes.distributed.group import set_host_threads
from zero_recipes.libs import fsdp, patches
from zero_recipes.libs.huggingface import attention_name


@dataclass(frozen=True)
class RunData:
    """The rows as the trainer takes them, and the tokenizer that made them."""

    tokenizer: PreTrainedTokenizerBase
    prepared: Prepared


@dataclass(frozen=True)
class RunParts:
    """TRL's arguments of a run and the model's configuration; the libraries are set up for it."""

    run: RunConfig
    args: SFTConfig
    peft_config: Any  # PEFT's; None without LoRA
    host_threads: int | None  # of each process's optimizer on the host; None where nothing was changed
    config: PretrainedConfig

    @classmethod
    def from_recipe(cls, run: RunConfig) -> RunParts:
        arguments = run.trl_arguments()
        host_threads = _prepare_libraries(run, arguments.training)
        with CLOCK.phase("model"):
            config = models.load_config(run.settings)
            models.refuse_other_keys(config, run.settings)
        arguments.training.model_init_kwargs = None  # of load_model; SFTTrainer would warn that it ignores them
        return cls(run, arguments.training, get_peft_config(arguments.model), host_threads, config)

    def prepare_data(self) -> RunData:
        """Changes `args` so that SFTTrainer takes the rows as they are."""
        with CLOCK.phase("data"):
            tokenizer = load_tokenizer(self.run.settings)
            rows = prepare_rows(self.run.settings, self.args, tokenizer)
        return RunData(tokenizer, rows)

    def load_model(self, data: RunData) -> PreTrainedModel:
        refuse_other_data(self.run.checkpoint, data.prepared.data_sha256)
        with CLOCK.phase("model"):
            return models.load_model(self.config, self.run.settings)


def _prepare_libraries(run: RunConfig, args: SFTConfig) -> int | None:
    """Set the libraries up for this run, once TrainingArguments exist and before model and trainer do.

    Returns RunParts.host_threads.
    """
    patches.patch_libraries(run.strategy, run.settings.ddp_timeout)
    patches.score_supervised_positions_only(run.settings.supervised_logits_only)
    if run.strategy.is_fsdp:
        fsdp.fix_arguments(args, run.device)
    attn_implementation = attention_name(run.settings.attn_implementation)
    ulysses.share_sequences(args, run.strategy.sequence_parallel, attn_implementation)
    return set_host_threads(run.strategy, run.device, os.environ)
