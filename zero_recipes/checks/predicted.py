"""The plan of a run that is about to start, made by a subprocess while the rows are tokenised."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

import torch

from zero_recipes.config.run import Run
from zero_recipes.core.findings import Finding, downgraded, ignored_codes, raise_errors
from zero_recipes.core.gpus import Gpu, card_named
from zero_recipes.core.process import local_world_size, rank
from zero_recipes.engine.group import agree, once
from zero_recipes.metrics.schema import PredictedMetrics

PLANNER = ("-m", "zero_recipes.tools.plan.of_run")
SECONDS = 90.0  # of its simulation


class Plan(NamedTuple):
    """What the planner answers about a run."""

    predicted: dict[str, Any] | None  # for metrics.json
    findings: list[Finding]


@contextmanager
def planning(run: Run) -> Iterator[Callable[[], PredictedMetrics | None]]:
    """Start the plan on rank 0; what is yielded waits for it. All ranks call both.

    What is yielded returns metrics.json's "predicted", None where nothing is to be planned.
    It raises Refusal on every rank where the run does not fit.
    """
    on_gpus = _is_compared_with_gpus(run)
    if not run.settings.predict and not on_gpus:
        yield lambda: None
        return
    cards = agree(card) if on_gpus else []
    planner = _planner(run, os.environ, cards) if rank() == 0 else nullcontext()
    with planner as answer:
        yield partial(_prediction_of_rank_0, answer)


def _prediction_of_rank_0(answer: Callable[[], Plan]) -> PredictedMetrics | None:
    """Wait for the plan on rank 0, print its warnings, and return it on all ranks. Raises Refusal on all."""

    def accepted() -> dict[str, Any] | None:
        plan = answer()
        raise_errors(plan.findings)
        for warning in plan.findings:
            print(warning, flush=True)
        return plan.predicted

    predicted = once(accepted, "plans the run")
    return predicted and PredictedMetrics.model_validate(predicted)


def planned_findings(run: Run, environment: Mapping[str, str], gpu: Gpu | None = None) -> list[Finding]:
    """What the run would be refused for, or warned of, on this machine's GPUs or on free cards like `gpu`."""
    if not _is_compared_with_gpus(run):
        return []
    world_size = run.strategy.world_size
    if gpu is None:
        here = min(local_world_size(environment, world_size), torch.cuda.device_count())
        cards = [card(index) for index in range(here)]
    else:
        cards = [_free_card(gpu, world_size)]
    with _planner(run, environment, cards) as answer:
        return answer().findings


def _is_compared_with_gpus(run: Run) -> bool:
    return run.device == "cuda" and not run.settings.skip_plan


def card(index: int | None = None) -> dict[str, Any]:
    """This process's GPU as it is now, in bytes; `index`: another of this machine's."""
    free, total = torch.cuda.mem_get_info(index)  # of the device: whoever uses it, this process's context included
    known = card_named(torch.cuda.get_device_name(index))
    is_group = torch.distributed.is_initialized()
    return {
        "rank": rank(),
        "host": socket.gethostname(),
        "ranks": torch.distributed.get_world_size() if is_group else 1,
        "total": total,
        "free": free,
        "reserved": torch.cuda.memory_reserved(index),
        "workspace": known.workspace_bytes if known else 0,
    }


def _free_card(gpu: Gpu, world_size: int) -> dict[str, Any]:
    return {
        "rank": 0,
        "host": gpu.name,
        "ranks": world_size,
        "total": gpu.memory_bytes,
        "free": gpu.memory_bytes,
        "reserved": 0,
        "workspace": gpu.workspace_bytes,
    }


@contextmanager
def _planner(
    run: Run, environment: Mapping[str, str], cards: Sequence[Mapping[str, Any]]
) -> Iterator[Callable[[], Plan]]:
    """Start tools/plan/of_run.py in a process of its own, which is killed when this is left.

    What is yielded waits for the plan and prints it.
    """
    print(f"plan          planning, up to {SECONDS:.0f} s", flush=True)
    question = json.dumps(_question(run, environment, cards), default=str)
    own = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, *PLANNER], env=own, text=True, **pipes) as process:
        try:
            with suppress(BrokenPipeError):  # it has failed: its answer says why
                process.stdin.write(question + "\n")
                process.stdin.flush()
            yield partial(_answer, process, run.settings.ignore)
        finally:
            process.kill()  # its simulations end with it (core/process.py `end_with_parent`)


def _question(run: Run, environment: Mapping[str, str], cards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    strategy = run.strategy
    job = {
        "strategy": strategy.name,
        "world_size": strategy.world_size,
        "gpus_per_node": local_world_size(environment, strategy.world_size),
        "ds_config": strategy.ds_config and dict(strategy.ds.raw),
        "settings": run.settings.as_dict(),
        "device": "gpu" if run.device == "cuda" else "cpu",
        "workspace": max((card["workspace"] for card in cards), default=0),
    }
    return {"job": job, "recipe": str(run.recipe.path), "cards": cards, "seconds": SECONDS}


def _answer(process: subprocess.Popen, ignore: list[str] | str | None) -> Plan:
    written, errors = process.communicate()
    if process.returncode:
        raise RuntimeError(f"the plan failed; --skip_plan true runs without one.\n{errors[-2000:]}")
    answer = json.loads(written)
    for line in answer["lines"]:
        print(f"plan          {line}", flush=True)
    findings = [Finding(**row) for row in answer["findings"]]
    return Plan(answer["predicted"], downgraded(findings, ignored_codes(ignore)))
