"""The plan of a run that is about to start, by a subprocess that works while the rows are tokenised."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch

from zero_recipes.config.run import Run
from zero_recipes.core.findings import Finding, downgraded, ignored_codes, raise_errors
from zero_recipes.core.host import Gpu, card_named
from zero_recipes.core.process import local_world_size, rank
from zero_recipes.engine.group import agree, once
from zero_recipes.metrics.schema import PredictedMetrics

PLANNER = ("-m", "zero_recipes.tools.plan.of_run")
SECONDS = 90.0  # of its simulation
# What metrics.json carries, and findings; prints. Raises RuntimeError where the planner failed.
Answer = Callable[[], tuple[dict[str, Any] | None, list[Finding]]]


@contextmanager
def planning(run: Run) -> Iterator[Callable[[], PredictedMetrics | None]]:
    """Start the plan; what is yielded waits for it. All ranks call both.

    On an accelerator, unless the recipe has `skip_plan: true`; on CPUs where it has `predict: true`. Rank 0 plans, for
    the smallest GPU of all ranks. What is yielded returns metrics.json's "predicted", None where there is no plan. It
    raises Refusal on every rank where the run does not fit.
    """
    if not (run.settings.predict or _is_compared_with_gpus(run)):
        yield lambda: None
        return
    cards = agree(card) if _is_compared_with_gpus(run) else []
    with _planner(run, os.environ, cards) if rank() == 0 else nullcontext() as answer:

        def result() -> PredictedMetrics | None:
            def predicted() -> dict[str, Any] | None:
                predicted, findings = answer()
                raise_errors(findings)
                print(*findings, sep="\n", end="\n" * bool(findings), flush=True)
                return predicted

            found = once(predicted, "plans the run")
            return found and PredictedMetrics.model_validate(found)

        yield result


def rehearsed(run: Run, environment: Mapping[str, str], gpu: Gpu | None = None) -> list[Finding]:
    """What the run would be refused for, or warned of, on this machine's GPUs or on such cards that are free."""
    if not _is_compared_with_gpus(run):
        return []
    if gpu is None:
        here = min(local_world_size(environment, run.strategy.world_size), torch.cuda.device_count())
        cards = [card(index) for index in range(here)]
    else:
        memory = {"total": gpu.memory_bytes, "free": gpu.memory_bytes, "reserved": 0}
        memory["workspace"] = gpu.workspace_bytes
        cards = [{"rank": 0, "host": gpu.name, "ranks": run.strategy.world_size, **memory}]
    with _planner(run, environment, cards) as answer:
        return answer()[1]


def _is_compared_with_gpus(run: Run) -> bool:
    return run.device == "cuda" and not run.settings.skip_plan


def card(index: int | None = None) -> dict[str, Any]:
    """This process's GPU as it is now, in bytes; `index`: another of this machine's."""
    free, total = torch.cuda.mem_get_info(index)  # of the device: whoever uses it, this process's context included
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    own = {"rank": rank(), "host": socket.gethostname(), "ranks": ranks, "reserved": torch.cuda.memory_reserved(index)}
    known = card_named(torch.cuda.get_device_name(index))
    return own | {"total": total, "free": free, "workspace": known.workspace_bytes if known else 0}


@contextmanager
def _planner(run: Run, environment: Mapping[str, str], cards: Sequence[dict[str, Any]]) -> Iterator[Answer]:
    """zero_recipes/tools/plan/of_run.py in a process of its own, which is killed when this is left."""
    print(f"plan          planning, up to {SECONDS:.0f} s", flush=True)
    strategy, here = run.strategy, local_world_size(environment, run.strategy.world_size)
    job = {"strategy": strategy.name, "world_size": strategy.world_size, "gpus_per_node": here}
    job |= {"ds_config": None if strategy.ds_config is None else dict(strategy.ds_config.raw)}
    job |= {"settings": run.settings.as_dict(), "device": "gpu" if run.device == "cuda" else "cpu"}
    job["workspace"] = max((card["workspace"] for card in cards), default=0)
    question = {"job": job, "recipe": str(run.recipe.path), "cards": list(cards), "seconds": SECONDS}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    own = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    with subprocess.Popen([sys.executable, *PLANNER], env=own, text=True, **pipes) as process:

        def answer() -> tuple[dict[str, Any] | None, list[Finding]]:
            written, errors = process.communicate()
            if process.returncode:
                raise RuntimeError(f"the plan failed; --skip_plan true runs without one.\n{errors[-2000:]}")
            found = json.loads(written)
            print(*(f"plan          {line}" for line in found["lines"]), sep="\n", flush=True)
            findings = [Finding(**row) for row in found["findings"]]
            return found["predicted"], downgraded(findings, ignored_codes(run.settings.ignore))

        try:
            with suppress(BrokenPipeError):  # it has failed: `answer` says why
                process.stdin.write(json.dumps(question, default=str) + "\n")
                process.stdin.flush()
            yield answer
        finally:
            process.kill()  # its simulations end with it (core/process.py `end_with_parent`)
