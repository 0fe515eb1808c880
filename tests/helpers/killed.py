"""run_sft.py that is killed on purpose, without timing: KILL="PLACE:RANK:STEP" names where. Started by a launcher."""

import io
import os
import shutil
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import run_sft

RANK_0_ONLY = ("manifest", "replace", "rotation")
PLACES = ("step", "begun", "weights", "optimizer", "random", *RANK_0_ONLY)  # in the order in which a run reaches them


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def terminate() -> None:
    """End the launcher, which is this process's parent, and wait for what it does to its workers."""
    os.kill(os.getppid(), signal.SIGTERM)
    signal.pause()


def sabotage(place: str, step: int) -> None:
    """Let this rank die while it trains step `step` ("step", "terminate"), or while it saves after it."""
    import torch

    from zero_recipes.checkpoint.save import MANIFEST
    from zero_recipes.training import trainer as training

    Trainer = training.ZeroSFTTrainer

    saves = []

    def before(owner, name: str, act, applies) -> None:
        original = getattr(owner, name)

        def wrapped(*arguments, **keywords):
            if applies(*arguments):
                act(*arguments)
            return original(*arguments, **keywords)

        setattr(owner, name, wrapped)

    def saving(*_) -> bool:
        return bool(saves)

    def half(value, path, *_) -> None:
        whole = io.BytesIO()
        save(value, whole)
        Path(path).write_bytes(whole.getvalue()[: len(whole.getvalue()) // 2])
        die()

    def some(folder, *_) -> None:
        next(path for path in Path(folder).rglob("*.safetensors")).unlink()
        die()

    save = torch.save
    before(
        Trainer,
        "_save_checkpoint",
        lambda *_: saves.append(step),
        lambda trainer, *_: trainer.state.global_step == step,
    )
    if place in ("step", "terminate"):
        act = {"step": die, "terminate": terminate}[place]
        before(Trainer, "training_step", lambda *_: act(), lambda trainer, *_: trainer.state.global_step == step - 1)
    elif place in ("begun", "weights", "random"):
        names = {"begun": "save_model", "weights": "_save_optimizer_and_scheduler", "random": "_save_rng_state"}
        before(Trainer, names[place], lambda *_: die(), saving)
    elif place == "optimizer":
        before(torch, "save", half, lambda value, path, *_: bool(saves) and "optim" in str(path))
    elif place == "manifest":
        before(training, "write_manifest", lambda *_: die(), saving)
    elif place == "replace":
        before(os, "replace", lambda *_: die(), lambda _, path: bool(saves) and Path(path).name == MANIFEST)
    elif place == "rotation":
        before(shutil, "rmtree", some, lambda folder, *_: bool(saves) and "checkpoint-" in str(folder))
    else:
        raise ValueError(place)


original = run_sft.train


def train(run):
    if "KILL" in os.environ:
        place, rank, step = os.environ["KILL"].split(":")
        if os.environ.get("RANK", "0") == rank:
            sabotage(place, int(step))
    return original(run)


run_sft.train = train
if __name__ == "__main__":
    run_sft.main(sys.argv[1:])
