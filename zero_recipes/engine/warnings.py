"""Output of libraries that tells a user nothing: each entry names its source and why it may go."""

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator

from zero_recipes.core.process import imported_for_good, rank

BAR_SECONDS = "10"  # between two states of a bar without a terminal; what is faster shows none
# (message, module): regular expressions of FutureWarnings
SUPPRESSED = [
    # deepspeed/comm/torch.py 0.19.8 calls all_gather_into_tensor and reduce_scatter_tensor, which torch 2.13 renamed:
    # at stage 3 a notice with every collective, thousands a run.
    (r".*torch\.distributed\.\w+.* is deprecated", r"torch\.distributed\.c10d_logger"),
    # peft/peft_model.py 0.21 asks for is_gradient_checkpointing, which transformers 5.23 renamed.
    (r"`is_gradient_checkpointing` is deprecated", r"transformers\.modeling_utils"),
    # trl/trainer/base_config.py 1.16 itself sets gradient_checkpointing, which transformers 5.23 deprecates.
    (r"`gradient_checkpointing(_kwargs)?` is deprecated", r"transformers\.training_args"),
]
LEVELS = {
    # the whole configuration for every engine; recipe.resolved.yaml has it
    "DeepSpeed": logging.WARNING,
    # bitsandbytes 0.50, which PEFT imports, misses a package for the kernel that patches.keep_4bit_layout avoids
    "bitsandbytes.backends.cpu.ops": logging.ERROR,
}


def quieten() -> None:
    """Drop the output above, and progress bars that nobody looks at.

    Bars move only on a terminal, on the first rank.
    Without one each machine's first process shows how far datasets is, every 10 s.
    """
    quieten_loggers()
    for message, module in SUPPRESSED:
        warnings.filterwarnings("ignore", message=message, category=FutureWarning, module=module)
    if rank() or not sys.stderr.isatty():
        import transformers

        transformers.utils.logging.disable_progress_bar()
    if int(os.environ.get("LOCAL_RANK", rank())):
        import datasets

        datasets.disable_progress_bars()


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Model libraries that are imported inside, for good (core/process.py), are quiet from then on."""
    quieten_loggers()
    with imported_for_good():
        yield
    quieten()


def quieten_loggers() -> None:
    """What must be done before the libraries are imported."""
    if not sys.stderr.isatty():  # tqdm reads its defaults when it is imported
        os.environ.setdefault("TQDM_DELAY", BAR_SECONDS)
        os.environ.setdefault("TQDM_MININTERVAL", BAR_SECONDS)
    for name, level in LEVELS.items():
        logging.getLogger(name).setLevel(level)
    # accelerate/accelerator.py 1.15, under DeepSpeed: transformers leaves accumulation to it
    logging.getLogger("accelerate.accelerator").addFilter(lambda line: "steps mismatch" not in str(line.msg))
