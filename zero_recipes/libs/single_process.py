"""The libraries used by one process for itself, inside of a launch of several."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Iterator

from zero_recipes.core.process import environment_kept
from zero_recipes.libs.huggingface import without_deepspeed_announcement

# prefixes of the variables that launchers set
LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_", "NODE_RANK")
LAUNCHED += ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "OMPI_", "PMI_", "MV2_", "PMIX_", "CROSS_")


@contextlib.contextmanager
def single_process_env() -> Iterator[None]:
    """One process on the CPU, whatever the launcher set, and silent libraries. The environment is restored afterwards.

    accelerate's states of this process stay. TrainingArguments makes them anew (transformers, training_args.py
    `_setup_devices`).
    """
    import datasets
    from accelerate import PartialState
    from datasets.utils import are_progress_bars_disabled
    from transformers.utils import logging as transformers_logging

    verbosity, hidden = transformers_logging.get_verbosity(), are_progress_bars_disabled()
    quiet = io.StringIO()
    with environment_kept():
        for name in [name for name in os.environ if name.startswith(LAUNCHED)]:
            del os.environ[name]
        logging.disable(logging.CRITICAL)
        datasets.disable_progress_bars()
        try:
            with (
                warnings.catch_warnings(action="ignore"),
                without_deepspeed_announcement(),
                contextlib.redirect_stdout(quiet),
                contextlib.redirect_stderr(quiet),
            ):
                PartialState(cpu=True)  # accelerate's loggers need one
                yield
        finally:
            logging.disable(logging.NOTSET)
            transformers_logging.set_verbosity(verbosity)
            if not hidden:
                datasets.enable_progress_bars()
