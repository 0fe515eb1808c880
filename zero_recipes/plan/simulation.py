"""Predictions from the real engine: jobs are simulated in processes of their own (engine.py), answers kept on disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from zero_recipes.checks.ds_config import precision_of
from zero_recipes.plan.job import Job, Prediction
from zero_recipes.refusal import Refusal

# The versions that the patches of patches.py were written for, up to the part of the number that must agree.
KNOWN_VERSIONS = {"torch": "2.13", "deepspeed": "0.19", "transformers": "5.23", "trl": "1.16", "accelerate": "1.15"}
AT_ONCE = 2  # simulations side by side: each takes a core and 0.6 to 1 GB

# Beside the caching allocator's segments, per GPU. Assumptions, not measured by this project: a CUDA context with its
# loaded kernels (some 0.5 GB on recent GPUs), cuBLAS workspaces (32 MiB a stream on Hopper), and the channels of a
# NCCL communicator (some 0.3 GB among 8 GPUs of one node).
CONTEXT = 600 * 10**6
COMMUNICATOR = 400 * 10**6
FRAGMENTATION = 1.05  # what a replay of other row lengths than these would add


def unknown_versions() -> list[str]:
    """Installed packages that the simulation has not been written for: "torch 2.14.0 (known: 2.13)"."""
    found = {name: version(name) for name in KNOWN_VERSIONS}
    return [
        f"{name} {found[name]} (known: {known})"
        for name, known in KNOWN_VERSIONS.items()
        if found[name].split("+")[0].split(".")[:2] != known.split(".")
    ]


def predict(job: Job) -> Prediction:
    """The prediction for one job; from the cache where it has been made with these versions."""
    return predict_all([job])[0]


def predict_all(jobs: Sequence[Job], done: Callable[[Job], None] = lambda job: None) -> list[Prediction]:
    """Predictions in the order of the jobs; `done` is told of each job as it is ready, in any order.

    Raises Refusal where a job cannot be simulated.
    """
    for job in jobs:
        _refuse_unknown(job)
    wanted = {job_key(job): job for job in jobs}
    found = {key: _cached(key) for key in wanted}
    for key, answer in found.items():
        if answer is not None:
            done(wanted[key])
    missing = {key: job for key, job in wanted.items() if found[key] is None}
    if missing:
        for key, answer in _simulate(missing, done).items():
            found[key] = answer
            _keep(key, answer)
    return [found[job_key(job)] for job in jobs]


def job_key(job: Job) -> str:
    return job.key({name: version(name) for name in KNOWN_VERSIONS} | {"zero-recipes": _own_version()})


def _own_version() -> str:
    """Changes with the code of this folder: a cached answer is as good as the code that made it."""
    import hashlib

    here = Path(__file__).parent
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(here.glob("*.py")))).hexdigest()[:16]


def _refuse_unknown(job: Job) -> None:
    unknown, values = unknown_versions(), job.values
    quick = "zero-recipes plan --quick answers by formulas."
    if unknown:
        raise Refusal(
            f"the simulation does not know {', '.join(unknown)}",
            "It replaces small parts of these libraries (zero_recipes/plan/patches.py), checked for one version each.",
            quick,
        )
    if values["load_in_4bit"] or values["load_in_8bit"]:
        raise Refusal("quantised weights cannot be simulated", "bitsandbytes packs them in kernels of its own.", quick)
    if values["max_length"] is None:
        raise Refusal(
            "the recipe sets no max_length", "Activations grow with the longest row.", "--max_length 1024, e.g."
        )


def _simulate(jobs: dict[str, Job], done: Callable[[Job], None]) -> dict[str, Prediction]:
    """One child imports the libraries and forks a process for each job and rank."""
    with tempfile.TemporaryDirectory() as folder:
        tasks = []
        for key, job in jobs.items():
            for rank in _ranks(job):
                tasks.append({"job": asdict(job), "rank": rank, "answer": str(Path(folder, f"{key}.{rank}.json"))})
        errors: dict[str, list[str]] = {}
        kinds = sorted({job.device for job in jobs.values()})  # the pretended GPU is made before the fork
        for device in kinds:
            those = [task for task in tasks if task["job"]["device"] == device]
            for answer, error in _engine(those, lambda path: _tell(path, jobs, folder, done)):
                errors.setdefault(Path(answer).name.split(".")[0], []).append(error)
        for key, said in errors.items():
            raise Refusal(
                f"{jobs[key].strategy} on {jobs[key].world_size} ranks cannot be simulated",
                said[0],
                "zero-recipes plan --quick answers by formulas.",
            )
        return {
            key: _prediction(job, [json.loads(path.read_text()) for path in sorted(Path(folder).glob(f"{key}.*.json"))])
            for key, job in jobs.items()
        }


def _ranks(job: Job) -> list[int]:
    """The first and the last, which hold most and least of what does not divide; one where nothing is sharded."""
    return sorted({0, job.world_size - 1}) if job.zero_stage else [0]


def _tell(path: str, jobs: dict[str, Job], folder: str, done: Callable[[Job], None]) -> None:
    key = Path(path).name.split(".")[0]
    if len(list(Path(folder).glob(f"{key}.*.json"))) == len(_ranks(jobs[key])):
        done(jobs[key])


def _engine(tasks: list[dict], told: Callable[[str], None]) -> list[tuple[str, str]]:
    """Run the tasks; [(answer's path, what went wrong)] of those that failed."""
    child = subprocess.Popen(
        [sys.executable, "-m", "zero_recipes.plan.engine", str(AT_ONCE)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONWARNINGS": "ignore", "TOKENIZERS_PARALLELISM": "false"},
    )
    noise: list[str] = []
    listener = threading.Thread(target=lambda: noise.extend(child.stderr), daemon=True)
    listener.start()
    child.stdin.write(json.dumps(tasks, default=str))
    child.stdin.close()
    failed, ended = [], set()
    for line in child.stdout:
        if line.startswith("{"):
            said = json.loads(line)
            ended.add(said["answer"])
            if said["error"]:
                failed.append((said["answer"], said["error"]))
            else:
                told(said["answer"])
    child.wait()
    listener.join()
    for task in tasks:
        if task["answer"] not in ended:
            failed.append((task["answer"], "".join(noise[-3:]).strip() or f"exit code {child.returncode}"))
    return failed


def _prediction(job: Job, ranks: list[dict[str, Any]]) -> Prediction:
    """The rank that needs most, with what the ranks need together."""
    most = max(ranks, key=lambda rank: rank["allocated_peak_bytes"])
    values = job.values
    here = min(job.gpus_per_node, job.world_size)
    reserved = most["reserved_peak_bytes"]
    extras = CONTEXT + (COMMUNICATOR if job.world_size > 1 else 0)
    return {
        "source": "engine",
        "strategy": job.strategy,
        "zero_stage": job.zero_stage,
        "world_size": job.world_size,
        "parameters": most["parameters"],
        "trainable_parameters": most["trainable_parameters"],
        "precision": precision_of(values),
        "micro_batch_size": values["per_device_train_batch_size"],
        "gradient_accumulation_steps": most["gradient_accumulation_steps"],
        "max_length": values["max_length"],
        **{key: most[key] for key in ("allocated_peak_bytes", "peak_phase", "peak_operator", "at_peak", "peaks")},
        "model_state_bytes": {
            part: max(rank["model_state_bytes"][part] for rank in ranks) for part in most["model_state_bytes"]
        },
        "memory_phases": most["memory_phases"],
        "reserved_bytes": {
            "low": reserved + extras,
            "high": int(reserved * FRAGMENTATION) + extras,
        },
        "host_bytes": {
            "load": here * (most["host_load"] + most["imports"]),
            "training": here * (most["host_training"] + most["imports"]),
        },
        "checkpoint_bytes": _checkpoint_bytes(job, most),
        "communication_bytes_per_step": most["communication_bytes_per_step"],
        "flops_per_step": most["flops_per_step"],
        "seconds": sum(rank["seconds"] for rank in ranks),
        "notes": _notes(job),
    }


def _checkpoint_bytes(job: Job, found: dict[str, Any]) -> dict[str, int]:
    """On disk, all ranks together: 16 bits of each weight (32 without DeepSpeed) and Adam's fp32 states.

    Below stage 3 DeepSpeed writes the weights once more (mp_rank_00_model_states.pt).
    """
    trainable = found["trainable_parameters"]
    lora = trainable < found["parameters"]
    each = 2 if job.ds_config is not None and precision_of(job.values) != "fp32" else 4
    weights = each * (trainable if lora else found["parameters"])
    if job.ds_config is None:
        return {"weights": weights, "resumable": weights + 8 * trainable}
    again = 0 if job.zero_stage == 3 else each * (trainable if lora else found["parameters"])
    return {"weights": weights, "resumable": weights + 12 * trainable + again}


def _notes(job: Job) -> list[str]:
    values = job.values
    notes = [
        f"Every row is taken for {values['max_length']} tokens long (max_length); shorter rows need less.",
        "Fragmentation is replayed for rows of one length; other lengths fragment more.",
    ]
    if str(values["attn_implementation"]).startswith("flash_attention"):
        notes.append(f"{values['attn_implementation']} is simulated by torch's own flash kernel.")
    if values["torch_compile"]:
        notes.append("torch.compile fuses operators and keeps other activations: not simulated.")
    if values["use_liger_kernel"]:
        notes.append("Liger kernels keep other activations: not simulated.")
    if any("expert" in key for key in job.config):
        notes.append("A mixture of experts is simulated with the routing of random tokens.")
    if str(getattr(values["eval_strategy"], "value", values["eval_strategy"])) not in ("no", "False"):
        notes.append(f"Evaluation in batches of {values['per_device_eval_batch_size']} is not simulated.")
    return notes


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/zero-recipes/plan, by default in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zero-recipes" / "plan"


def _cached(key: str) -> Prediction | None:
    path = cache_folder() / f"{key}.json"
    return json.loads(path.read_text()) if path.is_file() else None


def _keep(key: str, answer: Prediction) -> None:
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"{key}.{os.getpid()}.part"
    unfinished.write_text(json.dumps(answer))
    os.replace(unfinished, folder / f"{key}.json")
