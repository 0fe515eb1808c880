"""The columns of the report's tables: what each shows of a row, and how the reader is told what it is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zero_recipes.core import units


@dataclass(frozen=True)
class Measured:
    """A column with numbers: a key of a row (read.table_rows), written for people."""

    header: str
    key: str
    written: Callable[[Any], str]
    note: str | None = None  # under the tables


def _size_above_zero(value: float | None) -> str:
    return units.size(value or None)


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{units.significant(value)} s"


def _hundredths(value: float | None) -> str:
    return units.fixed(value, 2)


def _hundredths_above_zero(value: float | None) -> str:
    return units.fixed(value or None, 2)


def _loss(value: float | None) -> str:
    return units.fixed(value, 4)


MEMORY = (
    Measured(
        "Model\nstates",
        "state_bytes",
        units.size,
        "Model states: parameters, gradients and optimizer states on the rank with the most.",
    ),
    Measured("Params", "params_bytes", units.size),
    Measured("Grads", "grads_bytes", units.size),
    Measured("Optimizer", "optimizer_bytes", units.size),
    Measured(
        "Textbook",
        "textbook_bytes",
        units.size,
        "Textbook: the ZeRO paper's formula for the model states. The documentation's lesson says what is added.",
    ),
    Measured(
        "Planned\nstates",
        "planned_state_bytes",
        units.size,
        "Planned: model states and allocated peak that zero-recipes plan predicted before the run.",
    ),
    Measured(
        "On\nhost",
        "host_bytes",
        _size_above_zero,
        "On host, on disk: model states of that rank in host memory and in swap files on NVMe.",
    ),
    Measured("On\ndisk", "disk_bytes", _size_above_zero),
    Measured("Peak\nallocated", "peak_allocated_bytes", units.size),
    Measured(
        "Resident\n(mostly\nimports)",
        "resident_bytes",
        units.size,
        "Resident: memory of the whole process, mostly imported libraries. No accelerator was measured.",
    ),
    Measured("Planned\npeak", "planned_peak_bytes", units.size),
)
SPEED = (
    Measured(
        "Tokens/s",
        "tokens_per_second",
        units.count,
        "Tokens/s: non-padding tokens per second, over all ranks.",
    ),
    Measured("of baseline", "relative_speed", units.percent),
    Measured(
        "MFU",
        "mfu",
        units.percent,
        "MFU: model FLOPs of the non-padding tokens, as a share of the GPU's dense peak.",
    ),
    Measured(
        "Not\npadding",
        "non_padding_share",
        units.percent,
        "Not padding, with loss: shares of all tokens in the steps.",
    ),
    Measured("With\nloss", "supervised_share", units.percent),
    Measured("Step\nmedian", "step_seconds_median", _seconds),
    Measured(
        "Comm.\nper step",
        "communication_bytes",
        units.size,
        "Comm.: bytes sent through collectives per step. An all-reduce counts twice, other collectives once.",
    ),
    Measured(
        "in Φ",
        "communication_in_phi",
        _hundredths,
        "Φ: size of the trainable parameters in the run's precision.",
    ),
    Measured(
        "Between\nnodes in Φ",
        "between_nodes_in_phi",
        _hundredths_above_zero,
        "Between nodes: the part of the communication that crosses the network, per machine.",
    ),
    Measured(
        "Paper\nin Φ",
        "paper_in_phi",
        _hundredths,
        "Paper: the volume according to the strategy's paper. For ZeRO++ it is the volume between nodes. "
        "DeepSpeed's stages send another; the documentation of the strategies says why.",
    ),
    Measured("Final\nloss", "final_loss", _loss, "Final loss: mean over the last five steps."),
)
# those that a sweep over values shows
SWEPT = (
    "state_bytes",
    "host_bytes",
    "disk_bytes",
    "peak_allocated_bytes",
    "resident_bytes",
    "communication_bytes",
    "step_seconds_median",
    "tokens_per_second",
    "final_loss",
)
