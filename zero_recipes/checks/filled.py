"""A ds_config whose "auto" values transformers has filled in."""

import copy
import math
from functools import partial
from types import SimpleNamespace
from typing import Any

from zero_recipes.config.settings import Settings
from zero_recipes.engine.huggingface import without_deepspeed_announcement

HIDDEN_SIZE = 64  # of a model whose configuration is not at hand: only that it is a number matters


def warmup_of(settings: Settings, steps: int) -> int:
    """Count the warmup's steps, as transformers does (5.23, training_args.py `get_warmup_steps`)."""
    warmup = settings.warmup_steps
    return int(warmup) if warmup >= 1 else math.ceil(steps * warmup)


def fill_auto(config: dict[str, Any], settings: Settings, world_size: int):
    """Fill in what the recipe decides.

    Returns (transformers' HfTrainerDeepSpeedConfig, the arguments that it was given).
    """
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    arguments = SimpleNamespace(**settings.as_dict())
    arguments.world_size = world_size
    arguments.bf16 = settings.precision == "bf16"
    arguments.get_warmup_steps = partial(warmup_of, settings)
    with without_deepspeed_announcement():  # it announces itself to all; this is only a look
        filled = HfTrainerDeepSpeedConfig(copy.deepcopy(config))
    filled.trainer_config_process(arguments)
    return filled, arguments
