"""run_sft.py that is interrupted on purpose, without timing.

As a script, started by a launcher: KILL="PLACE:RANK:STEP" names where and how a rank ends (`sabotage`).
"""

import atexit
import io
import os
import shutil
import signal
import sys
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import run_sft
from tests.helpers.tools import before
from tests.helpers.worker import enter
from zero_recipes.core.run_end import run_to_end

RANK_0_ONLY = ("manifest", "replace", "rotation")
PLACES = ("step", "begun", "weights", "optimizer", "random", *RANK_0_ONLY)  # in the order in which a run reaches them
FILLER = "filler"
LEFT = 200_000
terminated: list[bool] = []
watched = ExitStack()  # until this process ends
whole_train = run_sft.train


def die(*_) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fill_memory(*_) -> None:
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def fill_disk(trainer, *_) -> None:
    """All but LEFT bytes of the output folder's disk, beside it."""
    folder = Path(trainer.args.output_dir).parent
    (folder / FILLER).write_bytes(bytes(shutil.disk_usage(folder).free - LEFT))


def terminate(*_) -> None:
    """End the launcher, which is this process's parent, once, and wait for the signal that it hands on."""
    if terminated:
        return
    terminated.append(True)
    come, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup)  # the signal may come before this thread waits for it, and to another thread
    os.kill(os.getppid(), signal.SIGTERM)
    os.read(come, 1)
    signal.set_wakeup_fd(-1)


def terminate_itself(*_) -> None:
    if not terminated:
        terminated.append(True)
        signal.raise_signal(signal.SIGTERM)


def sabotage(place: str, step: int) -> None:
    """Let this rank end in step `step` ("step", "terminate", "signal", "memory"), or while it saves after it."""
    import torch

    from zero_recipes.checkpoint import manager
    from zero_recipes.training.trainer import ZeroSFTTrainer as trainer

    saves, save = [], torch.save

    def watch(owner, name: str, act, applies=lambda *_: bool(saves)) -> None:
        watched.enter_context(before(owner, name, lambda *args, **_: applies(*args) and act(*args)))

    def half(value, path, *_) -> None:
        whole = io.BytesIO()
        save(value, whole)
        Path(path).write_bytes(whole.getvalue()[: len(whole.getvalue()) // 2])
        die()

    def some(folder, *_) -> None:
        next(path for path in Path(folder).rglob("*.safetensors")).unlink()
        die()

    def trains(self, *_) -> bool:
        return self.state.global_step == step - 1

    watch(trainer, "_save_checkpoint", lambda *_: saves.append(step), lambda self, *_: self.state.global_step == step)
    watch(
        *{
            "step": (trainer, "training_step", die, trains),
            "terminate": (trainer, "training_step", terminate, trains),
            "signal": (trainer, "training_step", terminate_itself, trains),
            "memory": (trainer, "training_step", fill_memory, trains),
            "begun": (trainer, "save_model", die),
            "disk": (trainer, "_save_optimizer_and_scheduler", fill_disk),
            "weights": (trainer, "_save_optimizer_and_scheduler", die),
            "optimizer": (torch, "save", half, lambda _, path, *more: saves and "optim" in str(path)),
            "random": (trainer, "_save_rng_state", die),
            "manifest": (manager, "write_manifest", die),
            "replace": (os, "replace", die, lambda _, path: saves and Path(path).name == "manifest.json"),
            "rotation": (shutil, "rmtree", some, lambda folder, *_: saves and "checkpoint-" in str(folder)),
        }[place]
    )


def train(run, clock):
    """Instead of run_sft.train: as KILL says."""
    place, rank, step = os.environ["KILL"].split(":")
    if os.environ.get("RANK", "0") == rank:
        sabotage(place, int(step))
    return whole_train(run, clock)


def run_with_pauses(
    argv: list[str], places: list[str], test: Connection, environment: dict[str, str], out: Path, err: Path
) -> None:
    """Be a process of run_sft.py, which tells `test` of each of these places, and goes on with its answer.

    "prepared": it has looked at the folder, and does not hold it; "step": it is about to train its first.
    """
    enter(out, err, environment)

    def pause(place: str) -> None:
        if place in places:
            places.remove(place)
            test.send(place)
            test.recv()

    def train(run, clock):
        from zero_recipes.training.trainer import ZeroSFTTrainer

        pause("prepared")
        with before(ZeroSFTTrainer, "training_step", lambda *_: pause("step")):
            return whole_train(run, clock)

    run_sft.train = train
    try:
        main(argv)
    finally:
        atexit._run_exitfuncs()  # as at an interpreter's end; a forked process has none


def main(argv: list[str]) -> None:
    run_to_end(run_sft.main, argv)


if __name__ == "__main__":
    if "KILL" in os.environ:
        run_sft.train = train
    main(sys.argv[1:])
