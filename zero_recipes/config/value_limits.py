"""What a key's value can be beyond its type: numbers in their ranges, and no date, set or bytes where YAML makes one.

The libraries refuse these late (seed, betas), or never (a rate that is NaN, an epoch of 0 steps).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from zero_recipes.core.findings import Finding, finding

# mappings, which the command line gives as JSON; other keys that take a mapping take a path as well
MAPPINGS = ("model_init_kwargs", "dataset_kwargs", "lr_scheduler_kwargs", "liger_kernel_config")
MAPPINGS += ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs")
# names of files and folders, some of them also other things
PATHS = ("model_name_or_path", "dataset_name", "output_dir", "chat_template_path", "resume_from_checkpoint")
PATHS += ("deepspeed", "nvme_path", "sample_prompts", "fsdp_config", "accelerator_config")
LONGEST_NAME, LONGEST_PATH = 255, 4095  # bytes, of Linux


class Range(NamedTuple):
    """Numbers from `low` to `high`; an open end is itself none of them."""

    low: float
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        return above and below  # NaN is neither

    def __str__(self) -> str:
        low = f"{'above' if self.open_low else 'at least'} {self.low:,}"
        return low if self.high == math.inf else f"{low} and {'below' if self.open_high else 'at most'} {self.high:,}"


COUNT, NOT_NEGATIVE, SHARE = Range(1), Range(0, math.inf, open_high=True), Range(0, 1, open_high=True)
RANGES = dict.fromkeys(
    (
        *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "max_length"),
        *("sample_max_new_tokens", "sequence_parallel_size", "lora_r", "lora_alpha", "dataset_num_proc"),
        *("eval_accumulation_steps", "torch_empty_cache_steps", "dataloader_prefetch_factor", "pad_to_multiple_of"),
    ),
    COUNT,
)
RANGES |= dict.fromkeys(
    ("learning_rate", "weight_decay", "adam_epsilon", "neftune_noise_alpha", "eval_delay"), NOT_NEGATIVE
)
RANGES |= dict.fromkeys(("adam_beta1", "adam_beta2", "lora_dropout", "label_smoothing_factor"), SHARE)
RANGES |= {
    "seed": Range(0, 2**32 - 1),  # numpy's
    "dataloader_num_workers": Range(0, 4096),
    "warmup_steps": Range(0),
    "max_grad_norm": Range(0),  # 0 and .inf: no clipping
    "max_steps": Range(-1),
    "ddp_timeout": Range(1, 10**9),  # seconds, thirty years: gloo adds it to a clock of 64-bit nanoseconds
    "save_total_limit": Range(0),
    "logging_steps": NOT_NEGATIVE,
    "save_steps": NOT_NEGATIVE,
    "eval_steps": NOT_NEGATIVE,
}


def limit_findings(where: str, key: str, value: Any) -> Iterator[Finding]:
    """At most one finding about a value that has the key's type."""
    if key in MAPPINGS and isinstance(value, str):
        yield finding("ZR155", key=key, where=where, value=value[:80])
    if key in PATHS and isinstance(value, str) and _is_too_long(value):
        yield finding(
            "ZR169", key=key, where=where, value=value[:40], longest_name=LONGEST_NAME, longest_path=LONGEST_PATH
        )
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return
    allowed = RANGES.get(key)
    if allowed is not None and value not in allowed:
        count = "1 or more" if allowed == COUNT else "such a number"
        yield finding("ZR113", key=key, where=where, value=value, allowed=allowed, count=count)
    elif math.isnan(value):
        yield finding("ZR153", key=key, where=where)


def foreign_findings(where: str, key: str, value: Any) -> Iterator[Finding]:
    """At most one finding: a date, a set or bytes, which no key takes, in a value or inside of it."""
    found = next(_foreign(value), None)
    if found is not None:
        yield finding("ZR145", key=key, where=where, found=found, name=type(found).__name__)


def _foreign(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _foreign(key)
            yield from _foreign(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _foreign(inner)
    elif value is not None and not isinstance(value, (str, int, float)):
        yield value


def _is_too_long(path: str) -> bool:
    names = path.encode(errors="surrogatepass").split(b"/")
    is_json = path.lstrip().startswith("{")  # a mapping as the command line gives it
    return not is_json and (max(map(len, names)) > LONGEST_NAME or sum(map(len, names)) + len(names) > LONGEST_PATH)
