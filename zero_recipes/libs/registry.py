"""Every private part of a library that this project touches, and what is said before a run about those that it uses.

The planner's simulator replaces more parts
in a process of its own; it takes no version but the tested ones (plan/simulator/parent.py).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from zero_recipes.config.settings import Settings
from zero_recipes.config.strategy import Strategy
from zero_recipes.core.findings import Finding, finding
from zero_recipes.libs import parts_of_accelerate as ac
from zero_recipes.libs import parts_of_deepspeed as ds
from zero_recipes.libs import parts_of_huggingface as hf
from zero_recipes.libs import parts_of_torch as pt
from zero_recipes.libs import parts_of_trl as trl
from zero_recipes.libs import versions
from zero_recipes.libs.private_part import PrivatePart

# by the runs that use them
EVERY_RUN = (
    *(hf.DEEPSPEED_ANNOUNCEMENT, hf.TOKEN_WEIGHTS, hf.EPOCH, hf.CHECKPOINTS, hf.TIED_WEIGHTS, hf.RESUMING, hf.WEIGHTS),
    *(hf.ROWS_LEFT_OVER, hf.ROW_ORDER, hf.BETWEEN_STEPS, trl.TOKEN_METRICS),
    *(hf.GRADIENT_NORM, hf.ATTENTION, hf.ATTENTION_KERNELS, hf.KEPT_IN_FP32, trl.ROWS, trl.FINGERPRINT, trl.BARS),
    *(ac.SHARED_STATE, ac.WRAPPED_OPTIMIZER, pt.STORAGES, pt.PARAMETERS),
)
DEEPSPEED = (ds.MODEL_STATES, ds.RESHARDED_STATES, ds.BACKEND, ds.TIMERS, ds.GROUP_TIMEOUT, ds.NUMA_CORES)
STAGE_0 = (ds.FRESH_ADAM,)
STAGE_3 = (ds.PARTITIONS, ds.TRACE, ds.RELEASES)
QUANTIZED_GRADIENTS = (ds.QUANTIZED_GRADIENTS,)
FSDP2 = (hf.NAMES_OF_THE_FILE, hf.FSDP_POLICY, pt.WHOLE_GRADIENTS, pt.OPERATORS)
FSDP2_ON_CPU = (ac.SHARDING_ON_CPU,)
DATA_PARALLEL = (pt.BUCKETS,)
PADDING_FREE = (trl.CUT_ROWS,)
CHECK = (ac.LAUNCH,)
SUPERVISED_LOGITS = (trl.LM_HEAD,)
FOUR_BIT = (pt.PACKED_WEIGHTS, pt.LAYOUT)

PARTS: dict[str, tuple[PrivatePart, ...]] = {
    "every run": EVERY_RUN,
    "DeepSpeed": DEEPSPEED,
    "DeepSpeed, stage 0": STAGE_0,
    "DeepSpeed, stage 3": STAGE_3,
    "zero_quantized_gradients": QUANTIZED_GRADIENTS,
    "FSDP2": FSDP2,
    "FSDP2 on CPUs": FSDP2_ON_CPU,
    "neither DeepSpeed nor FSDP2": DATA_PARALLEL,
    "4-bit weights": FOUR_BIT,
    "supervised_logits_only": SUPERVISED_LOGITS,
    "padding_free with a max_length, without packing": PADDING_FREE,
    "check --config_file": CHECK,
}


def parts_in_use(strategy: Strategy, settings: Settings, device: str) -> list[PrivatePart]:
    """The parts that a run touches."""
    in_use = {
        "every run": True,
        "DeepSpeed": strategy.is_deepspeed,
        "DeepSpeed, stage 0": strategy.is_deepspeed and strategy.zero_stage == 0,
        "DeepSpeed, stage 3": strategy.is_deepspeed and strategy.zero_stage == 3,
        "zero_quantized_gradients": strategy.is_deepspeed and strategy.ds_config.quantizes_gradients,
        "FSDP2": strategy.is_fsdp,
        "FSDP2 on CPUs": strategy.is_fsdp and device == "cpu",
        "neither DeepSpeed nor FSDP2": not (strategy.is_deepspeed or strategy.is_fsdp),
        "supervised_logits_only": settings.supervised_logits_only,
        "padding_free with a max_length, without packing": settings.padding_free
        and settings.max_length is not None
        and not settings.packing,
        "check --config_file": False,  # it looks at the part itself
        # without bitsandbytes checks/quantized.py refuses
        "4-bit weights": settings.load_in_4bit and importlib.util.find_spec("bitsandbytes") is not None,
    }
    return [part for group, parts in PARTS.items() if in_use[group] for part in parts]


def private_part_findings(parts: list[PrivatePart]) -> Iterator[Finding]:
    """An error for each part whose self-check fails; one warning for each library of an untested version, with the
    names of the parts that this run uses of it and whose self-check passes."""
    unproven: dict[str, list[str]] = {}
    for part in parts:
        missing = part.missing()
        if missing:
            yield part.finding(missing)
        elif not versions.is_tested(part.library):
            unproven.setdefault(part.library, []).append(part.name)
    for library, names in unproven.items():
        tested = versions.TESTED[library]
        yield finding(
            "ZR625", library=library, installed=versions.installed(library), tested=tested, names=", ".join(names)
        )
