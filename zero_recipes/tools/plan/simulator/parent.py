"""Predictions from the real engine: jobs are simulated in a process of their own, which forks for each (worker.py).

    python -m zero_recipes.tools.plan.simulator.parent DEVICE

The process imports the libraries and stays.
It reads lines [how many at once, [{"job", "rank", "masked"}]], and prints a line for each task: its number, its answer.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import ModuleType
from typing import IO, TYPE_CHECKING, Any

import psutil
from rich.progress import track

from zero_recipes.core.host import Host
from zero_recipes.core.process import end_with_parent, imported_for_good, kill_with_children
from zero_recipes.core.tables import terminal
from zero_recipes.engine.launchers import LAUNCHED
from zero_recipes.metrics.schema import ModelStateBytes, Prediction
from zero_recipes.tools.plan.simulator.layers import NOT_LINEAR, extrapolated, layers_to_simulate, with_layers

if TYPE_CHECKING:
    from zero_recipes.tools.plan.job import Job

WORKER = ("-m", "zero_recipes.tools.plan.simulator.parent")  # benchmarks/planners/ has its own
RESIDENT = 10**9  # bytes that a simulated rank may take; benchmarks/results/plan.json has what they do
# of the process that simulates
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}


def not_simulated(job: "Job") -> str | None:
    """Say why formulas answer in the engine's place; None where the engine can be simulated."""
    zero = job.zero
    if job.is_fsdp:
        return "FSDP2 is not simulated"
    if job.on_nvme:
        return "DeepSpeed writes states to NVMe with a kernel that reads addresses"
    if zero.hpz_partition_size > 1:
        return "hpZ's secondary shard is not simulated"
    if zero.quantizes_weights or zero.quantizes_gradients:
        return "ZeRO++'s quantizers are CUDA kernels"
    if job.settings.max_length is None:
        return "the recipe sets no max_length"
    if job.settings.load_in_8bit:
        return "bitsandbytes multiplies 8-bit weights in its own kernels"
    return None


def simulate(
    jobs: Sequence["Job"],
    deadline: float = math.inf,
    ready: Callable[["Job", Prediction | str], None] = lambda job, prediction: None,
) -> list[Prediction | str]:
    """Simulate jobs of one device, and call `ready` with each as it ends.

    Returns the error of one that fails, or is late by time.monotonic(), in its prediction's place.
    """
    found: dict[int, Prediction | str] = {}
    todo = {index: layers_to_simulate(_own_sequences(job)) for index, job in enumerate(jobs)}
    while todo:
        whole = {}  # of which a few layers do not tell
        for index, prediction in _simulated(jobs, todo, deadline):
            if todo[index] and isinstance(prediction, str) and NOT_LINEAR in prediction:
                whole[index] = ()
                continue
            found[index] = prediction
            ready(jobs[index], prediction)
        todo = whole
    return [found[index] for index in range(len(jobs))]


def _simulated(
    jobs: Sequence["Job"], todo: Mapping[int, tuple[int, ...]], deadline: float
) -> Iterator[tuple[int, Prediction | str]]:
    """(a job's index, its prediction or error) as each is ready.

    `todo`: {the index of a job: the numbers of layers to simulate; none for all of them}.
    """
    from zero_recipes.tools.plan.job import packs_under_mask  # not needed to be the process

    tasks = []  # (a job's index, its rank, the job to simulate)
    for index, numbers in todo.items():
        own = _own_sequences(jobs[index])
        few = [with_layers(own, number) for number in numbers]
        tasks += [(index, rank, simulated) for rank in _ranks(jobs[index]) for simulated in few or [own]]
    tasks.sort(key=lambda task: not todo[task[0]])  # a few layers take seconds, whole models a minute
    waiting = Counter(index for index, _, _ in tasks)
    answers = {}  # {(a job's index, its rank): {number of a task: its answer}}
    masked = {index: packs_under_mask(jobs[index]) for index in todo}  # in a simulation it would count as its memory
    asked = [{"job": simulated.as_dict(), "rank": rank, "masked": masked[index]} for index, rank, simulated in tasks]
    progress = track(_answers(asked, deadline), "simulating", len(tasks), console=terminal(stderr=True), transient=True)
    for number, answer in progress:
        index, rank, _ = tasks[number]
        answers.setdefault((index, rank), {})[number] = answer
        waiting[index] -= 1
        if not waiting[index]:
            job = jobs[index]
            yield index, _prediction(job, [answers[index, rank] for rank in _ranks(job)], bool(todo[index]))


def _own_sequences(job: "Job") -> "Job":
    """Under Ulysses a rank's part of each sequence as one of its own: the same tensors, but for those it swaps."""
    shared = job.sequence_parallel
    if shared == 1:
        return job
    length = job.settings.max_length // shared
    return job.changed(max_length=length, sequence_parallel_size=1, pad_to_multiple_of=None)


def _ranks(job: "Job") -> list[int]:
    """The first and the last at stages 1 and 2, whose partitions cut other tensors. Elsewhere all are alike."""
    return sorted({0, job.world_size - 1}) if job.zero_stage in (1, 2) else [0]


_started: dict[tuple[str, ...], tuple[subprocess.Popen, IO[str]]] = {}


def start(device: str) -> tuple[subprocess.Popen, IO[str]]:
    """Start the process for jobs of this device, or find it. Returns it and its stderr.

    Does not wait for its imports.
    """
    command = (sys.executable, *WORKER, device)
    if command not in _started or _started[command][0].poll() is not None:
        own = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHED)}
        errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (open as long as the process)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
        _started[command] = subprocess.Popen(command, text=True, env=own | ENVIRONMENT, **pipes), errors
    return _started[command]


def _answers(tasks: list[dict], deadline: float) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number of a task, its answer) as each is ready. Where the process ends early, the others' `error`."""
    process, errors = start(tasks[0]["job"]["device"])
    child = psutil.Process(process.pid)
    at_once = max(1, min(Host().cores(), psutil.virtual_memory().available // RESIDENT))  # each takes a core
    missing = set(range(len(tasks)))
    seconds = min(threading.TIMEOUT_MAX, deadline - time.monotonic())
    timer = threading.Timer(seconds, kill_with_children, [child])
    timer.daemon = True
    timer.start()
    try:
        with suppress(BrokenPipeError):  # it has ended: said below
            print(json.dumps([at_once, tasks], default=str), file=process.stdin, flush=True)
        while missing and (line := process.stdout.readline()):
            number, answer = line.split(maxsplit=1)
            missing.remove(int(number))
            yield int(number), json.loads(answer)
    finally:
        timer.cancel()
        if missing:  # the other answers would be taken for those to the next tasks
            kill_with_children(child)
            process.communicate()
    if missing:
        errors.seek(0)
        error = "".join(errors.readlines()[-3:]).strip() or f"exit code {process.returncode}"
        for number in missing:
            yield number, {"error": error}


def _prediction(job: "Job", by_rank: list[dict[int, dict[str, Any]]], of_few_layers: bool) -> Prediction | str:
    """The rank that needs most, with what the ranks need together; or the error of one."""
    from zero_recipes.tools.plan import formulas  # imports torch: `start` need not wait for it

    layers = job.config.get("num_hidden_layers", 0)
    ranks = [extrapolated([answer for _, answer in sorted(answers.items())], layers) for answers in by_rank]
    for rank in ranks:
        if "error" in rank:
            return rank["error"]
    states = {}
    for part in ranks[0]["model_state_bytes"]:
        states[part] = max(rank["model_state_bytes"][part] for rank in ranks)
    most = max(ranks, key=lambda rank: max(rank["peaks"].values()))
    highest = max(most["peaks"], key=most["peaks"].get)
    imports = most.pop("imports")
    host = (imports + most.pop("host_load"), imports + most.pop("host_training"))
    sizes = formulas.Sizes(job, formulas.shape_of(job.config, job.settings))
    notes = []
    if of_few_layers:
        notes.append(f"{job.strategy} is simulated from a few of the {layers} layers.")
    most |= {
        "source": "engine",
        "allocated_peak_bytes": most["peaks"][highest],
        "peak_phase": highest,
        "at_peak": most.pop("at_peaks")[highest],
        "max_length": job.settings.max_length,
        "model_state_bytes": ModelStateBytes(**states),
        "flops_per_step": sizes.flops(),
        "notes": notes,
    }
    return formulas.prediction_of(job, sizes.weights, sizes.terms.saved, host, **most)


def main(device: str) -> None:
    """Be the process: import the libraries, then answer what comes on stdin."""
    end_with_parent()  # a run that is killed leaves no plan behind
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to stderr
    with imported_for_good():  # or each fork would look through a million objects again
        worker = load_worker(device)
    for line in sys.stdin:
        at_once, tasks = json.loads(line)
        waiting = list(enumerate(tasks))
        running = {}
        while waiting or running:
            while waiting and len(running) < at_once:
                number, task = waiting.pop(0)
                answer = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed where it is read)
                child = os.fork()
                if child == 0:
                    worker.run(task, answer)
                running[child] = number, answer
            ended, status = os.wait()
            number, answer = running.pop(ended)
            with answer:
                answer.seek(0)
                written = answer.read() or json.dumps({"error": f"its process ended with status {status}"})
            print(number, written, file=answers, flush=True)


def load_worker(device: str) -> ModuleType:
    """Import what simulates jobs of this device."""
    if device == "gpu":
        from zero_recipes.tools.plan.simulator.device import set_up_fake_gpu

        set_up_fake_gpu()  # before others take names out of torch
    from zero_recipes.tools.plan.simulator import worker

    return worker


if __name__ == "__main__":
    main(sys.argv[1])
