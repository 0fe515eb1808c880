"""Jobs for the tests of the plan: recipes of this repository, and predictions made up to order."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from zero_recipes.metrics.parts import ModelStateBytes, PhaseBytes
from zero_recipes.metrics.prediction import PARTS, CheckpointBytes, HostBytes, Prediction, ReservedRange
from zero_recipes.plan.job import Job
from zero_recipes.plan.jobs import ALL, job_of, model_config, read_recipe

ROOT = Path(__file__).resolve().parents[2]
GB = 10**9


@lru_cache
def recipe(name: str, *overrides: str):
    return read_recipe(ROOT / "recipes" / f"{name}.yaml", overrides)


@lru_cache
def strategies() -> dict:
    """All of accelerate_configs/, whatever the working directory is."""
    named = {"ddp": None}
    named |= {name: json.loads((ROOT / "ds_configs" / f"{name}.json").read_text()) for name in ALL if name != "ddp"}
    return named


def job(strategy: str, ranks: int = 2, name: str = "pythia", gpus_per_node: int = 8, **values) -> Job:
    own = recipe(name)
    made = job_of(own, model_config(own.settings), strategy, strategies()[strategy], ranks, gpus_per_node)
    return replace(made, settings=made.settings.replace(**values))


def made_up(job: Job, peak: int, states: int | None = None, phase: str = "backward", overhead: int = 0) -> Prediction:
    """A prediction of `peak` bytes, `states` of them model states; the reserved range is [peak, peak + overhead]."""
    states = peak // 2 if states is None else states
    return Prediction(
        source="engine",
        strategy=job.strategy,
        zero_stage=job.zero_stage,
        world_size=job.world_size,
        parameters=GB,
        trainable_parameters=GB,
        precision="bf16",
        micro_batch_size=job.settings.per_device_train_batch_size,
        gradient_accumulation_steps=job.settings.gradient_accumulation_steps,
        max_length=job.settings.max_length,
        allocated_peak_bytes=peak,
        peak_phase=phase,
        peak_operator="aten.mm",
        at_peak=dict.fromkeys(PARTS, 0) | {"params": states, "activations": peak - states},
        model_state_bytes=ModelStateBytes(params=states, grads=0, optimizer=0, offloaded_host=0, offloaded_disk=0),
        memory_phases=PhaseBytes(model_loaded=0, engine_built=0, forward=0, backward=0, step=0),
        reserved_bytes=ReservedRange(low=peak, high=peak + overhead),
        host_bytes=HostBytes(load=0, training=100 * GB if job.strategy.endswith("_offload") else 0),
        checkpoint_bytes=CheckpointBytes(weights=2 * GB, resumable=14 * GB),
        communication_bytes_per_step={"all_reduce": 2 * GB, "all_gather": 2 * GB},
        flops_per_step=10**15,
        seconds=1.5,
        notes=[],
    )
