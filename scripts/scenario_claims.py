"""The sections of docs/scenarios.md beside its first table: what is commonly given in bytes, and what the plan says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from zero_recipes.core.hardware import gpu_named, gpus
from zero_recipes.core.units import parameters, significant, size
from zero_recipes.plan import jobs
from zero_recipes.plan.cost import estimate
from zero_recipes.plan.fit import fit_of
from zero_recipes.plan.formulas.predict import activation_bytes, predict_by_formulas
from zero_recipes.plan.formulas.shape import shape_of
from zero_recipes.plan.job import Job
from zero_recipes.theory.zero_paper import model_state_bytes

MakeJob = Callable[..., Job]  # of a model, a strategy, a number of GPUs and overrides

# (who says it, parameters, GPUs, GB of model states at stages 0 to 3, the model that is planned, the GPU)
STATES = [
    ("ZeRO paper, figure 1", 7_500_000_000, 64, (120, 31.4, 16.6, 1.9), "megatron-7.5b", "a100-80gb"),
    ("the same on 8 GPUs, by its formulas", 7_500_000_000, 8, None, "megatron-7.5b", "a100-80gb"),
    ("commonly said", 7_000_000_000, 8, (112, 38.5, 26.25, 14), "meta-llama/Llama-2-7b-hf", "a100-80gb"),
    ("commonly said", 7_000_000_000, 2, (112, 70, 63, 56), "meta-llama/Llama-2-7b-hf", "h100-80gb"),
]
STAGES = ("zero0", "zero1", "zero2", "zero3")
INFINITY = ("megatron-1t", 16, "h100-80gb", "zero3_infinity")  # recomputing activations
LONG = ("meta-llama/Llama-2-7b-hf", 32, 2048, "10 to 20 GB")  # model, sequences, tokens of each, what is said


def sections(recipe: Path) -> dict[str, Any]:
    """What the page says beside its first table, by formulas alone, of this recipe with other models."""
    job = partial(one_job, recipe)
    found = {"states": [states(job, claim) for claim in STATES], "infinity": infinity(job)}
    return found | {"activations": activations(job)}


def states(one_job: MakeJob, claim: tuple) -> dict[str, Any]:
    """Model states of four stages: as claimed, by the paper's formula, and the peak that is planned."""
    who, psi, count, said, model, gpu = claim
    planned = [predict_by_formulas(one_job(model, name, count)) for name in STAGES]
    capacity = gpu_named(gpu, gpus()).memory_bytes
    formula = [int(model_state_bytes(psi, count, stage).total) for stage in range(4)]
    return {
        "who": who,
        "parameters": psi,
        "count": count,
        "said_gb": said,
        "formula_bytes": formula,
        "model": model,
        "peak_bytes": [found.allocated_peak_bytes for found in planned],
        "fits": [fit_of(found, capacity).status for found in planned],
        "gpu": gpu,
    }


def infinity(one_job: MakeJob) -> dict[str, Any]:
    model, count, gpu, strategy = INFINITY
    job = one_job(model, strategy, count, "--activation_checkpointing", "true")
    found = predict_by_formulas(job)
    nodes = job.world_size // job.gpus_per_node
    speed = estimate(job, found, gpu_named(gpu, gpus()))
    return {
        "model": model,
        "count": count,
        "gpu": gpu,
        "nodes": nodes,
        "peak_bytes": found.allocated_peak_bytes,
        "host_bytes_of_a_node": found.host_bytes.training,
        "nvme_bytes_of_a_node": found.nvme_bytes,
        "states_bytes": int(model_state_bytes(found.parameters, 1, 3).total),
        "step_seconds": list(speed.step_seconds),
    }


def activations(one_job: MakeJob) -> dict[str, Any]:
    """Bytes that one GPU keeps for the backward pass, whole and recomputing."""
    model, sequences, tokens, said = LONG
    batch = ["--per_device_train_batch_size", str(sequences), "--max_length", str(tokens)]
    found = {"model": model, "sequences": sequences, "tokens": tokens, "said": said}
    for name, again in (("kept", "false"), ("recomputed", "true")):
        job = one_job(model, "zero3", 8, *batch, "--activation_checkpointing", again)
        shape = shape_of(job.config, job.settings)
        found[name] = int(activation_bytes(job, shape))
    return found | {"inputs_of_layers": shape.layers * 2 * sequences * tokens * shape.hidden}


def one_job(path: Path, model: str, strategy: str, count: int, *overrides: str) -> Job:
    recipe = jobs.read_recipe(path, ["--model_name_or_path", model, *overrides])
    config = jobs.model_config(recipe.settings)
    return jobs.job_of(recipe, config, strategy, jobs.read_strategies(recipe, [strategy])[strategy], count)


def pages(content: dict[str, Any]) -> Iterator[str]:
    """The sections of docs/scenarios.md that are made of `sections`."""
    yield """
## Model states that are commonly given

Bytes on one GPU in mixed precision with Adam, at stages 0 / 1 / 2 / 3: as they are given, by the ZeRO paper's formulas
for so many parameters (16Ψ, 4Ψ + 12Ψ/N, 2Ψ + 14Ψ/N, 16Ψ/N), and the peak that the plan expects by formulas for a model
of about that size, with activations, buckets and the copies inside the optimizer step.

| Who | Parameters | GPUs | Given, GB | Formula, GB | Planned model | Planned peak, GB | Fits |
| --- | ---: | --- | ---: | ---: | --- | ---: | --- |
"""
    for row in content["states"]:
        cells = [row["who"], parameters(row["parameters"]), f"{row['count']} x {row['gpu']}"]
        cells.append(" / ".join(map(str, row["said_gb"] or ())) or "-")
        cells.append(_slashed(held / 1e9 for held in row["formula_bytes"]))
        cells += [row["model"].rpartition("/")[2], _slashed(peak / 1e9 for peak in row["peak_bytes"])]
        yield f"| {' | '.join([*cells, ' / '.join(row['fits'])])} |\n"
    found = content["infinity"]
    nodes = found["nodes"]
    host, nvme = found["host_bytes_of_a_node"], found["nvme_bytes_of_a_node"]
    low, high = found["step_seconds"]
    yield f"""
## One trillion parameters on {found["count"]} GPUs

{found["model"]} on {found["count"]} x {found["gpu"]} in {nodes} nodes under `zero3_infinity`, recomputing; by
formulas. It is commonly given as 20 GB of GPU, 400 GB of host memory and 2 TB of NVMe; the model states alone are
{size(found["states_bytes"])}.

| On a GPU, at the peak | Host memory of a node | NVMe of a node | NVMe in all | A step |
| ---: | ---: | ---: | ---: | ---: |
| {size(found["peak_bytes"])} | {size(host)} | {size(nvme)} | {size(nodes * nvme)} | {low:.0f} to {high:.0f} s |

Host memory: the gradients in 16 bits, which DeepSpeed 0.19.8 keeps there whatever is on NVMe, and the swap buffers.
NVMe: 18 bytes a parameter, the fp32 gradients among them. The step's time is an estimate; no such run was made here.
"""
    found = content["activations"]
    yield f"""
## Activations of {found["sequences"]} x {found["tokens"]} tokens

{found["model"].rpartition("/")[2]}, {found["sequences"]} sequences of {found["tokens"]} tokens in one micro batch,
on each GPU and whatever the stage (arXiv:2205.05198, with fused attention). Commonly given: {found["said"]}.

| Kept whole | Recomputed (`activation_checkpointing: true`) | of it the inputs of the layers |
| ---: | ---: | ---: |
| {size(found["kept"])} | {size(found["recomputed"])} | {size(found["inputs_of_layers"])} |

Recomputed, the inputs of all layers are kept, and one layer whole while it is at work.
"""


def _slashed(values: Iterable[float]) -> str:
    return " / ".join(map(significant, values))
