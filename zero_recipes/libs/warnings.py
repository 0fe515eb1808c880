"""Noise from below that tells a user nothing: each entry names its source and why it may go; all else stays."""

from __future__ import annotations

import logging
import sys
import warnings

from zero_recipes.config.settings import Settings
from zero_recipes.core.process import rank

# (category, message, module): all as regular expressions of the warnings filter
SUPPRESSED = [
    # deepspeed/comm/torch.py 0.19.8 calls all_gather_into_tensor and reduce_scatter_tensor, which torch 2.13 renamed;
    # at stage 3 the notice comes with every collective, thousands of times a run. Ours to change: nothing.
    (FutureWarning, r".*torch\.distributed\.\w+.* is deprecated", r"torch\.distributed\.c10d_logger"),
    # peft/peft_model.py 0.21 asks for is_gradient_checkpointing, which transformers 5.23 has renamed.
    (FutureWarning, r"`is_gradient_checkpointing` is deprecated", r"transformers\.modeling_utils"),
    # trl/trainer/base_config.py 1.16 itself sets gradient_checkpointing, the name that transformers 5.23 deprecates:
    # the notice comes whatever the recipe says.
    (FutureWarning, r"`gradient_checkpointing(_kwargs)?` is deprecated", r"transformers\.training_args"),
]


def quieten() -> None:
    """Drop the warnings above, and the progress bars of all ranks but the first (they say the same, interleaved)."""
    for category, message, module in SUPPRESSED:
        warnings.filterwarnings("ignore", message=message, category=category, module=module)
    quieten_loggers()
    if rank() or not sys.stderr.isatty():
        import datasets
        import transformers

        datasets.disable_progress_bars()
        transformers.utils.logging.disable_progress_bar()


def quieten_loggers() -> None:
    """The part that must be done before the libraries are imported, and costs nothing."""
    # DeepSpeed logs its whole configuration on every engine; what is in force stands in recipe.resolved.yaml
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # bitsandbytes 0.50 (backends/cpu/ops.py), which PEFT imports wherever it is installed, misses a package for the
    # kernel that patches.keep_4bit_layout keeps out
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def hides_progress(settings: Settings) -> bool:
    """A moving bar on a terminal, one line per `logging_steps` elsewhere, unless the recipe says which."""
    return not sys.stderr.isatty() if settings.disable_tqdm is None else settings.disable_tqdm
