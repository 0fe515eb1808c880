"""Output of libraries that tells a user nothing, and is dropped."""

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator

from zero_recipes.core.process import imported_for_good, rank

BAR_SECONDS = "10"  # between two states of a bar without a terminal; what is faster shows none
FUTURE_WARNINGS = {  # {module: message}, regular expressions
    # deepspeed/comm/torch.py 0.19.8 calls all_gather_into_tensor and reduce_scatter_tensor, which torch 2.13 renamed:
    # at stage 3 a notice with every collective, thousands a run
    r"torch\.distributed\.c10d_logger": r".*torch\.distributed\.\w+.* is deprecated",
    # peft/peft_model.py 0.21 asks for is_gradient_checkpointing, which transformers 5.23 renamed
    r"transformers\.modeling_utils": "`is_gradient_checkpointing` is deprecated",
    # trl/trainer/base_config.py 1.16 itself sets gradient_checkpointing, which transformers 5.23 deprecates
    r"transformers\.training_args": "`gradient_checkpointing(_kwargs)?` is deprecated",
}
LEAST_LEVELS = {  # {logger: the lowest level that is printed}
    "DeepSpeed": "WARNING",  # the whole configuration for every engine; recipe.resolved.yaml has it
    # bitsandbytes 0.50, which PEFT imports, misses a package for the kernel that faults/four_bit_on_cpu.py avoids
    "bitsandbytes.backends.cpu.ops": "ERROR",
}
DROPPED_LINES = {  # {logger: words of a line}
    # accelerate/accelerator.py 1.15, under DeepSpeed: transformers leaves accumulation to it
    "accelerate.accelerator": "steps mismatch",
    # accelerator/real_accelerator.py 0.19.8, where there is no GPU: ask, export and rehearse work there
    "DeepSpeed": "Setting accelerator to CPU",
}


def quieten() -> None:
    """Drop such output, and progress bars that nobody looks at.

    Bars move only on a terminal, on the first rank.
    Without one each machine's first process shows how far datasets is, every 10 s.
    """
    quieten_loggers()
    for module, message in FUTURE_WARNINGS.items():
        warnings.filterwarnings("ignore", message=message, category=FutureWarning, module=module)
    if rank() or not sys.stderr.isatty():
        import transformers

        transformers.utils.logging.disable_progress_bar()
    if int(os.environ.get("LOCAL_RANK", rank())):
        import datasets

        datasets.disable_progress_bars()


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Keep model libraries quiet that are imported inside, for good (core/process.py)."""
    quieten_loggers()
    with imported_for_good():
        yield
    quieten()


def quieten_loggers() -> None:
    """Quieten what must be quietened before the libraries are imported: loggers, and bars without a terminal."""
    if not sys.stderr.isatty():  # tqdm reads its defaults when it is imported
        os.environ.setdefault("TQDM_DELAY", BAR_SECONDS)
        os.environ.setdefault("TQDM_MININTERVAL", BAR_SECONDS)
    for name, level in LEAST_LEVELS.items():
        logging.getLogger(name).setLevel(level)
    for name, words in DROPPED_LINES.items():
        logging.getLogger(name).addFilter(lambda line, words=words: words not in str(line.msg))
