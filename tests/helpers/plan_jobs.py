"""Jobs for the tests of the plan: recipes of this repository, and predictions made up to order."""

from contextlib import chdir
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from zero_recipes.core.gpus import gpu_named, gpus
from zero_recipes.metrics import schema
from zero_recipes.tools.plan import job as plan_job
from zero_recipes.tools.plan.choose import Row, make_row
from zero_recipes.tools.plan.job import Job

ROOT = Path(__file__).resolve().parents[2]
GB = 10**9
H100 = gpu_named("h100-80gb", gpus())


@lru_cache
def recipe(name: str, *overrides: str):
    return plan_job.read_recipe(ROOT / "recipes" / f"{name}.yaml", overrides)


@lru_cache
def every_strategy() -> dict:
    """All that a plan knows, whatever the working directory is."""
    with chdir(ROOT):
        return plan_job.read_strategies(recipe("pythia"), ["all"])


def strategies() -> dict:
    """The stages and CPU offload."""
    return {name: every_strategy()[name] for name in plan_job.USUAL}


def job(strategy: str, ranks: int = 2, name: str = "pythia", gpus_per_node: int = 8, **values) -> Job:
    own = recipe(name)
    made = plan_job.job_of(
        own, plan_job.model_config(own.settings), strategy, every_strategy()[strategy], ranks, gpus_per_node
    )
    return replace(made, settings=made.settings.replace(**values))


def rows_of(needs: dict[str, int | tuple], ranks: int = 2, **request) -> list[Row]:
    """Rows of recipes/pythia.yaml on H100s. `needs`: {strategy: GB, or (GB, seconds of a step)}."""
    own, names = recipe("pythia"), {name: every_strategy()[name] for name in needs}
    asked = plan_job.PlanRequest(own, [], job("zero3").config, names, [ranks], 8, H100, **request)
    taken = {name: need if isinstance(need, tuple) else (need, None) for name, need in needs.items()}
    rows = []
    for name, (size, seconds) in taken.items():
        predicted = lambda one, size=size: made_up(one, size * GB, cache=size * GB * 9 // 20)  # noqa: E731
        made = make_row(asked, job(name, ranks), predicted)
        if seconds is not None:
            made = replace(made, speed=replace(made.speed, step_seconds=(0.9 * seconds, 1.1 * seconds), middle=seconds))
        rows.append(made)
    return rows


def made_up(
    job: Job, peak: int, states: int | None = None, phase: str = "backward", cache: int = 0, activations: int = 0
) -> schema.Prediction:
    """A prediction of `peak` bytes, `states` of them model states; the reserved range is [peak, peak + cache]."""
    states = peak // 2 if states is None else states
    other = peak - states - activations
    return schema.Prediction(
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
        at_peak=dict.fromkeys(schema.PARTS, 0) | {"params": states, "activations": activations, "other": other},
        model_state_bytes=schema.ModelStateBytes(
            params=states, grads=0, optimizer=0, offloaded_host=0, offloaded_disk=0
        ),
        reserved_bytes=schema.ReservedRange(low=peak, high=peak + cache),
        host_bytes=schema.HostBytes(load=0, training=100 * GB if job.strategy.endswith("_offload") else 0),
        checkpoint_bytes=schema.CheckpointBytes(weights=2 * GB, resumable=14 * GB),
        communication_bytes_per_step={"all_reduce": 2 * GB, "all_gather": 2 * GB},
        flops_per_step=10**15,
        notes=[],
    )
