"""The libraries used by one process for itself, inside of a launch of several."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Iterator

from zero_recipes.libs import parts_of_accelerate as parts
from zero_recipes.libs.huggingface import without_deepspeed_announcement

# what launchers put into the environment, by its beginnings
LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_", "NODE_RANK")
LAUNCHED += ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "OMPI_", "PMI_", "MV2_", "PMIX_", "CROSS_")


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """One process, whatever the launcher says, without a word of the libraries; afterwards as if nothing had been."""
    import datasets
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from datasets.utils import are_progress_bars_disabled
    from transformers.utils import logging as transformers_logging

    parts.SHARED_STATE.require()
    kept, verbosity = dict(os.environ), transformers_logging.get_verbosity()
    hidden = are_progress_bars_disabled()
    for name in [name for name in os.environ if name.startswith(LAUNCHED)]:
        del os.environ[name]
    quiet = io.StringIO()
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
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        os.environ.clear()
        os.environ.update(kept)
