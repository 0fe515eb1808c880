"""Predictions from the real engine: jobs are simulated in processes of their own (worker.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import psutil

from zero_recipes.checks.lower_bounds import resumable_bytes
from zero_recipes.core.findings import refusal
from zero_recipes.core.host import Host
from zero_recipes.metrics.parts import ModelStateBytes, PhaseBytes
from zero_recipes.metrics.prediction import CheckpointBytes, HostBytes, Prediction
from zero_recipes.plan.job import Job
from zero_recipes.plan.overheads import overheads
from zero_recipes.plan.simulator.time_limit import TimeLimit
from zero_recipes.theory.deepspeed_memory import read_at_resume

WORKER = ("-m", "zero_recipes.plan.simulator.worker")  # what the child runs; benchmarks/planners/ has its own
RESIDENT = 10**9  # bytes that a simulated rank may take; benchmarks/results/plan.json has what they do


def not_simulated(job: Job) -> str | None:
    """Why the engine cannot be simulated for this job; None where it can."""
    if job.is_fsdp:
        return "FSDP2 is not simulated"
    if job.on_nvme:
        return "states on NVMe are not simulated: DeepSpeed writes them by a kernel that reads addresses"
    if job.zero.hpz_partition_size > 1:
        return "hpZ's second copy of the weights is not simulated"
    if job.zero.quantizes_weights or job.zero.quantizes_gradients:
        return "ZeRO++'s quantisers are not simulated: they are CUDA kernels"
    if job.sequence_parallel > 1:
        return "sequences that Ulysses shares out are not simulated"
    if job.settings.max_length is None:
        return "the recipe sets no max_length"
    if job.quantizes:
        return "quantised weights are not simulated: bitsandbytes packs them in kernels of its own"
    return None


def simulate(
    jobs: Sequence[Job], done: Callable[[Job], None] = lambda job: None, limit: TimeLimit | None = None
) -> list[Prediction]:
    """Predictions in the order of the jobs; `done` is told of each job as it is ready, in any order.

    All jobs of one device in one child, which imports the libraries once and forks for each job and rank.
    Raises Refusal where a simulation fails, or where the time `limit` is over.
    """
    with tempfile.TemporaryDirectory() as folder:
        answers = [[Path(folder, f"{index}.{rank}.json") for rank in _ranks(job)] for index, job in enumerate(jobs)]

        def answered(answer: Path) -> None:
            index = int(answer.name.split(".")[0])
            if all(path.exists() for path in answers[index]):
                done(jobs[index])

        # stage 3 takes longest and comes first, so that no core is left alone with it at the end
        for device in sorted({job.device for job in jobs}):  # the device that stands for a GPU comes before the forks
            tasks = [
                {"job": job.as_dict(), "rank": rank, "answer": str(path)}
                for job, paths in sorted(zip(jobs, answers, strict=True), key=lambda pair: pair[0].zero_stage != 3)
                if job.device == device
                for rank, path in zip(_ranks(job), paths, strict=True)
            ]
            for answer, error in _run_worker(tasks, answered, limit):
                job = jobs[int(answer.name.split(".")[0])]
                raise refusal("ZR821", strategy=job.strategy, world_size=job.world_size, error=error)
        return [
            _prediction(job, [json.loads(path.read_text()) for path in paths])
            for job, paths in zip(jobs, answers, strict=True)
        ]


def _ranks(job: Job) -> list[int]:
    """The first and the last at stages 1 and 2: their flat partitions cut other tensors, which are kept whole.

    One where nothing is sharded, and at stage 3, where each tensor is cut into padded parts of one size.
    """
    return sorted({0, job.world_size - 1}) if job.zero_stage in (1, 2) else [0]


def _run_worker(tasks: list[dict], answered: Callable[[Path], None], limit: TimeLimit | None) -> list[tuple[Path, str]]:
    """Run the tasks; [(answer's path, what went wrong)] of those that failed."""
    child = subprocess.Popen(
        [sys.executable, *WORKER, str(_at_once())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=_environment(),
    )
    noise: list[str] = []
    listener = threading.Thread(target=lambda: noise.extend(child.stderr), daemon=True)
    listener.start()
    failed, ended = [], set()
    with limit.of(child) if limit else nullcontext():
        with suppress(BrokenPipeError), child.stdin:  # it was killed: said below, of each task
            child.stdin.write(json.dumps(tasks, default=str))
        for line in child.stdout:
            if line.startswith("{"):
                message = json.loads(line)
                ended.add(message["answer"])
                if message["error"]:
                    failed.append((Path(message["answer"]), message["error"]))
                else:
                    answered(Path(message["answer"]))
        child.wait()
    listener.join()
    for task in tasks:
        if task["answer"] not in ended:
            failed.append((Path(task["answer"]), "".join(noise[-3:]).strip() or f"exit code {child.returncode}"))
    return failed


def _at_once() -> int:
    """Simulations side by side: each takes a core."""
    free = psutil.virtual_memory().available // RESIDENT
    return max(1, min(Host().cores(), free))


def _environment() -> dict[str, str]:
    """This process's, without what a launcher has put there; no GPU is touched."""
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ACCELERATE_", "FSDP_", "TORCHELASTIC_"))
    }
    return own | {"CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore", "TOKENIZERS_PARALLELISM": "false"}


def _prediction(job: Job, ranks: list[dict[str, Any]]) -> Prediction:
    """The rank that needs most, with what the ranks need together."""
    most = max(ranks, key=lambda rank: rank["allocated_peak_bytes"])
    settings = job.settings
    here, segments = job.ranks_per_node, most["reserved_peak_bytes"]
    as_found = ("parameters", "trainable_parameters", "gradient_accumulation_steps", "allocated_peak_bytes")
    as_found += ("peak_phase", "peak_operator", "at_peak", "peaks", "communication_bytes_per_step", "flops_per_step")
    return Prediction(
        source="engine",
        strategy=job.strategy,
        zero_stage=job.zero_stage,
        world_size=job.world_size,
        precision=job.precision,
        micro_batch_size=settings.per_device_train_batch_size,
        max_length=settings.max_length,
        **{key: most[key] for key in as_found},
        model_state_bytes=ModelStateBytes(
            **{part: max(rank["model_state_bytes"][part] for rank in ranks) for part in most["model_state_bytes"]}
        ),
        memory_phases=PhaseBytes(**most["memory_phases"]),
        segment_bytes=segments,
        reserved_bytes=overheads().reserved_range(segments, job.world_size),
        host_bytes=HostBytes(
            load=here * (most["host_load"] + most["imports"]),
            training=here * (most["host_training"] + most["imports"]),
            resume=here * (most["host_training"] + most["imports"] + _read_at_resume(job, most)),
        ),
        checkpoint_bytes=_checkpoint_bytes(job, most),
        seconds=sum(rank["seconds"] for rank in ranks),
        resident_bytes=max(rank["resident_bytes"] for rank in ranks),
        notes=_notes(job),
    )


def _checkpoint_bytes(job: Job, found: dict[str, Any]) -> CheckpointBytes:
    """16 bits of each weight (32 without DeepSpeed), and Adam's fp32 states with DeepSpeed's fp32 master."""
    trainable = found["trainable_parameters"]
    lora = trainable < found["parameters"]
    each = 2 if job.ds_config is not None and job.settings.precision != "fp32" else 4
    weights = each * (trainable if lora else found["parameters"])
    optimizer = (8 if job.ds_config is None else job.zero.adam_bytes) * trainable
    return CheckpointBytes(weights=weights, resumable=resumable_bytes(weights, optimizer, job.zero_stage))


def _read_at_resume(job: Job, found: dict[str, Any]) -> int:
    saved = _checkpoint_bytes(job, found).weights
    optimizer = (8 if job.ds_config is None else job.zero.adam_bytes) * found["trainable_parameters"]
    return read_at_resume(saved, optimizer, job.zero_stage, job.world_size)


def _notes(job: Job) -> list[str]:
    settings = job.settings
    notes = [
        f"Every row is taken for {settings.max_length} tokens long (max_length); shorter rows need less.",
        "Fragmentation is replayed for rows of one length; other lengths fragment more.",
    ]
    if settings.attn_implementation not in (None, "sdpa", "eager"):
        notes.append(f"{settings.attn_implementation} is simulated by torch's own flash kernel.")
    if settings.torch_compile:
        notes.append("torch.compile fuses operators and keeps other activations: not simulated.")
    if settings.use_liger_kernel:
        notes.append("Liger kernels keep other activations: not simulated.")
    if any("expert" in key for key in job.config):
        notes.append("A mixture of experts is simulated with the routing of random tokens.")
    return notes
