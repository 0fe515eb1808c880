"""Cases of tests/helpers/group.py for runs that end otherwise than well."""

import json
import os
import signal
from contextlib import ExitStack, chdir
from typing import Any
from unittest import mock

import torch

import run_sft
from tests.helpers.cases import train
from tests.helpers.forget import forget_last_run
from tests.helpers.tools import before, without_rules
from zero_recipes.core.findings import Finding, Refusal
from zero_recipes.core.process import rank as rank_here
from zero_recipes.core.run_end import Preempted, RunFailed
from zero_recipes.metrics.callback import StageMetricsCallback
from zero_recipes.model import load
from zero_recipes.training import answers, trainer


def strict(text: str) -> Any:
    """JSON as the standard has it."""

    def refuse(constant: str):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def ending(argv: list[str]) -> dict:
    """How a run ends on this rank: its error's type and message, metrics.json and the files of its folder."""
    return ending_of(run_sft.read_run(argv))


def ending_without_rules(argv: list[str]) -> dict:
    """`ending`, and what each evaluation has given."""
    evaluated: list[list[str]] = []

    def keep(_, metrics: dict[str, float], **__) -> None:
        evaluated.append(sorted(metrics))

    with without_rules(), before(trainer.ZeroSFTTrainer, "_determine_best_metric", keep):
        return ending(argv) | {"evaluated": evaluated}


def ending_of(run) -> dict:
    error = None
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


def ending_after_another(argv: list[str]) -> dict:
    """`ending` of a run that has looked at its folder before another one trained there to its end; with the steps that
    it trains."""
    run = run_sft.read_run(argv)
    run_sft.train(run_sft.read_run(argv))
    torch.distributed.barrier()
    forget_last_run()
    steps = []
    with before(trainer.ZeroSFTTrainer, "training_step", lambda self, *_: steps.append(self.state.global_step)):
        return ending_of(run) | {"steps": steps}


def ending_at_hub(argv: list[str], address: str) -> dict:
    """`ending`, where that is the hub's address."""
    from huggingface_hub import constants

    with mock.patch.multiple(constants, ENDPOINT=address, HF_HUB_OFFLINE=False):
        return ending(argv)


def break_at(
    argv: list[str], point: str, error: str = "RuntimeError", words: str = "it broke", address: str | None = None
) -> dict:
    """`ending` of a run that breaks on all ranks: where it loads the weights, saves the model, or answers the samples
    after training. `address`: of `ending_at_hub`."""
    points = {"load": (load, "load_model"), "save": (trainer.ZeroSFTTrainer, "save_model")}
    owner, name = points.get(point, (answers, "answer"))
    kinds = {"RuntimeError": RuntimeError, "MemoryError": MemoryError, "OSError": OSError}
    kinds["Refusal"] = lambda text: Refusal([Finding("ZR000", text, "why", "fix")])
    original, first = getattr(owner, name), iter([True] * (point == "samples"))  # samples are answered before, too

    def call(*arguments, **keywords):
        if next(first, False):
            return original(*arguments, **keywords)
        raise kinds[error](words)

    with mock.patch.object(owner, name, call):
        return ending(argv) if address is None else ending_at_hub(argv, address)


def nan_on_rank_1(argv: list[str], first: int, steps: int, value: float | str = "nan") -> dict:
    """`ending` of a run whose loss is not finite on rank 1 alone, for so many steps from `first` on (from 1)."""
    original = StageMetricsCallback.add_loss

    def add_loss(self, loss):
        spoiled = os.environ["RANK"] == "1" and first <= self.done + 1 < first + steps
        original(self, loss + float(value) if spoiled else loss)

    with mock.patch.object(StageMetricsCallback, "add_loss", add_loss):
        return ending(argv)


# what a run calls over and over, from its first step on: a batch of the training, the evaluation, the samples; a save
PLACES = ("training_step", "prediction_step", "generate_texts", "_save_rng_state")


def train_signalled(
    argv: list[str], rank: int = 0, place: str | None = "", number: int = 0, name: str = "SIGTERM"
) -> str:
    """How it ends: in a call of PLACES on one rank the signal is sent. `place`: only calls of that name count."""
    calls = 0

    def count(called: str) -> None:
        nonlocal calls
        if place in (None, called) and signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            calls += 1
            if calls == number and rank_here() == rank:
                os.kill(os.getpid(), getattr(signal, name))

    with ExitStack() as stack:
        for each in PLACES:
            owner = answers if each == "generate_texts" else trainer.ZeroSFTTrainer
            stack.enter_context(before(owner, each, lambda *_, each=each, **__: count(each)))
        try:
            run_sft.train(run_sft.read_run(argv))
            return "done"
        except Preempted as ending:
            return str(ending)


def refusal_of(argv: list[str]) -> str:
    """What a run is refused for, on this rank."""
    try:
        train(argv)
        return "not refused"
    except Refusal as refusal:
        return "\n".join(f"{finding.what} [{finding.code}]" for finding in refusal.findings)


def ended(folder: str, argv: list[str], environment: dict[str, str]) -> str:
    """How one step of a run ends: "ran", or "refused" before the weights are loaded."""
    loaded = mock.Mock(wraps=load.load_model)
    with chdir(folder), mock.patch.object(load, "load_model", loaded):
        try:
            train([*argv, "--max_steps", "1"], environment=environment)
            return "ran"
        except Refusal:
            loaded.assert_not_called()
            return "refused"


def losses_or_codes(folder: str, argv: list[str]) -> dict[str, list]:
    """The losses of a run's steps; or the codes by which it is refused, before the weights are loaded."""
    loaded = mock.Mock(wraps=load.load_model)
    with chdir(folder), mock.patch.object(load, "load_model", loaded):
        try:
            return {"losses": train(argv)["metrics"]["loss_history"]}
        except Refusal as refusal:
            loaded.assert_not_called()
            return {"codes": refusal.codes}
