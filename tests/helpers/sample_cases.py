"""Cases of tests/helpers/group.py for runs that end otherwise than well; arguments and results are JSON."""

import json
import os
from typing import Any
from unittest import mock

import torch

import run_sft
from zero_recipes import model as models
from zero_recipes.core.findings import Finding, Refusal, RunFailed
from zero_recipes.metrics.callback import StageMetricsCallback
from zero_recipes.training import samples, trainer


def strict(text: str) -> Any:
    """JSON as the standard has it."""

    def refuse(constant: str):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def ending(argv: list[str]) -> dict:
    """How a run ends on this rank: its error's type and message, metrics.json and the files of its folder."""
    run, error = run_sft.prepare(argv), None
    try:
        run_sft.train(run)
    except (RunFailed, Refusal, Exception) as raised:
        error = raised
    torch.distributed.barrier()  # every rank has written what it leaves
    metrics = run.output_dir / "metrics.json"
    return {
        "error": None if error is None else [type(error).__name__, str(error)],
        "known": isinstance(error, (RunFailed, Refusal)),
        "metrics": strict(metrics.read_text()) if metrics.is_file() else None,
        "files": sorted(path.name for path in run.output_dir.glob("*")),
    }


def ending_at_hub(argv: list[str], address: str) -> dict:
    """`ending`, where that is the hub's address."""
    from huggingface_hub import constants

    with mock.patch.multiple(constants, ENDPOINT=address, HF_HUB_OFFLINE=False):
        return ending(argv)


def break_at(argv: list[str], point: str, error: str = "RuntimeError", words: str = "it broke") -> dict:
    """`ending` of a run that breaks on all ranks: where it loads the weights, saves the model, or answers the samples
    after training."""
    points = {"load": (models, "load_model"), "save": (trainer.ZeroSFTTrainer, "save_model")}
    owner, name = points.get(point, (samples, "answer"))
    kinds = {"RuntimeError": RuntimeError, "MemoryError": MemoryError, "OSError": OSError}
    kinds["Refusal"] = lambda text: Refusal([Finding("ZR000", text, "why", "fix")])
    original, before = getattr(owner, name), iter([True] * (point == "samples"))  # samples are answered before, too

    def call(*arguments, **keywords):
        if next(before, False):
            return original(*arguments, **keywords)
        raise kinds[error](words)

    with mock.patch.object(owner, name, call):
        return ending(argv)


def nan_on_rank_1(argv: list[str], first: int, steps: int, value: float | str = "nan") -> dict:
    """`ending` of a run whose loss is not finite on rank 1 alone, for so many steps from `first` on (from 1)."""
    original = StageMetricsCallback.add_loss

    def add_loss(self, loss):
        spoiled = os.environ["RANK"] == "1" and first <= self.done + 1 < first + steps
        original(self, loss + float(value) if spoiled else loss)

    with mock.patch.object(StageMetricsCallback, "add_loss", add_loss):
        return ending(argv)
